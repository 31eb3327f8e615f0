"""The Hopper kernel: what a decode step computes between two attentions, as one persistent kernel.

    o ─ quantise ─► o ═ wo ═ sum, residual, norm ─► h ═ gate_up, silu ─► a
    a ═ down ═ sum, residual, norm ─► h ═ wqkv ═ sum ─► qkv

A double line is a matmul, an arrow a grid barrier: see `_persistent`. The weights of all four stream from the first
moment, before o is even read. Before the first attention the chain begins at the second norm, after the last one it
ends there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _tuned
from .._chain import Config, Residual, can_run
from .._dispatch import need_capability
from .._mosaic import LANE, load
from .._persistent import ACC, Walker, bf16, f32, mesh, over_rows, scratch
from ..prepare import prepare_weights
from ..types import BLOCK, BlockScaled
from .config import plan
from .reference import After, Before


def why_not(rows: int, D: int, before: Before | None, after: After | None, config: Config | None = None) -> str | None:
    """None when this kernel can run here and now, else the reason."""
    return need_capability("9.0") or can_run(_plan(rows, D, before, after, config))


def between_attentions(
    x_DM: jax.Array,
    o_MK: jax.Array | None,
    before: Before | None,
    after: After | None,
    eps: float,
    config: Config | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array | None]:
    """(x_DM float32, qkv_MN bfloat16 or None)."""
    D, rows = x_DM.shape
    c = _plan(rows, D, before, after, config)
    if reason := can_run(c):
        raise NotImplementedError(f"between_attentions: {reason}")
    given = _Given(
        x=jnp.pad(x_DM.astype(f32), ((0, 0), (0, c.M - rows))),
        o=None if o_MK is None else o_MK.astype(bf16),
        norms=_norms(before, after),
        weights={name: prepare_weights(w, "block_scaled_matmul") for name, w in _weights(before, after).items()},
    )
    x, qkv = _launch(c, given, eps, interpret)
    return x[:, :rows], None if after is None else qkv[:rows]


def _plan(rows: int, D: int, before: Before | None, after: After | None, config: Config | None):
    K, F = (0, 0) if before is None else (before.wo.shape[1], before.w_down.shape[1])
    N = 0 if after is None else after.wqkv.shape[0]
    return plan(config or pick(rows, D, K, N, F), rows, D, K, N, F)


def pick(rows: int, D: int, K: int, N: int, F: int) -> Config:
    """The measured choice for this device and shape, else the default; widths that are not there are 0."""
    fields = _tuned.lookup("between_attentions", _tuned.bucket(rows), D, K, N, F)
    return Config() if fields is None else Config(**fields)


def _norms(before: Before | None, after: After | None) -> list[jax.Array]:
    return ([] if before is None else [before.ffn_norm_D]) + ([] if after is None else [after.norm_D])


def _weights(before: Before | None, after: After | None) -> dict[str, BlockScaled]:
    """In the order of the chain."""
    weights = {} if before is None else {"wo": before.wo, "gate_up": before.w_gate_up, "down": before.w_down}
    return weights if after is None else {**weights, "qkv": after.wqkv}


class _Given(NamedTuple):
    """x (D, M) float32; o (M or fewer, K) bfloat16 or None; norms of the residual in their order; weights by name."""

    x: Any
    o: Any
    norms: Any
    weights: Any


class _Between(NamedTuple):
    """What passes from block to block besides the residual: o and a quantised, parts of K."""

    partial: Any
    o: Any
    o_scale: Any
    a: Any
    a_scale: Any


def _launch(c, given: _Given, eps: float, interpret) -> tuple[jax.Array, jax.Array]:
    tm, kb, M = c.tm, c.D // BLOCK, c.M
    one_cluster = interpret is not None
    before, after = "wo" in c.matmuls, "qkv" in c.matmuls

    def body(given_g: _Given, qkv_g, r_g: Residual, g: _Between, s):
        walk = Walker(c, s, g.partial)
        block_units = {name: walk.units(m) for name, m in c.matmuls.items()}
        names = list(c.matmuls)
        unit = {name: sum((block_units[n] for n in names[:i]), start=jnp.int32(0)) for i, name in enumerate(names)}

        @pl.when(walk.thread == 2)
        def _stream():
            for name, m in c.matmuls.items():
                w = given_g.weights[name]
                walk.produce(m, w.values_NK, w.scale_NbKb, unit[name])
            walk.drain(sum(block_units.values(), start=jnp.int32(0)))

        def quantise(head, token):
            """One head of o; tokens that it does not have see its last one."""

            def copy(i, into, barrier):
                row = jnp.minimum(token + i, given_g.o.shape[0] - 1)
                plgpu.copy_gmem_to_smem(given_g.o.at[row, pl.ds(head * BLOCK, BLOCK)], into, barrier)

            walk.quantise(walk.gathered(copy), g.o, g.o_scale, head, token)

        def begin(tile, token):
            x = load(given_g.x.at[pl.ds(tile * BLOCK, BLOCK), pl.ds(token, tm)], ACC, optimized=False)
            walk.settle(x, r_g, given_g.norms[0], tile, token)

        def attended(tile, token):
            walk.settle(walk.add(c.matmuls["wo"], given_g.x, tile, token), r_g, given_g.norms[0], tile, token)

        def last(tile, token):
            x = walk.add(c.matmuls["down"], r_g.x, tile, token)
            if after:
                walk.settle(x, r_g, given_g.norms[1], tile, token)
            else:
                r_g.x[pl.ds(tile * BLOCK, BLOCK), pl.ds(token, tm)] = x

        def put(tile, token):
            inverse_rms = walk.inverse_rms(r_g.squares, token, eps)
            value = walk.summed(c.matmuls["qkv"], tile, token) * over_rows(inverse_rms, (BLOCK, tm))
            rows = walk.head_rows((value[: BLOCK // 2], value[BLOCK // 2 :]))
            plgpu.copy_smem_to_gmem(rows, qkv_g.at[pl.ds(token, tm), pl.ds(tile * BLOCK, BLOCK)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(walk.thread < 2)
        def _compute():
            epochs = iter(range(1, 16))

            def sync():
                walk.sync(next(epochs))

            if before:
                wo, gate_up, down = (c.matmuls[name] for name in ("wo", "gate_up", "down"))
                walk.tile_tasks(wo.steps, quantise)
                sync()
                walk.multiply(wo, unit["wo"], g.o, g.o_scale, walk.leave)
                sync()
                walk.tile_tasks(kb, attended)
                sync()
                finish = walk.swiglu(g.a, g.a_scale)
                inverse_rms = functools.partial(walk.all_inverse_rms, r_g.squares, eps)
                walk.multiply(gate_up, unit["gate_up"], r_g.h, r_g.h_scale, finish, inverse_rms)
                sync()
                walk.multiply(down, unit["down"], g.a, g.a_scale, walk.leave)
                sync()
                walk.tile_tasks(kb, last)
            else:
                walk.tile_tasks(kb, begin)
            if after:
                sync()
                qkv = c.matmuls["qkv"]
                walk.multiply(qkv, unit["qkv"], r_g.h, r_g.h_scale, walk.leave)
                sync()
                walk.tile_tasks(qkv.tiles, put)

    struct = jax.ShapeDtypeStruct
    width = c.matmuls["wo"].steps * BLOCK if before else BLOCK
    F = c.matmuls["down"].steps * BLOCK if before else BLOCK
    qkv_rows = c.matmuls["qkv"].tiles * BLOCK if after else BLOCK
    qkv, residual, _ = plgpu.kernel(
        body,
        out_type=(
            struct((M, qkv_rows), bf16),
            c.residual(),
            _Between(struct(c.partial_shape, f32), *c.quantised(width), *c.quantised(F)),
        ),
        scratch_types=(scratch(c, one_cluster=one_cluster),),
        compiler_params=LANE,
        interpret=interpret,
        **mesh(c, one_cluster=one_cluster),
    )(given)
    return residual.x, qkv
