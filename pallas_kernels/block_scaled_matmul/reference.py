"""y = x w^T on FP8 operands with block scales: the formula.

    y[m, n] = sum over blocks kb of  x_scale[m, kb] * w_scale[n / 128, kb] * (sum over its 128 k of  x[m, k] * w[n, k])

Scale layout: x_scale is (M, K / 128), one per row and 128 columns; w_scale is (ceil(N / 128), K / 128), one per
128 x 128 block. Everything is float32. Kernels must add up at most 128 products in the tensor core's short
accumulator before they scale the partial sum and add it to a float32 one; here there is nothing short.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..types import BlockScaled


def block_scaled_matmul(x_MK: BlockScaled, w_NK: BlockScaled, out_dtype: jnp.dtype) -> jax.Array:
    """(M, K) x (N, K) -> (M, N); see the module for the formula. Takes plain and prepared weights."""
    y = jnp.dot(x_MK.dequantize(), w_NK.dequantize().T, precision=jax.lax.Precision.HIGHEST)
    return y.astype(out_dtype)
