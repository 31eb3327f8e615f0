"""One pre-norm transformer block, used by both transformers: attention with fused wqkv, then SwiGLU.

The block knows nothing of caches: it makes q, k, v (rotated) and hands them to an `attend` function of its
caller, which decides what is remembered and what is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import TransformerConfig
from fishjax.model.layers import (
    FeedForward,
    FusedFeedForward,
    HeadRMSNorm,
    Linear,
    RMSNorm,
    apply_rope,
    head_rms_norm,
    rope_table,
)

# (q_BTHd, k_BTGd, v_BTGd) -> o_BTHd
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_MASKED = -1e30  # finite, so that a row that sees nothing (padding) stays finite and differentiable


class Attention(nnx.Module):
    """Grouped-query attention: rows of `wqkv` are all query heads, then key heads, then value heads."""

    def __init__(self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.wqkv = Linear(config.dim, config.qkv_dim, use_bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.wo = Linear(config.num_heads * config.head_dim, config.dim, use_bias=config.o_bias, dtype=dtype, rngs=rngs)
        self.q_norm = HeadRMSNorm(config.head_dim, config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = HeadRMSNorm(config.head_dim, config.norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, x_BTD: jax.Array, table_BTd2: jax.Array, attend: AttendFn) -> jax.Array:
        """x_BTD -> o_BTD; `table_BTd2` holds the rotary rows of the T positions."""
        return self.wo(self.mix(self.wqkv(x_BTD), table_BTd2, attend))

    def mix(self, qkv_BTN: jax.Array, table_BTd2: jax.Array, attend: AttendFn) -> jax.Array:
        """What lies between the two projections: heads, norms, rotation, `attend`; (B, T, H d)."""
        heads_BTHd = qkv_BTN.reshape(*qkv_BTN.shape[:2], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated_BTHd, v_BTGd = heads_BTHd[:, :, :num_rotated], heads_BTHd[:, :, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:  # as one: on a GPU each costs a launch a layer
            is_query_H1 = jnp.arange(num_rotated)[:, None] < self.num_heads
            weight_Hd = jnp.where(is_query_H1, self.q_norm.weight[...], self.k_norm.weight[...])
            rotated_BTHd = head_rms_norm(rotated_BTHd, weight_Hd, self.q_norm.eps)
        rotated_BTHd = apply_rope(rotated_BTHd, table_BTd2)
        o_BTHd = attend(rotated_BTHd[:, :, : self.num_heads], rotated_BTHd[:, :, self.num_heads :], v_BTGd)
        return o_BTHd.reshape(*qkv_BTN.shape[:2], -1)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.feed_forward: FeedForward | FusedFeedForward = FeedForward(
            config.dim, config.ffn_dim, dtype=dtype, rngs=rngs
        )

    def __call__(self, x_BTD: jax.Array, table_BTd2: jax.Array, attend: AttendFn) -> jax.Array:
        """x_BTD -> x_BTD; `table_BTd2` holds the rotary rows of the T positions."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table_BTd2, attend)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


def attend_masked(
    q_BTHd: jax.Array, k_BGSd: jax.Array, v_BGSd: jax.Array, mask_BTS: jax.Array, *, score_dtype=jnp.float32
) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v where `mask_BTS` (B or 1, T, S) is true; o_BTHd in the dtype of q.

    Scores and weights are rounded to `score_dtype` (float32 for the slow transformer; the fast one rounds to
    the working dtype, as its reference does). Query head h reads key/value head h // (H / G).
    """
    batch, length, num_heads, head_dim = q_BTHd.shape
    q_BTGRd = q_BTHd.reshape(batch, length, k_BGSd.shape[1], -1, head_dim)
    scores = jnp.einsum("btgrd,bgsd->bgrts", q_BTGRd, k_BGSd, preferred_element_type=jnp.float32)
    scores = (scores.astype(score_dtype) * head_dim**-0.5).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, _MASKED), axis=-1).astype(score_dtype)
    # The weights come first in the product: XLA's CPU has no program for the other order in bfloat16 from 8 slots on.
    o_BGRTd = jnp.einsum("bgrts,bgsd->bgrtd", weights, v_BGSd, preferred_element_type=jnp.float32)
    return o_BGRTd.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim).astype(q_BTHd.dtype)


@functools.lru_cache(maxsize=16)
def cached_rope_table(num_positions: int, head_dim: int, base: float) -> np.ndarray:
    """`rope_table`, built once per shape: it becomes a constant of the compiled program."""
    return rope_table(num_positions, head_dim, base)
