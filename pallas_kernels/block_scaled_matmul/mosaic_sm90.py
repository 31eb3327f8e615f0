"""The Hopper kernel: FP8 wgmma with the operands swapped, so that a few tokens fill a whole instruction.

    weights (tile_n, 128) ──TMA──► ring ─┐  wgmma: acc[tile_n, M] over one 128-wide step of K
    tokens  (M, 128)      ──TMA──► ring ─┘  sum += acc * w_scale[tile, k] * x_scale[k, :]     float32 registers
    splits of K: partial sums meet in a fixed order, in the cluster's first block or in one more kernel

The weight is wgmma's 64-row side and the tokens its N = 8 ... 128, so M = 8 costs what it reads. The tensor core's
short accumulator never holds more than 128 products: each step starts from zero and is added to float32 registers
with both scales. One block is one warpgroup; two or three blocks share an SM and hide each other's waits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._dispatch import need_capability
from .._mosaic import WARPGROUP, load, tiled
from ..prepare import prepare_weights
from ..types import BLOCK, BlockScaled
from .config import Config, can_run, default_config, scale_rows_of

MAX_TILE_M = 128


def why_not(M: int, N: int, K: int, config: Config | None = None) -> str | None:
    """None when this kernel can run here and now, else the reason."""
    tile_m, rows = _tile_m(M), -(-N // 64) * 64
    return need_capability("9.0") or can_run(config or _pick(tile_m, rows, K), tile_m, rows, K)


def block_scaled_matmul(
    x_MK: BlockScaled, w_NK: BlockScaled, out_dtype: jnp.dtype, config: Config | None = None, interpret=None
) -> jax.Array:
    """(M, K) x (N, K) -> (M, N). A weight that is not prepared is padded here, at the price of copying it."""
    M, K = x_MK.shape
    N = w_NK.shape[0]
    w_NK = prepare_weights(w_NK, "block_scaled_matmul")
    tile_m = _tile_m(M)
    padding = -M % tile_m
    x_values = jnp.pad(x_MK.values_NK, ((0, padding), (0, 0)))
    # Rows to a multiple of 4, so that even 8 tokens make whole 128-byte lines.
    x_scale_KbM = jnp.pad(x_MK.scale_NbKb[:, : K // BLOCK].T, ((0, -(K // BLOCK) % 4), (0, padding)))
    rows = w_NK.values_NK.shape[0]
    config = config or _pick(tile_m, rows, K)
    if reason := can_run(config, tile_m, rows, K):
        raise NotImplementedError(f"block_scaled_matmul: {reason}")
    y = _call(x_values, x_scale_KbM, w_NK.values_NK, w_NK.scale_NbKb, out_dtype, tile_m, config, interpret)
    return y[:M, :N]


def _pick(tile_m: int, rows: int, K: int) -> Config:
    """The measured choice for this device and shape, else the default."""
    fields = _tuned.lookup("block_scaled_matmul", _tuned.bucket(tile_m), rows, K)
    return default_config(tile_m, rows, K) if fields is None else Config(**fields)


def _tile_m(M: int) -> int:
    """Rows of one tile: M rounded up to 8, in equal tiles of at most 128."""
    tiles = -(-M // MAX_TILE_M)
    return -(-M // (8 * tiles)) * 8


def _call(x_MK, x_scale_KbM, w_NK, w_scale_NbKb, out_dtype, tile_m: int, config: Config, interpret) -> jax.Array:
    (M, K), N = x_MK.shape, w_NK.shape[0]
    num_steps, splits, tile_n = K // BLOCK, config.splits, config.tile_n
    clustered = config.combine == "cluster" and splits > 1
    summed = config.combine == "sum" and splits > 1
    stages = min(config.stages, num_steps // splits)
    scale_rows = scale_rows_of(num_steps, splits)
    store_dtype = jnp.dtype(jnp.float32) if summed else jnp.dtype(out_dtype)

    def body(x_gmem, x_scale_gmem, w_gmem, w_scale_gmem, y_gmem, *scratch):
        x_smem, w_smem, x_scale_smem, w_scale_smem, y_smem, loaded, scales_loaded, *cluster_scratch = scratch
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        # Tiles of the same weight rows are neighbours in time: the second one reads them from L2.
        m, n = lax.rem(tile, M // tile_m), lax.div(tile, M // tile_m)
        first = split * (num_steps // splits) + jnp.minimum(split, num_steps % splits)
        steps = num_steps // splits + jnp.where(split < num_steps % splits, 1, 0)
        scales_from = jnp.minimum(first, x_scale_KbM.shape[0] - scale_rows)

        def fetch_w(i, slot):
            k = pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(n * tile_n, tile_n), k], w_smem.at[slot], loaded.at[slot])

        def fetch_x(i, slot):
            k = pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(m * tile_m, tile_m), k], x_smem.at[slot], loaded.at[slot])

        for slot in range(stages):
            fetch_w(slot, slot)
        plgpu.copy_gmem_to_smem(w_scale_gmem.at[lax.div(n * tile_n, BLOCK)], w_scale_smem, scales_loaded)
        if config.early:
            plgpu.griddepcontrol_wait()
        for slot in range(stages):
            fetch_x(slot, slot)
        at = (pl.ds(scales_from, scale_rows), pl.ds(m * tile_m, tile_m))
        plgpu.copy_gmem_to_smem(x_scale_gmem.at[at], x_scale_smem, scales_loaded)
        plgpu.barrier_wait(scales_loaded)

        def step(i, total):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])

            def multiply(acc):
                plgpu.wgmma(acc, w_smem.at[slot], x_smem.at[slot].T)
                return acc[...]  # waits: the slot may be filled again

            partial = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tile_n, tile_m), jnp.float32))

            @pl.when(i + stages < steps)
            def _():
                fetch_w(i + stages, slot)
                fetch_x(i + stages, slot)

            x_scale = load(x_scale_smem.at[first - scales_from + i], plgpu.Layout.WGMMA.reduce(0))
            scale = lax.broadcast_in_dim(x_scale, (tile_n, tile_m), (1,)) * w_scale_smem[first + i]
            return total + partial * scale

        zeros = plgpu.layout_cast(jnp.zeros((tile_n, tile_m), jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, steps, step, zeros)
        if config.early:
            plgpu.griddepcontrol_launch_dependents()

        def store(total):
            y = plgpu.layout_cast(total.astype(store_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            y_smem.T[...] = y
            plgpu.commit_smem()
            target = y_gmem.at[split] if summed else y_gmem
            at = (pl.ds(m * tile_m, tile_m), pl.ds(n * tile_n, tile_n))
            plgpu.copy_smem_to_gmem(y_smem, target.at[at])
            plgpu.wait_smem_to_gmem(0)

        if not clustered:
            store(total)
            return
        pushed_smem, pushed = cluster_scratch

        for peer in range(1, splits):

            @pl.when(split == peer)
            def _push(peer=peer):
                plgpu.async_store_smem(
                    total,
                    pushed_smem.at[peer - 1],
                    pushed.at[peer - 1],
                    cluster_idx=jnp.int32(0),
                    cluster_dim="split",
                )

        @pl.when(split == 0)
        def _combine():
            everything = total
            for peer in range(1, splits):  # in this order, whatever arrives first: the same bits every time
                plgpu.barrier_wait(pushed.at[peer - 1])
                everything += load(pushed_smem.at[peer - 1], plgpu.Layout.WGMMA)
            store(everything)

    scratch = [
        plgpu.SMEM((stages, tile_m, BLOCK), x_MK.dtype, transforms=tiled(BLOCK, x_MK.dtype)),
        plgpu.SMEM((stages, tile_n, BLOCK), w_NK.dtype, transforms=tiled(BLOCK, x_MK.dtype)),
        plgpu.SMEM((scale_rows, tile_m), jnp.float32),
        plgpu.SMEM((w_scale_NbKb.shape[1],), jnp.float32),
        plgpu.SMEM((tile_m, tile_n), store_dtype, transforms=tiled(tile_n, store_dtype)),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2),
    ]
    if clustered:
        scratch += [
            plgpu.SMEM((splits - 1, tile_n, tile_m), jnp.float32, transforms=tiled(tile_m, jnp.float32)),
            plgpu.Barrier(num_barriers=splits - 1),
        ]
    tiles = (M // tile_m) * (N // tile_n)
    mesh = (
        {"grid": (tiles,), "grid_names": ("tile",), "cluster": (splits,), "cluster_names": ("split",)}
        if clustered
        else {"grid": (tiles, splits), "grid_names": ("tile", "split")}
    )
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, M, N) if summed else (M, N), store_dtype),
        scratch_types=scratch,
        compiler_params=WARPGROUP,
        interpret=interpret,
        **mesh,
    )(x_MK, x_scale_KbM, w_NK, w_scale_NbKb)
    return jnp.sum(y, axis=0).astype(out_dtype) if summed else y
