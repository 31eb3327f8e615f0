"""What a run of verify compared, for tests that then change what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fishjax.verify.report import GoldenFile

Compared = dict[tuple[str, str], tuple[Any, float]]
"""(file, entry) -> what fishjax computed, and the tolerance."""


@pytest.fixture(scope="session")
def recording():
    """`with recording() as compared:` every `GoldenFile.compare` is noted."""

    @contextmanager
    def noted() -> Iterator[Compared]:
        compared, compare = {}, GoldenFile.compare

        def record(self, name, actual, tolerance, **rest):
            compared[self.name, name] = (actual, tolerance)
            compare(self, name, actual, tolerance, **rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GoldenFile, "compare", record)
            yield compared

    return noted
