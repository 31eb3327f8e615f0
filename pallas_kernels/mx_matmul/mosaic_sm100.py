"""The Blackwell kernel: block-scaled tcgen05, operands swapped as on Hopper. **Never run on a Blackwell.**

    weights (128, 128) e4m3 ──TMA──► ring ─┐
    tokens  (M, 128)   e4m3 ──TMA──► ring ─┤ tcgen05.mma: sum[128, M] += (w 2^(w_byte - 127)) (x 2^(x_byte - 127))
    their E8M0 bytes ──TMA──► ring ──tcgen05.cp──► tensor memory ┘      float32, in tensor memory
    sum ──► registers ──► y^T through shared memory ──TMA──► y; with several splits of K: float32 parts, summed by XLA

The tensor core applies the scales, so K is walked without anything leaving it. One warp of the block loads, one
multiplies; all four carry the sum out. The ring's slot is free again when the tensor core says that it has read it;
the scales of a slot have tensor memory of their own, so that none is overwritten while a product reads it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._dispatch import BLACKWELL
from .._mosaic import LANE, tiled
from ..prepare import prepare_weights, rows_of_prepared
from ..quantize_mx.mosaic_sm90 import quantize_rows
from ..types import MxScaled, scale_tiles
from .config_sm100 import SCALE_ROWS, STEP, TILE_M, TILE_N, Config, can_run, default_config

LOAD, MULTIPLY = 0, 1
"""Warps of the block that have a part of their own."""
_SCALE, _TILE = jnp.float8_e8m0fnu, (1, 1, 32, 16)


def why_not(M: int, N: int, K: int, config: Config | None = None) -> str | None:
    """None when this kernel can run these shapes, else the reason."""
    tile_m, rows = _tile_m(M), rows_of_prepared(N)
    return can_run(config or _pick(tile_m, rows, K), tile_m, rows, K)


def mx_matmul(
    x_MK: jax.Array | MxScaled, w_NK: MxScaled, out_dtype: jnp.dtype, config: Config | None = None, interpret=None
) -> jax.Array:
    """(M, K) x (N, K) -> (M, N), x quantised here if it is not.

    A weight that is not prepared is laid out here, at the price of copying it.
    """
    (M, K), N = x_MK.shape, w_NK.shape[0]
    tile_m, rows = _tile_m(M), rows_of_prepared(N)
    config = config or _pick(tile_m, rows, K)
    if reason := can_run(config, tile_m, rows, K):
        raise NotImplementedError(f"mx_matmul: {reason}")
    weight = prepare_weights(w_NK, "mx_matmul", BLACKWELL)
    tiles = -(-M // tile_m)
    more = tiles * tile_m - M
    if isinstance(x_MK, MxScaled):
        values_MK, byte_MKb = x_MK.values_NK, x_MK.scale_rows
    else:
        values_MK, byte_KbM = quantize_rows(x_MK, interpret)
        values_MK, byte_MKb = values_MK[:M], byte_KbM[:, :M].T
    values_MK = jnp.pad(values_MK, ((0, more), (0, 0)))
    byte = jnp.pad(byte_MKb, ((0, more), (0, 0))).reshape(tiles, tile_m, -1)
    byte = jnp.pad(byte, ((0, 0), (0, SCALE_ROWS - tile_m), (0, 0)))  # each tile of tokens has a tile of scales
    x_scale = scale_tiles(byte.reshape(tiles * SCALE_ROWS, -1))
    parts = _call(values_MK, x_scale, weight, out_dtype, tile_m, config, interpret)
    y = parts[0] if config.splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)
    return y[:M, :N]


def _tile_m(M: int) -> int:
    """Rows of one tile: M rounded up to 32, in equal tiles of at most 128."""
    tiles = -(-M // SCALE_ROWS)
    return -(-M // (TILE_M * tiles)) * TILE_M


def _pick(tile_m: int, rows: int, K: int) -> Config:
    """The measured choice for this device and shape, else the default."""
    fields = _tuned.lookup("mx_matmul", _tuned.bucket(tile_m), rows, K)
    return default_config(tile_m, rows, K) if fields is None else Config(**fields)


def _call(x_MK, x_scale, weight: MxScaled, out_dtype, tile_m: int, config: Config, interpret):
    """(splits, M, N): `out_dtype` when there is one split, else float32."""
    w_NK, w_scale = weight.values_NK, weight.scale_NKb
    (M, K), N = x_MK.shape, w_NK.shape[0]
    num_steps, splits = K // STEP, config.splits
    stages = min(config.stages, num_steps // splits)
    stored = out_dtype if splits == 1 else jnp.dtype(jnp.float32)

    def body(x_gmem, x_scale_gmem, w_gmem, w_scale_gmem, y_gmem, *scratch):
        x_smem, x_scale_smem, w_smem, w_scale_smem, y_smem, x_scale_tmem, w_scale_tmem, sum_tmem, *barriers = scratch
        loaded, read, done = barriers
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        # Tiles of the same weight rows are neighbours in time: the second one reads them from L2.
        m, n = lax.rem(tile, M // tile_m), lax.div(tile, M // tile_m)
        first = split * (num_steps // splits) + jnp.minimum(split, num_steps % splits)
        steps = num_steps // splits + jnp.where(split < num_steps % splits, 1, 0)
        tokens, rows = pl.ds(m * tile_m, tile_m), pl.ds(n * TILE_N, TILE_N)

        def fetch(i, _):
            slot, step = lax.rem(i, stages), first + i

            @pl.when(i >= stages)
            def _wait():
                plgpu.barrier_wait(read.at[slot])

            k, one = pl.ds(step * STEP, STEP), pl.ds(step, 1)
            for source, target in (
                (w_gmem.at[rows, k], w_smem),
                (w_scale_gmem.at[pl.ds(n, 1), one], w_scale_smem),
                (x_gmem.at[tokens, k], x_smem),
                (x_scale_gmem.at[pl.ds(m, 1), one], x_scale_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

        def multiply(i, _):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])
            own = pl.ds(slot * 4, 4)
            plgpu.async_copy_scales_to_tmem(w_scale_smem.at[slot], w_scale_tmem.at[:, own])
            plgpu.async_copy_scales_to_tmem(x_scale_smem.at[slot], x_scale_tmem.at[:, own])
            plgpu.tcgen05_mma(
                sum_tmem,
                w_smem.at[slot],
                x_smem.at[slot].T,
                read.at[slot],
                a_scale=w_scale_tmem.at[:, own],
                b_scale=x_scale_tmem.at[:, own],
                accumulate=i > 0,
            )

        @plgpu.warp_map
        def _warps(warp):
            @pl.when(warp == LOAD)
            def _load():
                lax.fori_loop(0, steps, fetch, None)
                for last in range(stages):  # every completion of a barrier must be waited for
                    plgpu.barrier_wait(read.at[lax.rem(steps + last, stages)])

            @pl.when(warp == MULTIPLY)
            def _multiply():
                lax.fori_loop(0, steps, multiply, None)
                plgpu.tcgen05_commit_arrive(done)

        plgpu.barrier_wait(done)
        total = plgpu.async_load_tmem(sum_tmem, layout=plgpu.Layout.TCGEN05).astype(stored)
        y_smem.T[...] = plgpu.layout_cast(total, plgpu.Layout.TCGEN05_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, y_gmem.at[split, tokens, rows])
        plgpu.wait_smem_to_gmem(0)

    ring = tiled(STEP, w_NK.dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, M, N), stored),
        grid=((M // tile_m) * (N // TILE_N), splits),
        grid_names=("tile", "split"),
        scratch_types=[
            plgpu.SMEM((stages, tile_m, STEP), x_MK.dtype, transforms=ring),
            plgpu.SMEM((stages, *_TILE), _SCALE),
            plgpu.SMEM((stages, TILE_N, STEP), w_NK.dtype, transforms=ring),
            plgpu.SMEM((stages, *_TILE), _SCALE),
            plgpu.SMEM((tile_m, TILE_N), stored, transforms=tiled(TILE_N, stored)),
            plgpu.TMEM((SCALE_ROWS, stages * 4), _SCALE, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            plgpu.TMEM((TILE_N, stages * 4), _SCALE, layout=plgpu.TMEMLayout.SCALES_LAYOUT),
            plgpu.TMEM((TILE_N, tile_m), jnp.float32),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=LANE,
        interpret=interpret,
    )(x_MK, lax.bitcast_convert_type(x_scale, _SCALE), w_NK, lax.bitcast_convert_type(w_scale, _SCALE))
