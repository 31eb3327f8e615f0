"""The Hopper kernel: flash decoding, one block per (slot, kv head, part of the live positions).

    k (block_kv, d) ──TMA──► ring ─┐ wgmma, rows = positions: logits (block_kv, 8)
    q (8 query heads, d) ──────────┘     └─► running softmax over the positions, float32 registers
    weights (8, block_kv) ─────────┐ wgmma, rows = channels:  o (d, 8)
    v (block_kv, d) ──TMA──► ring ─┘     parts of one (slot, kv head) meet by log-sum-exp, in a fixed order:
                                         pushed to the first block of their cluster, or in a launch of XLA's

Positions, then channels, are the 64-row side of wgmma and the query heads of a kv head its 8 columns, so no row of an
instruction and no exponential is spent on padding. Only live positions are read: a slot of length 100 costs two steps
of 64.

FP8 keys and values are widened to float16 on the chip, exactly (the hardware converts e4m3 to nothing else), so HBM
sees one byte an element: keys in registers, values through shared memory. A key's scale multiplies its logit. A value's
scale s joins the exponent: weights 2^(logit + log2 s - top) stay at most 1, whatever the scales, and the softmax sum
adds weight / s. Queries become float16 too: bfloat16 is exact there up to 65,504 in magnitude, where it saturates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._chip import SM90, Chip, broadcast
from .._mosaic import LANE, load, tiled
from ..types import ScaledKV
from .config import GROUP_ROWS, LSE_ROW, Config, can_run, default_config


def why_not(q_BHd, k_cache, config: Config | None = None, chip: Chip = SM90) -> str | None:
    """None when this kernel can run these shapes, else the reason."""
    fp8 = isinstance(k_cache, ScaledKV)
    if not fp8 and k_cache.dtype != jnp.bfloat16:
        return f"the cache is {k_cache.dtype}; the kernel reads bfloat16 or ScaledKV"
    if q_BHd.dtype != jnp.bfloat16:
        return f"q is {q_BHd.dtype}; the kernel reads bfloat16"
    (_, H, d), (_, G, S, _) = q_BHd.shape, k_cache.shape
    return can_run(config or pick(k_cache, chip), H, G, S, d, 1 if fp8 else 2, chip)


def decode_attention(
    q_BHd: jax.Array,
    k_cache,
    v_cache,
    lengths_B: jax.Array,
    scale: float,
    config: Config | None = None,
    interpret=None,
    chip: Chip = SM90,
) -> jax.Array:
    """(B, H, d) bfloat16 -> (B, H, d) bfloat16 over a bfloat16 or ScaledKV cache."""
    (B, H, d), (_, G, S, _) = q_BHd.shape, k_cache.shape
    fp8 = isinstance(k_cache, ScaledKV)
    config = config or pick(k_cache, chip)
    if reason := can_run(config, H, G, S, d, 1 if fp8 else 2, chip):
        raise NotImplementedError(f"decode_attention: {reason}")
    if fp8:
        most = float(jnp.finfo(jnp.float16).max)
        q_BHd = jnp.clip(q_BHd.astype(jnp.float32), -most, most).astype(jnp.float16)
    q_BGRd = jnp.pad(q_BHd.reshape(B, G, H // G, d), ((0, 0), (0, 0), (0, GROUP_ROWS - H // G), (0, 0)))
    caches = (
        (k_cache.values_BGSd, v_cache.values_BGSd, k_cache.scale_BGS, v_cache.scale_BGS) if fp8 else (k_cache, v_cache)
    )
    lengths_B, slots = lengths_B.astype(jnp.int32), jnp.arange(B, dtype=jnp.int32)
    if B * G * config.splits > chip.num_sms:  # some blocks wait for others: the longest go first, so that none is last
        lengths_B, slots = lax.sort_key_val(-jnp.clip(lengths_B, 0, S), slots)
        lengths_B = -lengths_B
    o, lse = launch(q_BGRd, caches, lengths_B, slots, H // G, scale, config, interpret, chip)
    if lse is not None:
        o = merged([(o[:, :, i], lse[:, :, i, : H // G, None]) for i in range(config.splits)])
    return o.reshape(B, H, d).astype(jnp.bfloat16)


def merged(parts: Sequence[tuple[jax.Array, ...]]) -> jax.Array:
    """One average of several, each with its base-2 log-sum-exp. Term by term, which XLA makes one launch of."""
    top = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    weights = [jnp.exp2(lse - jnp.where(top == -jnp.inf, 0.0, top)) for _, lse in parts]
    total = sum(weights[1:], start=weights[0])
    terms = [o * weight for (o, _), weight in zip(parts, weights, strict=True)]
    return sum(terms[1:], start=terms[0]) / jnp.where(total == 0.0, 1.0, total)


def pick(k_cache, chip: Chip = SM90) -> Config:
    """The measured choice for this device and shape, else the default."""
    B, G, S, d = k_cache.shape
    kind = "float8" if isinstance(k_cache, ScaledKV) else "bfloat16"
    fields = _tuned.lookup("decode_attention", B, G, S, d, kind)
    return default_config(B, G, S, chip) if fields is None else Config(**fields)


def launch(
    q_BGRd,
    caches,
    lengths_B,
    slots_B,
    heads: int,
    scale: float,
    config: Config,
    interpret=None,
    chip: Chip = SM90,
):
    """The kernel and no other operation. slots_B: in the order in which they start; their lengths.

    (o (B * G * heads, d) bfloat16, None), or what another launch merges, each part's own average: o (B, G, splits,
    heads, d) float32 and its base-2 log-sum-exp (B, G, splits, 32), first `heads` meant.
    """
    B, G, _, d = q_BGRd.shape
    S = caches[0].shape[2]
    fp8 = len(caches) == 4
    block_kv, splits, stages = config.block_kv, config.splits, config.stages
    parts_leave = splits > 1 and not config.in_cluster
    to_log2 = scale * math.log2(math.e)
    tile = (block_kv, GROUP_ROWS)
    wide, f32 = q_BGRd.dtype, jnp.float32
    row_layout = chip.layout.reduce(1)
    logits_types, weighed_types = chip.scratch(tile, 1), chip.scratch((d, GROUP_ROWS), 1)

    def over_rows(row):
        """(8,) to (block_kv, 8)."""
        return broadcast(row, tile, 1, chip)

    def body(q_gmem, lengths_gmem, slots_gmem, *refs):
        gmem, o_gmem, *scratch = refs[: len(caches)], *refs[len(caches) :]
        if parts_leave:
            lse_gmem, *scratch = scratch
        q_smem, p_smem, o_smem, narrow_smem, lse_smem, loaded, q_loaded, *rest = scratch
        if config.in_cluster:
            pushed_smem, pushed, *rest = rest
        logits_scratch, rest = rest[: len(logits_types)], rest[len(logits_types) :]
        weighed_scratch, rings = rest[: len(weighed_types)], rest[len(weighed_types) :]
        head = lax.axis_index("head")
        turn, g = lax.div(head, G), lax.rem(head, G)
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        b, length = slots_gmem[turn], jnp.clip(lengths_gmem[turn], 0, S)
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

        plgpu.copy_gmem_to_smem(q_gmem.at[b, g], q_smem, q_loaded)
        plgpu.barrier_wait(q_loaded)

        def widen(ring):
            """An FP8 tile as float16 registers."""
            return plgpu.layout_cast(load(ring, plgpu.Layout.WGMMA_UPCAST_2X).astype(wide), plgpu.Layout.WGMMA)

        def step(i, carry):
            o, top, total = carry
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(loaded.at[slot])
            left = length - (first + i) * block_kv  # live positions from this step's first one on
            channel_row = plgpu.broadcasted_iota(jnp.int32, (block_kv, d), 0, layout=plgpu.Layout.WGMMA)
            if fp8:
                k, v_smem = widen(rings[0].at[slot]), rings[4]
                if config.keys_in == "shared":
                    rings[5][...] = k
                    k = rings[5]
                v = widen(rings[1].at[slot])
                v_smem[...] = jnp.where(channel_row < left, v, jnp.zeros_like(v))
                plgpu.commit_smem()
            else:
                k, v_smem = rings[0].at[slot], rings[1].at[slot]

                @pl.when(left < block_kv)
                def _clear():
                    # A dead row's weight is 0, but 0 * NaN is not.
                    v = load(v_smem, plgpu.Layout.WGMMA)
                    v_smem[...] = jnp.where(channel_row < left, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

            (logits,) = chip.products([(k, q_smem.T)], tile, logits_scratch)
            logits = logits * to_log2
            if fp8:
                k_scale, v_scale = (load(ring.at[slot], row_layout) for ring in rings[2:4])
                weaker = broadcast(1.0 / v_scale, tile, 0, chip)  # of a row once, not of each of its elements
                logits = logits * broadcast(k_scale, tile, 0, chip) + broadcast(jnp.log2(v_scale), tile, 0, chip)
            live = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=chip.layout) < left
            logits = jnp.where(live, logits, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(logits, axis=0))
            shrink = jnp.exp2(top - new_top)
            p = jnp.exp2(logits - over_rows(new_top))
            total = total * over_rows(shrink) + (jnp.where(live, p * weaker, 0.0) if fp8 else p)
            p_smem.T[...] = plgpu.layout_cast(p.astype(wide), chip.transposed)
            plgpu.commit_smem()

            o = o * broadcast(shrink, o.shape, 1, chip)
            (weighed,) = chip.products([(v_smem.T, p_smem.T)], o.shape, weighed_scratch)
            o += weighed

            @pl.when(i + stages < steps)
            def _next():
                fetch(i + stages, slot)

            return o, new_top, total

        o, top, total = lax.fori_loop(
            0,
            steps,
            step,
            (
                plgpu.layout_cast(jnp.zeros((d, GROUP_ROWS), f32), chip.layout),
                plgpu.layout_cast(jnp.full((GROUP_ROWS,), -jnp.inf, f32), chip.layout.reduce(0)),
                plgpu.layout_cast(jnp.zeros(tile, f32), chip.layout),
            ),
        )
        total = jnp.sum(total, axis=0)
        safe = jnp.where(total == 0.0, 1.0, total)
        average = o * broadcast(1.0 / safe, o.shape, 1, chip)
        lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log2(safe))

        def store(average):
            o_smem.T[...] = plgpu.layout_cast(average, chip.transposed)
            rows = load(o_smem, plgpu.Layout.WG_STRIDED(o_smem.shape, vec_size=4), optimized=False)
            narrow_smem[...] = rows.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(narrow_smem.at[pl.ds(0, heads)], o_gmem.at[pl.ds((b * G + g) * heads, heads)])

        if splits == 1:
            store(average)
        elif config.in_cluster:
            for at, value in enumerate((average, broadcast(lse, o.shape, 1, chip))):
                to = pushed_smem.at[split, at]
                plgpu.async_store_smem(value, to, pushed, cluster_idx=jnp.int32(0), cluster_dim="split")

            @pl.when(split == 0)
            def _merge():
                plgpu.barrier_wait(pushed)
                store(
                    merged([tuple(load(pushed_smem.at[i, at], chip.layout) for at in range(2)) for i in range(splits)])
                )
        else:
            o_smem.T[...] = plgpu.layout_cast(average, chip.transposed)
            lse_smem[pl.ds(0, GROUP_ROWS)] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, heads)], o_gmem.at[b, g, split])
            plgpu.copy_smem_to_gmem(lse_smem, lse_gmem.at[b, g, split])
        plgpu.wait_smem_to_gmem(0)

    def ring(kind):
        return plgpu.SMEM((stages, block_kv, d), kind, transforms=tiled(d, kind))

    cluster_types: list = []
    if config.in_cluster:
        pushed_type = plgpu.SMEM((splits, 2, d, GROUP_ROWS), f32, transforms=tiled(GROUP_ROWS, f32))
        cluster_types = [pushed_type, plgpu.Barrier(num_arrivals=2 * splits)]
    scratch = [
        plgpu.SMEM((GROUP_ROWS, d), wide, transforms=tiled(d, wide)),
        plgpu.SMEM((GROUP_ROWS, block_kv), wide, transforms=tiled(block_kv, wide)),
        plgpu.SMEM((GROUP_ROWS, d), f32),  # neither tiled nor swizzled: written transposed, read as rows
        plgpu.SMEM((GROUP_ROWS, d), jnp.bfloat16),
        plgpu.SMEM((LSE_ROW,), f32),
        plgpu.Barrier(num_arrivals=len(caches), num_barriers=stages),
        plgpu.Barrier(),
        *cluster_types,
        *logits_types,
        *weighed_types,
        ring(caches[0].dtype),
        ring(caches[1].dtype),
    ]
    if fp8:
        scratch += [plgpu.SMEM((stages, block_kv), f32)] * 2
        tiles = 2 if config.keys_in == "shared" else 1
        scratch += [plgpu.SMEM((block_kv, d), wide, transforms=tiled(d, wide))] * tiles
    parts = jax.ShapeDtypeStruct((B, G, splits, heads, d), f32), jax.ShapeDtypeStruct((B, G, splits, LSE_ROW), f32)
    whole = jax.ShapeDtypeStruct((B * G * heads, d), jnp.bfloat16)
    mesh: dict = {"grid": (B * G,), "grid_names": ("head",)}
    if parts_leave:
        mesh = {"grid": (B * G, splits), "grid_names": ("head", "split")}
    elif config.in_cluster:
        mesh |= {"cluster": (splits,), "cluster_names": ("split",)}
    made = plgpu.kernel(
        body,
        out_type=parts if parts_leave else whole,
        scratch_types=scratch,
        compiler_params=LANE,
        interpret=interpret,
        **mesh,
    )(q_BGRd, lengths_B, slots_B, *caches)
    return made if parts_leave else (made, None)
