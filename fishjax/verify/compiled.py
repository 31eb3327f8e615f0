"""One compiled program for each (function, structure of a module, shapes), shared by all rooms and calls of verify."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx


def compiled(function: Callable[..., Any], module: nnx.Module) -> Callable[..., Any]:
    """`function(module, *inputs)` as a jitted function of `inputs`.

    `function` must be the same object each time (a method or a function of a file) for its programs to be found again.
    """
    graph, state = nnx.split(module)
    return partial(_program, function, graph, state)


@partial(jax.jit, static_argnums=(0, 1))
def _program(function: Callable[..., Any], graph: nnx.GraphDef, state: nnx.State, *inputs: Any) -> Any:
    return function(nnx.merge(graph, state), *inputs)
