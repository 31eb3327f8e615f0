"""Compiles several programs at the same time: tracing has Python's lock, but XLA and ptxas have the other cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

Program = tuple[str, partial[Any], tuple[Any, ...]]
"""What it is, a jitted function with its first arguments, and the rest of an example."""
MAX_AT_ONCE = 8


def compile_ahead(programs: Sequence[Program], progress: Callable[[str], None]) -> None:
    """Compile each for its example's shapes, types and devices; nothing runs, and no argument is donated.

    A call with such arguments then finds its program in JAX's cache. `progress` hears of each that is done.
    """
    with ThreadPoolExecutor(max(1, min(MAX_AT_ONCE, os.cpu_count() or 1))) as pool:
        running = {pool.submit(_compile, bound, arguments): name for name, bound, arguments in programs}
        for done in as_completed(running):
            done.result()
            progress(f"compiled: {running[done]}")


def _compile(bound: partial[Any], arguments: tuple[Any, ...]) -> None:
    bound.func.lower(*bound.args, *arguments).compile()
