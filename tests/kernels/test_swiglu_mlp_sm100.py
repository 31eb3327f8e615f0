"""The Blackwell SwiGLU kernels without a Blackwell: they lower for one; the GPU interpreter runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err, swiglu_oracle
from pallas_kernels.swiglu_mlp import mosaic_sm100
from pallas_kernels.swiglu_mlp.arg_specs import ROWS, SPECS
from pallas_kernels.swiglu_mlp.config import Config, can_run
from pallas_kernels.types import BlockScaled

(SPEC,) = SPECS


def shapes(N, K):
    grid = jax.ShapeDtypeStruct((N // 128, -(-(K // 128) // 32) * 32), jnp.float32)
    return BlockScaled(jax.ShapeDtypeStruct((N, K), jnp.float8_e4m3fn), grid, N)


@pytest.mark.parametrize("M", [*ROWS, 3, 40, 72])
def test_lowers_for_a_blackwell(M, lowered_for):
    x = jax.ShapeDtypeStruct((M, SPEC.D), jnp.bfloat16)
    weights = shapes(2 * SPEC.F, SPEC.D), shapes(SPEC.D, SPEC.F)
    assert lowered_for("10.0", mosaic_sm100.swiglu_mlp, x, *weights) == ["10.0"] * 3  # quantise, gate and up, down


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(("M", "D", "F"), [(5, 384, 128), (40, 128, 256), (70, 128, 128)])
def test_interpreter_equals_float64(M, D, F):
    rng = np.random.default_rng(M)
    x = jnp.asarray(rng.standard_normal((M, D)), jnp.bfloat16)
    gate_up, down = (
        pk.quantize_blocks(jnp.asarray(rng.standard_normal(s) * s[1] ** -0.5, jnp.float32), (128, 128))
        for s in ((2 * F, D), (D, F))
    )
    ref = swiglu_oracle(
        np.asarray(x.astype(jnp.float32)),
        (np.asarray(gate_up.values_NK), np.asarray(gate_up.scale_NbKb)),
        (np.asarray(down.values_NK), np.asarray(down.scale_NbKb)),
    )
    y = mosaic_sm100.swiglu_mlp(x, gate_up, down, Config(1, 2), interpret=gpu_interpreter())
    assert y.shape == (M, D) and rel_err(y, ref) <= TOLERANCES["swiglu_mlp", "bfloat16"].bound


def test_can_run_says_what_a_blackwell_does_not():
    assert "8 to 32" in can_run(Config(1), 40, SPEC.D, SPEC.F, SM100)
    assert "10.0" in can_run(Config(2), 32, SPEC.D, SPEC.F, SM100)
    assert "10.0" in can_run(Config(1, warpgroups=2), 32, SPEC.D, SPEC.F, SM100)
