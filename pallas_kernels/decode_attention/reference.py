"""One query position per slot against that slot's live keys and values: the formula.

    query head h reads kv head g = h / (H / G)
    p[b, h, s] = softmax over s < lengths[b] of  scale * q[b, h] . k[b, g, s]
    o[b, h]    = sum over s < lengths[b] of  p[b, h, s] * v[b, g, s]

Everything is float32. Length 0 gives zeros; lengths above S count as S. Positions at or after the length are never
read in effect: whatever lies there, NaN included, does not reach the output.

Layout: k, v (B, G, S, d) bfloat16 or float32, or ScaledKV with one float32 scale per (slot, kv head, position).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..quantize_blocks.reference import scale_and_round
from ..types import ScaledKV


def quantize_kv(x_BGSd: jax.Array) -> ScaledKV:
    """Keys or values to FP8, one scale per (slot, kv head, position): the rule of quantize_blocks."""
    values, scale = scale_and_round(x_BGSd.astype(jnp.float32), axes=(-1,))
    return ScaledKV(values, scale[..., 0])


def decode_attention(
    q_BHd: jax.Array, k_BGSd: jax.Array | ScaledKV, v_BGSd: jax.Array | ScaledKV, lengths_B: jax.Array, scale: float
) -> jax.Array:
    """(B, H, d) -> (B, H, d) in q's type; see the module for the formula."""
    k, v = (c.dequantize() if isinstance(c, ScaledKV) else c.astype(jnp.float32) for c in (k_BGSd, v_BGSd))
    B, H, d = q_BHd.shape
    G, S = k.shape[1:3]
    live_BS = jnp.arange(S) < lengths_B[:, None]
    k = jnp.where(live_BS[:, None, :, None], k, 0.0)
    v = jnp.where(live_BS[:, None, :, None], v, 0.0)
    q_BGRd = q_BHd.astype(jnp.float32).reshape(B, G, H // G, d)
    exact = jax.lax.Precision.HIGHEST
    logits = scale * jnp.einsum("bgrd,bgsd->bgrs", q_BGRd, k, precision=exact)
    logits = jnp.where(live_BS[:, None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(p, axis=-1, keepdims=True)
    o = jnp.einsum("bgrs,bgsd->bgrd", p, v, precision=exact) / jnp.where(total == 0.0, 1.0, total)
    return o.reshape(B, H, d).astype(q_BHd.dtype)
