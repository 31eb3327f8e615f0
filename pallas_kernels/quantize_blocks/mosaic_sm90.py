"""The Hopper kernel for activations: rows to FP8 with 1 x 128 scales, in one launch and in the layout matmuls read.

    x (64 rows, 128) ──TMA──► registers ──► amax of each row ──► scale ──► e4m3 (rows, 128) and a row of scales

Where x is gate and up side by side, silu(gate) * up is what is quantised. One block is one step of K for up to 64 rows;
the formula is reference.py's, bit for bit. The scales leave transposed, (K / 128, rows), because a matmul with swapped
operands wants one scale per column of its accumulator.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._mosaic import LANE, LINE, load, silu
from ..types import BLOCK, E4M3_MAX, F32_MAX
from .reference import scale_of

ROWS = 64
"""Rows of one block: one register tile."""


def why_not(block: tuple[int, int]) -> str | None:
    """None when this kernel can make such blocks, else the reason."""
    return None if block == (1, BLOCK) else f"it has one scale per 1 x {BLOCK}; weights are quantised once, by XLA"


def scale_shape(M: int, K: int) -> tuple[int, int]:
    """(K / 128 rounded up to 4, M rounded up to 32, or to 64 above 32): whole lines for every bulk copy."""
    return -(-(K // BLOCK) // 4) * 4, LINE if M <= LINE else -(-M // ROWS) * ROWS


def quantize_rows(x_MK: jax.Array, interpret=None, *, early: bool = False) -> tuple[jax.Array, jax.Array]:
    """(M, K) floating point -> values (M rounded up to 8, K) e4m3, scale_KbM float32 of `scale_shape`.

    New rows are zeros with scale 1; rows of scales past K / 128 are not written. Above 64 rows M goes to a multiple
    of 64. `early` lets a kernel that waits for this one start meanwhile (programmatic dependent launch).
    """
    return _launch(x_MK, 1, lambda x: x, interpret, early)


def quantize_swiglu_rows(x_MN: jax.Array, interpret=None, *, early: bool = False) -> tuple[jax.Array, jax.Array]:
    """silu(gate) * up of (M, 2 F), F columns of gate and then F of up, as `quantize_rows` returns it."""
    return _launch(x_MN, 2, lambda gate, up: silu(gate) * up, interpret, early)


def scale_and_round_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The formula for each row of a float32 tile in registers: (e4m3 values, float32 scales)."""
    finite = jnp.abs(x) <= F32_MAX
    scale = scale_of(jnp.max(jnp.where(finite, jnp.abs(x), 0.0), axis=1))
    quotient = jnp.clip(x / lax.broadcast_in_dim(scale, x.shape, (0,)), -E4M3_MAX, E4M3_MAX)
    return jnp.where(finite, quotient, jnp.nan).astype(jnp.float8_e4m3fn), scale


def _launch(x_MN, parts: int, combine: Callable, interpret, early: bool) -> tuple[jax.Array, jax.Array]:
    """Quantise `combine` of x's `parts`, equal shares of its columns, float32 tiles (64, 128)."""
    M, K = x_MN.shape[0], x_MN.shape[1] // parts
    if M > ROWS and M % ROWS:
        x_MN = jnp.pad(x_MN, ((0, -M % ROWS), (0, 0)))
        M = x_MN.shape[0]
    tile, padded = min(M, ROWS), -(-M // 8) * 8
    stored = min(padded, ROWS)
    scales = scale_shape(M, K)
    line = min(scales[1], ROWS)

    def body(x_gmem, values_gmem, scale_gmem, x_smem, values_smem, scale_smem, loaded):
        kb, m = lax.axis_index("block"), lax.axis_index("tile")
        if early:
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        for part in range(parts):
            at = (pl.ds(m * ROWS, tile), pl.ds(part * K + kb * BLOCK, BLOCK))
            plgpu.copy_gmem_to_smem(x_gmem.at[at], x_smem.at[part, pl.ds(0, tile)], loaded)
        plgpu.barrier_wait(loaded)
        tiles = (load(x_smem.at[part], plgpu.Layout.WGMMA, optimized=False) for part in range(parts))
        x = combine(*(value.astype(jnp.float32) for value in tiles))
        if tile < ROWS:
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
            x = jnp.where(row < tile, x, 0.0)
        values_smem[...], scale_smem[...] = scale_and_round_rows(x)
        plgpu.commit_smem()
        to = (pl.ds(m * ROWS, stored), pl.ds(kb * BLOCK, BLOCK))
        plgpu.copy_smem_to_gmem(values_smem.at[pl.ds(0, stored)], values_gmem.at[to])
        plgpu.copy_smem_to_gmem(scale_smem.at[pl.ds(0, line)], scale_gmem.at[kb, pl.ds(m * ROWS, line)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((padded, K), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        ),
        grid=(K // BLOCK, -(-M // ROWS)),
        grid_names=("block", "tile"),
        scratch_types=[
            plgpu.SMEM((parts, ROWS, BLOCK), x_MN.dtype),
            plgpu.SMEM((ROWS, BLOCK), jnp.float8_e4m3fn),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=parts),
        ],
        compiler_params=LANE,
        interpret=interpret,
    )(x_MN)
