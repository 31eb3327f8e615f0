"""Chains: every call, in order, traced once, for the op and for XLA's versions; all lower for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fishjax.bench import cases, inputs, ops, peers_xla, timing
from fishjax.bench.cases import tolerance
from fishjax.bench.chain import chain, chain_shapes
from fishjax.bench.timing import Plan
from pallas_kernels import _dispatch
from pallas_kernels._testing import rel_err

SEED = jax.ShapeDtypeStruct((), np.int32)


def test_a_chain_makes_every_call_in_order_and_traces_it_once():
    traces = []

    def call(x, w):
        traces.append(1)
        return x["a"] @ w[0]

    rng = np.random.default_rng(0)
    plan = Plan(calls=7, copies=3)
    xs = [{"a": rng.standard_normal((2, 4), dtype=np.float32)} for _ in range(plan.num_inputs)]
    ws = [(rng.standard_normal((4, 5), dtype=np.float32),) for _ in range(plan.copies)]
    run = jax.jit(chain(call, plan, xs[0], ws[0]))
    leaves = jax.tree.leaves((xs, ws))
    firsts, last = run(*leaves)
    assert len(traces) == 1
    wanted = [xs[i // 3]["a"] @ ws[i % 3][0] for i in range(7)]
    np.testing.assert_allclose(firsts, [y[0, 0] for y in wanted], rtol=1e-5)
    np.testing.assert_allclose(last, wanted[-1], rtol=1e-5)
    assert run.lower(*leaves).as_text().count("optimization_barrier") == 6
    assert len(chain_shapes(xs[0], ws[0], plan)) == len(leaves) == 3 + 3


def test_plans_are_cold_long_and_never_short_of_copies():
    for case in cases.grid():
        num_bytes = cases.weight_bytes(case)
        plan = timing.plan(num_bytes, cases.floor_us(case))
        assert plan.copies * num_bytes > 120_000_000 and plan.calls >= max(50, plan.copies)
        assert plan.num_inputs * plan.copies >= plan.calls


def test_time_of_a_replay():
    running = []

    def start():
        running.append(len(running))
        assert len(running) - len(ended) <= 2  # the one that is waited for, and the next

        def wait():
            ended.append(running[len(ended)])
            sum(range(2000))

        return wait

    ended = []
    times = timing.time_replays(start, calls=4)
    assert times["host_us"] > 0 and times["host_us_spread"] >= 0
    assert ended == running and len(ended) > timing.MIN_REPLAYS


@pytest.mark.parametrize("part", ["kernel", "xla_bf16", "xla_fp8"])
@pytest.mark.parametrize("case", [c for c in cases.grid() if c.m in (1, 64)], ids=lambda c: c.key)
def test_lowers_for_cuda(case, part, monkeypatch):
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: "9.0")
    if part == "kernel":
        call, make_x, make_w = ops.kernel_call(case, "mosaic", ops.config_of(case)), inputs.make_x, inputs.make_w
    else:
        if reason := peers_xla.why_not(case, part):
            where = {"mx_matmul": "block_scaled_matmul", "between_attentions": "its matmuls"}.get(case.op, "bfloat16")
            assert part == "xla_fp8" and where in reason
            return
        call, (make_x, make_w) = peers_xla.call(case, part), peers_xla.operands(case, part)
    x, w = (jax.eval_shape(functools.partial(make, case), SEED) for make in (make_x, make_w))
    plan = Plan(3, 2)
    traced = jax.jit(chain(call, plan, x, w)).trace(*chain_shapes(x, w, plan))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (part == "kernel")
    for make in (make_x, make_w):
        jax.jit(functools.partial(make, case)).trace(SEED).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("case", cases.tiny_grid(), ids=lambda c: c.key)
def test_the_reference_meets_the_oracle_on_these_inputs(case):
    x, w = inputs.make_x(case, jnp.int32(3)), inputs.make_w(case, jnp.int32(4))
    y = ops.kernel_call(case, "reference", None)(x, w)
    assert rel_err(np.asarray(y), inputs.oracle(case, *jax.device_get((x, w)))) <= tolerance(case)


@pytest.mark.parametrize(("peer", "bound"), [("xla_bf16", 1e-2), ("xla_fp8", 8e-2)])
@pytest.mark.parametrize("case", cases.tiny_grid(), ids=lambda c: c.key)
def test_peers_compute_the_same_thing(case, peer, bound):
    if peers_xla.why_not(case, peer):
        return
    make_x, make_w = peers_xla.operands(case, peer)
    x, w = make_x(case, jnp.int32(3)), make_w(case, jnp.int32(4))
    y = np.asarray(peers_xla.call(case, peer)(x, w)).astype(np.float64)
    assert rel_err(y, _plain(case, x, w)) <= bound


def _plain(case, x, w):
    """Float64 of what the operands stand for, before any rounding inside."""
    if case.op == "decode_attention":
        return inputs.oracle(case, *jax.device_get((x, w)))
    if case.op == "between_attentions":
        residual, o, norm, wo, gate_up, down, wqkv = (_float64(item) for item in (*x, *w))
        residual = residual + o @ wo.T
        residual = residual + _mlp(_normed(residual, norm), gate_up, down)
        return _normed(residual, norm) @ wqkv.T
    x, *w = (_float64(item) for item in (x, *w))
    return x @ w[0].T if case.op in cases.MATMULS else _mlp(x, *w)


def _mlp(x, gate_up, down):
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def _normed(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + inputs.EPS) * weight


def _float64(item):
    if isinstance(item, tuple):
        return np.asarray(item[0]).astype(np.float64) * float(item[1])
    return np.asarray(item).astype(np.float64)
