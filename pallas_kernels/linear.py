"""One matmul for every kind of weight: plain arrays here, quantised pytrees by their own op."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .block_scaled_matmul.api import block_scaled_matmul
from .mx_matmul.api import mx_matmul
from .types import BlockScaled, MxScaled


def matmul(x: jax.Array, w_NK: jax.Array | BlockScaled | MxScaled) -> jax.Array:
    """y = x w^T over the last axis of `x` (..., K) and a weight (N, K); accumulates in float32, returns x.dtype.

    A BlockScaled or MxScaled weight quantises x the way the weight is quantised.

    Raises:
      ValueError: shapes do not fit, or K is not a multiple of 128 (BlockScaled) or 32 (MxScaled).
    """
    if isinstance(w_NK, BlockScaled | MxScaled):
        rows = x.reshape(-1, x.shape[-1])
        y = block_scaled_matmul(rows, w_NK) if isinstance(w_NK, BlockScaled) else mx_matmul(rows, w_NK)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    y = jax.lax.dot_general(x, w_NK, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
