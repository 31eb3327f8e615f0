"""One measurement in a JAX worker: the op's own kernel, or a peer compiled by XLA.

Everything is compiled ahead, from shapes. The GPU is touched only while the lock is held, except that the chain of an
XLA peer is compiled without it: a chain of two calls was compiled under the lock before, so that XLA's autotuner has
run its candidates on a quiet GPU and remembers its choices.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from pallas_kernels import _tuned
from pallas_kernels._testing import rel_err

from . import inputs, ops, peers_xla
from .cases import Case, floor_us, weight_bytes
from .chain import Call, chain, chain_shapes, kernel_us
from .timing import MIN_CALLS, Plan, plan, time_replays

Make = Callable[[Case, jax.Array], Any]
WEIGHT_SEED, X_SEED = 1, 100_000
_expected: dict[str, Any] = {}
"""The float64 answer of the last case: a tuner asks for it once per config."""


def hello() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "platform": jax.default_backend(),
        "device": _tuned.device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
    }


def measure(case: Case, part: str, options: dict[str, Any], lock: AbstractContextManager) -> dict[str, Any]:
    """The fields that this part adds to a row. part: "kernel" or the name of an XLA peer.

    Raises:
      NotImplementedError: it cannot run; the message says why.
    """
    if part == "kernel":
        return _measure_kernel(case, options, lock)
    if reason := peers_xla.why_not(case, part):
        raise NotImplementedError(reason)
    make_x, make_w = peers_xla.operands(case, part)
    prepared = _Chain(case, peers_xla.call(case, part), make_x, make_w, weight_bytes(case, part))
    with lock:
        prepared.compile(Plan(2, 2))
    hlo = prepared.compile(prepared.plan).as_text() or ""
    if part == "xla_fp8" and (reason := peers_xla.why_not_fp8(case, hlo)):
        raise NotImplementedError(reason)
    with lock:
        return prepared.run()[0]


def _measure_kernel(case: Case, options: dict[str, Any], lock: AbstractContextManager) -> dict[str, Any]:
    backend = options["backend"]
    config = None
    if backend == "mosaic":
        config = ops.config_of(case, options.get("config"))
    call = ops.kernel_call(case, backend, config)
    prepared = _Chain(case, call, inputs.make_x, inputs.make_w, weight_bytes(case))
    prepared.compile(prepared.plan)
    with lock:
        times, (x, w, y) = prepared.run()
    if _expected.get("case") != case.key:
        _expected.update(case=case.key, y=inputs.oracle(case, x, w))
    fields = dataclasses.asdict(config) if config else None
    return {"config": fields, "rel_err": rel_err(y, _expected["y"]), **times}


@functools.lru_cache(maxsize=4)
def _maker(case: Case, make: Make) -> tuple[jax.stages.Compiled, Any]:
    """The compiled maker of operands, and the shapes of what it makes (kept, because a tuner comes back)."""
    seed = jax.ShapeDtypeStruct((), np.int32)
    jitted = jax.jit(functools.partial(make, case))
    return jitted.lower(seed).compile(), jax.eval_shape(jitted, seed)


class _Chain:
    """A chain and its operands, compiled ahead; `run` is the only method that touches the device."""

    def __init__(self, case: Case, call: Call, make_x: Make, make_w: Make, bytes_per_call: int):
        on_gpu = jax.default_backend() == "gpu"
        self.plan = plan(bytes_per_call, floor_us(case)) if on_gpu else Plan(MIN_CALLS, 2)
        self._call = call
        self._make_x, self._x_like = _maker(case, make_x)
        self._make_w, self._w_like = _maker(case, make_w)

    def compile(self, plan: Plan) -> jax.stages.Compiled:
        run = chain(self._call, plan, self._x_like, self._w_like)
        self._compiled = jax.jit(run).lower(*chain_shapes(self._x_like, self._w_like, plan)).compile()
        return self._compiled

    def run(self) -> tuple[dict[str, Any], tuple[Any, Any, np.ndarray]]:
        """Times, and the operands and the output of the last call on the host."""
        inputs = [self._make_x(np.int32(X_SEED + i)) for i in range(self.plan.num_inputs)]
        copies = [self._make_w(np.int32(WEIGHT_SEED + i)) for i in range(self.plan.copies)]
        leaves = jax.tree.leaves((inputs, copies))
        outputs = jax.block_until_ready(self._compiled(*leaves))
        last = jax.device_get((inputs[-1], copies[(self.plan.calls - 1) % self.plan.copies], outputs[-1]))
        del outputs
        times: dict[str, Any] = time_replays(
            lambda: functools.partial(jax.block_until_ready, self._compiled(*leaves)[-1]), self.plan.calls
        )
        times["kernel_us"], reason = kernel_us(self._compiled, leaves, self.plan.calls)
        if reason:
            times["kernel_us_reason"] = reason
        return times, last
