"""Shared by all tests: where the golden numbers are, and a count of XLA compilations."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
import pytest

GOLDEN = Path(__file__).parent / "golden"


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
