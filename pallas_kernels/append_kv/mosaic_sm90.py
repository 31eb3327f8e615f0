"""The Hopper kernel: the new keys and values of every slot quantised and put into the caches, in one launch.

    k (G, d) ──TMA──► rows 0 ..  ┐ of a tile
    v (G, d) ──TMA──► rows 32 .. ┘ (64, d) ──► registers ──► amax of each row ──► scale ──► e4m3 (64, d), scale (64,)
    e4m3  (G, d) ──TMA──► values[b, :, at]      one copy a cache: G rows that lie S rows apart
    scale (G,) ──stores──► scale[b, :, at]      numbers that lie S apart, which no bulk copy moves

One block is one slot. Where G is less than 32 the other rows are whatever lay there: rows know nothing of each other.
The caches are references that the kernel changes: what it does not write stays, and where the caller donates them
nothing is copied.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._mosaic import LANE, load
from ..quantize_blocks.mosaic_sm90 import scale_and_round_rows
from ..types import ScaledKV
from .config import HALF, can_run

# No barriers but those written here: shared memory is written once and read once, `commit_smem` between the two waits
# for all threads, and there would be two more around every store of a scale.
_PARAMS = dataclasses.replace(LANE, unsafe_no_auto_barriers=True)


def why_not(k_BGd: jax.Array) -> str | None:
    """None when this kernel can write these rows, else the reason."""
    if k_BGd.dtype != jnp.bfloat16:
        return f"k and v are {k_BGd.dtype}; the kernel reads bfloat16"
    return can_run(*k_BGd.shape[1:])


def append_kv(
    k_BGd: jax.Array, v_BGd: jax.Array, k_cache: ScaledKV, v_cache: ScaledKV, positions_B: jax.Array, interpret=None
) -> tuple[ScaledKV, ScaledKV]:
    """(B, G, d) bfloat16 into caches (B, G, S, d); reference.py has the formula, which this is bit for bit."""
    B, G, S, d = k_cache.shape
    # XLA does this with what makes the rows; values alone, a part of a wider array, it would copy first.
    rows = jnp.concatenate([k_BGd, v_BGd], axis=1)
    caches = jax.tree.map(jax.new_ref, (k_cache, v_cache))

    def body(rows_gmem, positions_gmem, caches_gmem, x_smem, values_smem, scale_smem, loaded):
        b = lax.axis_index("slot")
        at = positions_gmem[b]
        at = jnp.where(at < 0, at + S, at)

        @pl.when((at >= 0) & (at < S))
        def _inside():
            for half in range(2):
                plgpu.copy_gmem_to_smem(rows_gmem.at[b, pl.ds(half * G, G)], x_smem.at[pl.ds(half * HALF, G)], loaded)
            plgpu.barrier_wait(loaded)
            x = load(x_smem, plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            values_smem[...], scale_smem[...] = scale_and_round_rows(x)
            plgpu.commit_smem()
            for half, cache in enumerate(caches_gmem):
                plgpu.copy_smem_to_gmem(values_smem.at[pl.ds(half * HALF, G)], cache.values_BGSd.at[b, :, at])
                for g in range(G):
                    cache.scale_BGS[b, g, at] = scale_smem[half * HALF + g]
            plgpu.wait_smem_to_gmem(0)

    def block(*operands):
        pl.run_scoped(
            functools.partial(body, *operands),
            plgpu.SMEM((2 * HALF, d), jnp.bfloat16),
            plgpu.SMEM((2 * HALF, d), jnp.float8_e4m3fn),
            plgpu.SMEM((2 * HALF,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        )

    # Not plgpu.kernel, whose rule for vmap takes no references before jax 0.11.
    pl.kernel(
        block,
        mesh=plgpu.Mesh(grid=(B,), grid_names=("slot",)),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="append_kv",
    )(rows, positions_B.astype(jnp.int32), caches)  # pyright: ignore[reportCallIssue]  # it is typed as a decorator
    return jax.tree.map(jax.freeze, caches)
