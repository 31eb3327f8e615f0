"""The Hopper kernel: a convolution as one matmul whose left operand is never written down.

    seen    (rows, depth) bfloat16 of one tap ──TMA──► ring ─┐  wgmma: acc[rows, cols], float32 registers,
    weights (depth, cols) bfloat16            ──TMA──► ring ─┘  over taps x input channels
    acc + bias (+ residual) (snake) ──► bfloat16 tile, where the ring was ──TMA──► y

A tap's copy of the signal is the same memory read from a later step on: each bulk copy just starts there. But wgmma
wants rows in groups of 8, and a copy starts at one. So 8 slots lie interleaved: row 8 t + i is step t of slot i, and a
step is 8 rows. XLA writes them so with whatever makes the signal, and where one convolution follows another they simply
stay so.

A block is a warpgroup for each 64 rows; they share the weights. Two blocks share an SM: one multiplies while the other
begins or ends.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._mosaic import LANE, load, tiled
from .config import GROUP, ROWS, Config, Shape, can_run, default_config, piece_of
from .reference import SNAKE_EPS


def shape_of(x_BTI: jax.Array, w_kIO: jax.Array, bias_O: jax.Array) -> Shape:
    """What the choice of tiles depends on."""
    (slots, num_steps, num_in), (taps, _, num_out) = x_BTI.shape, w_kIO.shape
    return Shape(slots, num_steps, num_in, num_out, taps, bias_O.shape[0])


def why_not(x_BTI, w_kIO, bias_O, stride: int, residual: bool, config: Config | None = None) -> str | None:
    """None when this kernel can run the call, else the reason."""
    if stride != 1:
        return f"stride = {stride} is not 1"
    if x_BTI.dtype != jnp.bfloat16:
        return f"x is {x_BTI.dtype}; the kernel reads bfloat16"
    shape = shape_of(x_BTI, w_kIO, bias_O)
    return can_run(config or default_config(shape, residual), shape, residual)


def causal_conv(
    past_BPI: jax.Array,
    x_BTI: jax.Array,
    w_kIO: jax.Array,
    bias_O: jax.Array,
    dilation: int = 1,
    alpha_O: jax.Array | None = None,
    residual_BTO: jax.Array | None = None,
    config: Config | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """(B, T, out) bfloat16, rounded once, and the next past; reference.py has the formula."""
    shape = shape_of(x_BTI, w_kIO, bias_O)
    config = config or default_config(shape, residual_BTO is not None)
    if reason := can_run(config, shape, residual_BTO is not None):
        raise NotImplementedError(f"causal_conv: {reason}")
    # One array, from which the next past comes, too: without the barrier XLA takes that from what makes x, and makes x
    # in a pass of its own because two then want it.
    seen = lax.optimization_barrier(jnp.concatenate([_interleaved(past_BPI), _interleaved(x_BTI)], axis=1))
    residual = None if residual_BTO is None else _interleaved(residual_BTO).reshape(-1, shape.O)
    y = _launch(seen, w_kIO.reshape(-1, shape.O), bias_O, alpha_O, residual, shape, dilation, config, interpret)
    return _apart(y.reshape(shape.B // GROUP, -1, shape.O)), _apart(seen[:, GROUP * shape.T :])


def _interleaved(x_BTC: jax.Array) -> jax.Array:
    """(B, T, C) -> (B / 8, 8 T, C): row 8 t + i of group b is step t of slot 8 b + i."""
    slots, num_steps, width = x_BTC.shape
    groups = x_BTC.reshape(slots // GROUP, GROUP, num_steps, width)
    return jnp.swapaxes(groups, 1, 2).reshape(slots // GROUP, GROUP * num_steps, width)


def _apart(x_GRC: jax.Array) -> jax.Array:
    """The way back: (B / 8, 8 T, C) -> (B, T, C)."""
    groups, num_rows, width = x_GRC.shape
    steps = x_GRC.reshape(groups, num_rows // GROUP, GROUP, width)
    return jnp.swapaxes(steps, 1, 2).reshape(groups * GROUP, num_rows // GROUP, width)


def _launch(seen_GRI, w_KO, bias_O, alpha_O, residual_RO, shape: Shape, dilation: int, config: Config, interpret):
    """The kernel and no other operation, on interleaved rows: (B T, O) bfloat16."""
    rows, cols, depth, warpgroups = config.rows, config.cols, config.depth, config.warpgroups
    group_rows, piece = GROUP * shape.T, piece_of(shape, config)
    steps_per_tap, col_tiles = shape.I // depth, shape.O // cols
    num_steps = shape.taps * steps_per_tap
    stages = min(config.stages, num_steps)
    part = 64 if cols % 64 == 0 else 32
    operands = [a for a in (alpha_O, residual_RO) if a is not None]

    def body(seen_gmem, w_gmem, bias_gmem, *refs):
        optional, (y_gmem, shared, begun, loaded, read, ended) = (
            list(refs[: len(operands)]),
            refs[len(operands) :],
        )
        alpha_gmem = None if alpha_O is None else optional.pop(0)
        residual_gmem = None if residual_RO is None else optional.pop(0)
        (seen_smem, w_smem), y_smem = shared
        own = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        tile = lax.axis_index("tile")
        # Tiles of the same steps are neighbours in time: the second one reads them from L2.
        m, n = lax.div(tile, col_tiles), lax.rem(tile, col_tiles)
        columns = pl.ds(n * cols, cols)

        def fetch(i, slot):
            tap, channels = lax.div(i, steps_per_tap), pl.ds(lax.rem(i, steps_per_tap) * depth, depth)
            for start in range(0, rows, piece):
                group, row = lax.div(m * rows + start, group_rows), lax.rem(m * rows + start, group_rows)
                plgpu.copy_gmem_to_smem(
                    seen_gmem.at[group, pl.ds(row + tap * dilation * GROUP, piece), channels],
                    seen_smem.at[slot, pl.ds(start, piece)],
                    loaded.at[slot],
                )
            plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(i * depth, depth), columns], w_smem.at[slot], loaded.at[slot])

        @pl.when(own == 0)
        def _begin():
            for slot in range(stages):
                fetch(slot, slot)
            if residual_gmem is not None:
                plgpu.copy_gmem_to_smem(residual_gmem.at[pl.ds(m * rows, rows), columns], y_smem, begun)

        own_rows = pl.ds(own * ROWS, ROWS)

        def multiply(acc):
            @pl.loop(0, num_steps)
            def _step(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(acc, seen_smem.at[slot, own_rows], w_smem.at[slot])
                plgpu.wgmma_wait(1)
                done = i - 1  # this warpgroup has read its slot, and the others most likely, too

                @pl.when((done >= 0) & (done + stages < num_steps))
                def _refill():
                    freed = lax.rem(done, stages)
                    plgpu.barrier_arrive(read.at[freed])

                    @pl.when(own == 0)
                    def _fetch():
                        plgpu.barrier_wait(read.at[freed])
                        fetch(done + stages, freed)

            return acc[...]

        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, cols), jnp.float32))
        if residual_gmem is None:
            plgpu.barrier_arrive(ended)
            plgpu.barrier_wait(ended)  # nobody reads the ring any more
        else:
            plgpu.barrier_wait(begun)

        def over_rows(ref, start):
            vector = load(ref.at[pl.ds(start, part)], plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return vector.astype(jnp.float32)

        def over_tile(vector):
            return lax.broadcast_in_dim(vector, (ROWS, part), (1,))

        for start in range(0, cols, part):  # in parts, which take fewer registers than the whole
            at = y_smem.at[own_rows, pl.ds(start, part)]
            y = total[:, start : start + part]
            y += over_tile(over_rows(bias_gmem, lax.rem(n * cols, shape.period) + start))
            if residual_gmem is not None:
                y += load(at, plgpu.Layout.WGMMA).astype(jnp.float32)
            if alpha_gmem is not None:
                alpha = over_rows(alpha_gmem, n * cols + start)
                sine = jnp.sin(over_tile(alpha) * y)
                y += sine * sine * over_tile(1.0 / (alpha + SNAKE_EPS))
            at[...] = y.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem.at[own_rows], y_gmem.at[pl.ds(m * rows + own * ROWS, ROWS), columns])
        plgpu.wait_smem_to_gmem(0)

    def smem(width, *shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled(width, jnp.bfloat16))

    both = math.gcd(depth, cols)  # wgmma wants its operands swizzled alike
    ring, tile = (smem(both, stages, rows, depth), smem(both, stages, depth, cols)), smem(cols, rows, cols)
    mesh: dict = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.B * shape.T, shape.O), jnp.bfloat16),
        grid=(shape.B * shape.T // rows * col_tiles,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.RefUnion(ring, tile) if residual_RO is None else (ring, tile),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=1 + rows // piece, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(seen_GRI, w_KO, bias_O, *operands)
