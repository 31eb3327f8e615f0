"""What the Mosaic GPU kernels share: layouts of shared memory, and what differs between JAX versions."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# By name, because the default differs (0.10 Lane, 0.11 Warpgroup). Warpgroup infers the layouts of registers and gives
# up on long kernels; Lane takes the layouts that the kernel names.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
LINE = 32
"""Float32 per 128 bytes, the least a bulk copy moves."""
_LOAD_WANTS_INDEX = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty


def load(ref, layout, *, optimized: bool = True) -> jax.Array:
    """A whole reference as registers in `layout` (jax 0.10 asks for an index besides)."""
    index = ((),) if _LOAD_WANTS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def tiled(width: int, dtype) -> tuple:
    """Tiling and swizzle of shared memory whose rows have `width` elements: what wgmma and bulk copies want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if width * size % s == 0)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
