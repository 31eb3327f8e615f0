"""What persistent Hopper kernels are made of: a chain of block-scaled matmuls whose weights never wait.

    thread 2      w tiles of every matmul of the chain ──TMA──► ring, as far ahead as it holds
    threads 0, 1  x tiles ──TMA──► small ring ─► wgmma, 64 rows each ─► promoted, float32 registers
                  tasks between the matmuls (sums, norms, SwiGLU, ...), dealt over all blocks

A thread is a warpgroup. One block per SM, all resident at once. A block has at most one piece of a matmul: 128 weight
rows by some steps of K (two tiles a step for gate and up). Between a matmul and what reads it lies a grid barrier;
while a block waits there, its ring fills with the next matmuls' weights, so the memory never rests.

Operands are swapped: tokens are columns of every tile, (128 weight rows, tm tokens), so scales are per column. Sums
over parts of K, the residual and scales pass between blocks as plain loads and stores; what becomes an operand passes
as bulk copies. Parts are added in their order, so the bits do not depend on who came first.

Quantising does not wait for a norm's mean: h = x * weight is quantised as it is, the squares of x go to a side array,
and whoever multiplies h scales its sums by 1 / rms(x) afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._chain import HALF, Chain, Matmul, Residual
from ._mosaic import LINE, REDUCED, load, over_tile, over_tile_rows, signal, silu, tiled, wait_for
from .quantize_blocks.reference import scale_of
from .types import BLOCK, E4M3_MAX, F32_MAX

ACC, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
f32, bf16, fp8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn


class Scratch(NamedTuple):
    """A block's shared memory and barriers for its part of a chain."""

    w: Any
    w_scale: Any
    x: Any
    x_scale: Any
    y: Any
    rows16: Any
    rows8: Any
    top: Any
    reduced: Any
    scalar: Any
    w_loaded: Any
    w_read: Any
    x_loaded: Any
    x_read: Any
    task_loaded: Any
    pair: Any
    everyone: Any


