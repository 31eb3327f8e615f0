"""The Blackwell attention without a Blackwell: it lowers for one; the GPU interpreter runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, attention_oracle, gpu_interpreter, rel_err
from pallas_kernels.decode_attention import mosaic_sm100
from pallas_kernels.decode_attention.arg_specs import CACHES, SPECS
from pallas_kernels.decode_attention.config import Config, can_run
from pallas_kernels.types import ScaledKV


@pytest.mark.parametrize("spec", [s for s in SPECS if s.d == 128], ids=lambda s: s.name)
@pytest.mark.parametrize("cache", CACHES)
def test_lowers_for_a_blackwell(spec, cache, lowered_for):
    shape = (spec.B, spec.G, spec.S, spec.d)
    kv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if cache == "float8":
        kv = ScaledKV(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    q = jax.ShapeDtypeStruct((spec.B, spec.H, spec.d), jnp.bfloat16)
    for config in (None, Config(128, 1, 3, "shared")):
        call = functools.partial(mosaic_sm100.decode_attention, scale=0.1, config=config)
        assert lowered_for("10.0", call, q, kv, kv, jax.ShapeDtypeStruct((spec.B,), jnp.int32)) == ["10.0"]


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("H", "G", "splits"), [(4, 1, 1), (8, 2, 2)])
def test_interpreter_equals_float64_with_poison_past_the_length(cache, H, G, splits):
    rng = np.random.default_rng(H)
    S, d, lengths = 256, 128, np.array([0, 1, 17, 128, 200], np.int32)
    q = jnp.asarray(rng.standard_normal((5, H, d)) * 2, jnp.bfloat16)
    spread = 2.0 ** rng.uniform(-8, 3, (1, 1, S, 1))
    k, v = (jnp.asarray(rng.standard_normal((5, G, S, d)) * spread, jnp.bfloat16) for _ in range(2))
    dead = (jnp.arange(S) >= lengths[:, None])[:, None, :, None]
    if cache == "float8":
        k, v = pk.quantize_kv(k), pk.quantize_kv(v)
        ref_kv = [np.asarray(c.dequantize()) for c in (k, v)]
        k, v = (
            ScaledKV(
                jnp.where(dead, jnp.nan, c.values_BGSd.astype(jnp.float32)).astype(jnp.float8_e4m3fn),
                jnp.where(dead[..., 0], jnp.nan, c.scale_BGS),
            )
            for c in (k, v)
        )
    else:
        ref_kv = [np.asarray(c.astype(jnp.float32)) for c in (k, v)]
        k, v = (jnp.where(dead, jnp.nan, c) for c in (k, v))
    ref = attention_oracle(np.asarray(q.astype(jnp.float32)), *ref_kv, lengths)
    config = Config(128, splits, 2, "shared")
    o = mosaic_sm100.decode_attention(q, k, v, jnp.asarray(lengths), d**-0.5, config, interpret=gpu_interpreter())
    assert not np.asarray(o[0]).astype(np.float32).any()
    for b in range(1, 5):
        assert rel_err(o[b], ref[b]) <= TOLERANCES["decode_attention", "bfloat16"].bound


def test_can_run_says_what_a_blackwell_does_not():
    assert "head width 64 is not 128" in can_run(Config(128), 8, 2, 128, 64, 2, SM100)
    assert "block_kv = 64" in can_run(Config(64), 8, 2, 128, 128, 2, SM100)
    assert "registers" in can_run(Config(128), 8, 2, 128, 128, 1, SM100)
