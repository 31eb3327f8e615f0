"""The SwiGLU block: the formula.

    h = x w_gate_up^T                 (M, 2F): columns 0 ... F-1 are the gate, F ... 2F-1 the up projection
    a = silu(h_gate) * h_up           (M, F), float32
    y = a w_down^T                    (M, D)

With quantised weights both matmuls quantise their left operand the way the weight is quantised (1 x 128 float32
scales beside BlockScaled, 1 x 32 E8M0 beside MxScaled); `h` and `a` stay float32 until then, so `a` is rounded once,
to FP8. With plain arrays everything is float32 and rounded once, at the end.

State layout: w_gate_up (2F, D) is the gate's F rows and then the up projection's F rows, as `concatenate([w1, w3])`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._reference import linear
from ..types import BlockScaled, MxScaled


def swiglu_mlp(x_MD: jax.Array, w_gate_up: jax.Array | BlockScaled | MxScaled, w_down) -> jax.Array:
    """(M, D) -> (M, D) in x's type; see the module for the formula."""
    h = linear(x_MD.astype(jnp.float32), w_gate_up)
    gate, up = jnp.split(h, 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, w_down).astype(x_MD.dtype)
