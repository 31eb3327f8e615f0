"""Shared by all tests: where the golden numbers are, a cache of compiled programs, a count of XLA compilations."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import jax
import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    """Compiling is most of what a run costs, and many tests compile the same program: each is kept for one run.

    Programs started by tests, and the workers of `pytest -n`, inherit the folder through the environment. `compiles`
    counts what comes out of it too.
    """
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.TemporaryDirectory(prefix="fishjax-tests-")
    config.add_cleanup(folder.cleanup)
    for name, value in (
        ("jax_compilation_cache_dir", folder.name),
        ("jax_persistent_cache_min_compile_time_secs", 0.1),
    ):
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


class CompileCounter:
    """Counts programs that XLA compiles, through jax's own monitoring events."""

    def __init__(self):
        self.count = 0

    def __call__(self, event: str, duration_s: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


@pytest.fixture
def compiles():
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    with contextlib.suppress(ValueError):
        jax.monitoring.unregister_event_duration_listener(counter)
