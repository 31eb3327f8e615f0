"""A worker process: takes measurements one by one from stdin, answers each on stdout, both one JSON object a line.

Between the two it tells its stage ("compile", "wait", "run"), so that the parent can end it when it hangs. Everything
that is timed happens while the lock is held: one process at a time has the GPU. stdout belongs to this protocol; what
libraries print there goes to stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

_ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
RESERVED_CORES = 2
"""Cores that compile nothing, so that who measures launches without waiting for who compiles."""


def _settle(measuring: bool) -> None:
    """All threads of this process onto the reserved cores, or onto the others; nothing where there are too few."""
    cores = sorted(_ALL_CORES)
    if len(cores) < 4 * RESERVED_CORES:
        return
    chosen = cores[-RESERVED_CORES:] if measuring else cores[:-RESERVED_CORES]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(thread), chosen)


class GpuLock:
    """A lock between processes, let go by the kernel when its holder dies: exclusive for who measures.

    Who waits for it lets nobody past: a second lock is a turnstile, without which those who share it, coming and going,
    could keep the others out.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]):
        self._file = path.open("w")
        self._turnstile = path.with_name(path.name + ".turnstile").open("w")
        self._tell = tell

    def __enter__(self) -> None:
        self._take(fcntl.LOCK_EX)
        _settle(measuring=True)
        self._tell("run")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Together with others who use the GPU and measure nothing."""
        self._take(fcntl.LOCK_SH)
        self._tell("compile")
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take(self, kind: int) -> None:
        self._tell("wait")
        fcntl.flock(self._turnstile, fcntl.LOCK_EX)
        fcntl.flock(self._file, kind)
        fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        _settle(measuring=False)
        self._tell("compile")


def serve(side: Any, lock_path: Path, out: IO[str]) -> int:
    """Answer measurements until stdin ends; returns the exit code, 1 when the process is no longer fit to go on.

    `side` is the module that measures: `hello()`, `Case` and `measure(case, part, options, lock)`.
    """

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    _settle(measuring=False)
    lock = GpuLock(lock_path, lambda stage: say({"stage": stage}))
    say({"hello": side.hello()})
    for line in sys.stdin:
        task = json.loads(line)
        say({"stage": "compile"})
        try:
            result = side.measure(side.Case(**task["case"]), task["part"], task["options"], lock)
        except NotImplementedError as error:
            result = {"reason": str(error)}
        except Exception as error:  # whatever it was, it is the result of this measurement
            traceback.print_exc()
            say({"result": {"reason": f"{type(error).__name__}: {_first_line(error)}", "failed": True}})
            if "CUDA" in str(error):  # the context may be broken: a fresh process does the next one
                return 1
            continue
        say({"result": result})
    return 0


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def main() -> int:
    """`python -m fishjax.bench.worker {jax,torch,step} LOCK_FILE`."""
    kind, lock_path = sys.argv[1], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if kind == "torch":
        from . import peers_torch as side
    elif kind == "step":
        from fishjax.engine.xla_flags import set_xla_flags

        set_xla_flags()
        from .step import measure as side
    else:
        from . import measure_jax as side
    return serve(side, lock_path, out)


if __name__ == "__main__":
    sys.exit(main())
