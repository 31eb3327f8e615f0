"""Where a step's time goes, by part: differences of programs that leave one part more out.

The engine's own decode step is traced with one function after the other replaced by something that costs nothing, in
the order of PARTS; what a program loses with its part is the part's time, so the parts add up to the step. Kernel names
could not tell the slow transformer's matmuls from the fast one's. Where CUPTI counts kernels, a part is the device time
of its kernels, and what the step took beyond all kernels is gaps; elsewhere it is wall clock and there is no such row.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from fishjax.engine import sampling
from fishjax.model import slow
from fishjax.model.fast import FastTransformer
from fishjax.model.layers import FusedFeedForward, Linear
from fishjax.model.slow import SlowTransformer

from ..chain import NO_CUPTI
from .rig import EngineRun, Filled, Program, Rig, steady_ms

STEPS = 64
REST = "embedding, norms, rotary, bookkeeping"
GAPS = "gaps between kernels"
NUM_KERNELS = 20


def _greedy(logits_BN: jax.Array, *_: Any) -> jax.Array:
    return jnp.argmax(logits_BN, axis=-1).astype(jnp.int32)


def _one_code(self: FastTransformer, projected_BD: jax.Array, semantic_B: jax.Array, pick: Any) -> jax.Array:
    return jnp.tile(semantic_B[:, None].astype(jnp.int32), (1, self.config.num_codebooks))


def _to_width(x: jax.Array, width: int) -> jax.Array:
    return jnp.concatenate([x] * -(-width // x.shape[-1]), axis=-1)[..., :width]


def _no_logits(self: SlowTransformer, hidden_BD: jax.Array, head_NK: Any) -> jax.Array:
    return _to_width(self.norm(hidden_BD), head_NK.shape[0])


PARTS: dict[str, tuple[tuple[Any, str, Callable], ...]] = {
    "sampling": ((sampling, "sample_semantic", _greedy), (sampling, "sample_code", _greedy)),
    "fast transformer": ((FastTransformer, "frame", _one_code),),
    "attention and cache": (
        (slow, "write", lambda k_cache, v_cache, *_: (k_cache, v_cache)),
        (slow, "attend_cached", lambda q, k, v, start: q),
    ),
    "slow matmuls and head": (
        (Linear, "__call__", lambda self, x: _to_width(x, self.weight.shape[0])),
        (FusedFeedForward, "__call__", lambda self, x: x),
        (SlowTransformer, "logits", _no_logits),
    ),
}
"""Part -> what is replaced (owner, name, by what) to leave it out."""


@contextlib.contextmanager
def without(parts: list[str]) -> Iterator[None]:
    """While a program is traced: these parts do nothing."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            for owner, name, replacement in PARTS[part]:
                stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def variants(rig: Rig) -> list[tuple[str, Program, tuple[Any, ...]]]:
    """(part left out last, program, arguments): the decode step without one part, two, three ..., not yet traced."""
    return [(part, *rig.decode()) for part in PARTS]


def lower(rig: Rig, **options: Any) -> list[tuple[str, Program, jax.stages.Lowered]]:
    """Every variant with its lowering; `options` as `jax.stages.Traced.lower` takes them."""
    lowered, left_out = [], []
    for part, bound, arguments in variants(rig):
        left_out.append(part)
        with without(left_out):
            traced = bound.func.trace(*bound.args, *arguments)
        lowered.append((part, bound, traced.lower(**options)))
    return lowered


def measure(rig: Rig, filled: Filled, decode: Program, sound: Program, lowered: list) -> dict[str, Any]:
    """The parts of a step in milliseconds, and its longest kernels. Programs must be compiled."""
    programs: list[tuple[str | None, Program, Program | None]] = [(None, decode, sound), ("codec", decode, None)]
    programs += [(part, bound, None) for part, bound, _ in lowered]
    wall, kernels, reasons = [], [], []
    for _, bound, with_sound in programs:  # one after the other: each has caches of its own
        run = EngineRun(rig, filled.decode(bound), with_sound and filled.sound(with_sound))
        wall.append(float(np.median(steady_ms(run, STEPS))))
        found, reason = _kernels(run)
        kernels.append(found)
        reasons.append(reason)
    names = [part for part, _, _ in programs[1:]]
    spent = wall
    if counted := all(kernels):
        spent = [sum(ms for _, ms in one) for one in kernels if one]
    rows = [
        {"part": part, "ms": before - after} for part, before, after in zip(names, spent[:-1], spent[1:], strict=True)
    ]
    rows.append({"part": REST, "ms": spent[-1]})
    if counted:
        rows.append({"part": GAPS, "ms": wall[0] - spent[0]})
    return {
        "step_ms": wall[0],
        "clock": "device time of kernels" if counted else f"wall clock, because {next(filter(None, reasons))}",
        "parts": rows,
        "kernels": _longest(kernels[0]) if kernels[0] else [],
    }


@jax.stages.Wrapped.register  # pyright: ignore[reportAttributeAccessIssue]  a protocol is an abstract class
class _OneStep:
    """A whole step, for the profiler, which calls what it measures, twice; what is not `Wrapped` it traces first.

    A jitted function could not be handed over: the step's state is donated.
    """

    def __init__(self, run: EngineRun):
        self._run = run

    def __call__(self) -> Any:
        return self._run.step().result()


def _kernels(run: EngineRun) -> tuple[list[tuple[str, float]] | None, str | None]:
    """(name, milliseconds) of every kernel of one step, or None and why CUPTI tells nothing."""
    if jax.default_backend() != "gpu":
        return None, NO_CUPTI
    try:
        found = profiler.measure(_OneStep(run), aggregate=False)()[1]  # pyright: ignore[reportCallIssue,reportArgumentType]
    except RuntimeError as error:
        return None, f"CUPTI: {error}"
    return (found, None) if found else (None, "CUPTI reported no kernels")


def _longest(kernels: list[tuple[str, float]]) -> list[dict[str, Any]]:
    total: dict[str, float] = {}
    count = Counter(name for name, _ in kernels)
    for name, ms in kernels:
        total[name] = total.get(name, 0.0) + ms
    longest = sorted(total.items(), key=lambda item: -item[1])[:NUM_KERNELS]
    return [{"kernel": name, "calls": count[name], "ms": ms} for name, ms in longest]
