"""The Blackwell matmul without a Blackwell: it lowers for one at every real shape; the GPU interpreter runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err
from pallas_kernels.block_scaled_matmul import mosaic_sm90, mosaic_sm100
from pallas_kernels.block_scaled_matmul.arg_specs import SPECS
from pallas_kernels.block_scaled_matmul.config import Config, can_run, default_config
from pallas_kernels.types import BlockScaled


def shapes(M, N, K):
    rows, f8, f32 = -(-N // 128) * 128, jnp.float8_e4m3fn, jnp.float32
    grid = jax.ShapeDtypeStruct((rows // 128, -(-(K // 128) // 32) * 32), f32)
    return jax.ShapeDtypeStruct((M, K), jnp.bfloat16), BlockScaled(jax.ShapeDtypeStruct((rows, K), f8), grid, N)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lowers_for_a_blackwell(spec, lowered_for):
    for M in (1, 24, 64, 128):
        tile_m, rows = mosaic_sm90.tile_of(M, SM100), -(-spec.N // 128) * 128
        assert can_run(default_config(tile_m, rows, spec.K, SM100), tile_m, rows, spec.K, SM100) is None
        call = functools.partial(mosaic_sm100.block_scaled_matmul, out_dtype=jnp.dtype(jnp.bfloat16))
        assert lowered_for("10.0", call, *shapes(M, spec.N, spec.K)) == ["10.0"] * 2  # the rows are quantised before


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(
    ("M", "N", "K", "config"),
    [(8, 128, 512, Config(128, 1, 2)), (3, 100, 640, Config(128, 1, 2)), (72, 256, 256, Config(128, 1, 1))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_float64(M, N, K, config, dtype):
    rng = np.random.default_rng(M)
    grid = np.kron(2.0 ** rng.uniform(-4, 4, (-(-N // 128), K // 128)), np.ones((128, 128)))[:N]
    x = pk.quantize_blocks(jnp.asarray(rng.standard_normal((M, K)), jnp.float32))
    w = pk.quantize_blocks(jnp.asarray(rng.standard_normal((N, K)) * grid, jnp.float32), (128, 128))
    ref = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).T
    # One split: the interpreter has no stores into a peer's shared memory.
    y = mosaic_sm100.block_scaled_matmul(x, w, dtype, config, interpret=gpu_interpreter())
    assert y.shape == (M, N) and y.dtype == dtype
    assert rel_err(y, ref) <= TOLERANCES["matmul", jnp.dtype(dtype).name].bound


def test_can_run_says_what_a_blackwell_does_not():
    assert "8 to 64" in can_run(Config(128), 72, 128, 128, SM100)
    assert "tile_n = 64 (128)" in can_run(Config(64), 8, 128, 128, SM100)
    assert "warpgroups" in can_run(Config(128, warpgroups=2), 16, 128, 128, SM100)
