"""The Hopper kernel: flash decoding, one block per (slot, kv head, part of the live positions).

    q  (8 rows of a 64-row wgmma tile) ─┐
    k  (block_kv, d) ──TMA──► ring ─────┴► logits (64, block_kv) ──► running softmax, float32 registers ─┐
    v  (block_kv, d) ──TMA──► ring ──────────────────────────────────────────────────────────────────────┴► o (64, d)
    parts of one (slot, kv head) are merged by their log-sum-exp in a fixed order, in one more small kernel

The query heads of a kv head are the first rows of wgmma's 64; the other rows hold whatever was there and are never
stored: rows do not mix, and the kernel waits for memory, not for the tensor core. Only live positions are read: a slot
of length 100 costs two steps of 64.

FP8 keys and values are widened to float16 on the chip, exactly (the hardware converts e4m3 to nothing else), so HBM
sees one byte an element. A key's scale multiplies its logit. A value's scale s joins the exponent: weights
2^(logit + log2 s - top) stay at most 1, whatever the scales, and the softmax sum adds weight / s. Queries become
float16 too: bfloat16 is exact there up to 65,504 in magnitude, where it saturates.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._dispatch import need_capability
from .._mosaic import WARPGROUP, load, tiled
from ..types import ScaledKV
from .config import GROUP_ROWS, QUERY_ROWS, Config, can_run, default_config

_ROW, _COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def why_not(q_BHd, k_cache, config: Config | None = None) -> str | None:
    """None when this kernel can run here and now, else the reason."""
    fp8 = isinstance(k_cache, ScaledKV)
    if not fp8 and k_cache.dtype != jnp.bfloat16:
        return f"the cache is {k_cache.dtype}; the kernel reads bfloat16 or ScaledKV"
    if q_BHd.dtype != jnp.bfloat16:
        return f"q is {q_BHd.dtype}; the kernel reads bfloat16"
    (_, H, d), (_, G, S, _) = q_BHd.shape, k_cache.shape
    return need_capability("9.0") or can_run(config or _pick(k_cache), H, G, S, d, 1 if fp8 else 2)


def decode_attention(
    q_BHd: jax.Array, k_cache, v_cache, lengths_B: jax.Array, scale: float, config: Config | None = None, interpret=None
) -> jax.Array:
    """(B, H, d) bfloat16 -> (B, H, d) bfloat16 over a bfloat16 or ScaledKV cache."""
    (B, H, d), (_, G, S, _) = q_BHd.shape, k_cache.shape
    fp8 = isinstance(k_cache, ScaledKV)
    config = config or _pick(k_cache)
    if reason := can_run(config, H, G, S, d, 1 if fp8 else 2):
        raise NotImplementedError(f"decode_attention: {reason}")
    if fp8:
        most = float(jnp.finfo(jnp.float16).max)
        q_BHd = jnp.clip(q_BHd.astype(jnp.float32), -most, most).astype(jnp.float16)
    q_BGRd = jnp.pad(q_BHd.reshape(B, G, H // G, d), ((0, 0), (0, 0), (0, GROUP_ROWS - H // G), (0, 0)))
    lengths_B = jnp.clip(lengths_B.astype(jnp.int32), 0, S)
    caches = (
        (k_cache.values_BGSd, v_cache.values_BGSd, k_cache.scale_BGS, v_cache.scale_BGS) if fp8 else (k_cache, v_cache)
    )
    o, lse = _call(q_BGRd, caches, lengths_B, scale, config, interpret)
    if config.splits == 1:
        o = o[:, :, 0]
    else:
        lse = lse[..., :GROUP_ROWS]
        top = jnp.max(lse, axis=2, keepdims=True)
        weight = jnp.exp2(lse - jnp.where(jnp.isneginf(top), 0.0, top))
        total = jnp.sum(weight, axis=2)
        o = jnp.sum(o * weight[..., None], axis=2) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return o[:, :, : H // G].reshape(B, H, d).astype(jnp.bfloat16)


def _pick(k_cache) -> Config:
    """The measured choice for this device and shape, else the default."""
    B, G, S, d = k_cache.shape
    kind = "float8" if isinstance(k_cache, ScaledKV) else "bfloat16"
    fields = _tuned.lookup("decode_attention", B, G, S, d, kind)
    return default_config(B, G, S) if fields is None else Config(**fields)


def _call(q_BGRd, caches, lengths_B, scale: float, config: Config, interpret) -> tuple[jax.Array, jax.Array]:
    """Each part's own softmax average (B, G, splits, 8, d) float32 and base-2 log-sum-exp (B, G, splits, 64)."""
    B, G, _, d = q_BGRd.shape
    fp8 = len(caches) == 4
    block_kv, splits, stages = config.block_kv, config.splits, config.stages
    to_log2 = scale * math.log2(math.e)
    tile = (QUERY_ROWS, block_kv)
    wide = q_BGRd.dtype

    def body(q_gmem, lengths_gmem, *refs):
        gmem, (o_gmem, lse_gmem), scratch = refs[: len(caches)], refs[len(caches) :][:2], refs[len(caches) + 2 :]
        q_smem, o_smem, lse_smem, loaded, q_loaded, *rings = scratch
        b, g = lax.div(lax.axis_index("head"), G), lax.rem(lax.axis_index("head"), G)
        split = lax.axis_index("split")
        length = lengths_gmem[b]
        blocks = lax.div(length + (block_kv - 1), block_kv)
        each = lax.div(blocks + (splits - 1), splits)
        first = split * each
        steps = jnp.maximum(jnp.minimum(each, blocks - first), 0)

        def fetch(i, slot):
            at = pl.ds((first + i) * block_kv, block_kv)
            for source, ring in zip(gmem, rings[: len(caches)], strict=True):
                plgpu.copy_gmem_to_smem(source.at[b, g, at], ring.at[slot], loaded.at[slot])

        for slot in range(stages):

            @pl.when(slot < steps)
            def _first(slot=slot):
                fetch(slot, slot)

        plgpu.copy_gmem_to_smem(q_gmem.at[b, g], q_smem.at[pl.ds(0, GROUP_ROWS)], q_loaded)
        plgpu.barrier_wait(q_loaded)

        def step(i, carry):
            o, top, total = carry
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])
            left = length - (first + i) * block_kv  # live positions from this step's first one on
            if fp8:
                k_smem, v_smem = rings[4:6]
                k_smem[...] = load(rings[0].at[slot], plgpu.Layout.WGMMA, optimized=False).astype(wide)
                row = plgpu.broadcasted_iota(jnp.int32, (block_kv, d), 0, layout=plgpu.Layout.WGMMA)
                v = load(rings[1].at[slot], plgpu.Layout.WGMMA, optimized=False).astype(wide)
                v_smem[...] = jnp.where(row < left, v, jnp.zeros_like(v))
                plgpu.commit_smem()
            else:
                k_smem, v_smem = rings[0].at[slot], rings[1].at[slot]

                @pl.when(left < block_kv)
                def _clear():
                    # A dead row's probability is 0, but 0 * NaN is not.
                    row = plgpu.broadcasted_iota(jnp.int32, (block_kv, d), 0, layout=plgpu.Layout.WGMMA)
                    v = load(v_smem, plgpu.Layout.WGMMA)
                    v_smem[...] = jnp.where(row < left, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

            def multiply(acc):
                plgpu.wgmma(acc, q_smem, k_smem.T)
                return acc[...]

            logits = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(tile, jnp.float32)) * to_log2
            if fp8:
                v_scale = load(rings[3].at[slot], _COLUMN)
                logits = logits * lax.broadcast_in_dim(load(rings[2].at[slot], _COLUMN), tile, (1,))
                logits += lax.broadcast_in_dim(jnp.log2(v_scale), tile, (1,))
            live = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=plgpu.Layout.WGMMA) < left
            logits = jnp.where(live, logits, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(logits, axis=1))
            shrink = jnp.exp2(top - new_top)
            p = jnp.exp2(logits - lax.broadcast_in_dim(new_top, tile, (0,)))
            share = jnp.where(live, p * lax.broadcast_in_dim(1.0 / v_scale, tile, (1,)), 0.0) if fp8 else p
            total = total * shrink + jnp.sum(share, axis=1)
            p = p.astype(wide)
            if config.weights_in == "shared":
                rings[-1][...] = p
                plgpu.commit_smem()
                p = rings[-1]

            def weigh(acc):
                plgpu.wgmma(acc, p, v_smem)
                return acc[...]

            o = o * lax.broadcast_in_dim(shrink, o.shape, (0,)) + pl.run_scoped(
                weigh, plgpu.WGMMAAccumulatorRef(o.shape, jnp.float32)
            )

            @pl.when(i + stages < steps)
            def _next():
                if not fp8:
                    plgpu.commit_smem()  # _clear may have written the tile that the copy engine now overwrites
                fetch(i + stages, slot)

            return o, new_top, total

        o, top, total = lax.fori_loop(
            0,
            steps,
            step,
            (
                plgpu.layout_cast(jnp.zeros((QUERY_ROWS, d), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((QUERY_ROWS,), -jnp.inf, jnp.float32), _ROW),
                plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), _ROW),
            ),
        )
        safe = jnp.where(total == 0.0, 1.0, total)
        o_smem[...] = o / lax.broadcast_in_dim(safe, o.shape, (0,))
        lse_smem[...] = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(safe) * math.log2(math.e))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, GROUP_ROWS)], o_gmem.at[b, g, split])
        plgpu.copy_smem_to_gmem(lse_smem, lse_gmem.at[b, g, split])
        plgpu.wait_smem_to_gmem(0)

    def ring(kind):
        return plgpu.SMEM((stages, block_kv, d), kind, transforms=tiled(d, kind))

    scratch = [
        plgpu.SMEM((QUERY_ROWS, d), wide, transforms=tiled(d, wide)),
        plgpu.SMEM((QUERY_ROWS, d), jnp.float32, transforms=tiled(d, jnp.float32)),
        plgpu.SMEM((QUERY_ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=len(caches), num_barriers=stages),
        plgpu.Barrier(),
        ring(caches[0].dtype),
        ring(caches[1].dtype),
    ]
    if fp8:
        scratch += [plgpu.SMEM((stages, block_kv), jnp.float32)] * 2
        scratch += [plgpu.SMEM((block_kv, d), wide, transforms=tiled(d, wide))] * 2
    if config.weights_in == "shared":
        scratch += [plgpu.SMEM(tile, wide, transforms=tiled(block_kv, wide))]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, G, splits, GROUP_ROWS, d), jnp.float32),
            jax.ShapeDtypeStruct((B, G, splits, QUERY_ROWS), jnp.float32),
        ),
        grid=(B * G, splits),
        grid_names=("head", "split"),
        scratch_types=scratch,
        compiler_params=WARPGROUP,
        interpret=interpret,
    )(q_BGRd, lengths_B, *caches)
