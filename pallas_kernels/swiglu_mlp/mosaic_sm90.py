"""The Hopper kernels of the SwiGLU block, in one of two forms.

With SwiGLU in the epilogue it is three launches, and between them nothing but FP8 and scales.

    x (M, D) ──quantize_rows──► e4m3, scales
    gate and up rows of w_gate_up ──TMA──► ring ─► wgmma, twice a step ─► silu(gate) * up, float32 registers
        the pair's second block pushes its 64 columns to the first, which quantises all 128 (1 x 128) and writes e4m3
    a (M, F) e4m3, scales ──block_scaled_matmul with w_down──► y (M, D)

A block owns 128 / blocks_per_group columns of F, for gate and for up: the operands are swapped and each 128-wide step
of D is promoted as in block_scaled_matmul. Only the activations' 1 x 128 groups tie the blocks of a pair together.

Two products and two sums of more than 64 tokens do not fit a block's registers, and 64 at a time read the weights once
more. Then gate and up are one block_scaled_matmul, whose float32 result stays in L2 for `quantize_swiglu_rows` to read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._chip import SM90, Chip, broadcast
from .._mosaic import LANE, load, silu, tiled
from ..block_scaled_matmul import mosaic_sm90 as matmul
from ..prepare import prepare_weights
from ..quantize_blocks.mosaic_sm90 import quantize_rows, quantize_swiglu_rows, scale_shape
from ..quantize_blocks.reference import scale_of
from ..types import BLOCK, E4M3_MAX, F32_MAX, BlockScaled
from .config import L2_TOKENS, Config, can_run, default_config, max_tile_m


def why_not(M: int, w_gate_up, w_down, config: Config | None = None, chip: Chip = SM90) -> str | None:
    """None when these kernels can run these shapes, else the reason."""
    if not (isinstance(w_gate_up, BlockScaled) and isinstance(w_down, BlockScaled)):
        return f"the weights are {type(w_gate_up).__name__}; the kernel reads BlockScaled"
    D, F = w_down.shape
    config = config or _pick(M, D, F, chip)
    if config.epilogue:
        reason = can_run(config, _tile_m(M, chip), D, F, chip)
    else:
        reason = matmul.why_not(M, 2 * F, D, chip=chip)
    return reason or matmul.why_not(M, D, F, chip=chip)


def swiglu_mlp(
    x_MD: jax.Array,
    w_gate_up: BlockScaled,
    w_down: BlockScaled,
    config: Config | None = None,
    interpret=None,
    chip: Chip = SM90,
) -> jax.Array:
    """(M, D) -> (M, D) in x's type."""
    values, scale_KbM = gate_up(x_MD, w_gate_up, config, interpret, chip)
    return matmul.multiply_rows(values, scale_KbM, w_down, x_MD.shape[0], x_MD.dtype, interpret=interpret, chip=chip)


