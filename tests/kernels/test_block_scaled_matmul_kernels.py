"""The matmul's kernels without their chips: they lower for them at every real shape; the GPU interpreter runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err
from pallas_kernels.block_scaled_matmul import mosaic_sm90, mosaic_sm100
from pallas_kernels.block_scaled_matmul.arg_specs import ROWS, SPECS
from pallas_kernels.block_scaled_matmul.config import Config, can_run, configs_to_try, default_config, tile_of
from pallas_kernels.prepare import rows_of_prepared
from pallas_kernels.types import BlockScaled

KERNELS = {"sm90": mosaic_sm90.block_scaled_matmul, "sm100": mosaic_sm100.block_scaled_matmul}
CHANGES = (
    {},
    {"early": True},
    {"splits": 1, "stages": 2, "warpgroups": 2},
    {"splits": 8, "stages": 2},
    {"splits": 4, "stages": 3, "warpgroups": 2, "together": 2},
)


def weight(N, K):
    rows = rows_of_prepared(N)
    grid = jax.ShapeDtypeStruct((-(-rows // 128), -(-(K // 128) // 32) * 32), jnp.float32)
    return BlockScaled(jax.ShapeDtypeStruct((rows, K), jnp.float8_e4m3fn), grid, N)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_any_number_of_rows_has_a_default_that_fits(spec):
    rows = rows_of_prepared(spec.N)
    for M in range(1, 600):
        config = default_config(M, rows, spec.K)
        assert can_run(config, tile_of(M, config), rows, spec.K) is None, M
    for M in ROWS:
        assert configs_to_try(M, rows, spec.K)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_lowers_for_cuda(spec, change):
    rows = rows_of_prepared(spec.N)
    for M in (1, 24, 64, 128):
        config = dataclasses.replace(default_config(M, rows, spec.K), **change)
        if can_run(config, tile_of(M, config), rows, spec.K):
            assert rows % 128 and config.warpgroups > 1, config
            continue
        call = functools.partial(KERNELS["sm90"], out_dtype=jnp.bfloat16, config=config)
        scale = jax.ShapeDtypeStruct((M, spec.K // 128), jnp.float32)
        x = BlockScaled(jax.ShapeDtypeStruct((M, spec.K), jnp.float8_e4m3fn), scale)
        traced = jax.jit(call).trace(x, weight(spec.N, spec.K))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lowers_for_a_blackwell(spec, lowered_for):
    for M in (1, 24, 64, 128):
        rows = rows_of_prepared(spec.N)
        config = default_config(M, rows, spec.K, SM100)
        assert can_run(config, tile_of(M, config, SM100), rows, spec.K, SM100) is None
        call = functools.partial(KERNELS["sm100"], out_dtype=jnp.dtype(jnp.bfloat16))
        x = jax.ShapeDtypeStruct((M, spec.K), jnp.bfloat16)
        assert lowered_for("10.0", call, x, weight(spec.N, spec.K)) == ["10.0"] * 2  # rows are quantised before


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(
    ("chip", "M", "N", "K", "config"),
    [
        ("sm90", 8, 128, 512, Config(64, 1, 2)),
        ("sm90", 3, 100, 640, Config(64, 1, 2)),
        ("sm90", 16, 128, 256, Config(128, 1, 4)),
        ("sm90", 32, 128, 640, Config(64, 1, 2, 2)),
        ("sm90", 48, 256, 384, Config(64, 1, 2, 4)),
        ("sm90", 130, 200, 512, Config(64, 1, 2, 2)),
        ("sm90", 8, 64, 512, Config(64, 1, 2, together=2)),
        ("sm90", 24, 64, 640, Config(64, 1, 3, together=2)),
        ("sm90", 32, 128, 896, Config(64, 1, 3, 2, together=2)),
        ("sm100", 8, 128, 512, Config(128, 1, 2)),
        ("sm100", 3, 100, 640, Config(128, 1, 2)),
        ("sm100", 72, 256, 256, Config(128, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_float64(chip, M, N, K, config, dtype):
    rng = np.random.default_rng(M)
    grid = np.kron(2.0 ** rng.uniform(-4, 4, (-(-N // 128), K // 128)), np.ones((128, 128)))[:N]
    x = pk.quantize_blocks(jnp.asarray(rng.standard_normal((M, K)), jnp.float32))
    w = pk.quantize_blocks(jnp.asarray(rng.standard_normal((N, K)) * grid, jnp.float32), (128, 128))
    ref = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).T
    # One split: the interpreter has no stores into a peer's shared memory.
    y = KERNELS[chip](x, w, dtype, config, interpret=gpu_interpreter())
    assert y.shape == (M, N) and y.dtype == dtype
    assert rel_err(y, ref) <= TOLERANCES["matmul", jnp.dtype(dtype).name].bound
    if config.together > 1:  # the same sums in the same order
        one = dataclasses.replace(config, together=1)
        np.testing.assert_array_equal(y, KERNELS[chip](x, w, dtype, one, interpret=gpu_interpreter()))


def test_can_run_says_what_is_wrong():
    assert "multiple of 8" in can_run(Config(), 12, 128, 128)
    assert "tile_n" in can_run(Config(tile_n=128), 8, 64, 128)
    assert "multiple of 128" in can_run(Config(), 8, 64, 100)
    assert "is not 1, or 2 or 4" in can_run(Config(warpgroups=3), 8, 192, 256)
    assert "each of 2 warpgroups" in can_run(Config(warpgroups=2), 8, 64, 256)
    assert "one more with several warpgroups" in can_run(Config(splits=4, warpgroups=2), 8, 128, 512)
    assert "splits" in can_run(Config(splits=4), 8, 64, 256)
    assert "cluster" in can_run(Config(splits=16), 8, 64, 4096)
    assert "shared memory" in can_run(Config(tile_n=128, stages=12), 128, 128, 4096)
    assert "is not 1, or 2" in can_run(Config(together=3), 8, 64, 1024)
    assert "as many stages" in can_run(Config(splits=4, together=2), 8, 64, 512)


def test_can_run_says_what_a_blackwell_does_not():
    assert "8 to 64" in can_run(Config(128), 72, 128, 128, SM100)
    assert "tile_n = 64 (128)" in can_run(Config(64), 8, 128, 128, SM100)
    assert "warpgroups" in can_run(Config(128, warpgroups=2), 16, 128, 128, SM100)
    assert "together" in can_run(Config(128, together=2), 16, 128, 256, SM100)
