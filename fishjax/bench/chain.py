"""A chain of calls under one jit, ordered and cold: what is timed on JAX's side, for the op and for its XLA peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from .timing import Plan

Call = Callable[[Any, Any], jax.Array]
NO_CUPTI = "CUPTI needs an NVIDIA GPU"


def chain(call: Call, plan: Plan, x_like: Any, w_like: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """run(*leaves): plan.calls calls of call(x, weights) over plan.num_inputs inputs and plan.copies weights.

    Call i + 1 may not start before call i has its result. Returned are the first element of every output and the last
    output: no result is unused and no two calls have the same operands (XLA drops or merges such calls), and the host
    does not spend its time on hundreds of arrays (measured: 5 us each). The call sits in a jit of its own, so that it
    is traced and lowered once. `leaves` are the arrays of all inputs and then of all weight copies (flat, because
    hundreds of pytrees cost host time); x_like and w_like are one of each, or their shapes.
    """
    once = jax.jit(call)
    x_tree, w_tree = jax.tree.structure(x_like), jax.tree.structure(w_like)
    num_x = plan.num_inputs * x_tree.num_leaves

    def run(*leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = _grouped(x_tree, leaves[:num_x])
        weights = _grouped(w_tree, leaves[num_x:])
        outputs: list[jax.Array] = []
        for i in range(plan.calls):
            x = inputs[i // plan.copies]
            if outputs:
                x, _ = jax.lax.optimization_barrier((x, outputs[-1]))
            outputs.append(once(x, weights[i % plan.copies]))
        return jnp.stack([y[(0,) * y.ndim] for y in outputs]), outputs[-1]

    return run


def _grouped(tree: Any, leaves: Sequence[jax.Array]) -> list[Any]:
    each = tree.num_leaves
    return [jax.tree.unflatten(tree, leaves[i : i + each]) for i in range(0, len(leaves), each)]


def chain_shapes(x_like: Any, w_like: Any, plan: Plan) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a chain as shapes, for lowering ahead."""
    return jax.tree.leaves(x_like) * plan.num_inputs + jax.tree.leaves(w_like) * plan.copies


def kernel_us(
    compiled: jax.stages.Compiled, arguments: Sequence[jax.Array], calls: int
) -> tuple[float | None, str | None]:
    """Device time of all kernels of one replay over its calls, or None and why there is none."""
    if jax.default_backend() != "gpu":
        return None, NO_CUPTI
    try:
        _, milliseconds = profiler.measure(compiled)(*arguments)
    except RuntimeError as error:
        return None, f"CUPTI: {error}"
    return (milliseconds * 1e3 / calls, None) if milliseconds else (None, "CUPTI reported no kernels")
