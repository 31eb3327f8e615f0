"""Float32 to FP8 with one float32 scale per block: the formula.

    amax  = max |x| over the finite elements of the block        (1 x 128: activations, 128 x 128: weights)
    scale = max(amax * float32(1 / 448), 2^-126), or 1 when amax is 0
    value = e4m3(clip(x / scale, -448, 448)), round half to even

Scale layout: scale[i, j] covers rows i * block[0] ... and columns j * 128 ...; the last row of blocks may be short.

Not finite: e4m3 has no infinity, so NaN and both infinities become NaN, and only those elements do: they are left
out of amax, their neighbours keep their precision. A wrong number stays visible and stays where it is.
Small: 2^-126, the smallest normal float32, is the smallest scale, so blocks whose amax lies under 448 * 2^-126 use
less than the full range. Float32 subnormal inputs count as zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..types import BLOCK, E4M3_MAX, BlockScaled

SMALLEST_SCALE = 2.0**-126
INVERSE_MAX = np.float32(1.0 / E4M3_MAX)  # a product, because compilers turn the division into it anyway


def quantize_blocks(x_NK: jax.Array, block: tuple[int, int]) -> BlockScaled:
    """Quantise a matrix whose K is a multiple of 128 (see the module for the formula)."""
    num_rows, width = x_NK.shape
    padded = jnp.pad(x_NK.astype(jnp.float32), ((0, -num_rows % block[0]), (0, 0)))
    blocks = padded.reshape(-1, block[0], width // BLOCK, BLOCK)
    values, scale = scale_and_round(blocks, axes=(1, 3))
    return BlockScaled(values.reshape(padded.shape)[:num_rows], scale[:, 0, :, 0])


def scale_of(amax: jax.Array) -> jax.Array:
    """The scale of blocks with such a largest magnitude."""
    return jnp.where(amax == 0.0, 1.0, jnp.maximum(amax * INVERSE_MAX, SMALLEST_SCALE))


def scale_and_round(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The formula over any axes of a float32 array: (e4m3 values, float32 scale with `axes` of length 1)."""
    finite = jnp.isfinite(x)
    amax = jnp.max(jnp.where(finite, jnp.abs(x), 0.0), axis=axes, keepdims=True)
    scale = scale_of(amax)
    quotient = jnp.clip(x / scale, -E4M3_MAX, E4M3_MAX)
    return jnp.where(finite, quotient, jnp.nan).astype(jnp.float8_e4m3fn), scale
