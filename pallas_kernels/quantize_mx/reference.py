"""Float32 to OCP MXFP8 (E4M3 elements, one E8M0 scale per 32 columns): the rules of the MX specification v1.0.

    amax     = max |x| over the 32 elements
    exponent = floor(log2 amax) - 8, clamped to -127 ... 127            (8 is e4m3's largest exponent: 448 = 1.75 * 2^8)
    byte     = exponent + 127
    value    = e4m3(clip(x * 2^-exponent, -448, 448)), round half to even (saturating conversion)

Because the exponent is floored, x * 2^-exponent lies in [256, 512) for the largest element and what exceeds 448
saturates; the specification asks for exactly that.

Scale layout: scale[n, j] covers row n, columns 32 j ... 32 j + 31.
Zero block: byte 0 (2^-127), values 0. A block with a NaN or an infinity: byte 255, the format's NaN, so all 32
elements decode to NaN; its values are NaN where the input was not finite and 0 elsewhere. Float32 subnormal inputs
count as zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..types import E4M3_MAX, MX_BLOCK, NAN_SCALE, MxScaled, _power_of_two

E4M3_MAX_EXPONENT = 8


def quantize_mx(x_NK: jax.Array) -> MxScaled:
    """Quantise a matrix whose K is a multiple of 32 (see the module for the rules)."""
    num_rows, width = x_NK.shape
    blocks = x_NK.astype(jnp.float32).reshape(num_rows, width // MX_BLOCK, MX_BLOCK)
    finite = jnp.isfinite(blocks)
    is_finite_block = jnp.all(finite, axis=-1)
    amax = jnp.max(jnp.where(finite, jnp.abs(blocks), 0.0), axis=-1)
    # The exponent field is floor(log2) + 127 exactly; a zero or subnormal amax has field 0 and clamps.
    field = jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23
    exponent = jnp.maximum(field - 127 - E4M3_MAX_EXPONENT, -127)
    scaled = jnp.clip(blocks * _power_of_two(-exponent)[..., None], -E4M3_MAX, E4M3_MAX)
    scaled = jnp.where(is_finite_block[..., None], scaled, jnp.where(finite, 0.0, jnp.nan))
    byte = jnp.where(is_finite_block, exponent + 127, NAN_SCALE).astype(jnp.uint8)
    return MxScaled(scaled.astype(jnp.float8_e4m3fn).reshape(num_rows, width), byte)