def gate_up(
    x_MD: jax.Array, w_gate_up: BlockScaled, config: Config | None = None, interpret=None, chip: Chip = SM90
) -> tuple[jax.Array, jax.Array]:
    """silu(gate) * up of (M, D): e4m3 (M rounded up to 8, F) and scale_FbM (`scale_shape(M, F)`) float32."""
    M, D = x_MD.shape
    F = w_gate_up.shape[0] // 2
    config = config or _pick(M, D, F, chip)
    if not config.epilogue:
        values, scale_KbM = quantize_rows(x_MD, interpret, early=config.early)
        both = matmul.multiply_rows(
            values, scale_KbM, w_gate_up, M, jnp.dtype(jnp.float32), interpret=interpret, chip=chip
        )
        return quantize_swiglu_rows(both, interpret, early=config.early)
    tile_m = _tile_m(M, chip)
    if reason := can_run(config, tile_m, D, F, chip):
        raise NotImplementedError(f"swiglu_mlp: {reason}")
    if (-(-M // 8) * 8) % tile_m:
        x_MD = jnp.pad(x_MD, ((0, -M % tile_m), (0, 0)))
    values, scale_KbM = quantize_rows(x_MD, interpret, early=config.early)
    weight = prepare_weights(w_gate_up, "swiglu_mlp", chip.capability)
    return _gate_up(values, scale_KbM, weight, tile_m, config, interpret, chip)


def _tile_m(M: int, chip: Chip = SM90) -> int:
    """Rows of one tile: M rounded up to 8, or the most that fit."""
    return min(-(-M // 8) * 8, max_tile_m(chip))


def _pick(M: int, D: int, F: int, chip: Chip = SM90) -> Config:
    """The measured choice for this device and shape, else the default."""
    fields = _tuned.lookup("swiglu_mlp", _tuned.bucket(M), D, F)
    config = default_config(M, chip) if fields is None else Config(**fields)
    return config if config.epilogue or M <= L2_TOKENS else default_config(M, chip)


def _gate_up(x_MD, x_scale_KbM, w_gate_up: BlockScaled, tile_m: int, config: Config, interpret, chip: Chip):
    M, D = x_MD.shape
    w_NK, w_scale_NbKb = w_gate_up.values_NK, w_gate_up.scale_NbKb
    F = w_NK.shape[0] // 2
    steps, blocks = D // BLOCK, config.blocks_per_group
    columns = BLOCK // blocks  # of F, in one block
    stages = min(config.stages, steps)
    tile = (columns, tile_m)
    chip_types = chip.scratch(tile, 2)
    f32, fp8 = jnp.float32, x_MD.dtype
    scales = scale_shape(M, F)
    line = min(scales[1], max_tile_m(chip))

    def body(x_gmem, x_scale_gmem, w_gmem, w_scale_gmem, a_gmem, a_scale_gmem, *scratch):
        (x_smem, w_smem, x_scale_smem, w_scale_smem, y_smem, a_smem, row_smem), rest = scratch[:7], scratch[7:]
        loaded, scales_loaded, *rest = rest
        chip_scratch, cluster_scratch = rest[: len(chip_types)], rest[len(chip_types) :]
        group = lax.axis_index("group")
        part = lax.axis_index("part") if blocks > 1 else jnp.int32(0)
        # Row tiles of the same weights are neighbours in time: the second one reads them from L2.
        m, t = lax.rem(group, M // tile_m), lax.div(group, M // tile_m)

        def fetch_w(i, slot):
            for side in range(2):
                rows = pl.ds(side * F + t * BLOCK + part * columns, columns)
                at = (rows, pl.ds(i * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(w_gmem.at[at], w_smem.at[slot, side], loaded.at[slot])

        def fetch_x(i, slot):
            at = (pl.ds(m * tile_m, tile_m), pl.ds(i * BLOCK, BLOCK))
            plgpu.copy_gmem_to_smem(x_gmem.at[at], x_smem.at[slot], loaded.at[slot])

        for slot in range(stages):
            fetch_w(slot, slot)
        for side in range(2):
            at = side * (F // BLOCK) + t
            plgpu.copy_gmem_to_smem(w_scale_gmem.at[at], w_scale_smem.at[side], scales_loaded)
        if config.early:
            plgpu.griddepcontrol_wait()
        for slot in range(stages):
            fetch_x(slot, slot)
        plgpu.copy_gmem_to_smem(x_scale_gmem.at[:, pl.ds(m * tile_m, tile_m)], x_scale_smem, scales_loaded)
        plgpu.barrier_wait(scales_loaded)

        def step(i, totals):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])

            # This warpgroup has read the slot when it has the products.
            pairs = [(w_smem.at[slot, side], x_smem.at[slot].T) for side in range(2)]
            partials = chip.products(pairs, tile, chip_scratch)

            @pl.when(i + stages < steps)
            def _refill():
                fetch_w(i + stages, slot)
                fetch_x(i + stages, slot)

            x_scale = load(x_scale_smem.at[i], chip.layout.reduce(0))
            x_scale = broadcast(x_scale, tile, 1, chip)
            return tuple(
                total + partial * (x_scale * w_scale_smem[side, i])
                for side, (total, partial) in enumerate(zip(totals, partials, strict=True))
            )

        zeros = plgpu.layout_cast(jnp.zeros(tile, f32), chip.layout)
        gate, up = lax.fori_loop(0, steps, step, (zeros, zeros))
        if config.early:
            plgpu.griddepcontrol_launch_dependents()
        a = silu(gate) * up

        def top_of(value):
            """Largest finite magnitude of each column."""
            return jnp.max(jnp.where(jnp.abs(value) <= F32_MAX, jnp.abs(value), 0.0), axis=0)

        def finish(parts):
            """Quantise the group's 128 columns, `columns` from each block, and write them."""
            tops = [top_of(value) for value in parts]
            amax = tops[0] if blocks == 1 else jnp.maximum(*tops)
            scale = scale_of(amax)
            row_smem[pl.ds(0, tile_m)] = scale
            for at, value in enumerate(parts):
                quotient = jnp.clip(value * broadcast(1.0 / scale, tile, 1, chip), -E4M3_MAX, E4M3_MAX)
                quotient = jnp.where(jnp.abs(value) <= F32_MAX, quotient, jnp.nan)
                # FP8 cannot be stored transposed: float32 goes to shared memory and comes back as rows.
                y_smem.at[at].T[...] = plgpu.layout_cast(quotient, chip.transposed)
                rows = plgpu.Layout.WG_STRIDED((tile_m, columns), vec_size=4)
                a_smem[at] = load(y_smem.at[at], rows, optimized=False).astype(fp8)
            plgpu.commit_smem()
            first = m * tile_m
            for at in range(blocks):
                where = (pl.ds(first, tile_m), pl.ds(t * BLOCK + at * columns, columns))
                plgpu.copy_smem_to_gmem(a_smem.at[at], a_gmem.at[where])
            plgpu.copy_smem_to_gmem(row_smem, a_scale_gmem.at[t, pl.ds(first, line)])
            plgpu.wait_smem_to_gmem(0)

        if blocks == 1:
            finish([a])
            return
        pushed_smem, pushed = cluster_scratch

        @pl.when(part == 1)
        def _push():
            plgpu.async_store_smem(a, pushed_smem, pushed, cluster_idx=jnp.int32(0), cluster_dim="part")

        @pl.when(part == 0)
        def _both():
            plgpu.barrier_wait(pushed)
            finish([a, load(pushed_smem, chip.layout)])

    scratch = [
        plgpu.SMEM((stages, tile_m, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        plgpu.SMEM((stages, 2, columns, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        plgpu.SMEM((x_scale_KbM.shape[0], tile_m), f32),
        plgpu.SMEM((2, w_scale_NbKb.shape[1]), f32),
        plgpu.SMEM((blocks, tile_m, columns), f32),  # neither tiled nor swizzled: stored transposed
        plgpu.SMEM((blocks, tile_m, columns), fp8),
        plgpu.SMEM((line,), f32),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=3),
        *chip_types,
    ]
    mesh: dict = {"grid": ((M // tile_m) * (F // BLOCK),), "grid_names": ("group",)}
    if blocks > 1:
        mesh |= {"cluster": (blocks,), "cluster_names": ("part",)}
        scratch += [
            plgpu.SMEM(tile, f32, transforms=tiled(tile_m, f32)),
            plgpu.Barrier(),
        ]
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((M, F), fp8), jax.ShapeDtypeStruct(scales, f32)),
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(x_MD, x_scale_KbM, w_NK, w_scale_NbKb)