def scratch(c: Chain, *, one_cluster: bool) -> Scratch:
    """The types of a block's scratch."""
    return Scratch(
        w=plgpu.SMEM((c.stages, 2, HALF, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        w_scale=plgpu.SMEM((c.stages, LINE), f32),
        x=plgpu.SMEM((c.x_stages, c.M, BLOCK), fp8, transforms=tiled(BLOCK, fp8)),
        x_scale=plgpu.SMEM((2, c.scale_rows, c.M), f32),
        y=plgpu.SMEM((2, 2, c.tm, HALF), f32),  # neither tiled nor swizzled: written transposed, read as rows
        rows16=plgpu.SMEM((2, c.tm, BLOCK), bf16),
        rows8=plgpu.SMEM((2, 2, c.tm, HALF), fp8),
        top=plgpu.SMEM((2 * c.groups, 64), f32),
        reduced=plgpu.SMEM((2, REDUCED), f32),
        scalar=plgpu.SMEM((2, 1), f32),
        w_loaded=plgpu.Barrier(num_arrivals=3, num_barriers=c.stages),
        w_read=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        x_loaded=plgpu.Barrier(num_barriers=c.x_stages),
        x_read=plgpu.Barrier(num_arrivals=2, num_barriers=c.x_stages),
        task_loaded=plgpu.Barrier(num_arrivals=c.tm, num_barriers=2),
        pair=plgpu.Barrier(num_arrivals=2),
        everyone=plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=2) if one_cluster else (),
    )


def mesh(c: Chain, *, one_cluster: bool) -> dict[str, Any]:
    """Grid and threads. `one_cluster`: for the interpreter, which runs one cluster at a time and has no semaphores.

    Elsewhere a grid barrier is a counter in global memory.
    """
    where: dict[str, Any] = {"grid": (c.blocks,), "grid_names": ("block",)}
    if one_cluster:
        where = {"grid": (1,), "grid_names": ("all",), "cluster": (c.blocks,), "cluster_names": ("block",)}
    return {**where, "num_threads": 3, "thread_name": "thread"}


def strided(*shape: int):
    """Registers dealt row by row."""
    each = math.prod(shape) // 128
    return plgpu.Layout.WG_STRIDED(shape, vec_size=next(v for v in (4, 2, 1) if each % v == 0))


def over_rows(row, shape):
    """A value per column, for every row."""
    return lax.broadcast_in_dim(row, shape, (1,))


def over_columns(column, shape):
    """A value per row, for every column."""
    return lax.broadcast_in_dim(column, shape, (0,))


def rounded(value, scale):
    """What becomes e4m3, still float32."""
    quotient = jnp.clip(value * over_rows(1.0 / scale, value.shape), -E4M3_MAX, E4M3_MAX)
    return jnp.where(jnp.abs(value) <= F32_MAX, quotient, jnp.nan)


class Walker:
    """One warpgroup's walk along a chain, inside the kernel: `thread` 2 calls `produce`, the others the rest."""

    def __init__(self, c: Chain, s: Scratch, partial_g):
        self.c, self.s, self.partial_g = c, s, partial_g
        self.block, self.thread = lax.axis_index("block"), lax.axis_index("thread")
        # Asked for once: each time would be another counter.
        self.arrived = pl.get_global(plgpu.SemaphoreType.REGULAR) if isinstance(s.everyone, tuple) else None

    def piece(self, m: Matmul):
        """(tile, split, first step, steps) of this block; no steps where it has no piece."""
        index = self.c.blocks - 1 - self.block if m.from_end else self.block
        tile, split = lax.div(index, m.splits), lax.rem(index, m.splits)
        first = split * (m.steps // m.splits) + jnp.minimum(split, m.steps % m.splits)
        steps = m.steps // m.splits + jnp.where(split < m.steps % m.splits, 1, 0)
        return tile, split, first, jnp.where(tile < m.tiles, steps, 0)

    def units(self, m: Matmul):
        """Weight tiles of this block's piece."""
        return self.piece(m)[3] * m.mats

    # --- the warpgroup that streams weights

    def produce(self, m: Matmul, values_g, scale_g, unit, layer: tuple = ()) -> None:
        """Stream this block's piece of a weight, (N, K) or layer `layer` of (L, N, K); `unit` tiles went before."""
        c, s = self.c, self.s
        tile, _, first, steps = self.piece(m)

        @pl.loop(0, steps * m.mats)
        def _tile(i):
            step, mat = lax.div(i, m.mats), lax.rem(i, m.mats)
            slot, k = lax.rem(unit + i, c.stages), first + step

            @pl.when(unit + i >= c.stages)
            def _free():
                plgpu.barrier_wait(s.w_read.at[slot])

            row = tile + mat * m.tiles
            for half in range(2):
                at = (*layer, pl.ds(row * BLOCK + half * HALF, HALF), pl.ds(k * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(values_g.at[at], s.w.at[slot, half], s.w_loaded.at[slot])
            line = (*layer, row, pl.ds(lax.div(k, LINE) * LINE, LINE))
            plgpu.copy_gmem_to_smem(scale_g.at[line], s.w_scale.at[slot], s.w_loaded.at[slot])

    def drain(self, total) -> None:
        """Wait until the last tiles of `total` have been read."""

        @pl.loop(jnp.maximum(total - self.c.stages, 0), total)
        def _read(unit):
            plgpu.barrier_wait(self.s.w_read.at[lax.rem(unit, self.c.stages)])

    # --- the two that multiply

    def sync(self, epoch) -> None:
        """Grid barrier number `epoch`, from 1 on, of all multiplying warpgroups."""
        if self.arrived is None:
            plgpu.barrier_arrive(self.s.everyone)
            plgpu.barrier_wait(self.s.everyone)
            return
        plgpu.barrier_arrive(self.s.pair)
        plgpu.barrier_wait(self.s.pair)

        @pl.when(self.thread == 0)
        def _block():
            signal(self.arrived)

        wait_for(self.arrived, self.c.blocks * epoch)

    def multiply(self, m: Matmul, unit, x_g, x_scale_g, finish: Callable, prepare: Callable = lambda: None) -> None:
        """This block's piece: finish(prepare(), tile, split, *sums (64, M) of this warpgroup's rows, one per mat)."""
        c, s = self.c, self.s
        tile, split, first, steps = self.piece(m)

        def fetch(i):
            slot, at = lax.rem(i, c.x_stages), pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(x_g.at[:, at], s.x.at[slot], s.x_loaded.at[slot])

        def step(i, totals):
            x_slot = lax.rem(i, c.x_stages)
            slots = [lax.rem(unit + i * m.mats + mat, c.stages) for mat in range(m.mats)]
            plgpu.barrier_wait(s.x_loaded.at[x_slot])
            for slot in slots:
                plgpu.barrier_wait(s.w_loaded.at[slot])

            def run(*accs):
                for acc, slot in zip(accs, slots, strict=True):
                    plgpu.wgmma(acc, s.w.at[slot, self.thread], s.x.at[x_slot].T)
                return tuple(acc[...] for acc in accs)  # waits: this warpgroup has read both

            partials = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((HALF, c.M), f32)] * m.mats)
            w_scales = [s.w_scale[slot, lax.rem(first + i, LINE)] for slot in slots]
            plgpu.commit_smem()  # these reads come before the bulk copy that fills the slot again
            for slot in slots:
                plgpu.barrier_arrive(s.w_read.at[slot])

            @pl.when(i + c.x_stages < steps)
            def _refill():
                plgpu.barrier_arrive(s.x_read.at[x_slot])

                @pl.when(self.thread == 0)
                def _next():
                    plgpu.barrier_wait(s.x_read.at[x_slot])
                    fetch(i + c.x_stages)

            x_scale = load(s.x_scale.at[self.thread, first + i - scales_from], COLUMN, optimized=False)
            x_scale = over_rows(x_scale, (HALF, c.M))
            return tuple(
                total + partial * (x_scale * w_scale)
                for total, partial, w_scale in zip(totals, partials, w_scales, strict=True)
            )

        scales_from = jnp.minimum(first, x_scale_g.shape[0] - m.scale_rows)

        @pl.when(steps > 0)
        def _piece():
            @pl.when(self.thread == 0)
            def _begin():
                @pl.loop(0, jnp.minimum(steps, c.x_stages))
                def _first(i):
                    fetch(i)

            rows = pl.ds(0, m.scale_rows)
            scales = load(x_scale_g.at[pl.ds(scales_from, m.scale_rows)], strided(m.scale_rows, c.M), optimized=False)
            prepared = prepare()  # its loads are on their way together with those of the scales
            s.x_scale[self.thread, rows] = scales
            plgpu.commit_smem()
            zeros = plgpu.layout_cast(jnp.zeros((HALF, c.M), f32), ACC)
            finish(prepared, tile, split, *lax.fori_loop(0, steps, step, (zeros,) * m.mats))

    def leave(self, prepared, tile, split, total) -> None:
        """Finish of a part of K: leave it for the task that adds the parts up."""
        del prepared
        self.partial_g[split, pl.ds(tile * BLOCK + self.thread * HALF, HALF)] = total

    def reduce(self, op: Literal["add", "max"], value):
        """The sum or largest of each column of a tile."""
        return over_tile_rows(op, value, self.s.reduced.at[self.thread], interpreted=self.arrived is None)

    def reduce_all(self, op: Literal["add", "max"], value):
        """The sum or largest of all of a tile, a scalar."""
        own, result = self.s.reduced.at[self.thread], self.s.scalar.at[self.thread]
        return over_tile(op, value, own, result, interpreted=self.arrived is None)

    def top_of(self, value):
        """Largest finite magnitude of each column."""
        return self.reduce("max", jnp.where(jnp.abs(value) <= F32_MAX, jnp.abs(value), 0.0))

    def tasks(self, count: int, task: Callable) -> None:
        """task(index) for all indices, dealt over the multiplying warpgroups of all blocks."""
        workers = 2 * self.c.blocks
        for turn in range(-(-count // workers)):
            index = self.thread * self.c.blocks + self.block + turn * workers

            @pl.when(index < count)
            def _task(index=index):
                task(index)

    def tile_tasks(self, tiles: int, task: Callable) -> None:
        """task(tile, first token) for all tiles and groups of tokens."""
        groups, tm = self.c.groups, self.c.tm
        self.tasks(tiles * groups, lambda index: task(lax.div(index, groups), lax.rem(index, groups) * tm))

    def summed(self, m: Matmul, tile, token):
        """All parts of K of a tile, (128, tm), in their order."""
        at = (pl.ds(tile * BLOCK, BLOCK), pl.ds(token, self.c.tm))
        parts = [load(self.partial_g.at[(split, *at)], ACC, optimized=False) for split in range(m.splits)]
        return sum(parts[1:], start=parts[0])

    def inverse_rms(self, squares_g, token, eps: float):
        """1 / rms of x, (tm,)."""
        at = pl.ds(token, self.c.tm)
        parts = [load(squares_g.at[tile, at], COLUMN, optimized=False) for tile in range(self.c.D // BLOCK)]
        return lax.rsqrt(sum(parts[1:], start=parts[0]) * (1.0 / self.c.D) + eps)

    def all_inverse_rms(self, squares_g, eps: float) -> list:
        """1 / rms of x for each group of tokens."""
        return [self.inverse_rms(squares_g, group * self.c.tm, eps) for group in range(self.c.groups)]

    # --- from tiles to rows

    def as_rows(self, value, half: int):
        """(64, tm) as (tm, 64), through shared memory, float32."""
        y = self.s.y.at[self.thread, half]
        y.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        return load(y, strided(self.c.tm, HALF), optimized=False)

    def quantise(self, value, to_g, scale_g, tile, token) -> None:
        """(128, tm) out as rows of e4m3, columns `tile` * 128 ..., and their scales."""
        tokens, rows8 = pl.ds(token, self.c.tm), self.s.rows8
        scale = scale_of(self.top_of(value))
        scale_g[tile, tokens] = scale
        values = rounded(value, scale)
        for half in range(2):
            rows8[self.thread, half] = self.as_rows(values[half * HALF : (half + 1) * HALF], half).astype(fp8)
        plgpu.commit_smem()
        for half in range(2):
            to = (tokens, pl.ds(tile * BLOCK + half * HALF, HALF))
            plgpu.copy_smem_to_gmem(rows8.at[self.thread, half], to_g.at[to])
        plgpu.wait_smem_to_gmem(0)

    def gathered(self, copy: Callable):
        """Rows as a tile: copy(i, into, barrier) starts the copy of token i's 128 bfloat16; (128, tm) float32."""
        into, barrier = self.s.rows16.at[self.thread], self.s.task_loaded.at[self.thread]
        for i in range(self.c.tm):
            copy(i, into.at[i], barrier)
        plgpu.barrier_wait(barrier)
        rows = load(into.T, plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
        return plgpu.layout_cast(rows.astype(f32), ACC)

    # --- what transformers do between matmuls

    def settle(self, x, r: Residual, norm_g, tile, token) -> None:
        """A tile of x is final: keep it, its squares, and h = x * weight (norm_g (D,)), quantised."""
        columns, tokens = pl.ds(tile * BLOCK, BLOCK), pl.ds(token, self.c.tm)
        r.x[columns, tokens] = x
        r.squares[tile, tokens] = self.reduce("add", x * x)
        weight = load(norm_g.at[columns], ROW, optimized=False).astype(f32)
        self.quantise(x * over_columns(weight, x.shape), r.h, r.h_scale, tile, token)

    def add(self, m: Matmul, x_g, tile, token):
        """The residual's tile plus what a matmul made of it."""
        x = load(x_g.at[pl.ds(tile * BLOCK, BLOCK), pl.ds(token, self.c.tm)], ACC, optimized=False)
        return x + self.summed(m, tile, token)

    def swiglu(self, a_g, a_scale_g) -> Callable:
        """The finish of gate and up: silu(gate) * up of both warpgroups' rows, quantised together."""
        s, tm = self.s, self.c.tm

        def finish(inverse_rms, tile, split, gate, up) -> None:
            del split
            for group in range(self.c.groups):
                tokens, columns = pl.ds(group * tm, tm), slice(group * tm, (group + 1) * tm)
                r = over_rows(inverse_rms[group], (HALF, tm))
                g, u = gate[:, columns] * r, up[:, columns] * r
                a = silu(g) * u
                s.top[2 * group + self.thread, pl.ds(0, tm)] = self.top_of(a)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.pair)
                plgpu.barrier_wait(s.pair)
                tops = [load(s.top.at[2 * group + half, pl.ds(0, tm)], COLUMN, optimized=False) for half in (0, 1)]
                scale = scale_of(jnp.maximum(*tops))

                @pl.when(self.thread == 0)
                def _scale(scale=scale, tokens=tokens):
                    a_scale_g[tile, tokens] = scale

                s.rows8[self.thread, 0] = self.as_rows(rounded(a, scale), 0).astype(fp8)
                plgpu.commit_smem()
                to = (tokens, pl.ds(tile * BLOCK + self.thread * HALF, HALF))
                plgpu.copy_smem_to_gmem(s.rows8.at[self.thread, 0], a_g.at[to])
                plgpu.wait_smem_to_gmem(0)

        return finish

    def rotated(self, value, cosine, sine):
        """The two halves of a head's (128, tm), rotated by (64, tm) each."""
        low, high = value[:HALF], value[HALF:]
        return low * cosine - high * sine, high * cosine + low * sine

    def head_rows(self, halves) -> Any:
        """A head's two halves as rows (tm, 128) bfloat16 in shared memory, ready for a bulk copy."""
        rows = self.s.rows16.at[self.thread]
        for half, value in enumerate(halves):
            rows[:, pl.ds(half * HALF, HALF)] = self.as_rows(value, half).astype(bf16)
        plgpu.commit_smem()
        return rows
