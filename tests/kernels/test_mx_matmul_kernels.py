"""The MX matmul's kernels without their chips: they lower at every real shape; the GPU interpreter runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, mx_dequant, rel_err
from pallas_kernels.block_scaled_matmul.config import equal_tiles
from pallas_kernels.mx_matmul import config as hopper
from pallas_kernels.mx_matmul import config_sm100 as blackwell
from pallas_kernels.mx_matmul import mosaic_sm90, mosaic_sm100
from pallas_kernels.mx_matmul.arg_specs import ROWS, SPECS
from pallas_kernels.prepare import rows_of_prepared
from pallas_kernels.types import MxScaled, register_tiles, rows_of_register_tiles

# One split on Hopper: the interpreter has no stores into a peer's shared memory.
KERNELS = {
    "sm90": (mosaic_sm90.mx_matmul, hopper.Config(1, 2)),
    "sm100": (mosaic_sm100.mx_matmul, blackwell.Config(1, 2)),
}
needs_interpreter = pytest.mark.skipif(
    gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on"
)


def shapes(M, N, K, layout):
    rows, f8, u8 = rows_of_prepared(N), jnp.float8_e4m3fn, jnp.uint8
    x = MxScaled(jax.ShapeDtypeStruct((M, K), f8), jax.ShapeDtypeStruct((M, K // 32), u8))
    scale_shape = {"registers": (K // 32 + 1, rows), "tiles": (rows // 128, K // 128, 32, 16)}[layout]
    return x, MxScaled(jax.ShapeDtypeStruct((rows, K), f8), jax.ShapeDtypeStruct(scale_shape, u8), N, layout)


def operand(rng, rows, K, bytes_from, bytes_to):
    """Random e4m3 values with random E8M0 bytes, one per 32."""
    values = jnp.asarray(np.clip(rng.standard_normal((rows, K)) * 100, -448, 448), jnp.float8_e4m3fn)
    return MxScaled(values, jnp.asarray(rng.integers(bytes_from, bytes_to, (rows, K // 32)), jnp.uint8))


def exact(x, w):
    x, w = (mx_dequant(np.asarray(a.values_NK), np.asarray(a.scale_NKb)) for a in (x, w))
    return x @ w.T


def interpreted(chip, x, w, dtype=jnp.float32, config=None):
    kernel, usual = KERNELS[chip]
    return kernel(x, w, jnp.dtype(dtype), config or usual, interpret=gpu_interpreter())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_any_number_of_rows_has_a_default_that_fits_and_the_tuner_has_more(spec):
    rows = rows_of_prepared(spec.N)
    for M in range(1, 600):
        tile_m = equal_tiles(M, mosaic_sm90.MAX_TILE_M)
        assert hopper.can_run(hopper.default_config(tile_m, rows, spec.K), tile_m, rows, spec.K) is None, M
    assert all(hopper.configs_to_try(-(-M // 8) * 8, rows, spec.K) for M in ROWS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("change", [{}, {"splits": 1, "warpgroups": 1}, {"splits": 8, "stages": 2}], ids=str)
def test_lowers_for_cuda(spec, change):
    for M in (1, 24, 64, 128, 200):
        tile_m = equal_tiles(M, mosaic_sm90.MAX_TILE_M)
        config = dataclasses.replace(hopper.default_config(tile_m, rows_of_prepared(spec.N), spec.K), **change)
        call = functools.partial(mosaic_sm90.mx_matmul, out_dtype=jnp.dtype(jnp.bfloat16), config=config)
        traced = jax.jit(call).trace(*shapes(M, spec.N, spec.K, "registers"))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lowers_for_a_blackwell(spec, lowered_for):
    for M in (1, 24, 64, 128, 200):
        tile_m, rows = mosaic_sm100._tile_m(M), rows_of_prepared(spec.N)
        assert blackwell.can_run(blackwell.default_config(tile_m, rows, spec.K), tile_m, rows, spec.K) is None
        assert blackwell.configs_to_try(tile_m, rows, spec.K)
        call = functools.partial(mosaic_sm100.mx_matmul, out_dtype=jnp.dtype(jnp.bfloat16))
        assert lowered_for("10.0", call, *shapes(M, spec.N, spec.K, "tiles")) == ["10.0"]


@needs_interpreter
@pytest.mark.parametrize(
    ("chip", "M", "N", "K", "config", "prepared_for"),
    [
        ("sm90", 8, 128, 512, hopper.Config(1, 2, 2), (None, "9.0")),
        ("sm90", 3, 100, 640, hopper.Config(1, 3, 1), (None, "10.0")),
        ("sm90", 48, 64, 256, hopper.Config(1, 1, 1), (None, "9.0")),
        ("sm90", 130, 256, 128, hopper.Config(1, 2, 4), (None, "9.0")),
        ("sm100", 8, 128, 512, blackwell.Config(1, 2), (None,)),
        ("sm100", 3, 100, 640, blackwell.Config(1, 3), ("9.0",)),
        ("sm100", 48, 256, 256, blackwell.Config(1, 1), ("10.0",)),
        ("sm100", 130, 128, 640, blackwell.Config(2, 2), (None,)),
        ("sm100", 128, 128, 384, blackwell.Config(3, 4), ("10.0",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_float64(chip, M, N, K, config, prepared_for, dtype):
    rng = np.random.default_rng(M)
    x, w = operand(rng, M, K, 122, 132), operand(rng, N, K, 120, 134)
    for capability in prepared_for:
        weight = pk.prepare_weights(w, "mx_matmul", capability) if capability else w
        y = interpreted(chip, x, weight, dtype, config)
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
        y, ref = np.asarray(interpreted("sm90", x, w), np.float64), exact(x, w)
        size = np.abs(ref)
        fits = (size < 2.0**127) & (size > 2.0**-125)
        assert fits[:4, 0].all() and fits[4:, 1:].sum() > 800
        assert (np.abs(y - ref) <= 1e-6 * size)[fits].all()


def test_a_thread_has_the_operands_of_its_rows():
    """Bytes against the PTX manual: thread t has rows g, g + 8 of its warp's 16, columns 2 q, 2 q + 1 and these + 8."""
    row, column = np.divmod(np.arange(128 * 256), 256)
    where = np.asarray(register_tiles(jnp.arange(128 * 256).reshape(128, 256))).reshape(2, 2, 4, 128, 2, 2, 2, 2)
    for n, k, i, t, at, half, e, pair in np.ndindex(where.shape):
        found = where[n, k, i, t, at, half, e, pair]
        assert row[found] == 64 * n + 16 * (t // 32) + t % 32 // 4 + 8 * half
        assert column[found] == 128 * k + 32 * i + 16 * at + 2 * (t % 4) + e + 8 * pair
    values = jnp.asarray(np.random.default_rng().integers(0, 255, (192, 384)), jnp.uint8)
    np.testing.assert_array_equal(np.asarray(rows_of_register_tiles(register_tiles(values))), np.asarray(values))


@needs_interpreter
@pytest.mark.parametrize(("w_spread", "x_spread"), [(110, 0), (0, 110), (55, 55)])
def test_scales_far_apart_in_a_row_lose_nothing(w_spread, x_spread):
    """The largest scale of each row stands beside zeros, so that the smaller ones are all there is."""
    rng = np.random.default_rng(4)
    x, w = operand(rng, 8, 256, 127, 128), operand(rng, 64, 256, 227, 228)
    x = MxScaled(x.values_NK.at[:, :32].set(0), x.scale_NKb.at[:, 1:].add(-x_spread))
    w = MxScaled(w.values_NK.at[:, :32].set(0), w.scale_NKb.at[:, 1:].add(-w_spread))
    assert rel_err(interpreted("sm90", x, w), exact(x, w)) <= TOLERANCES["matmul", "float32"].bound


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
        np.testing.assert_array_equal(np.asarray(interpreted("sm100", x, w), np.float64), exact(x, w))


@needs_interpreter
@pytest.mark.parametrize(("chip", "N"), [("sm90", 64), ("sm100", 128)])
def test_a_nan_value_or_scale_reaches_its_row_and_no_other(chip, N):
    rng = np.random.default_rng(2)
    x, w = operand(rng, 8, 256, 120, 130), operand(rng, N, 256, 120, 130)
    zero = x.values_NK.at[5, 64:96].set(0)  # a NaN scale counts beside zeros too
    x = MxScaled(zero, x.scale_NKb.at[5, 2].set(255))
    w = MxScaled(w.values_NK.at[40, 9].set(jnp.nan), w.scale_NKb.at[17, 7].set(255))
    nan = np.zeros((8, N), bool)
    nan[5], nan[:, 17], nan[:, 40] = True, True, True
    np.testing.assert_array_equal(np.isnan(np.asarray(interpreted(chip, x, w))), nan)
    np.testing.assert_array_equal(np.isnan(np.asarray(pk.mx_matmul(x, w, backend="reference"))), nan)


@needs_interpreter
def test_zero_under_the_largest_scales_is_zero():
    """0 * 2^127 * 2^127; on Hopper alone: what interprets a block-scaled tcgen05 scales each operand, to infinity."""
    w = operand(np.random.default_rng(2), 64, 256, 254, 255)
    zero = MxScaled(jnp.zeros((8, 256), jnp.float8_e4m3fn), jnp.full((8, 8), 254, jnp.uint8))
    assert not np.asarray(interpreted("sm90", zero, w)).any()


@needs_interpreter
@pytest.mark.parametrize(("chip", "N", "K"), [("sm90", 64, 2048), ("sm100", 128, 4096)])
def test_the_scales_transposed_are_caught(chip, N, K):
    rng = np.random.default_rng(3)
    x, w = operand(rng, 8, K, 120, 134), operand(rng, N, K, 120, 134)
    assert rel_err(interpreted(chip, x, w), exact(x, w)) <= TOLERANCES["matmul", "float32"].bound
    wrong = dataclasses.replace(w, scale_NKb=w.scale_NKb.T)
    assert rel_err(interpreted(chip, x, wrong), exact(x, w)) > 0.3


def test_can_run_says_what_is_wrong():
    can_run, Config = hopper.can_run, hopper.Config
    assert "multiple of 8" in can_run(Config(), 12, 128, 128)
    assert "prepare_weights" in can_run(Config(), 8, 100, 128)
    assert "multiple of 128" in can_run(Config(), 8, 64, 96)
    assert "cluster" in can_run(Config(splits=16), 8, 64, 4096)
    assert "warpgroups" in can_run(Config(warpgroups=3), 8, 64, 4096)
    assert "each of 2 warpgroups" in can_run(Config(warpgroups=2), 8, 64, 4096)
    assert "stages" in can_run(Config(stages=0), 8, 64, 4096)
    assert "shared memory" in can_run(Config(stages=12), 128, 128, 4096)


def test_can_run_says_what_is_wrong_on_a_blackwell():
    can_run, Config = blackwell.can_run, blackwell.Config
    assert "multiple of 32" in can_run(Config(), 8, 128, 128)
    assert "prepare_weights" in can_run(Config(), 32, 64, 128)
    assert "multiple of 128" in can_run(Config(), 32, 128, 96)
    assert "splits" in can_run(Config(splits=5), 32, 128, 512)
    assert "stages" in can_run(Config(stages=0), 32, 128, 512)
    assert "shared memory" in can_run(Config(stages=12), 128, 128, 4096)
    assert "tensor memory" in can_run(Config(stages=60), 64, 128, 8192)
