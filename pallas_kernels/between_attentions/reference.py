"""What a decode step computes between one attention and the next: the formula.

    x = x + o wo^T
    x = x + swiglu(norm(x; ffn_norm); w_gate_up, w_down)          of the layer whose attention made o
    qkv = norm(x; norm) wqkv^T                                    of the layer after it

The first part is left out before the first attention, the last after the last one. Every matmul quantises its left
operand 1 x 128, as `block_scaled_matmul` does; everything else is float32, and qkv is rounded to bfloat16. The
residual x lies transposed, a column a token, and stays float32 from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._reference import linear, rms_norm
from ..swiglu_mlp.reference import swiglu_mlp
from ..types import BlockScaled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Before:
    """Of the layer that attended: wo (D, H d), ffn_norm_D, w_gate_up (2F, D), w_down (D, F)."""

    wo: BlockScaled
    ffn_norm_D: jax.Array
    w_gate_up: BlockScaled
    w_down: BlockScaled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class After:
    """Of the layer that attends next: norm_D, wqkv (N, D)."""

    norm_D: jax.Array
    wqkv: BlockScaled


def between_attentions(
    x_DM: jax.Array, o_MK: jax.Array | None, before: Before | None, after: After | None, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """(x_DM float32, qkv_MN bfloat16 or None)."""
    x_MD, qkv_MN = x_DM.T.astype(jnp.float32), None
    if before is not None and o_MK is not None:
        o_MK = jnp.pad(o_MK.astype(jnp.float32), ((0, len(x_MD) - len(o_MK)), (0, 0)))
        x_MD = x_MD + linear(o_MK, before.wo)
        x_MD = x_MD + swiglu_mlp(rms_norm(x_MD, before.ffn_norm_D, eps), before.w_gate_up, before.w_down)
    if after is not None:
        qkv_MN = linear(rms_norm(x_MD, after.norm_D, eps), after.wqkv).astype(jnp.bfloat16)
    return x_MD.T, qkv_MN
