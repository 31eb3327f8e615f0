"""What the Mosaic GPU kernels share: layouts of shared memory, and what differs between JAX versions."""

from __future__ import annotations

import inspect
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

# By name, because the default differs (0.10 Lane, 0.11 Warpgroup). Warpgroup infers the layouts of registers and gives
# up on long kernels; Lane takes the layouts that the kernel names.
# approx_math: exp, log and rsqrt by the hardware's own instruction, within 2^-21 of the value, instead of a dozen.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)
LINE = 32
"""Float32 per 128 bytes, the least a bulk copy moves."""
_GPU_SCOPE = hasattr(plgpu, "semaphore_signal")
_LOAD_WANTS_INDEX = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty


def load(ref, layout, *, optimized: bool = True) -> jax.Array:
    """A whole reference as registers in `layout` (jax 0.10 asks for an index besides)."""
    index = ((),) if _LOAD_WANTS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def silu(x):
    """x / (1 + exp(-x)) without a division, which is fifteen instructions an element and a slow path."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)


def tiled(width: int, dtype) -> tuple:
    """Tiling and swizzle of shared memory whose rows have `width` elements: what wgmma and bulk copies want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if width * size % s == 0)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


REDUCED = 4 * 32 * 2 * 2
"""Float32 of shared memory that a reduction takes: two values of every thread at a time, twice."""


def over_tile_rows(op: Literal["add", "max"], tile, scratch, interpreted: bool) -> jax.Array:
    """The sum or largest of each column of a tile in WGMMA's layout, (rows, columns) float32 -> (columns,).

    For kernels of several warpgroups: `jnp.max` and `jnp.sum` pass values from warp to warp through one place in shared
    memory, the same for all warpgroups of a block, without a word of it. `scratch`: this warpgroup's own, (REDUCED,).
    """
    if interpreted:  # a warpgroup is one thread there, and inline code is refused
        return (jnp.max if op == "max" else jnp.sum)(tile, axis=0)
    column = plgpu.ShapeDtypeStruct(tile.shape[1:], jnp.float32, layout=plgpu.Layout.WGMMA.reduce(0))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=column)
    def reduce(_, values, own):
        return values.reduce(op, 0, own)

    return reduce(tile, scratch)  # pyright: ignore[reportCallIssue]  # the decorator hides the first argument


def over_tile(op: Literal["add", "max"], tile, scratch, result, interpreted: bool) -> jax.Array:
    """The sum or largest of a whole tile, a scalar; otherwise as `over_tile_rows`. It passes through `result`, (1,)."""
    if interpreted:
        result[0] = (jnp.max if op == "max" else jnp.sum)(tile)
        return result[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType()))
    def reduce(_, values, own, into):
        (found,) = values.reduce(op, (0, 1), own).registers.flat
        # Every thread writes the same and reads its own; the barriers of the next reduction come before its write.
        memref.store(found, into, [mgpu.c(0, ir.IndexType.get())])

    reduce(tile, scratch, result)  # pyright: ignore[reportCallIssue]
    return result[0]


def signal(semaphore) -> None:
    """Adds one, seen on this device, after all that this warpgroup did (jax 0.10 only knows the whole system)."""
    if _GPU_SCOPE:
        plgpu.semaphore_signal(semaphore, memory_scope="gpu")
    else:
        pl.semaphore_signal(semaphore)


def wait_for(semaphore, value) -> None:
    """Until a semaphore has reached `value`, which it keeps."""
    if _GPU_SCOPE:
        plgpu.semaphore_wait(semaphore, value, decrement=False, memory_scope="gpu")
    else:
        pl.semaphore_wait(semaphore, value, decrement=False)
