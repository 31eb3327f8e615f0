"""The Hopper kernel: FP8 wgmma with the operands swapped, so that a few tokens fill a whole instruction.

    weights (tile_n, 128) ──TMA──► ring ─┐  wgmma: acc[tile_n, M] over one 128-wide step of K
    tokens  (M, 128)      ──TMA──► ring ─┘  sum += acc * w_scale[tile, k] * x_scale[k, :]     float32 registers
    splits of K: the cluster's blocks push their sums to each other, each adds up its share of the tokens, in order

The weight is wgmma's 64-row side and the tokens its N = 8 ... 128, so M = 8 costs what it reads. The tensor core's
short accumulator never holds more than 128 products: each step starts from zero and is added to float32 registers
with both scales, the first of two while the second is made. One block is one warpgroup, or several with weight rows of
their own that share the tokens of a step: one multiplies while another adds up. Two to four small blocks share an SM
and hide each other's waits: a shallow ring that lets one more block in beats a deep one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._chip import SM90, Chip, broadcast
from .._mosaic import LANE, load, tiled
from ..prepare import prepare_weights, rows_of_prepared
from ..quantize_blocks.mosaic_sm90 import quantize_rows
from ..types import BLOCK, BlockScaled
from .config import Config, can_run, default_config, owners_of, rows_of, scale_rows_of, tile_of


def why_not(M: int, N: int, K: int, config: Config | None = None, chip: Chip = SM90) -> str | None:
    """None when this kernel can run these shapes, else the reason."""
    rows = rows_of_prepared(N)
    config = config or pick(M, rows, K, chip)
    return can_run(config, tile_of(M, config, chip), rows, K, chip)


def block_scaled_matmul(
    x_MK: jax.Array | BlockScaled,
    w_NK: BlockScaled,
    out_dtype: jnp.dtype,
    config: Config | None = None,
    interpret=None,
    chip: Chip = SM90,
) -> jax.Array:
    """(M, K) x (N, K) -> (M, N). A weight that is not prepared is padded here, at the price of copying it."""
    M, K = x_MK.shape
    config = config or pick(M, rows_of_prepared(w_NK.shape[0]), K, chip)
    if isinstance(x_MK, BlockScaled):
        values, scale_KbM = transposed_scales(x_MK)
    else:
        values, scale_KbM = quantize_rows(x_MK, interpret, early=config.early)
    return multiply_rows(values, scale_KbM, w_NK, M, out_dtype, config, interpret, chip)


def transposed_scales(x_MK: BlockScaled) -> tuple[jax.Array, jax.Array]:
    """Quantised rows as the kernel reads them: values padded to 8 rows, scales (K / 128 to 4, M to 8)."""
    padding = -x_MK.shape[0] % 8
    scale_KbM = x_MK.scale_NbKb[:, : x_MK.shape[1] // BLOCK].T
    return jnp.pad(x_MK.values_NK, ((0, padding), (0, 0))), jnp.pad(
        scale_KbM, ((0, -scale_KbM.shape[0] % 4), (0, padding))
    )


def multiply_rows(
    values_MK: jax.Array,
    scale_KbM: jax.Array,
    w_NK: BlockScaled,
    M: int,
    out_dtype: jnp.dtype,
    config: Config | None = None,
    interpret=None,
    chip: Chip = SM90,
) -> jax.Array:
    """The first M rows of e4m3 values (M to 8, K) with scales (K / 128 or more, M to 8 or more) times w^T: (M, N)."""
    N, K = w_NK.shape
    w_NK = prepare_weights(w_NK, "block_scaled_matmul", chip.capability)
    rows = w_NK.values_NK.shape[0]
    config = config or pick(M, rows, K, chip)
    tile_m = tile_of(M, config, chip)
    tiled_rows = -(-M // tile_m) * tile_m
    values_MK = values_MK[:tiled_rows]
    more = tiled_rows - values_MK.shape[0]
    values_MK = jnp.pad(values_MK, ((0, more), (0, 0)))
    scale_KbM = jnp.pad(scale_KbM, ((0, 0), (0, max(0, tiled_rows - scale_KbM.shape[1]))))
    if reason := can_run(config, tile_m, rows, K, chip):
        raise NotImplementedError(f"block_scaled_matmul: {reason}")
    w_TnK = w_NK.values_NK.reshape(-1, config.tile_n, K)
    y = launch(values_MK, scale_KbM, w_TnK, w_NK.scale_NbKb, M, out_dtype, tile_m, config, interpret, chip)
    return y[:M, :N]


def pick(M: int, rows: int, K: int, chip: Chip = SM90) -> Config:
    """The measured choice for this device and M rows of x, else the default."""
    fields = _tuned.lookup("block_scaled_matmul", _tuned.bucket(M), rows, K)
    return default_config(M, rows, K, chip) if fields is None else Config(**fields)


def launch(
    x_MK,
    x_scale_KbM,
    w_TnK,
    w_scale_NbKb,
    wanted: int,
    out_dtype,
    tile_m: int,
    config: Config,
    interpret=None,
    chip: Chip = SM90,
) -> jax.Array:
    """The kernel and no other operation: `wanted` rows when fewer than 8, else all of x's, by all of the weight's.

    x (M, K) in whole tiles, its scales (K / 128 to 4 or more, M or more), a prepared weight's values in tiles of
    `config.tile_n` rows (N / tile_n, tile_n, K) and its scales.
    """
    (M, K), N = x_MK.shape, w_TnK.shape[0] * config.tile_n
    few = wanted < 8  # then exactly these rows are stored, so that no other kernel need cut them out
    num_steps, splits, tile_n, warpgroups = K // BLOCK, config.splits, config.tile_n, config.warpgroups
    owners = owners_of(splits, tile_m)
    share = tile_m // owners
    stages, together = min(config.stages, num_steps // splits), config.together
    scale_rows = scale_rows_of(num_steps, splits)
    lag = 1 if warpgroups > 1 else 0  # steps after which a slot is refilled, so that no warpgroup waits for another
    chip_types = chip.scratch((tile_n, tile_m), 1)

    def body(x_gmem, x_scale_gmem, w_gmem, w_scale_gmem, y_gmem, *scratch):
        x_smem, w_smem, x_scale_smem, w_scale_smem, y_smem, loaded, read, scales_loaded, *rest = scratch
        chip_scratch, cluster_scratch = rest[: len(chip_types)], rest[len(chip_types) :]
        tile = lax.axis_index("tile")
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        own = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        # Tiles of the same weight rows are neighbours in time: the second one reads them from L2.
        m, n = lax.rem(tile, M // tile_m), lax.div(tile, M // tile_m) * warpgroups
        first = split * (num_steps // splits) + jnp.minimum(split, num_steps % splits)
        steps = num_steps // splits + jnp.where(split < num_steps % splits, 1, 0)
        scales_from = jnp.minimum(first, x_scale_KbM.shape[0] - scale_rows)

        def fetch_w(i, slot):
            k = pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(n, warpgroups), :, k], w_smem.at[slot], loaded.at[slot])

        def fetch_x(i, slot):
            k = pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(m * tile_m, tile_m), k], x_smem.at[slot], loaded.at[slot])

        @pl.when(own == 0)
        def _begin():
            for slot in range(stages):
                fetch_w(slot, slot)
            for part in range(warpgroups):
                row = w_scale_gmem.at[lax.div((n + part) * tile_n, BLOCK)]
                plgpu.copy_gmem_to_smem(row, w_scale_smem.at[part], scales_loaded)
            if config.early:
                plgpu.griddepcontrol_wait()
            for slot in range(stages):
                fetch_x(slot, slot)
            at = (pl.ds(scales_from, scale_rows), pl.ds(m * tile_m, tile_m))
            plgpu.copy_gmem_to_smem(x_scale_gmem.at[at], x_scale_smem, scales_loaded)

        plgpu.barrier_wait(scales_loaded)

        def refill(i, slot):
            """Step i's product is there, so this warpgroup has read the slot."""
            if warpgroups > 1:

                @pl.when(i + stages < steps)
                def _release():
                    plgpu.barrier_arrive(read.at[slot])

            done = i - lag  # which the other warpgroups have most likely read, too

            @pl.when((own == 0) & (done >= 0) & (done + stages < steps))
            def _refill():
                freed = lax.rem(done, stages) if lag else slot
                if warpgroups > 1:
                    plgpu.barrier_wait(read.at[freed])
                fetch_w(done + stages, freed)
                fetch_x(done + stages, freed)

        def multiply(count, i, total):
            """Steps i ... i + count - 1."""
            slots = [lax.rem(i + n, stages) for n in range(count)]
            for slot in slots:
                plgpu.barrier_wait(loaded.at[slot])
            sums = [total]

            def add(n, partial):
                refill(i + n, slots[n])
                row = load(x_scale_smem.at[first - scales_from + i + n], chip.layout.reduce(0))
                scale = broadcast(row, (tile_n, tile_m), 1, chip)
                sums.append(sums[-1] + partial * (scale * w_scale_smem[own, first + i + n]))
                return sums[-1]

            pairs = [(w_smem.at[slot, own], x_smem.at[slot].T) for slot in slots]
            return chip.products(pairs, (tile_n, tile_m), chip_scratch, add)[-1]

        total = plgpu.layout_cast(jnp.zeros((tile_n, tile_m), jnp.float32), chip.layout)
        whole = lax.div(steps, together)
        total = lax.fori_loop(0, whole, lambda turn, total: multiply(together, turn * together, total), total)
        if together > 1:
            total = lax.fori_loop(whole * together, steps, functools.partial(multiply, 1), total)
        if config.early:
            plgpu.griddepcontrol_launch_dependents()

        def store(total, owner):
            y_smem.at[own].T[...] = plgpu.layout_cast(total.astype(out_dtype), chip.transposed)
            plgpu.commit_smem()
            columns = pl.ds((n + own) * tile_n, tile_n)
            if few:
                plgpu.copy_smem_to_gmem(y_smem.at[own, pl.ds(0, wanted)], y_gmem.at[:, columns])
            else:
                tokens = pl.ds(m * tile_m + owner * share, share)
                plgpu.copy_smem_to_gmem(y_smem.at[own], y_gmem.at[tokens, columns])
            plgpu.wait_smem_to_gmem(0)

        if splits == 1:
            store(total, 0)
            return
        pushed_smem, pushed = cluster_scratch
        for owner in range(owners):
            plgpu.async_store_smem(
                total[:, owner * share : (owner + 1) * share],
                pushed_smem.at[own, split],
                pushed,
                cluster_idx=jnp.int32(owner),
                cluster_dim="split",
            )

        @pl.when(split < owners)
        def _combine():
            plgpu.barrier_wait(pushed)
            everything = load(pushed_smem.at[own, 0], chip.layout)
            for other in range(1, splits):  # in this order, whatever arrived first: the same bits every time
                everything += load(pushed_smem.at[own, other], chip.layout)
            store(everything, split)

    scratch = [
        plgpu.SMEM((stages, tile_m, BLOCK), x_MK.dtype, transforms=tiled(BLOCK, x_MK.dtype)),
        plgpu.SMEM((stages, warpgroups, tile_n, BLOCK), w_TnK.dtype, transforms=tiled(BLOCK, x_MK.dtype)),
        plgpu.SMEM((scale_rows, tile_m), jnp.float32),
        plgpu.SMEM((warpgroups, w_scale_NbKb.shape[1]), jnp.float32),
        plgpu.SMEM((warpgroups, share, tile_n), out_dtype, transforms=() if few else tiled(tile_n, out_dtype)),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups + 1),
        *chip_types,
    ]
    mesh: dict = {"grid": ((M // tile_m) * (N // rows_of(config)),), "grid_names": ("tile",)}
    if splits > 1:
        mesh |= {"cluster": (splits,), "cluster_names": ("split",)}
        scratch += [
            plgpu.SMEM((warpgroups, splits, tile_n, share), jnp.float32, transforms=tiled(share, jnp.float32)),
            plgpu.Barrier(num_arrivals=splits * warpgroups),
        ]
    if warpgroups > 1:
        mesh |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((wanted if few else M, N), out_dtype),
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(x_MK, x_scale_KbM, w_TnK, w_scale_NbKb)
