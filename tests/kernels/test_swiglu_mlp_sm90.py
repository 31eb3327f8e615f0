"""The persistent SwiGLU kernel without a Hopper: it lowers for CUDA; the GPU interpreter runs one block of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err, swiglu_oracle
from pallas_kernels.swiglu_mlp import mosaic_sm90
from pallas_kernels.swiglu_mlp.arg_specs import SPECS
from pallas_kernels.swiglu_mlp.config import Config, can_run, configs_to_try, plan
from pallas_kernels.types import BlockScaled

SPEC = SPECS[0]


def shapes(N, K):
    line = -(-(K // 128) // 32) * 32
    grid = jax.ShapeDtypeStruct((N // 128, line), jnp.float32)
    return BlockScaled(jax.ShapeDtypeStruct((N, K), jnp.float8_e4m3fn), grid, N)


@pytest.mark.parametrize("M", [1, 16, 32])
def test_lowers_for_cuda(M):
    configs = configs_to_try(-(-M // 8) * 8, SPEC.D, SPEC.F)
    assert configs
    for config in configs:
        call = functools.partial(mosaic_sm90.swiglu_mlp, config=config)
        x = jax.ShapeDtypeStruct((M, SPEC.D), jnp.bfloat16)
        traced = jax.jit(call).trace(x, shapes(2 * SPEC.F, SPEC.D), shapes(SPEC.D, SPEC.F))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("config", configs_to_try(8, SPEC.D, SPEC.F), ids=str)
def test_every_tile_and_every_step_is_dealt_once(config):
    p = plan(config, SPEC.D, SPEC.F)
    assert p.blocks == SPEC.F // 128 * config.splits
    seen = {(j % p.down_tiles, j // p.down_tiles) for j in range(p.blocks) if j // p.down_tiles < p.down_splits}
    assert seen == {(t, s) for t in range(SPEC.D // 128) for s in range(p.down_splits)}


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
def test_one_block_in_the_interpreter(monkeypatch):
    # The interpreter has no grid-wide semaphore; with one block there is nobody to wait for.
    for name in ("get_global", "semaphore_signal", "semaphore_wait"):
        monkeypatch.setattr(mosaic_sm90.pl, name, lambda *_, **__: None)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 128)), jnp.bfloat16)
    gate_up, down = (
        pk.quantize_blocks(jnp.asarray(rng.standard_normal(s) * 128**-0.5, jnp.float32), (128, 128))
        for s in ((256, 128), (128, 128))
    )
    ref = swiglu_oracle(
        np.asarray(x.astype(jnp.float32)),
        (np.asarray(gate_up.values_NK), np.asarray(gate_up.scale_NbKb)),
        (np.asarray(down.values_NK), np.asarray(down.scale_NbKb)),
    )
    y = mosaic_sm90.swiglu_mlp(x, gate_up, down, Config(1, 2), interpret=gpu_interpreter())
    assert rel_err(y, ref) <= TOLERANCES["swiglu_mlp", "bfloat16"].bound


def test_can_run_refuses_what_would_hang_or_not_fit():
    assert "holds at once" in can_run(Config(splits=4, stages=4), 8, SPEC.D, SPEC.F)
    assert "holds at once" in can_run(Config(splits=2, stages=8), 8, SPEC.D, SPEC.F)
    assert "even" in can_run(Config(stages=3), 8, SPEC.D, SPEC.F)
    assert "M = 128" in can_run(Config(), 128, SPEC.D, SPEC.F)
    assert "fewer" in can_run(Config(splits=1), 8, 512, 256)
