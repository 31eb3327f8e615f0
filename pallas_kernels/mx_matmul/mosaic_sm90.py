"""The Hopper kernel: FP8 weights widened to bfloat16 in registers with their scales, then plain wgmma over all of K.

    weights (64, 128) e4m3, 4 scale bytes a row ──TMA──► ring ──► bfloat16 (64, 128), registers ─┐  wgmma
    tokens  (M, 128)  bfloat16                  ──TMA──► ring ───────────────────────────────────┘  acc[64, M] += w x
    y = acc * 2^(largest w byte of the row - 127) * 2^(largest x byte of the column - 127)
    splits of K: the cluster's blocks push their sums to each other, each adds up its share of the tokens, in order

Hopper has no block-scaled instruction, but an e4m3 value times a power of two is a bfloat16 value, so scales are spent
before the tensor core and nothing leaves it until K is through; HBM still sees one byte a weight. Weights are taken
relative to the largest scale of their row, which multiplies the sum at the end, and rows that come quantised likewise:
whatever the scales, nothing is lost of a product less than 2^110 times smaller than the largest that the scales of its
row and column allow. Rows that come as numbers are rounded to MXFP8 and used as they are, up to 2^105 in magnitude.

A block is one warpgroup for each 64 rows of weights; they share the tokens of a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from .. import _tuned
from .._dispatch import HOPPER
from .._mosaic import LANE, LINE, load, tiled
from ..block_scaled_matmul.config import equal_tiles, owners_of
from ..prepare import prepare_weights, rows_of_prepared
from ..quantize_mx.mosaic_sm90 import round_rows
from ..types import MX_BLOCK, MxScaled, rows_of_register_tiles, scale_halves
from .config import BLOCKS_PER_STEP, ROWS, STEP, Config, can_run, default_config

MAX_TILE_M = 128
ONE = 127
"""The byte of scale 1."""
_TILE = (ROWS, STEP)


def why_not(M: int, N: int, K: int, config: Config | None = None) -> str | None:
    """None when this kernel can run these shapes, else the reason."""
    tile_m, rows = equal_tiles(M, MAX_TILE_M), rows_of_prepared(N)
    return can_run(config or _pick(tile_m, rows, K), tile_m, rows, K)


def mx_matmul(
    x_MK: jax.Array | MxScaled, w_NK: MxScaled, out_dtype: jnp.dtype, config: Config | None = None, interpret=None
) -> jax.Array:
    """(M, K) x (N, K) -> (M, N), x rounded to MXFP8 here if it is not.

    A weight that is not prepared is laid out here, at the price of copying it.
    """
    (M, K), N = x_MK.shape, w_NK.shape[0]
    tile_m, rows = equal_tiles(M, MAX_TILE_M), rows_of_prepared(N)
    config = config or _pick(tile_m, rows, K)
    if reason := can_run(config, tile_m, rows, K):
        raise NotImplementedError(f"mx_matmul: {reason}")
    weight = prepare_weights(w_NK, "mx_matmul", HOPPER)
    tiled_rows = -(-M // tile_m) * tile_m
    if isinstance(x_MK, MxScaled):
        values_MK, largest_M = _relative_rows(x_MK)
        largest_M = jnp.pad(largest_M, (0, tiled_rows + LINE - M))  # whole lines from each tile on
    else:
        values_MK = round_rows(x_MK, interpret)[:tiled_rows]
        largest_M = np.full((tiled_rows + LINE,), ONE, np.int32)  # in the program: what jax makes is a launch
    values_MK = jnp.pad(values_MK, ((0, tiled_rows - values_MK.shape[0]), (0, 0)))
    y = _launch(values_MK, largest_M, weight, M, out_dtype, tile_m, config, interpret)
    return y[:M, :N]


def _relative_rows(x_MK: MxScaled) -> tuple[jax.Array, jax.Array]:
    """Quantised rows as bfloat16 (M, K) relative to the largest scale of each, and its byte, int32 (M,)."""
    byte = x_MK.scale_rows.astype(jnp.int32)
    largest = jnp.max(byte, axis=1, keepdims=True)
    factor = lax.bitcast_convert_type(jnp.maximum(byte - largest + ONE, 0) << 23, jnp.float32)
    values = x_MK.value_rows.astype(jnp.float32) * jnp.repeat(factor, MX_BLOCK, axis=1)
    return values.astype(jnp.bfloat16), largest[:, 0]


def _pick(tile_m: int, rows: int, K: int) -> Config:
    """The measured choice for this device and shape, else the default."""
    fields = _tuned.lookup("mx_matmul", _tuned.bucket(tile_m), rows, K)
    return default_config(tile_m, rows, K) if fields is None else Config(**fields)


WIDENED = 120
"""The bits of an e4m3 value, moved to where bfloat16 has them, are worth 2^-120 times the value (7 - 127)."""


def _factor(byte: jax.Array, largest: jax.Array) -> jax.Array:
    """bfloat16 2^(120 + byte - largest), 0 where that is no normal number."""
    exponent = jnp.maximum(byte - largest + (127 + WIDENED), 0)
    return lax.bitcast_convert_type(lax.shift_left(exponent, 23), jnp.float32).astype(jnp.bfloat16)


def _widen(packed, factors: list[jax.Array], interpreted: bool) -> jax.Array:
    """A tile of `register_tiles` (64, 128) times a factor for each row and 32 columns: bfloat16 (64, 128), registers.

    Each 32 bits are four values of two column pairs that alternate: two masks and a shift make a pair.
    """
    if interpreted:
        values = rows_of_register_tiles(packed).astype(jnp.float32) * 2.0**-WIDENED
        return (values * jnp.repeat(jnp.stack(factors, 1).astype(jnp.float32), MX_BLOCK, axis=1)).astype(jnp.bfloat16)

    row = plgpu.Layout.WGMMA.reduce(1)
    operand = plgpu.ShapeDtypeStruct(_TILE, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_PACKED, *[row] * BLOCKS_PER_STEP), return_type=operand)
    def widen(_, packed, *factors):
        i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()
        pair = ir.VectorType.get((2,), bf16)

        def constant(bits):
            return mgpu.c(int(np.int32(np.uint32(bits))), i32)

        def widened(word, scale):
            sign = arith.andi(word, constant(0x80008000))
            rest = arith.andi(arith.shrui(word, constant(4)), constant(0x07F007F0))
            return arith.mulf(mgpu.utils.bitcast(arith.ori(sign, rest), pair), scale)

        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(_TILE), object)
        columns = registers.reshape(STEP // 8, 2)  # eight columns; row g or g + 8
        for block, (vec, factor) in enumerate(zip(packed.registers.flat, factors, strict=True)):
            words = mgpu.utils.bitcast(vec, ir.VectorType.get((4,), i32))
            for half, scale in enumerate(factor.registers.flat):
                scale = vector.broadcast(pair, vector.extract(scale, [], [0]))
                for at in range(2):
                    word = vector.extract(words, [], [2 * at + half])
                    columns[4 * block + 2 * at, half] = widened(arith.shli(word, constant(8)), scale)
                    columns[4 * block + 2 * at + 1, half] = widened(word, scale)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return widen(packed, *factors)  # pyright: ignore[reportCallIssue, reportReturnType]  # the decorator hides the first argument


_PACKED = plgpu.Layout.WG_STRIDED(_TILE, vec_size=16)


def _launch(x_MK, largest_M, weight: MxScaled, wanted: int, out_dtype, tile_m: int, config: Config, interpret):
    """The kernel and no other operation: `wanted` rows when fewer than 8, else all of x's, by all of the weight's.

    x (M, K) bfloat16 in whole tiles, the bytes of its rows (M + 32,) int32, a prepared weight.
    """
    (M, K), N = x_MK.shape, weight.values_NK.shape[0]
    few = wanted < 8  # then exactly these rows are stored, so that no other kernel need cut them out
    num_steps, splits, warpgroups = K // STEP, config.splits, config.warpgroups
    owners = owners_of(splits, tile_m)
    share, columns = tile_m // owners, -(-tile_m // LINE) * LINE
    stages = min(config.stages, num_steps // splits)
    interpreted = interpret is not None  # it refuses inline code, and wants both operands of wgmma in shared memory

    def body(x_gmem, largest_gmem, w_gmem, w_byte_gmem, y_gmem, *scratch):
        x_smem, w_smem, w_byte_smem, largest_smem, y_smem, loaded, read, begun, *rest = scratch
        tile = lax.axis_index("tile")
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        own = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        # Tiles of the same weight rows are neighbours in time: the second one reads them from L2.
        m, n = lax.rem(tile, M // tile_m), lax.div(tile, M // tile_m) * warpgroups
        first = split * (num_steps // splits) + jnp.minimum(split, num_steps % splits)
        steps = num_steps // splits + jnp.where(split < num_steps % splits, 1, 0)

        own_rows = pl.ds((n + own) * ROWS, ROWS)

        def row_bytes(ref):
            return load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.int32)

        def fetch(i, slot):
            k = first + i
            plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(n, warpgroups), k], w_smem.at[slot], loaded.at[slot])
            blocks, rows = pl.ds(k * BLOCKS_PER_STEP, BLOCKS_PER_STEP), pl.ds(n * ROWS, ROWS * warpgroups)
            plgpu.copy_gmem_to_smem(w_byte_gmem.at[blocks, rows], w_byte_smem.at[slot], loaded.at[slot])
            tokens = x_gmem.at[pl.ds(m * tile_m, tile_m), pl.ds(k * STEP, STEP)]
            plgpu.copy_gmem_to_smem(tokens, x_smem.at[slot], loaded.at[slot])

        @pl.when(own == 0)
        def _begin():
            for slot in range(stages):
                fetch(slot, slot)
            plgpu.copy_gmem_to_smem(largest_gmem.at[pl.ds(m * tile_m, columns)], largest_smem, begun)

        w_largest = row_bytes(w_byte_gmem.at[num_steps * BLOCKS_PER_STEP, own_rows])

        def refill(i, slot):
            """Step i's product is there, so this warpgroup has read the slot."""

            @pl.when(i + stages < steps)
            def _refill():
                plgpu.barrier_arrive(read.at[slot])

                @pl.when(own == 0)
                def _fetch():
                    plgpu.barrier_wait(read.at[slot])
                    fetch(i + stages, slot)

        def multiply(acc):
            @pl.loop(0, steps)
            def _step(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(loaded.at[slot])
                packed = load(w_smem.at[slot, own], _PACKED)
                rows = pl.ds(own * ROWS, ROWS)
                bytes_ = [row_bytes(w_byte_smem.at[slot, block, rows]) for block in range(BLOCKS_PER_STEP)]
                factors = [_factor(byte, w_largest) for byte in bytes_]
                weights = _widen(packed, factors, interpreted)
                if interpreted:
                    rest[-1][own] = weights
                    plgpu.commit_smem()
                    weights = rest[-1].at[own]
                plgpu.wgmma(acc, weights, x_smem.at[slot].T)
                plgpu.wgmma_wait(0)
                refill(i, slot)

            return acc[...]

        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, tile_m), jnp.float32))

        def over_tile(vector, axis):
            return lax.broadcast_in_dim(vector, (ROWS, share), (axis,))

        def store(total, owner):
            plgpu.barrier_wait(begun)
            at = pl.ds(owner * share, share)
            x_largest = load(largest_smem.at[at], plgpu.Layout.WGMMA.reduce(0), optimized=False)
            w_low, w_high = (over_tile(half, 0) for half in scale_halves(w_largest))
            x_low, x_high = (over_tile(half, 1) for half in scale_halves(x_largest))
            y = total * (w_low * x_high) * (w_high * x_low)
            y_smem.at[own].T[...] = plgpu.layout_cast(y.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            if few:
                plgpu.copy_smem_to_gmem(y_smem.at[own, pl.ds(0, wanted)], y_gmem.at[:, own_rows])
            else:
                tokens = pl.ds(m * tile_m + owner * share, share)
                plgpu.copy_smem_to_gmem(y_smem.at[own], y_gmem.at[tokens, own_rows])
            plgpu.wait_smem_to_gmem(0)

        if splits == 1:
            store(total, 0)
            return
        pushed_smem, pushed, *_ = rest
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
            everything = load(pushed_smem.at[own, 0], plgpu.Layout.WGMMA)
            for other in range(1, splits):  # in this order, whatever arrived first: the same bits every time
                everything += load(pushed_smem.at[own, other], plgpu.Layout.WGMMA)
            store(everything, split)

    scratch = [
        plgpu.SMEM((stages, tile_m, STEP), jnp.bfloat16, transforms=tiled(STEP, jnp.bfloat16)),
        plgpu.SMEM((stages, warpgroups, *_TILE), jnp.float8_e4m3fn),
        plgpu.SMEM((stages, BLOCKS_PER_STEP, ROWS * warpgroups), jnp.uint8),
        plgpu.SMEM((columns,), jnp.int32),
        plgpu.SMEM((warpgroups, share, ROWS), out_dtype, transforms=() if few else tiled(ROWS, out_dtype)),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(),
    ]
    mesh: dict = {"grid": ((M // tile_m) * (N // (ROWS * warpgroups)),), "grid_names": ("tile",)}
    if splits > 1:
        mesh |= {"cluster": (splits,), "cluster_names": ("split",)}
        scratch += [
            plgpu.SMEM((warpgroups, splits, ROWS, share), jnp.float32, transforms=tiled(share, jnp.float32)),
            plgpu.Barrier(num_arrivals=splits * warpgroups),
        ]
    if interpreted:
        scratch.append(plgpu.SMEM((warpgroups, *_TILE), jnp.bfloat16))
    if warpgroups > 1:
        mesh |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((wanted if few else M, N), out_dtype),
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(x_MK, largest_M, weight.values_NK.reshape(-1, num_steps, *_TILE), weight.scale_NKb)
