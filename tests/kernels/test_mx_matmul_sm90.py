"""The Hopper MX matmul without a Hopper: it lowers for CUDA at every real shape; the GPU interpreter runs it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, mx_dequant, rel_err
from pallas_kernels.mx_matmul import mosaic_sm90
from pallas_kernels.mx_matmul.arg_specs import ROWS, SPECS
from pallas_kernels.mx_matmul.config import Config, can_run, configs_to_try, default_config
from pallas_kernels.types import MxScaled

needs_interpreter = pytest.mark.skipif(
    gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on"
)


def shapes(M, N, K):
    rows, f8, u8 = -(-N // 64) * 64, jnp.float8_e4m3fn, jnp.uint8
    x = MxScaled(jax.ShapeDtypeStruct((M, K), f8), jax.ShapeDtypeStruct((M, K // 32), u8))
    scales = jax.ShapeDtypeStruct((K // 32, rows), u8)
    return x, MxScaled(jax.ShapeDtypeStruct((rows, K), f8), scales, N, scales="transposed")


def operand(rng, rows, K, bytes_from, bytes_to):
    """Random e4m3 values with random E8M0 bytes, one per 32."""
    values = jnp.asarray(rng.standard_normal((rows, K)) * 100, jnp.float8_e4m3fn)
    return MxScaled(values, jnp.asarray(rng.integers(bytes_from, bytes_to, (rows, K // 32)), jnp.uint8))


def exact(x, w):
    x, w = (mx_dequant(np.asarray(a.values_NK), np.asarray(a.scale_NKb)) for a in (x, w))
    return x @ w.T


def interpreted(x, w, dtype=jnp.float32, config=None):
    # One split: the interpreter has no stores into a peer's shared memory.
    return mosaic_sm90.mx_matmul(x, w, jnp.dtype(dtype), config or Config(1, 2), interpret=gpu_interpreter())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_any_number_of_rows_has_a_default_that_fits_and_the_tuner_has_more(spec):
    rows = -(-spec.N // 64) * 64
    for M in range(1, 600):
        tile_m = mosaic_sm90._tile_m(M)
        assert can_run(default_config(tile_m, rows, spec.K), tile_m, rows, spec.K) is None, M
    assert all(configs_to_try(-(-M // 8) * 8, rows, spec.K) for M in ROWS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("change", [{}, {"splits": 1, "together": 1}, {"splits": 8, "stages": 2}], ids=str)
def test_lowers_for_cuda(spec, change):
    for M in (1, 24, 64, 128, 200):
        tile_m = min(-(-M // 8) * 8, 128)
        config = dataclasses.replace(default_config(tile_m, -(-spec.N // 64) * 64, spec.K), **change)
        call = functools.partial(mosaic_sm90.mx_matmul, out_dtype=jnp.dtype(jnp.bfloat16), config=config)
        text = jax.jit(call).trace(*shapes(M, spec.N, spec.K)).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


@needs_interpreter
@pytest.mark.parametrize(
    ("M", "N", "K", "config"),
    [
        (8, 128, 512, Config(1, 2, 4)),
        (3, 100, 640, Config(1, 3, 2)),
        (48, 64, 256, Config(1, 1, 1)),
        (130, 64, 128, Config(1, 4, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_float64(M, N, K, config, dtype):
    rng = np.random.default_rng(M)
    x, w = operand(rng, M, K, 122, 132), operand(rng, N, K, 120, 134)
    for weight in (w, pk.prepare_weights(w, "mx_matmul")):
        y = interpreted(x, weight, dtype, config)
        assert y.shape == (M, N) and y.dtype == dtype
        assert rel_err(y, exact(x, w)) <= TOLERANCES["matmul", jnp.dtype(dtype).name].bound


@needs_interpreter
def test_scales_that_undo_each_other_lose_nothing():
    """2^-127 beside 2^127 and every pair between: each block of K alone, so that none hides another."""
    rng = np.random.default_rng(1)
    byte = np.arange(255)
    for kb in range(4):
        x, w = operand(rng, 8, 128, 254, 255), operand(rng, 255, 128, 0, 1)
        x = MxScaled(jnp.where(jnp.arange(128) // 32 == kb, x.values_NK, 0), x.scale_NKb.at[4:].set(127))
        w = MxScaled(w.values_NK, jnp.asarray(np.repeat(byte[:, None], 4, 1), jnp.uint8))
        y, ref = np.asarray(interpreted(x, w), np.float64), exact(x, w)
        size = np.abs(ref)
        fits = (size < 2.0**127) & (size > 2.0**-125)
        assert fits[:4, 0].all() and fits[4:, 1:].sum() > 800
        assert (np.abs(y - ref) <= 1e-6 * size)[fits].all()


@needs_interpreter
def test_the_nan_scale_reaches_its_row_and_no_other():
    rng = np.random.default_rng(2)
    x, w = operand(rng, 8, 256, 120, 130), operand(rng, 64, 256, 120, 130)
    zero = x.values_NK.at[5, 64:96].set(0)  # a NaN scale counts beside zeros too
    x = MxScaled(zero, x.scale_NKb.at[5, 2].set(255))
    w = MxScaled(w.values_NK, w.scale_NKb.at[17, 7].set(255))
    y = np.asarray(interpreted(x, w))
    nan = np.zeros((8, 64), bool)
    nan[5], nan[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(y), nan)
    np.testing.assert_array_equal(np.isnan(np.asarray(pk.mx_matmul(x, w, backend="reference"))), nan)
    both = MxScaled(jnp.zeros_like(x.values_NK), jnp.full_like(x.scale_NKb, 254))
    huge = MxScaled(w.values_NK, jnp.full_like(w.scale_NKb, 254))
    assert not np.asarray(interpreted(both, huge)).any()  # 0 * 2^127 * 2^127 is 0


@needs_interpreter
def test_the_scales_transposed_are_caught():
    rng = np.random.default_rng(3)
    x, w = operand(rng, 8, 2048, 120, 134), operand(rng, 64, 2048, 120, 134)
    wrong = dataclasses.replace(w, scale_NKb=w.scale_NKb.T)
    assert rel_err(interpreted(x, wrong), exact(x, w)) > 0.3


def test_can_run_says_what_is_wrong():
    assert "multiple of 8" in can_run(Config(), 12, 128, 128)
    assert "prepare_weights" in can_run(Config(), 8, 100, 128)
    assert "multiple of 128" in can_run(Config(), 8, 64, 96)
    assert "cluster" in can_run(Config(splits=16), 8, 64, 4096)
    assert "together" in can_run(Config(together=3), 8, 64, 4096)
    assert "stages" in can_run(Config(stages=0), 8, 64, 4096)
    assert "shared memory" in can_run(Config(stages=12), 128, 128, 4096)
