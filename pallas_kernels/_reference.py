"""What the references of several ops share: one linear layer and one norm, in float32 and without tricks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .block_scaled_matmul.reference import block_scaled_matmul
from .mx_matmul.reference import mx_matmul
from .quantize_blocks.reference import quantize_blocks
from .quantize_mx.reference import quantize_mx
from .types import BLOCK, BlockScaled, MxScaled


def linear(x_MK: jax.Array, w_NK: jax.Array | BlockScaled | MxScaled) -> jax.Array:
    """x w^T, float32 (M, K) -> (M, N), after x is quantised the way the weight is: 1 x 128, 1 x 32 or not at all."""
    f32 = jnp.dtype(jnp.float32)
    if isinstance(w_NK, BlockScaled):
        return block_scaled_matmul(quantize_blocks(x_MK, (1, BLOCK)), w_NK, f32)
    if isinstance(w_NK, MxScaled):
        return mx_matmul(quantize_mx(x_MK), w_NK, f32)
    return jnp.dot(x_MK, w_NK.astype(f32).T, precision=jax.lax.Precision.HIGHEST)


def rms_norm(x_MD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean of x^2 over D + eps) * weight, float32 (M, D)."""
    return x_MD * jax.lax.rsqrt(jnp.mean(jnp.square(x_MD), axis=-1, keepdims=True) + eps) * weight_D.astype(jnp.float32)
