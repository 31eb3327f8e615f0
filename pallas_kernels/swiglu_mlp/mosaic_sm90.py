"""The Hopper kernel: the whole SwiGLU block as one persistent kernel around one grid barrier.

    1  block (tile t of 128 columns of F, split r of D):  gate and up tiles of w_gate_up, 128 x 128 a step
       the cluster's splits push their partial sums to its first block, which makes silu(gate) * up, quantises it
       1 x 128 and writes e4m3 and scales (76 KB at M = 8: they stay in L2)
    -  grid barrier: a counter in global memory that every first block raises
    2  block (tile of 128 rows of D, split of F):  w_down tiles, 128 x 128 a step; float32 partial sums, summed by XLA

One ring of weight tiles serves both parts: while a block finishes part 1 and waits at the barrier, its first w_down
tiles are already on their way. The operands are swapped and each step is promoted as in block_scaled_matmul.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._dispatch import need_capability
from .._mosaic import LANE, load, tiled
from ..prepare import prepare_weights
from ..quantize_blocks.reference import INVERSE_MAX, SMALLEST_SCALE, quantize_blocks
from ..types import BLOCK, E4M3_MAX, BlockScaled
from .config import Config, can_run, configs_to_try, plan

_ACC, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
_LARGEST = float(jnp.finfo(jnp.float32).max)


def why_not(M: int, w_gate_up, w_down, config: Config | None = None) -> str | None:
    """None when this kernel can run here and now, else the reason."""
    if not (isinstance(w_gate_up, BlockScaled) and isinstance(w_down, BlockScaled)):
        return f"the weights are {type(w_gate_up).__name__}; the kernel reads BlockScaled"
    (D, F), rows = w_down.shape, -(-M // 8) * 8
    if reason := need_capability("9.0"):
        return reason
    config = config or _pick(rows, D, F)
    if config is None:
        return f"no config holds M = {rows}, D = {D}, F = {F} with all blocks resident"
    return can_run(config, rows, D, F)


def swiglu_mlp(
    x_MD: jax.Array, w_gate_up: BlockScaled, w_down: BlockScaled, config: Config | None = None, interpret=None
) -> jax.Array:
    """(M, D) -> (M, D) in x's type."""
    M, (D, F) = x_MD.shape[0], w_down.shape
    x = quantize_blocks(jnp.pad(x_MD.astype(jnp.float32), ((0, -M % 8), (0, 0))), (1, BLOCK))
    rows = x.values_NK.shape[0]
    config = config or _pick(rows, D, F) or Config()
    if reason := can_run(config, rows, D, F):
        raise NotImplementedError(f"swiglu_mlp: {reason}")
    w_gate_up, w_down = (prepare_weights(w, "swiglu_mlp") for w in (w_gate_up, w_down))
    x_scale_KbM = jnp.pad(x.scale_NbKb.T, ((0, -(D // BLOCK) % 4), (0, 0)))
    partial, _, _ = _call(x.values_NK, x_scale_KbM, w_gate_up, w_down, config, interpret)
    return jnp.sum(partial, axis=0)[:M].astype(x_MD.dtype)


def _pick(rows: int, D: int, F: int) -> Config | None:
    """The measured choice for this device and shape, else the first that fits, else None."""
    fields = _tuned.lookup("swiglu_mlp", _tuned.bucket(rows), D, F)
    return Config(**fields) if fields is not None else next(iter(configs_to_try(rows, D, F)), None)


def _call(x_MD, x_scale_KbM, w_gate_up: BlockScaled, w_down: BlockScaled, config: Config, interpret):
    M, D = x_MD.shape
    F = w_down.shape[1]
    splits, stages = config.splits, config.stages
    p = plan(config, D, F)
    lanes = max(M, 32)  # a row of scales is at least one 128-byte line
    gate_rows = (p.gate_steps + 3) // 4 * 4
    tile = (BLOCK, M)
    f32, fp8 = jnp.float32, x_MD.dtype

    def share(total: int, parts: int, part) -> tuple[jax.Array, jax.Array]:
        """First step and number of steps of one of `parts` nearly equal parts."""
        first = part * (total // parts) + jnp.minimum(part, total % parts)
        return first, total // parts + jnp.where(part < total % parts, 1, 0)

    def body(x_gmem, x_scale_gmem, w1_gmem, s1_gmem, w2_gmem, s2_gmem, y_gmem, a_gmem, a_scale_gmem, *scratch):
        (w_smem, x_smem, x_scale_smem, a_scale_smem, s_smem, s2_smem, y_smem, a_smem, row_smem) = scratch[:9]
        w_loaded, x_loaded, s_loaded, x_scale_loaded, a_scale_loaded, *cluster_scratch = scratch[9:]
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        t = lax.axis_index("tile")
        r = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        block = t * splits + r
        k1, steps1 = share(D // BLOCK, splits, r)
        tile2, split2 = lax.rem(block, p.down_tiles), lax.div(block, p.down_tiles)
        k2, steps2 = share(F // BLOCK, p.down_splits, split2)
        steps2 = jnp.where(split2 < p.down_splits, steps2, 0)
        tile2_row = pl.ds(tile2 * BLOCK, BLOCK)
        items = 2 * steps1 + steps2

        def fetch(item, slot):
            """Tile `item` of this block's walk: gate, up, gate, up, ..., then w_down's."""

            @pl.when(item < 2 * steps1)
            def _gate_up():
                row = t * BLOCK + lax.rem(item, 2) * F
                at = (pl.ds(row, BLOCK), pl.ds((k1 + lax.div(item, 2)) * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(w1_gmem.at[at], w_smem.at[slot], w_loaded.at[slot])

            @pl.when((item >= 2 * steps1) & (item < items))
            def _down():
                at = (tile2_row, pl.ds((k2 + item - 2 * steps1) * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(w2_gmem.at[at], w_smem.at[slot], w_loaded.at[slot])

        def multiply(item, x):
            """acc[128, M] of tile `item` against x (M, 128), from zero; its slot is filled again."""
            slot = lax.rem(item, stages)
            plgpu.barrier_wait(w_loaded.at[slot])

            def run(acc):
                plgpu.wgmma(acc, w_smem.at[slot], x.T)
                return acc[...]

            partial = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(tile, f32))
            fetch(item + stages, slot)
            return partial

        for slot in range(stages):
            fetch(jnp.int32(slot), slot)
        plgpu.copy_gmem_to_smem(s1_gmem.at[t], s_smem.at[0], s_loaded)
        plgpu.copy_gmem_to_smem(s1_gmem.at[F // BLOCK + t], s_smem.at[1], s_loaded)
        plgpu.copy_gmem_to_smem(s2_gmem.at[tile2], s2_smem, s_loaded)
        scales_from = jnp.minimum(k1, x_scale_KbM.shape[0] - gate_rows)
        plgpu.copy_gmem_to_smem(x_scale_gmem.at[pl.ds(scales_from, gate_rows)], x_scale_smem, x_scale_loaded)

        @pl.loop(0, steps1)
        def _load_x(i):
            plgpu.copy_gmem_to_smem(x_gmem.at[:, pl.ds((k1 + i) * BLOCK, BLOCK)], x_smem.at[i], x_loaded.at[i])

        plgpu.barrier_wait(s_loaded)
        plgpu.barrier_wait(x_scale_loaded)

        def gate_up_step(i, totals):
            gate, up = totals
            plgpu.barrier_wait(x_loaded.at[i])
            x_scale = lax.broadcast_in_dim(load(x_scale_smem.at[k1 - scales_from + i], _COLUMN), tile, (1,))
            gate += multiply(2 * i, x_smem.at[i]) * (x_scale * s_smem[0, k1 + i])
            up += multiply(2 * i + 1, x_smem.at[i]) * (x_scale * s_smem[1, k1 + i])
            return gate, up

        zeros = plgpu.layout_cast(jnp.zeros(tile, f32), _ACC)
        gate, up = lax.fori_loop(0, steps1, gate_up_step, (zeros, zeros))

        def finish(gate, up):
            """SwiGLU, quantise, write, and raise the grid barrier's counter."""
            a = gate / (1.0 + jnp.exp(-gate)) * up
            finite = jnp.abs(a) <= _LARGEST
            amax = jnp.max(jnp.where(finite, jnp.abs(a), 0.0), axis=0)
            scale = jnp.where(amax == 0.0, 1.0, jnp.maximum(amax * INVERSE_MAX, SMALLEST_SCALE))
            quotient = jnp.clip(a / lax.broadcast_in_dim(scale, tile, (1,)), -E4M3_MAX, E4M3_MAX)
            quotient = jnp.where(finite, quotient, jnp.nan)
            # FP8 cannot be stored transposed: float32 goes to shared memory and comes back as rows.
            y_smem.T[...] = plgpu.layout_cast(quotient, plgpu.Layout.WGMMA_TRANSPOSED)
            a_smem[...] = _rows(y_smem).astype(fp8)
            row_smem[pl.ds(0, M)] = scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(a_smem, a_gmem.at[:, pl.ds(t * BLOCK, BLOCK)])
            plgpu.copy_smem_to_gmem(row_smem, a_scale_gmem.at[t])
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(arrived)

        if splits == 1:
            finish(gate, up)
        else:
            pushed_smem, *pushed = cluster_scratch
            for peer in range(1, splits):

                @pl.when(r == peer)
                def _push(peer=peer):
                    for half, value in enumerate((gate, up)):
                        at = 2 * (peer - 1) + half
                        plgpu.async_store_smem(
                            value, pushed_smem.at[at], pushed[at], cluster_idx=jnp.int32(0), cluster_dim="split"
                        )

            @pl.when(r == 0)
            def _first():
                both = [gate, up]
                for peer in range(1, splits):  # in this order, whatever arrives first: the same bits every time
                    for half in range(2):
                        at = 2 * (peer - 1) + half
                        plgpu.barrier_wait(pushed[at])
                        both[half] += load(pushed_smem.at[at], _ACC)
                finish(*both)

        pl.semaphore_wait(arrived, F // BLOCK, decrement=False)

        @pl.when(split2 < p.down_splits)
        def _down():
            @pl.loop(0, steps2)
            def _load_a(i):
                plgpu.copy_gmem_to_smem(a_gmem.at[:, pl.ds((k2 + i) * BLOCK, BLOCK)], x_smem.at[i], x_loaded.at[i])

            a_scales_from = jnp.minimum(k2, F // BLOCK - p.down_steps)
            at = pl.ds(a_scales_from, p.down_steps)
            plgpu.copy_gmem_to_smem(a_scale_gmem.at[at], a_scale_smem, a_scale_loaded)
            plgpu.barrier_wait(a_scale_loaded)

            def down_step(i, total):
                plgpu.barrier_wait(x_loaded.at[i])
                row = a_scale_smem.at[k2 - a_scales_from + i, pl.ds(0, M)]
                scale = lax.broadcast_in_dim(load(row, _COLUMN), tile, (1,)) * s2_smem[k2 + i]
                return total + multiply(2 * steps1 + i, x_smem.at[i]) * scale

            total = lax.fori_loop(0, steps2, down_step, zeros)
            y_smem.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem, y_gmem.at[split2, :, tile2_row])
            plgpu.wait_smem_to_gmem(0)

    steps = max(p.gate_steps, p.down_steps)
    scratch = [
        plgpu.SMEM((stages, BLOCK, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        plgpu.SMEM((steps, M, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        plgpu.SMEM((gate_rows, M), f32),
        plgpu.SMEM((p.down_steps, lanes), f32),
        plgpu.SMEM((2, w_gate_up.scale_NbKb.shape[1]), f32),
        plgpu.SMEM((w_down.scale_NbKb.shape[1],), f32),
        plgpu.SMEM((M, BLOCK), f32),  # neither tiled nor swizzled: written transposed, read as rows
        plgpu.SMEM((M, BLOCK), fp8),
        plgpu.SMEM((lanes,), f32),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=steps),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(),
        plgpu.Barrier(),
    ]
    mesh: dict = {"grid": (F // BLOCK,), "grid_names": ("tile",)}
    if splits > 1:
        mesh |= {"cluster": (splits,), "cluster_names": ("split",)}
        pushes = 2 * (splits - 1)
        scratch += [plgpu.SMEM((pushes, BLOCK, M), f32, transforms=tiled(M, f32))]
        # One object each: in Lane semantics jax 0.11.2 signals barrier 2 i of a peer's array for barrier i.
        scratch += [plgpu.Barrier()] * pushes
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((p.down_splits, M, D), f32),
            jax.ShapeDtypeStruct((M, F), fp8),
            jax.ShapeDtypeStruct((F // BLOCK, lanes), f32),
        ),
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(x_MD, x_scale_KbM, w_gate_up.values_NK, w_gate_up.scale_NbKb, w_down.values_NK, w_down.scale_NbKb)


def _rows(ref) -> jax.Array:
    """A float32 tile in shared memory as rows dealt to the lanes one after the other."""
    return load(ref, plgpu.Layout.WG_STRIDED(ref.shape, vec_size=4), optimized=False)
