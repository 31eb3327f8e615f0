"""The Hopper kernels for activations: rows to MXFP8 in one launch, as bytes and scales or as the numbers they mean.

    x (64 rows, 128) ──TMA──► registers ──► amax of 32 columns, four times ──► 2^e ──► e4m3 (rows, 128), bytes (4, rows)
                                                                                   └─► bfloat16 (rows, 128)

One block is one step of K for up to 64 rows; the rules are reference.py's, bit for bit. The scales leave transposed,
(K / 32, rows), because a matmul with swapped operands wants one scale per column of its product. An e4m3 value times a
power of two is a bfloat16 value, so a matmul in bfloat16 takes the rounded numbers themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._mosaic import LANE, load
from ..types import BLOCK, E4M3_MAX, F32_MAX, MX_BLOCK, NAN_SCALE, scale_halves
from .reference import E4M3_MAX_EXPONENT

ROWS = 64
"""Rows of one block: one register tile."""
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def why_not(K: int) -> str | None:
    """None when this kernel can quantise rows of K columns, else the reason."""
    return f"K = {K} is not a multiple of {BLOCK}, the width of a block" if K % BLOCK else None


def quantize_rows(x_MK: jax.Array, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(M, K) floating point -> values (M rounded up to 8, K) e4m3, byte_KbM (K / 32, M rounded up to 64) uint8.

    New rows are zeros with byte 0. Above 64 rows M goes to a multiple of 64.
    """
    M, K = (x_MK := _whole_blocks(x_MK)).shape
    tile, padded = min(M, ROWS), -(-M // 8) * 8
    stored = min(padded, ROWS)
    blocks = BLOCK // MX_BLOCK
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def body(x_gmem, values_gmem, byte_gmem, x_smem, values_smem, byte_smem, loaded):
        kb, m = lax.axis_index("block"), lax.axis_index("tile")
        columns = pl.ds(kb * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(m * ROWS, tile), columns], x_smem.at[pl.ds(0, tile)], loaded)
        plgpu.barrier_wait(loaded)
        for block in range(blocks):
            at = pl.ds(block * MX_BLOCK, MX_BLOCK)
            scaled, byte = _scaled(x_smem.at[:, at], tile)
            values_smem[:, at] = scaled.astype(jnp.float8_e4m3fn)
            byte_smem[block] = plgpu.layout_cast(byte.astype(jnp.uint8), row_layout)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values_smem.at[pl.ds(0, stored)], values_gmem.at[pl.ds(m * ROWS, stored), columns])
        plgpu.copy_smem_to_gmem(byte_smem, byte_gmem.at[pl.ds(kb * blocks, blocks), pl.ds(m * ROWS, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    return _launch(
        body,
        x_MK,
        (
            jax.ShapeDtypeStruct((padded, K), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((K // MX_BLOCK, -(-M // ROWS) * ROWS), jnp.uint8),
        ),
        [plgpu.SMEM((ROWS, BLOCK), jnp.float8_e4m3fn), plgpu.SMEM((blocks, ROWS), jnp.uint8)],
        interpret,
    )


def round_rows(x_MK: jax.Array, interpret=None) -> jax.Array:
    """(M, K) floating point -> (M rounded up to 8, K) bfloat16: what `quantize_rows` stands for, new rows zeros.

    A block with a NaN or an infinity is NaN. Above 64 rows M goes to a multiple of 64.
    """
    M, K = (x_MK := _whole_blocks(x_MK)).shape
    tile, padded = min(M, ROWS), -(-M // 8) * 8
    stored = min(padded, ROWS)

    def body(x_gmem, y_gmem, x_smem, y_smem, loaded):
        m, columns = lax.axis_index("tile"), pl.ds(lax.axis_index("block") * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(m * ROWS, tile), columns], x_smem.at[pl.ds(0, tile)], loaded)
        plgpu.barrier_wait(loaded)
        for block in range(BLOCK // MX_BLOCK):
            at = pl.ds(block * MX_BLOCK, MX_BLOCK)
            scaled, byte = _scaled(x_smem.at[:, at], tile)
            rounded = scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32)
            for half in scale_halves(byte):
                rounded *= _over_columns(half)
            y_smem[:, at] = rounded.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(0, stored)], y_gmem.at[pl.ds(m * ROWS, stored), columns])
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((padded, K), jnp.bfloat16)
    return _launch(body, x_MK, out, [plgpu.SMEM((ROWS, BLOCK), jnp.bfloat16)], interpret)


def _whole_blocks(x_MK: jax.Array) -> jax.Array:
    """More than 64 rows, filled up to a multiple of 64."""
    M = x_MK.shape[0]
    return jnp.pad(x_MK, ((0, -M % ROWS), (0, 0))) if M > ROWS and M % ROWS else x_MK


def _scaled(x_ref, tile: int) -> tuple[jax.Array, jax.Array]:
    """32 columns of 64 rows, of which the first `tile` are meant, without their scales, and the bytes (64,) int32."""
    x = load(x_ref, plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    if tile < ROWS:
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
        x = jnp.where(row < tile, x, 0.0)
    size = jnp.abs(x)
    finite = size <= F32_MAX
    amax = jnp.max(jnp.where(finite, size, 0.0), axis=1)
    bad = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1)
    # The exponent field is floor(log2) + 127 exactly; a zero or subnormal amax has field 0 and clamps.
    field = lax.shift_right_logical(lax.bitcast_convert_type(amax, jnp.int32), 23)
    byte = jnp.maximum(field - E4M3_MAX_EXPONENT, 0)
    inverse = lax.bitcast_convert_type(lax.shift_left(254 - byte, 23), jnp.float32)
    scaled = jnp.clip(jnp.where(size < _SMALLEST, 0.0, x) * _over_columns(inverse), -E4M3_MAX, E4M3_MAX)
    scaled = jnp.where(_over_columns(bad) > 0.0, jnp.where(finite, 0.0, jnp.nan), scaled)
    return scaled, jnp.where(bad > 0.0, NAN_SCALE, byte)


def _over_columns(row: jax.Array) -> jax.Array:
    """(64,) to (64, 32)."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, (ROWS, MX_BLOCK), (0,)), plgpu.Layout.WGMMA)


def _launch(body, x_MK: jax.Array, out_type, tiles: list, interpret):
    """A block for every 64 rows and 128 columns, with room for them in shared memory and for what is made of them."""
    M, K = x_MK.shape
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(K // BLOCK, -(-M // ROWS)),
        grid_names=("block", "tile"),
        scratch_types=[plgpu.SMEM((ROWS, BLOCK), x_MK.dtype), *tiles, plgpu.Barrier()],
        compiler_params=LANE,
        interpret=interpret,
    )(x_MK)
