"""y = x w^T on OCP MXFP8 operands: the formula.

    y[m, n] = sum over blocks kb of  2^(x_byte[m, kb] - 127) * 2^(w_byte[n, kb] - 127) * (sum of 32 products)

Scale layout: x_byte is (M, K / 32), w_byte is (N, K / 32), both uint8 E8M0; byte 255 makes the element NaN.
Everything is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..types import MxScaled


def mx_matmul(x_MK: MxScaled, w_NK: MxScaled, out_dtype: jnp.dtype) -> jax.Array:
    """(M, K) x (N, K) -> (M, N); see the module for the formula. Takes plain and prepared weights."""
    y = jnp.dot(x_MK.dequantize(), w_NK.dequantize().T, precision=jax.lax.Precision.HIGHEST)
    return y.astype(out_dtype)
