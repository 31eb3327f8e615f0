"""The Hopper kernel: one frame of the fast transformer, all positions, layers and draws, as one persistent kernel.

    embed ─► h ═ wqkv ═ sum, rotate ─► q k v ─ attention ─► o ═ wo ═ sum, residual, norm ─► h
             h ═ gate_up, silu ─► a ═ down ═ sum, residual, norm ─► h        ... L layers ...
             h ═ head ─ draw ─► code                                         ... C positions ...

A double line is a matmul, an arrow a grid barrier: see `_persistent`. Attention takes four slots and a kv head at a
time: rows are 16 positions x 4 slots, columns query heads x 4 slots, and a column sees its own slot's rows. Keys and
values of the frame stay in L2. Up to 32 slots, positions 0 and 1 go in together: position 0 as tokens behind the rest.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._dispatch import need_capability
from .._mosaic import LANE, load, tiled
from .._persistent import (
    ACC,
    HALF,
    ROW,
    Residual,
    Walker,
    bf16,
    f32,
    fp8,
    mesh,
    over_columns,
    over_rows,
    rounded,
    scratch,
    strided,
)
from ..quantize_blocks.reference import scale_of
from ..types import BLOCK
from . import config as layout
from .config import POSITIONS, SLOTS, Config, Plan
from .reference import Draws
from .weights import FastWeights

_LAYER = ("qkv", "wo", "gate_up", "down")
_LARGEST_BF16 = float(jnp.finfo(bf16).max)
_SYNCS_A_LAYER, _SYNCS_A_DRAW = 8, 2


def why_not(slots: int, weights: FastWeights, config: Config | None = None) -> str | None:
    """None when this kernel can run here and now, else the reason."""
    return need_capability("9.0") or layout.why_not(_plan(slots, weights, config))


def fast_frame(
    hidden_BD: jax.Array,
    semantic_B: jax.Array,
    weights: FastWeights,
    draws: Draws,
    config: Config | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """codes_BC int32 and logits (C - 1, B, codes) float32."""
    B, p = len(hidden_BD), _plan(len(hidden_BD), weights, config)
    if reason := layout.why_not(p):
        raise NotImplementedError(f"fast_frame: {reason}")
    more = p.slots - B
    given = _Given(
        hidden=jnp.pad(hidden_BD.astype(bf16), ((0, more), (0, 0))),
        semantic=jnp.pad(semantic_B.astype(jnp.int32), (0, more)),
        temperature=jnp.pad(draws.temperature_B.astype(f32), (0, more), constant_values=1.0),
        top_p=jnp.pad(draws.top_p_B.astype(f32), (0, more)),
        top_k=jnp.pad(draws.top_k_B.astype(jnp.int32), (0, more), constant_values=1),
        gumbel=jnp.pad(draws.gumbel_CBN.astype(f32), ((0, 0), (0, more), (0, 0))),
    )
    codes, logits = _launch(p, given, weights, interpret)
    return codes[:B].at[:, 0].set(semantic_B), logits[:, :B].reshape(p.C - 1, B, -1)[..., : weights.num_codes]


def _plan(slots: int, weights: FastWeights, config: Config | None) -> Plan:
    (H, G), (L, two_F, D) = weights.heads, weights.w_gate_up.shape
    codes, C = weights.head.shape[1], weights.rope_C2h.shape[0]
    return layout.plan(config or Config(), slots, D, H, G, two_F // 2, L, C, codes)


class _Given(NamedTuple):
    """Per slot: hidden (B, D) bfloat16; semantic, temperature, top_p, top_k (B,); gumbel (C - 1, B, codes) float32."""

    hidden: Any
    semantic: Any
    temperature: Any
    top_p: Any
    top_k: Any
    gumbel: Any


class _Between(NamedTuple):
    """What passes from block to block besides the residual: q, k, v bfloat16; o, a quantised; parts of K; logits."""

    logits: Any
    partial: Any
    q: Any
    k: Any
    v: Any
    o: Any
    o_scale: Any
    a: Any
    a_scale: Any


class _Own(NamedTuple):
    """Shared memory and barriers of attention and draws."""

    rope: Any
    q: Any
    k: Any
    v: Any
    p: Any
    o: Any
    o8: Any
    scale: Any
    rope_loaded: Any
    kv_loaded: Any


def _launch(p: Plan, given: _Given, weights: FastWeights, interpret) -> tuple[jax.Array, jax.Array]:
    c, H, G, L, C = p.chain, p.H, p.G, p.L, p.C
    M, tm, kb, R, columns, slots = c.M, c.tm, c.D // BLOCK, H // G, p.columns, p.slots
    first_pass = int(p.paired)  # the position of most tokens in it
    matmuls, head = [c.matmuls[name] for name in _LAYER], c.matmuls["head"]
    qkv, wo, gate_up, down = matmuls
    code_rows = -(-head.tiles * 2 // HALF) * HALF  # of 64 codes: whole register tiles
    one_cluster = interpret is not None

    def body(given_g: _Given, w_g, codes_g, r_g: Residual, g: _Between, s, own: _Own):
        walk = Walker(c, s, g.partial)
        block, thread = walk.block, walk.thread
        units = [walk.units(m) for m in matmuls]
        units_a_layer, units_a_head = sum(units), walk.units(head)

        def draws_before(position):
            return jnp.maximum(position - 1, 0)

        def unit_of(position, layer, which: int):
            """Weight tiles that this block streams before matmul `which` of a layer."""
            before = (position - first_pass) * L * units_a_layer + draws_before(position) * units_a_head
            return before + layer * units_a_layer + sum(units[:which])

        def epoch_of(position, layer, which: int):
            """Grid barriers up to and with number `which` of a layer."""
            before = (position - first_pass) * (1 + L * _SYNCS_A_LAYER) + draws_before(position) * _SYNCS_A_DRAW
            return before + 1 + layer * _SYNCS_A_LAYER + which

        @pl.when(thread == 2)
        def _stream():
            @pl.loop(first_pass, C)
            def _position(position):
                @pl.loop(0, L)
                def _layer(layer):
                    stacks = (w_g.wqkv, w_g.wo, w_g.w_gate_up, w_g.w_down)
                    for which, (m, w) in enumerate(zip(matmuls, stacks, strict=True)):
                        unit = unit_of(position, layer, which)
                        walk.produce(m, w.values_LNK, w.scale_LNbKb, unit, (layer,))

                @pl.when(position > 0)
                def _head():
                    unit = unit_of(position, L, 0)
                    walk.produce(head, w_g.head.values_LNK, w_g.head.scale_LNbKb, unit, (0,))

            walk.drain(unit_of(C, 0, 0))

        def embed(position, tile, token):
            at = pl.ds(tile * BLOCK, BLOCK)
            here = [lax.rem(token + i, slots) for i in range(tm)]
            # All loads before the first use: each takes as long as a memory access.
            first = [given_g.semantic[slot] for slot in here]
            drawn = [codes_g[slot, jnp.maximum(position - 1, 1)] for slot in here]

            def copy(i, into, barrier):
                hidden = (position == 0) | (token + i >= slots)

                @pl.when(hidden)
                def _hidden():
                    plgpu.copy_gmem_to_smem(given_g.hidden.at[here[i], at], into, barrier)

                @pl.when(~hidden)
                def _code():
                    code = jnp.where(position == 1, first[i], drawn[i])
                    plgpu.copy_gmem_to_smem(w_g.embeddings_ND.at[code, at], into, barrier)

            walk.settle(walk.gathered(copy), r_g, w_g.norms_ID.at[0], tile, token)

        def rope(position, part: int, token):
            """Cosines (part 0) or sines of each token's position, (64, tm)."""
            now, begin = (load(own.rope.at[at, part], ROW, optimized=False) for at in (position, 0))
            tile = (HALF, tm)
            begins = token + plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=ACC) >= slots
            return jnp.where(begins, over_columns(begin, tile), over_columns(now, tile))

        def rotate(position, layer, head, token):
            """Queries, keys, values of one head: scale by 1 / rms, rotate, round, put where attention looks."""
            value = walk.summed(qkv, head, token)
            value *= over_rows(walk.inverse_rms(r_g.squares, token, weights.eps), (BLOCK, tm))
            rotated = head < H + G
            cosine, sine = (rope(position, part, token) for part in range(2))
            cosine, sine = jnp.where(rotated, cosine, 1.0), jnp.where(rotated, sine, 0.0)
            rows = walk.head_rows(walk.rotated(value, cosine, sine))
            for four in range(tm // SLOTS):
                some, group = rows.at[pl.ds(four * SLOTS, SLOTS)], lax.div(token, SLOTS) + four
                begins = group * SLOTS >= slots  # these tokens hold position 0, of the slots so many groups before
                to = lax.rem(group, slots // SLOTS) * HALF + jnp.where(begins, 0, position * SLOTS)
                kept = ~begins | (position == first_pass)

                @pl.when(head < H)
                def _query(some=some, group=group):
                    at = pl.ds(group * columns + lax.rem(head, R) * SLOTS, SLOTS)
                    plgpu.copy_smem_to_gmem(some, g.q.at[lax.div(head, R), at])

                @pl.when((head >= H) & rotated & kept)
                def _key(some=some, to=to):
                    plgpu.copy_smem_to_gmem(some, g.k.at[layer, head - H, pl.ds(to, SLOTS)])

                @pl.when(~rotated & kept)
                def _value(some=some, to=to):
                    plgpu.copy_smem_to_gmem(some, g.v.at[layer, head - H - G, pl.ds(to, SLOTS)])

            plgpu.wait_smem_to_gmem(0)

        def attend(position, layer, index):
            """Four slots and one kv head."""
            kv_head, group = lax.rem(index, G), lax.div(index, G)
            begins = group * SLOTS >= slots
            rows, tile = pl.ds(lax.rem(group, slots // SLOTS) * HALF, HALF), (HALF, columns)
            plgpu.copy_gmem_to_smem(g.q.at[kv_head, pl.ds(group * columns, columns)], own.q, own.kv_loaded)
            plgpu.copy_gmem_to_smem(g.k.at[layer, kv_head, rows], own.k, own.kv_loaded)
            plgpu.copy_gmem_to_smem(g.v.at[layer, kv_head, rows], own.v, own.kv_loaded)
            plgpu.barrier_wait(own.kv_loaded)

            def scores(acc):
                plgpu.wgmma(acc, own.k, own.q.T)
                return acc[...]

            logits = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef(tile, f32))
            row, column = (plgpu.broadcasted_iota(jnp.int32, tile, axis, layout=ACC) for axis in range(2))
            live = (row < SLOTS * jnp.where(begins, 1, position + 1)) & ((row & (SLOTS - 1)) == (column & (SLOTS - 1)))
            logits = jnp.where(live, logits * (BLOCK**-0.5 * math.log2(math.e)), -jnp.inf)
            weight = jnp.exp2(logits - over_rows(walk.reduce("max", logits), tile))
            total = walk.reduce("add", weight)
            # The product sums over other slots' rows with weight 0, and 0 * NaN is NaN. A slot's own NaN shows in its
            # keys.
            value = load(own.v, ACC)
            own.v[...] = jnp.where(jnp.abs(value) <= _LARGEST_BF16, value, jnp.zeros_like(value))
            own.p.T[...] = plgpu.layout_cast(weight.astype(bf16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()

            def weigh(acc):
                plgpu.wgmma(acc, own.v.T, own.p.T)
                return acc[...]

            o = pl.run_scoped(weigh, plgpu.WGMMAAccumulatorRef((BLOCK, columns), f32))
            o = o * over_rows(1.0 / total, o.shape)
            scale = scale_of(walk.top_of(o))
            own.o.T[...] = plgpu.layout_cast(rounded(o, scale), plgpu.Layout.WGMMA_TRANSPOSED)
            own.scale[...] = scale
            plgpu.commit_smem()
            own.o8[...] = load(own.o, strided(columns, BLOCK), optimized=False).astype(fp8)
            plgpu.commit_smem()
            for r in range(R):
                head = kv_head * R + r
                to = (pl.ds(group * SLOTS, SLOTS), pl.ds(head * BLOCK, BLOCK))
                plgpu.copy_smem_to_gmem(own.o8.at[pl.ds(r * SLOTS, SLOTS)], g.o.at[to])
                for slot in range(SLOTS):
                    g.o_scale[head, group * SLOTS + slot] = own.scale[r * SLOTS + slot]
            plgpu.wait_smem_to_gmem(0)

        def residual(m, norm, tile, token):
            walk.settle(walk.add(m, r_g.x, tile, token), r_g, w_g.norms_ID.at[norm], tile, token)

        def put_logits(position, inverse_rms, tile, split, total):
            del split
            for group in range(c.groups):
                value = total[:, group * tm : (group + 1) * tm] * over_rows(inverse_rms[group], (HALF, tm))
                y = s.y.at[thread, 0]
                y.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(y, g.logits.at[position - 1, pl.ds(group * tm, tm), 2 * tile + thread])
                plgpu.wait_smem_to_gmem(0)

        def draw(position, token):
            """The best candidate, the next best, ... as long as they survive; the largest score wins."""
            logits = load(g.logits.at[position - 1, token], ACC, optimized=False)
            row, column = (plgpu.broadcasted_iota(jnp.int32, logits.shape, axis, layout=ACC) for axis in range(2))
            number = (row * HALF + column).astype(f32)
            logits = jnp.where(number < weights.num_codes, logits, -jnp.inf)
            best = walk.reduce_all("max", logits)
            total = walk.reduce_all("add", jnp.exp(logits - best))
            temperature, top_p, top_k = given_g.temperature[token], given_g.top_p[token], given_g.top_k[token]

            def better(one, other):
                """Of two (score before noise, noise, code) the one that wins; the first of equals."""
                wins = one[0] + one[1] < other[0] + other[1]
                return tuple(jnp.where(wins, b, a) for a, b in zip(one, other, strict=True))

            def go_on(carry):
                rank, _, going, *_ = carry
                return (rank < top_k) & (going > 0)

            def candidate(carry):
                rank, cumulative, _, logits, winner, last = carry
                top = walk.reduce_all("max", logits)
                # The first of equals; a NaN equals nothing and must not become an address.
                first = -walk.reduce_all("max", jnp.where(logits == top, -number, 1.0 - weights.num_codes))
                winner = better(winner, last)  # only now: the noise of the last one has had the time to come
                cumulative += jnp.exp(top - best) / total
                keep = (rank == 0) | (cumulative <= top_p) | (top_p >= 1.0)
                code = first.astype(jnp.int32)
                score = jnp.where(keep, (top - best) / temperature, -jnp.inf)
                return (
                    rank + 1,
                    cumulative,
                    keep.astype(jnp.int32),
                    jnp.where(number == first, -jnp.inf, logits),
                    winner,
                    (score, given_g.gumbel[position - 1, token, code], code),
                )

            nobody = (f32(-jnp.inf), f32(0), jnp.int32(0))
            start = (jnp.int32(0), f32(0), jnp.int32(1), logits, nobody, nobody)
            *_, winner, last = lax.while_loop(go_on, candidate, start)
            codes_g[token, position] = better(winner, last)[2]

        @pl.when(thread < 2)
        def _compute():
            @pl.when(thread == 0)
            def _rope():
                plgpu.copy_gmem_to_smem(w_g.rope_C2h, own.rope, own.rope_loaded)

            plgpu.barrier_wait(own.rope_loaded)

            @pl.loop(first_pass, C)
            def _position(position):
                tiles = G * jnp.where(position == first_pass, M, slots) // SLOTS
                walk.tile_tasks(kb, functools.partial(embed, position))
                walk.sync(epoch_of(position, 0, 0))
                inverse_rms = functools.partial(walk.all_inverse_rms, r_g.squares, weights.eps)

                @pl.loop(0, L)
                def _layer(layer):
                    def unit(which):
                        return unit_of(position, layer, which)

                    def barrier(which):
                        walk.sync(epoch_of(position, layer, which))

                    walk.multiply(qkv, unit(0), r_g.h, r_g.h_scale, walk.leave)
                    barrier(1)
                    walk.tile_tasks(qkv.tiles, functools.partial(rotate, position, layer))
                    barrier(2)

                    @pl.when(thread == 0)
                    def _attention():
                        @pl.loop(block, tiles, step=c.blocks)
                        def _task(index):
                            attend(position, layer, index)

                    barrier(3)
                    walk.multiply(wo, unit(1), g.o, g.o_scale, walk.leave)
                    barrier(4)
                    walk.tile_tasks(kb, functools.partial(residual, wo, 2 * layer + 1))
                    barrier(5)
                    finish = walk.swiglu(g.a, g.a_scale)
                    walk.multiply(gate_up, unit(2), r_g.h, r_g.h_scale, finish, inverse_rms)
                    barrier(6)
                    walk.multiply(down, unit(3), g.a, g.a_scale, walk.leave)
                    barrier(7)
                    walk.tile_tasks(kb, functools.partial(residual, down, 2 * layer + 2))
                    barrier(8)

                @pl.when(position > 0)
                def _draw():
                    finish = functools.partial(put_logits, position)
                    walk.multiply(head, unit_of(position, L, 0), r_g.h, r_g.h_scale, finish, inverse_rms)
                    walk.sync(epoch_of(position, L, 1))
                    walk.tasks(slots, functools.partial(draw, position))
                    walk.sync(epoch_of(position, L, 2))

    struct = jax.ShapeDtypeStruct
    past = struct((L, G, slots * POSITIONS, BLOCK), bf16)
    between = _Between(
        struct((C - 1, M, code_rows, HALF), f32),
        struct(c.partial_shape, f32),
        struct((G, M * R, BLOCK), bf16),
        past,
        past,
        *c.quantised(H * BLOCK),
        *c.quantised(p.F),
    )
    own = _Own(
        rope=plgpu.SMEM((C, 2, HALF), f32),
        q=plgpu.SMEM((columns, BLOCK), bf16, transforms=tiled(BLOCK, bf16)),
        k=plgpu.SMEM((HALF, BLOCK), bf16, transforms=tiled(BLOCK, bf16)),
        v=plgpu.SMEM((HALF, BLOCK), bf16, transforms=tiled(BLOCK, bf16)),
        p=plgpu.SMEM((columns, HALF), bf16, transforms=tiled(HALF, bf16)),
        o=plgpu.SMEM((columns, BLOCK), f32),  # neither tiled nor swizzled: written transposed, read as rows
        o8=plgpu.SMEM((columns, BLOCK), fp8),
        scale=plgpu.SMEM((columns,), f32),
        rope_loaded=plgpu.Barrier(),
        kv_loaded=plgpu.Barrier(num_arrivals=3),
    )
    codes, _, between = plgpu.kernel(
        body,
        out_type=(struct((slots, C), jnp.int32), c.residual(), between),
        scratch_types=(scratch(c, one_cluster=one_cluster), own),
        compiler_params=LANE,
        interpret=interpret,
        **mesh(c, one_cluster=one_cluster),
    )(given, weights)
    return codes, between.logits
