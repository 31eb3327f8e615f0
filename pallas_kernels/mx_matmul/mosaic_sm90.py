"""The Hopper kernel: FP8 wgmma one MX block of 32 columns at a time, operands swapped as in block_scaled_matmul.

    weights (64, 128) e4m3 ──TMA──► ring ─┐  wgmma: acc[64, M] over 32 of K, four times a step
    tokens  (M, 128)  e4m3 ──TMA──► ring ─┤
    their E8M0 bytes, 4 rows each ──TMA──►┘  sum += acc * 2^(w - 127)[rows] * 2^(x - 127)[columns]    float32 registers
    splits of K: the cluster's blocks push their sums to each other, each adds up its share of the tokens, in order

Hopper has no block-scaled instruction, so every 32-wide product leaves the tensor core and is scaled by the other
units: exactly, because both factors are powers of two. Each is split in two halves and the halves of rows and columns
are multiplied first; so neither 2^-127 nor two extreme scales that undo each other leave float32's normal numbers on
the way. A swizzle of 32 bytes, not 128, makes 32 columns a whole tile that can be named.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._dispatch import HOPPER
from .._mosaic import LANE, load, tiled
from ..block_scaled_matmul.config import owners_of
from ..prepare import prepare_weights
from ..quantize_mx.mosaic_sm90 import quantize_rows
from ..types import MX_BLOCK, MxScaled
from .config import BLOCKS_PER_STEP, STEP, TILE_N, Config, can_run, default_config, scale_columns_of

MAX_TILE_M = 128
NAN_SCALE = 255
_TILE_OF_BLOCK = (plgpu.TilingTransform((8, MX_BLOCK)), plgpu.SwizzleTransform(MX_BLOCK))


def why_not(M: int, N: int, K: int, config: Config | None = None) -> str | None:
    """None when this kernel can run these shapes, else the reason."""
    tile_m, rows = _tile_m(M), -(-N // TILE_N) * TILE_N
    return can_run(config or _pick(tile_m, rows, K), tile_m, rows, K)


def mx_matmul(
    x_MK: jax.Array | MxScaled, w_NK: MxScaled, out_dtype: jnp.dtype, config: Config | None = None, interpret=None
) -> jax.Array:
    """(M, K) x (N, K) -> (M, N), x quantised here if it is not.

    A weight that is not prepared is laid out here, at the price of copying it.
    """
    (M, K), N = x_MK.shape, w_NK.shape[0]
    weight = prepare_weights(w_NK, "mx_matmul", HOPPER)
    tile_m, rows = _tile_m(M), weight.values_NK.shape[0]
    config = config or _pick(tile_m, rows, K)
    if reason := can_run(config, tile_m, rows, K):
        raise NotImplementedError(f"mx_matmul: {reason}")
    tiled_rows = -(-M // tile_m) * tile_m
    values_MK, scale_KbM = quantised(x_MK, interpret)
    values_MK = _fit(values_MK, 0, tiled_rows)
    scale_KbM = _fit(scale_KbM, 1, scale_columns_of(tiled_rows))
    return _call(values_MK, scale_KbM, weight, out_dtype, tile_m, config, interpret)[:M, :N]


def quantised(x_MK: jax.Array | MxScaled, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Values (M or more, K) and scale bytes (K / 32, M or more) of activations."""
    if isinstance(x_MK, MxScaled):
        return x_MK.values_NK, x_MK.scale_rows.T
    return quantize_rows(x_MK, interpret)


