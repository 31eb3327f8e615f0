"""S2-Pro's step lowered for a Hopper, real widths and two slow layers: kernels run, and nothing is in their way."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from fishjax.bench.step import parts
from fishjax.bench.step.cases import POLICIES, StepCase
from fishjax.bench.step.rig import Rig
from fishjax.config import CodecConfig, s2_pro
from fishjax.engine.memory import num_bytes
from fishjax.weights.prepare import prepared_weight
from fishjax.weights.quantize import encode
from pallas_kernels import _dispatch, decode_attention, matmul, swiglu_mlp

SMALLEST_WEIGHT = 2560 * 2560


@pytest.fixture(scope="module", autouse=True)
def hopper():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "gpu_capability", lambda: "9.0")
        patch.setattr(StepCase, "configs", property(lambda _: (s2_pro(num_layers=2), CodecConfig())))
        jax.clear_caches()  # what was traced before knows no Hopper
        yield
    jax.clear_caches()


def lowered(program):
    bound, arguments = program
    return bound.func.trace(*bound.args, *arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_launches(text: str) -> int:
    """Kernels of ours that one run of the program launches, those in functions that it calls included."""
    bodies = dict(re.findall(r"func\.func \w+ @([\w.]+)\((.*?)\n  }", text, flags=re.S))

    @functools.cache
    def of(name: str) -> int:
        callees = re.findall(r"\bcall @([\w.]+)\(", bodies[name])
        return bodies[name].count("@mosaic_gpu") + sum(map(of, callees))

    return of("main")


@functools.cache
def launches_of_ops(rows: int) -> tuple[int, int, int]:
    """Launches of one matmul, one SwiGLU block and one layer's attention, of so many rows or slots."""

    def of(op, *shapes):
        return num_launches(jax.jit(op).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())

    def weight(rows, columns):
        plain = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
        return jax.eval_shape(lambda w: prepared_weight(encode(w, "fp8")), plain)

    x, q, cache = (jax.ShapeDtypeStruct((rows, *s), jnp.bfloat16) for s in ((2560,), (32, 128), (8, 1024, 128)))
    return (
        of(matmul, x, weight(2560, 2560)),
        of(swiglu_mlp, x, weight(2 * 9728, 2560), weight(2560, 9728)),
        of(decode_attention, q, cache, cache, jax.ShapeDtypeStruct((rows,), jnp.int32)),
    )


@pytest.mark.parametrize(("policy", "slots"), [(POLICIES[0], 1), *((policy, 64) for policy in POLICIES)])
def test_the_decode_step(policy, slots):
    rig = Rig(StepCase("s2_pro", slots, policy))
    text = lowered(rig.decode())
    words = rig.case.precision
    slow, fast, head, kv = (word == "fp8" for word in (words.slow, words.fast, words.head, words.kv))
    one, mlp, attention = launches_of_ops(slots)
    layer = 2 * one + mlp
    assert num_launches(text) == 2 * (attention + slow * layer + kv) + head * one + fast * 9 * (4 * layer + one)
    # Nothing asks the device, and no large array is made anew but the cache's own halves: no copy, no wider weight. (A
    # weight seen as tiles of rows is the same bytes.)
    assert not re.search(r"stablehlo\.(case|if|while)", text)
    cache = rig.state.cache.k_BGSd[0]
    halves = {tuple(leaf.shape) for leaf in jax.tree.leaves(cache)}
    made = "\n".join(line for line in text.splitlines() if "stablehlo.reshape" not in line)
    for shape, kind in re.findall(r"-> tensor<((?:\d+x)+)(\w+)>\s*(?:loc\(.*)?$", made, flags=re.M):
        dims = tuple(int(d) for d in shape.split("x")[:-1])
        assert math.prod(dims) < SMALLEST_WEIGHT or dims in halves, (dims, kind)


@pytest.mark.parametrize("slots", [1, 64])
def test_the_fused_step(slots):
    """A launch a gap between attentions, one to write, one a frame of the fast transformer; for the head as before.

    By name: not all of these kernels come first, and a fused step of references would be a figure of nothing.
    """
    rig = Rig(StepCase("s2_pro", slots, POLICIES[0], fused="both"))
    text = lowered(rig.decode())
    one, _, attention = launches_of_ops(slots)
    assert num_launches(text) == 3 + 2 * (1 + attention) + one + 1
    assert not re.search(r"stablehlo\.(case|if|while)", text)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_reading_of_a_chunk_takes_the_kernels_and_no_copy_of_the_slots(policy):
    rig = Rig(StepCase("s2_pro", 64, policy))
    text = lowered(rig.prefill())
    one, mlp, _ = launches_of_ops(rig.prefill()[1][1].shape[2])
    # One layer whole, and of the last one only what makes its keys and values.
    assert num_launches(text) == (2 * one + mlp + one if rig.case.precision.slow == "fp8" else 0)
    assert not re.search(r"stablehlo\.(case|if|while)", text)
    # Of a whole half of the cache there is nothing but the update in place.
    half = "x".join(map(str, jax.tree.leaves(rig.state.cache)[0].shape))
    made = re.findall(rf"(stablehlo\.\w+).*-> tensor<{half}x\w+>", text)
    assert set(made) == {"stablehlo.dynamic_update_slice"}


@pytest.mark.parametrize("slots", [1, 64])
def test_the_codec_step_the_peer_and_all_variants(slots):
    rig = Rig(StepCase("s2_pro", slots, "bf16"))
    for text in (lowered(rig.sound()), lowered(rig.group())):
        assert ("stablehlo.convolution" in text) == (slots == 64)  # of few rows all are matmuls
    peer = lowered(rig.peer())
    assert "mosaic_gpu" not in peer and ("stablehlo.convolution" in peer) == (slots == 64)
    for _, _, low in parts.lower(rig, lowering_platforms=("cuda",)):
        assert low.as_text()


def test_what_the_engine_plans_for_the_whole_model(monkeypatch):
    monkeypatch.setattr(StepCase, "configs", property(lambda _: (s2_pro(), CodecConfig())))
    plain, small = (Rig(StepCase("s2_pro", 64, policy)).memory for policy in ("bf16", POLICIES[0]))
    assert plain.weights == pytest.approx(9.93e9, rel=0.01) and small.weights == pytest.approx(5.87e9, rel=0.01)
    assert plain.slots == pytest.approx(64 * 1024 * 36 * 2 * 8 * 128 * 2, rel=0.01)
    assert small.slots / plain.slots == pytest.approx((128 + 4) / 256, rel=0.01)
    assert num_bytes(Rig(StepCase("s2_pro", 64, "bf16")).codec_state) == plain.sound
