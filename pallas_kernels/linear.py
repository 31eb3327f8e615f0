"""One matmul for every kind of weight: plain arrays here, quantised pytrees by their own op."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w_NK: jax.Array) -> jax.Array:
    """y = x w^T over the last axis of `x` (..., K) and a weight (N, K); accumulates in float32, returns x.dtype."""
    y = jax.lax.dot_general(x, w_NK, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
