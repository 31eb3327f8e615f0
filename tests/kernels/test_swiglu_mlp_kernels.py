"""The SwiGLU kernels without their chips: they lower for them; the GPU interpreter runs whole groups of F."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._chip import SM100
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err, swiglu_oracle
from pallas_kernels.swiglu_mlp import mosaic_sm90, mosaic_sm100
from pallas_kernels.swiglu_mlp.arg_specs import ROWS, SPECS
from pallas_kernels.swiglu_mlp.config import Config, can_run, configs_to_try
from pallas_kernels.types import BlockScaled

KERNELS = {"sm90": mosaic_sm90.swiglu_mlp, "sm100": mosaic_sm100.swiglu_mlp}
(SPEC,) = SPECS


def operands(M):
    def weight(N, K):
        grid = jax.ShapeDtypeStruct((N // 128, -(-(K // 128) // 32) * 32), jnp.float32)
        return BlockScaled(jax.ShapeDtypeStruct((N, K), jnp.float8_e4m3fn), grid, N)

    x = jax.ShapeDtypeStruct((M, SPEC.D), jnp.bfloat16)
    return x, weight(2 * SPEC.F, SPEC.D), weight(SPEC.D, SPEC.F)


@pytest.mark.parametrize("M", [*ROWS, 3, 63, 65])
def test_lowers_for_cuda(M):
    configs = [None, *configs_to_try(M, SPEC.D, SPEC.F)]
    assert len(configs) > 4
    for config in configs[:: 1 if M in (1, 64) else 5]:
        traced = jax.jit(functools.partial(KERNELS["sm90"], config=config)).trace(*operands(M))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("M", [*ROWS, 3, 40, 72])
def test_lowers_for_a_blackwell(M, lowered_for):
    assert lowered_for("10.0", KERNELS["sm100"], *operands(M)) == ["10.0"] * 3  # quantise, gate and up, down


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(
    ("chip", "M", "D", "F"),
    [
        ("sm90", 5, 384, 128),
        ("sm90", 72, 128, 256),
        ("sm90", 70, 384, 128),
        ("sm100", 5, 384, 128),
        ("sm100", 40, 128, 256),
        ("sm100", 70, 128, 128),
    ],
)
def test_interpreter_equals_float64(chip, M, D, F):
    rng = np.random.default_rng(M)
    x = jnp.asarray(rng.standard_normal((M, D)), jnp.bfloat16)
    gate_up, down = (
        pk.quantize_blocks(jnp.asarray(rng.standard_normal(s) * s[1] ** -0.5, jnp.float32), (128, 128))
        for s in ((2 * F, D), (D, F))
    )
    weights = [(np.asarray(w.values_NK), np.asarray(w.scale_NbKb)) for w in (gate_up, down)]
    ref = swiglu_oracle(np.asarray(x.astype(jnp.float32)), *weights)
    # One block a group: the interpreter has no stores into a peer's shared memory.
    for config in (Config(1, 2), Config(epilogue=False)):
        y = KERNELS[chip](x, gate_up, down, config, interpret=gpu_interpreter())
        assert y.shape == (M, D) and rel_err(y, ref) <= TOLERANCES["swiglu_mlp", "bfloat16"].bound


def test_can_run_says_what_is_wrong():
    assert "M = 72" in can_run(Config(), 72, SPEC.D, SPEC.F)
    assert "multiples of 128" in can_run(Config(), 8, 100, 128)
    assert "blocks_per_group" in can_run(Config(blocks_per_group=4), 8, SPEC.D, SPEC.F)
    assert "shared memory" in can_run(Config(stages=12), 64, SPEC.D, SPEC.F)


def test_can_run_says_what_a_blackwell_does_not():
    assert "8 to 32" in can_run(Config(1), 40, SPEC.D, SPEC.F, SM100)
    assert "10.0" in can_run(Config(2), 32, SPEC.D, SPEC.F, SM100)
