"""One new key and value per slot into FP8 caches: reference, kernel in the interpreter and on a Hopper, bit for bit.

The caches are random bytes, NaN among them, so that whatever is touched beside the new rows shows.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._dispatch import gpu_capability
from pallas_kernels._testing import e4m3_rows, gpu_interpreter
from pallas_kernels.append_kv import config, mosaic_sm90, reference
from pallas_kernels.append_kv.arg_specs import SPECS
from pallas_kernels.types import ScaledKV

INTERPRETED = pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")


def rows(rng, B, G, d):
    """(B, G, d) bfloat16 of every magnitude; in the first slot a row of zeros and rows with NaN and infinities."""
    x = rng.standard_normal((B, G, d)) * 2.0 ** rng.uniform(-60, 60, (B, G, 1))
    x[0, 0] = 0
    x[0, 1, 3:5], x[0, -1, 0], x[0, -1, 7] = np.nan, np.inf, -np.inf
    return x.astype(ml_dtypes.bfloat16)


def cache(rng, B, G, S, d):
    """Values and scales of random bits."""
    values = rng.integers(0, 256, (B, G, S, d), np.uint8).view(ml_dtypes.float8_e4m3fn)
    return values, rng.integers(0, 1 << 32, (B, G, S), np.uint32).view(np.float32)


def positions(rng, B, S):
    """Both ends, outside at both of them, from the end, and anywhere."""
    told = np.array([S - 1, 0, S, -S - 1, -1, S + 7, -S, np.iinfo(np.int32).min, np.iinfo(np.int32).max], np.int32)
    return np.concatenate([told, rng.integers(0, S, max(0, B - len(told)), np.int32)])[:B]


def expected(x, values, scale, at):
    """By the float64 twin of the formula, a slot at a time: copies of `values` and `scale` with the new rows."""
    values, scale = values.copy(), scale.copy()
    S = scale.shape[2]
    for b in range(len(at)):
        if -S <= at[b] < S:
            wide = x[b].astype(np.float32)
            finite = np.isfinite(wide)
            new, new_scale = e4m3_rows(np.where(finite, wide, 0), x.shape[-1])
            values[b, :, at[b]] = np.where(finite, new.astype(np.float32), np.nan).astype(values.dtype)
            scale[b, :, at[b]] = new_scale[:, 0]
    return values, scale


def as_cache(pair):
    return ScaledKV(*map(jnp.asarray, pair))


def check(append, B, G, S, d):
    rng = np.random.default_rng(B * S + d)
    k, v, at = rows(rng, B, G, d), rows(rng, B, G, d), positions(rng, B, S)
    before = cache(rng, B, G, S, d), cache(rng, B, G, S, d)
    after = append(jnp.asarray(k), jnp.asarray(v), *map(as_cache, before), jnp.asarray(at))
    for got, x, half in zip(after, (k, v), before, strict=True):
        values, scale = expected(x, *half, at)
        assert (scale.view(np.uint32) != half[1].view(np.uint32)).any()
        np.testing.assert_array_equal(np.asarray(got.values_BGSd).view(np.uint8), values.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(got.scale_BGS).view(np.uint32), scale.view(np.uint32))


@pytest.mark.parametrize(("B", "G", "S", "d"), [(10, 3, 20, 64), (1, 8, 16, 128), (2, 40, 4, 32)])
def test_reference_equals_numpy_and_touches_nothing_else(B, G, S, d):
    check(jax.jit(reference.append_kv), B, G, S, d)


@INTERPRETED
@pytest.mark.parametrize(("B", "G", "S", "d"), [(10, 3, 20, 64), (2, 8, 64, 128), (1, 32, 8, 128)])
def test_interpreter_equals_numpy_and_touches_nothing_else(B, G, S, d):
    check(functools.partial(mosaic_sm90.append_kv, interpret=gpu_interpreter()), B, G, S, d)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_lowers_for_cuda_in_place(spec):
    traced = jax.jit(mosaic_sm90.append_kv, donate_argnums=(2, 3)).trace(*spec.arguments())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    # Every result is one of its operands, and so of the program's.
    assert text.count("#stablehlo.output_operand_alias<") == text.count("tf.aliasing_output") == 4


def test_can_run_says_what_is_wrong():
    assert config.can_run(8, 128) is config.can_run(32, 64) is None
    assert "33 kv heads are more than 32" in config.can_run(33, 128)
    assert "head width 96" in config.can_run(8, 96)
    assert "k and v are float32" in mosaic_sm90.why_not(jnp.zeros((1, 8, 128)))


def test_operands_that_do_not_fit_are_refused():
    rng = np.random.default_rng(0)
    x, half, at = jnp.asarray(rows(rng, 2, 3, 64)), as_cache(cache(rng, 2, 3, 8, 64)), jnp.zeros(2, jnp.int32)
    other = as_cache(cache(rng, 2, 3, 9, 64))
    for operands, match in (
        ((x, x, half.values_BGSd, half, at), "must be ScaledKV, got"),
        ((x, x, half, other, at), "both alike"),
        ((x[:, :2], x, half, half, at), "must both be"),
        ((x, x.astype(jnp.float32), half, half, at), "of one type"),
        ((x, x, half, half, at[:1]), "positions must be"),
    ):
        with pytest.raises(ValueError, match=match):
            pk.append_kv(*operands)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_hopper_writes_what_the_reference_writes_in_donated_caches(spec):
    """Step after step, to the same memory. A NaN of the values may be any NaN, the division is the chip's."""
    rng = np.random.default_rng()
    shape = spec.B, spec.G, spec.S, spec.d
    append = jax.jit(functools.partial(pk.append_kv, backend="mosaic"), donate_argnums=(2, 3))
    pairs = cache(rng, *shape), cache(rng, *shape)
    halves, wanted = (tuple(map(as_cache, pairs)) for _ in range(2))
    where = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(halves)]
    for at in (positions(rng, spec.B, spec.S), *rng.integers(-1, spec.S + 1, (20, spec.B), np.int32)):
        k, v = (jnp.asarray(rows(rng, spec.B, spec.G, spec.d)) for _ in range(2))
        halves = append(k, v, *halves, jnp.asarray(at))
        wanted = jax.jit(reference.append_kv)(k, v, *wanted, jnp.asarray(at))
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(halves)] == where
    for got, half in zip(halves, wanted, strict=True):
        bits, wanted_bits = (np.asarray(a.values_BGSd).view(np.uint8) for a in (got, half))
        nan = wanted_bits & 0x7F == 0x7F
        np.testing.assert_array_equal(bits & 0x7F == 0x7F, nan)
        np.testing.assert_array_equal(bits[~nan], wanted_bits[~nan])
        bits, wanted_bits = (np.asarray(a.scale_BGS).view(np.uint32) for a in (got, half))
        np.testing.assert_array_equal(bits, wanted_bits)