def _fit(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cut to `size` along an axis, or filled up with zeros."""
    x = lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    more = [(0, 0)] * x.ndim
    more[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, more) if more[axis][1] else x


def _pick(tile_m: int, rows: int, K: int) -> Config:
    """The measured choice for this device and shape, else the default."""
    fields = _tuned.lookup("mx_matmul", _tuned.bucket(tile_m), rows, K)
    return default_config(tile_m, rows, K) if fields is None else Config(**fields)


def _tile_m(M: int) -> int:
    """Rows of one tile: M rounded up to 8; above 128 equal tiles of a multiple of 32, so that their scales align."""
    tiles = -(-M // MAX_TILE_M)
    multiple = 8 if tiles == 1 else 32
    return -(-M // (multiple * tiles)) * multiple


def _halves(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal float32 whose product is 2^(byte - 127), the first the smaller or equal; NaN for byte 255."""
    low = lax.shift_right_logical(byte, 1)
    nan = byte == NAN_SCALE

    def power(exponent):
        return jnp.where(nan, jnp.nan, lax.bitcast_convert_type(lax.shift_left(exponent, 23), jnp.float32))

    return power(low + 64), power(byte - low + 63)


def _call(x_MK, x_scale_KbM, weight: MxScaled, out_dtype, tile_m: int, config: Config, interpret):
    w_NK, w_scale_KbN = weight.values_NK, weight.scale_NKb
    (M, K), N = x_MK.shape, w_NK.shape[0]
    num_steps, splits = K // STEP, config.splits
    owners = owners_of(splits, tile_m)
    share = tile_m // owners
    stages = min(config.stages, num_steps // splits)
    scale_columns = scale_columns_of(tile_m)

    def body(x_gmem, x_scale_gmem, w_gmem, w_scale_gmem, y_gmem, *scratch):
        x_smem, x_scale_smem, w_smem, w_scale_smem, y_smem, loaded, *rest = scratch
        tile = lax.axis_index("tile")
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        # Tiles of the same weight rows are neighbours in time: the second one reads them from L2.
        m, n = lax.rem(tile, M // tile_m), lax.div(tile, M // tile_m)
        rows = pl.ds(n * TILE_N, TILE_N)
        first = split * (num_steps // splits) + jnp.minimum(split, num_steps % splits)
        steps = num_steps // splits + jnp.where(split < num_steps % splits, 1, 0)

        def fetch(i, slot):
            k, kb = pl.ds((first + i) * STEP, STEP), pl.ds((first + i) * BLOCKS_PER_STEP, BLOCKS_PER_STEP)
            tokens, columns = pl.ds(m * tile_m, tile_m), pl.ds(m * tile_m, scale_columns)
            for source, target in (
                (w_gmem.at[rows, k], w_smem),
                (w_scale_gmem.at[kb, rows], w_scale_smem),
                (x_gmem.at[tokens, k], x_smem),
                (x_scale_gmem.at[kb, columns], x_scale_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

        for slot in range(stages):
            fetch(slot, slot)

        def scales(ref, axis):
            """Both halves of the scales of a block's rows (axis 0) or columns (axis 1), as (64, M)."""
            byte = load(ref, plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False).astype(jnp.int32)
            return (lax.broadcast_in_dim(half, (TILE_N, tile_m), (axis,)) for half in _halves(byte))

        def step(i, total):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])

            for start in range(0, BLOCKS_PER_STEP, config.together):
                blocks = range(start, start + config.together)

                def multiply(*accs, blocks=blocks):
                    for block, acc in zip(blocks, accs, strict=True):
                        k = pl.ds(block * MX_BLOCK, MX_BLOCK)
                        plgpu.wgmma(acc, w_smem.at[slot, :, k], x_smem.at[slot, :, k].T)
                    return [acc[...] for acc in accs]

                accs = [plgpu.WGMMAAccumulatorRef((TILE_N, tile_m), jnp.float32)] * config.together
                for block, partial in zip(blocks, pl.run_scoped(multiply, *accs), strict=True):
                    w_low, w_high = scales(w_scale_smem.at[slot, block], 0)
                    x_low, x_high = scales(x_scale_smem.at[slot, block, pl.ds(0, tile_m)], 1)
                    total += partial * (w_low * x_high) * (w_high * x_low)

            @pl.when(i + stages < steps)
            def _refill():
                plgpu.commit_smem()  # every warp has read the slot's scales
                fetch(i + stages, slot)

            return total

        zeros = plgpu.layout_cast(jnp.zeros((TILE_N, tile_m), jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, steps, step, zeros)

        def store(total, owner):
            y_smem.T[...] = plgpu.layout_cast(total.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem, y_gmem.at[pl.ds(m * tile_m + owner * share, share), rows])
            plgpu.wait_smem_to_gmem(0)

        if splits == 1:
            store(total, 0)
            return
        pushed_smem, pushed = rest
        for owner in range(owners):
            plgpu.async_store_smem(
                total[:, owner * share : (owner + 1) * share],
                pushed_smem.at[split],
                pushed,
                cluster_idx=jnp.int32(owner),
                cluster_dim="split",
            )

        @pl.when(split < owners)
        def _combine():
            plgpu.barrier_wait(pushed)
            everything = load(pushed_smem.at[0], plgpu.Layout.WGMMA)
            for other in range(1, splits):  # in this order, whatever arrived first: the same bits every time
                everything += load(pushed_smem.at[other], plgpu.Layout.WGMMA)
            store(everything, split)

    scratch = [
        plgpu.SMEM((stages, tile_m, STEP), x_MK.dtype, transforms=_TILE_OF_BLOCK),
        plgpu.SMEM((stages, BLOCKS_PER_STEP, scale_columns), jnp.uint8),
        plgpu.SMEM((stages, TILE_N, STEP), w_NK.dtype, transforms=_TILE_OF_BLOCK),
        plgpu.SMEM((stages, BLOCKS_PER_STEP, TILE_N), jnp.uint8),
        plgpu.SMEM((share, TILE_N), out_dtype, transforms=tiled(TILE_N, out_dtype)),
        plgpu.Barrier(num_arrivals=4, num_barriers=stages),
    ]
    mesh: dict = {"grid": ((M // tile_m) * (N // TILE_N),), "grid_names": ("tile",)}
    if splits > 1:
        mesh |= {"cluster": (splits,), "cluster_names": ("split",)}
        scratch += [
            plgpu.SMEM((splits, TILE_N, share), jnp.float32, transforms=tiled(share, jnp.float32)),
            plgpu.Barrier(num_arrivals=splits),
        ]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), out_dtype),
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(x_MK, x_scale_KbM, w_NK, w_scale_KbN)
