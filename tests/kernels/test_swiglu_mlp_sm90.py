"""The Hopper SwiGLU kernels without a Hopper: they lower for CUDA; the GPU interpreter runs whole groups of F."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err, swiglu_oracle
from pallas_kernels.swiglu_mlp import mosaic_sm90
from pallas_kernels.swiglu_mlp.arg_specs import ROWS, SPECS
from pallas_kernels.swiglu_mlp.config import Config, can_run, configs_to_try
from pallas_kernels.types import BlockScaled

SPEC = SPECS[0]


def shapes(N, K):
    line = -(-(K // 128) // 32) * 32
    grid = jax.ShapeDtypeStruct((N // 128, line), jnp.float32)
    return BlockScaled(jax.ShapeDtypeStruct((N, K), jnp.float8_e4m3fn), grid, N)


@pytest.mark.parametrize("M", [*ROWS, 3, 63, 65])
def test_lowers_for_cuda(M):
    configs = [None, *configs_to_try(mosaic_sm90._tile_m(M), SPEC.D, SPEC.F)]
    assert len(configs) > 4
    for config in configs[:: 1 if M in (1, 64) else 5]:
        call = functools.partial(mosaic_sm90.swiglu_mlp, config=config)
        x = jax.ShapeDtypeStruct((M, SPEC.D), jnp.bfloat16)
        traced = jax.jit(call).trace(x, shapes(2 * SPEC.F, SPEC.D), shapes(SPEC.D, SPEC.F))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(("M", "D", "F", "warpgroups"), [(5, 384, 128, 1), (72, 128, 256, 1), (70, 384, 128, 2)])
def test_interpreter_equals_float64(M, D, F, warpgroups):
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
    # One block a group: the interpreter has no stores into a peer's shared memory.
    y = mosaic_sm90.swiglu_mlp(x, gate_up, down, Config(1, 2, warpgroups), interpret=gpu_interpreter())
    assert rel_err(y, ref) <= TOLERANCES["swiglu_mlp", "bfloat16"].bound


def test_can_run_says_what_is_wrong():
    assert "M = 72" in can_run(Config(), 72, SPEC.D, SPEC.F)
    assert "multiples of 128" in can_run(Config(), 8, 100, 128)
    assert "blocks_per_group" in can_run(Config(blocks_per_group=4), 8, SPEC.D, SPEC.F)
    assert "warpgroups" in can_run(Config(warpgroups=2), 32, SPEC.D, SPEC.F)
    assert "shared memory" in can_run(Config(stages=12), 64, SPEC.D, SPEC.F)
