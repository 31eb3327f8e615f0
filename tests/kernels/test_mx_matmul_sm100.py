"""The Blackwell MX matmul without a Blackwell: it lowers for one at every real shape; the GPU interpreter runs it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, mx_dequant, rel_err
from pallas_kernels.mx_matmul import mosaic_sm100
from pallas_kernels.mx_matmul.arg_specs import SPECS
from pallas_kernels.mx_matmul.config_sm100 import Config, can_run, configs_to_try, default_config
from pallas_kernels.types import MxScaled

needs_interpreter = pytest.mark.skipif(
    gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on"
)


def shapes(M, N, K):
    rows, f8, u8 = -(-N // 128) * 128, jnp.float8_e4m3fn, jnp.uint8
    x = MxScaled(jax.ShapeDtypeStruct((M, K), f8), jax.ShapeDtypeStruct((M, K // 32), u8))
    tiles = jax.ShapeDtypeStruct((rows // 128, K // 128, 32, 16), u8)
    return x, MxScaled(jax.ShapeDtypeStruct((rows, K), f8), tiles, N, scales="tiles")


def operand(rng, rows, K, bytes_from, bytes_to):
    """Random e4m3 values with random E8M0 bytes, one per 32."""
    values = jnp.asarray(np.clip(rng.standard_normal((rows, K)) * 100, -448, 448), jnp.float8_e4m3fn)
    return MxScaled(values, jnp.asarray(rng.integers(bytes_from, bytes_to, (rows, K // 32)), jnp.uint8))


def exact(x, w):
    x, w = (mx_dequant(np.asarray(a.values_NK), np.asarray(a.scale_NKb)) for a in (x, w))
    return x @ w.T


def interpreted(x, w, dtype=jnp.float32, config=None):
    return mosaic_sm100.mx_matmul(x, w, jnp.dtype(dtype), config or Config(1, 2), interpret=gpu_interpreter())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lowers_for_a_blackwell(spec, lowered_for):
    for M in (1, 24, 64, 128, 200):
        tile_m, rows = mosaic_sm100._tile_m(M), -(-spec.N // 128) * 128
        assert can_run(default_config(tile_m, rows, spec.K), tile_m, rows, spec.K) is None
        assert configs_to_try(tile_m, rows, spec.K)
        call = functools.partial(mosaic_sm100.mx_matmul, out_dtype=jnp.dtype(jnp.bfloat16))
        assert lowered_for("10.0", call, *shapes(M, spec.N, spec.K)) == ["10.0"]


@needs_interpreter
@pytest.mark.parametrize(
    ("M", "N", "K", "config", "prepared_for"),
    [
        (8, 128, 512, Config(1, 2), None),
        (3, 100, 640, Config(1, 3), "9.0"),
        (48, 256, 256, Config(1, 1), "10.0"),
        (130, 128, 640, Config(2, 2), None),
        (128, 128, 384, Config(3, 4), "10.0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_float64(M, N, K, config, prepared_for, dtype):
    rng = np.random.default_rng(M)
    x, w = operand(rng, M, K, 122, 132), operand(rng, N, K, 120, 134)
    y = interpreted(x, pk.prepare_weights(w, "mx_matmul", prepared_for) if prepared_for else w, dtype, config)
    assert y.shape == (M, N) and y.dtype == dtype
    assert rel_err(y, exact(x, w)) <= TOLERANCES["matmul", jnp.dtype(dtype).name].bound


@needs_interpreter
def test_every_scale_counts_for_its_own_32_columns():
    """One row, one column and one block of K at a time bear a value: what comes out names its two scales."""
    rng = np.random.default_rng(1)
    byte = rng.permutation(np.arange(62, 62 + 128))
    at = rng.integers(0, 32, (128, 8))
    ones = np.zeros((128, 256), np.float32)
    np.put_along_axis(ones.reshape(128, 8, 32), at[..., None], 1, 2)
    for kb in range(8):
        only = jnp.asarray(np.where(np.arange(256) // 32 == kb, ones, 0), jnp.float8_e4m3fn)
        scales = np.full((128, 8), 200)
        scales[:, kb] = byte
        w = MxScaled(only, jnp.asarray(scales, jnp.uint8))
        x = MxScaled(jnp.full((32, 256), 1.0, jnp.float8_e4m3fn), jnp.asarray(np.roll(scales, 5, 0)[:32], jnp.uint8))
        np.testing.assert_array_equal(np.asarray(interpreted(x, w), np.float64), exact(x, w))


@needs_interpreter
def test_the_nan_scale_reaches_its_row_and_no_other():
    rng = np.random.default_rng(2)
    x, w = operand(rng, 8, 256, 120, 130), operand(rng, 128, 256, 120, 130)
    zero = x.values_NK.at[5, 64:96].set(0)  # a NaN scale counts beside zeros too
    x = MxScaled(zero, x.scale_NKb.at[5, 2].set(255))
    w = MxScaled(w.values_NK, w.scale_NKb.at[17, 7].set(255))
    nan = np.zeros((8, 128), bool)
    nan[5], nan[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(np.asarray(interpreted(x, w))), nan)


@needs_interpreter
def test_the_scales_transposed_are_caught():
    rng = np.random.default_rng(3)
    x, w = operand(rng, 8, 4096, 120, 134), operand(rng, 128, 4096, 120, 134)
    assert rel_err(interpreted(x, w), exact(x, w)) <= TOLERANCES["matmul", "float32"].bound
    wrong = dataclasses.replace(w, scale_NKb=w.scale_NKb.T)
    assert rel_err(interpreted(x, wrong), exact(x, w)) > 0.3


def test_can_run_says_what_is_wrong():
    assert "multiple of 32" in can_run(Config(), 8, 128, 128)
    assert "prepare_weights" in can_run(Config(), 32, 64, 128)
    assert "multiple of 128" in can_run(Config(), 32, 128, 96)
    assert "splits" in can_run(Config(splits=5), 32, 128, 512)
    assert "stages" in can_run(Config(stages=0), 32, 128, 512)
    assert "shared memory" in can_run(Config(stages=12), 128, 128, 4096)
    assert "tensor memory" in can_run(Config(stages=60), 64, 128, 8192)
