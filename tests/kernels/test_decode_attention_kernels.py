"""The attention's kernels without their chips: they lower for them; the GPU interpreter runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, attention_oracle, gpu_interpreter, rel_err
from pallas_kernels.decode_attention import mosaic_sm90, mosaic_sm100
from pallas_kernels.decode_attention.arg_specs import CACHES, SPECS
from pallas_kernels.decode_attention.config import Config, can_run, default_config
from pallas_kernels.types import ScaledKV

KERNELS = {"sm90": mosaic_sm90.decode_attention, "sm100": mosaic_sm100.decode_attention}


def operands(spec, cache):
    shape = (spec.B, spec.G, spec.S, spec.d)
    kv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if cache == "float8":
        kv = ScaledKV(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    q = jax.ShapeDtypeStruct((spec.B, spec.H, spec.d), jnp.bfloat16)
    return q, kv, kv, jax.ShapeDtypeStruct((spec.B,), jnp.int32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("block_kv", "merge"), [(64, "launch"), (128, "launch"), (64, "cluster")])
def test_lowers_for_cuda(spec, cache, block_kv, merge):
    config = Config(block_kv, min(default_config(spec.B, spec.G, spec.S).splits, 8), 2, merge=merge)
    assert can_run(config, spec.H, spec.G, spec.S, spec.d, 1 if cache == "float8" else 2) is None
    traced = jax.jit(functools.partial(KERNELS["sm90"], scale=0.1, config=config)).trace(*operands(spec, cache))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("spec", [s for s in SPECS if s.d == 128], ids=lambda s: s.name)
@pytest.mark.parametrize("cache", CACHES)
def test_lowers_for_a_blackwell(spec, cache, lowered_for):
    for config in (None, Config(128, 1, 3, "shared")):
        call = functools.partial(KERNELS["sm100"], scale=0.1, config=config)
        assert lowered_for("10.0", call, *operands(spec, cache)) == ["10.0"]


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("chip", "H", "G", "d", "block_kv", "splits", "lengths"),
    [
        ("sm90", 4, 1, 64, 64, 1, (0, 1, 17, 64, 128)),
        ("sm90", 8, 2, 128, 64, 2, (0, 1, 17, 64, 128)),
        ("sm100", 4, 1, 128, 128, 1, (0, 1, 17, 128, 200)),
        ("sm100", 8, 2, 128, 128, 2, (0, 1, 17, 128, 200)),
    ],
)
def test_interpreter_equals_float64_with_poison_past_the_length(
    cache, chip, H, G, d, block_kv, splits, lengths, poisoned
):
    rng = np.random.default_rng(d)
    S, lengths = 2 * block_kv, np.array(lengths, np.int32)
    q = jnp.asarray(rng.standard_normal((5, H, d)) * 2, jnp.bfloat16)
    spread = 2.0 ** rng.uniform(-8, 3, (1, 1, S, 1))
    k, v = (jnp.asarray(rng.standard_normal((5, G, S, d)) * spread, jnp.bfloat16) for _ in range(2))
    (k, v), known = poisoned(k, v, lengths, cache)
    ref = attention_oracle(np.asarray(q.astype(jnp.float32)), *known, lengths)
    config = Config(block_kv, splits, 2, keys_in="shared")
    o = KERNELS[chip](q, k, v, jnp.asarray(lengths), d**-0.5, config, interpret=gpu_interpreter())
    assert not np.asarray(o[0]).astype(np.float32).any()
    for b in range(1, 5):
        assert rel_err(o[b], ref[b]) <= TOLERANCES["decode_attention", "bfloat16"].bound


def test_can_run_says_what_is_wrong():
    assert "head width" in can_run(Config(), 8, 2, 128, 96, 2)
    assert "query heads" in can_run(Config(), 32, 2, 128, 64, 2)
    assert "block_kv" in can_run(Config(), 8, 2, 100, 64, 2)
    assert "shared memory" in can_run(Config(stages=9), 8, 2, 128, 128, 2)
    assert "meet in a cluster of at most 8" in can_run(Config(splits=16, merge="cluster"), 8, 2, 1024, 128, 2)
    assert can_run(Config(splits=16), 8, 2, 1024, 128, 2) is None
    q = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 2, 128, 64), jnp.bfloat16)
    assert "q is float32" in mosaic_sm90.why_not(q, cache)


def test_can_run_says_what_a_blackwell_does_not():
    assert "head width 64 is not 128" in can_run(Config(128), 8, 2, 128, 64, 2, SM100)
    assert "block_kv = 64" in can_run(Config(64), 8, 2, 128, 128, 2, SM100)
    assert "registers" in can_run(Config(128), 8, 2, 128, 128, 1, SM100)
    assert "cluster" in can_run(Config(128, 2, keys_in="shared", merge="cluster"), 8, 2, 256, 128, 2, SM100)
