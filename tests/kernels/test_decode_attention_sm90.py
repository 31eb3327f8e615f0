"""The Hopper attention without a Hopper: it lowers for CUDA at every real shape; the GPU interpreter runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, attention_oracle, gpu_interpreter, rel_err
from pallas_kernels.decode_attention import mosaic_sm90
from pallas_kernels.decode_attention.arg_specs import CACHES, SPECS
from pallas_kernels.decode_attention.config import Config, can_run, default_config
from pallas_kernels.types import ScaledKV


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("block_kv", [64, 128])
def test_lowers_for_cuda(spec, cache, block_kv):
    shape = (spec.B, spec.G, spec.S, spec.d)
    kv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if cache == "float8":
        kv = ScaledKV(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    config = Config(block_kv, default_config(spec.B, spec.G, spec.S).splits, 2)
    assert can_run(config, spec.H, spec.G, spec.S, spec.d, 1 if cache == "float8" else 2) is None
    q = jax.ShapeDtypeStruct((spec.B, spec.H, spec.d), jnp.bfloat16)
    call = functools.partial(mosaic_sm90.decode_attention, scale=0.1, config=config)
    text = jax.jit(call).trace(q, kv, kv, jax.ShapeDtypeStruct((spec.B,), jnp.int32))
    assert "mosaic_gpu" in text.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("H", "G", "d", "splits"), [(4, 1, 64, 1), (8, 2, 128, 2)])
def test_interpreter_equals_float64_with_poison_past_the_length(cache, H, G, d, splits):
    rng = np.random.default_rng(d)
    S, lengths = 128, np.array([0, 1, 17, 64, 128], np.int32)
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
    config = Config(64, splits, 2, keys_in="shared")
    o = mosaic_sm90.decode_attention(q, k, v, jnp.asarray(lengths), d**-0.5, config, interpret=gpu_interpreter())
    assert not np.asarray(o[0]).astype(np.float32).any()
    for b in range(1, 5):
        assert rel_err(o[b], ref[b]) <= TOLERANCES["decode_attention", "bfloat16"].bound


def test_can_run_says_what_is_wrong():
    assert "head width" in can_run(Config(), 8, 2, 128, 96, 2)
    assert "query heads" in can_run(Config(), 32, 2, 128, 64, 2)
    assert "block_kv" in can_run(Config(), 8, 2, 100, 64, 2)
    assert "shared memory" in can_run(Config(stages=9), 8, 2, 128, 128, 2)
    q = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 2, 128, 64), jnp.bfloat16)
    assert "q is float32" in mosaic_sm90.why_not(q, cache)
