"""`python -m fishjax.bench.serve.faulty`: the server, with a device that breaks in the step after SIGUSR1.

Takes the options of `python -m serving`. The service does not know: it gets an engine whose steps pass through here.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Collection
from typing import Any, NoReturn

import fishjax.speech
import serving.__main__ as service


class DeviceLost(RuntimeError):
    """What a broken device raises when a step is read."""


class _LostStep:
    def result(self) -> NoReturn:
        raise DeviceLost("a step was lost on purpose")


class BreakableEngine:
    """The verbs of `engine`, until `broken` is set: then the next step is lost."""

    def __init__(self, engine: Any, broken: threading.Event):
        self._engine = engine
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, run: Collection[int]) -> Any:
        """A step of the engine, or one that is lost."""
        pending = self._engine.step(run)
        return _LostStep() if self._broken.is_set() else pending


def main() -> None:
    """Serve, and break when told to."""
    broken, load = threading.Event(), fishjax.speech.load
    signal.signal(signal.SIGUSR1, lambda *_: broken.set())

    def load_breakable(*args: Any, **kwargs: Any) -> Any:
        speech = load(*args, **kwargs)
        return dataclasses.replace(speech, engine=BreakableEngine(speech.engine, broken))  # type: ignore[arg-type]

    fishjax.speech.load = load_breakable
    service.app()


if __name__ == "__main__":
    main()
