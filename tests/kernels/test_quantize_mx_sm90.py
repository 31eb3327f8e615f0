"""The kernel that quantises activations to MXFP8, without a GPU: it lowers for both chips; the interpreter runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, mx_dequant, mx_rows, rel_err
from pallas_kernels.mx_matmul import config as hopper
from pallas_kernels.mx_matmul import config_sm100 as blackwell
from pallas_kernels.mx_matmul import mosaic_sm90, mosaic_sm100
from pallas_kernels.quantize_mx.arg_specs import ROWS, SPECS
from pallas_kernels.quantize_mx.mosaic_sm90 import quantize_rows, round_rows, why_not

needs_interpreter = pytest.mark.skipif(
    gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on"
)


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lowers(spec, capability, lowered_for):
    for M in (ROWS[0], 24, 65, ROWS[-1]):
        x = jax.ShapeDtypeStruct((M, spec.K), jnp.bfloat16)
        assert lowered_for(capability, quantize_rows, x) == [capability]
        assert lowered_for(capability, round_rows, x) == [capability]


@needs_interpreter
@pytest.mark.parametrize("M", [1, 5, 40, 65])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreter_equals_the_reference_bit_for_bit(M, dtype):
    rng = np.random.default_rng(M)
    x = (rng.standard_normal((M, 256)) * 2.0 ** rng.integers(-40, 40, (M, 1))).astype(np.float32)
    x[0, :32], x[0, 64:96] = 0, 1.5 * 2.0**-126
    x[-1, 128:160], x[-1, 200] = 1e-40, 1e-40  # subnormal: counts as zero, alone and beside others
    x[M // 2, 40], x[M // 2, 100], x[M // 2, 130] = np.nan, np.inf, -np.inf
    values, byte_KbM = quantize_rows(jnp.asarray(x, dtype), gpu_interpreter())
    want = pk.quantize_mx(jnp.asarray(x, dtype), backend="reference")
    rounded = np.asarray(round_rows(jnp.asarray(x, dtype), gpu_interpreter()).astype(jnp.float32))
    np.testing.assert_array_equal(rounded[:M], np.asarray(want.dequantize()))
    assert not rounded[M:].any()
    np.testing.assert_array_equal(np.asarray(byte_KbM)[:, :M].T, np.asarray(want.scale_NKb))
    nan = np.isnan(np.asarray(want.values_NK).astype(np.float32))
    got, wanted = (np.asarray(a).view(np.uint8) for a in (values[:M], want.values_NK))
    np.testing.assert_array_equal(got[~nan], wanted[~nan])
    assert np.isnan(np.asarray(values[:M]).astype(np.float32)[nan]).all()


@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "config"), [(mosaic_sm90, hopper.Config(1, 2)), (mosaic_sm100, blackwell.Config(1, 2))]
)
@pytest.mark.parametrize("M", [3, 40])
def test_a_matmul_quantises_its_rows_with_it(kernel, config, M):
    rng = np.random.default_rng(M)
    x = jnp.asarray(rng.standard_normal((M, 256)) * 2.0 ** rng.uniform(-6, 6, (M, 1)), jnp.bfloat16)
    w = pk.quantize_mx(jnp.asarray(rng.standard_normal((128, 256)), jnp.float32))
    ref = mx_dequant(*mx_rows(np.asarray(x))) @ mx_dequant(*map(np.asarray, (w.values_NK, w.scale_NKb))).T
    call = functools.partial(kernel.mx_matmul, out_dtype=jnp.dtype(jnp.float32), config=config)
    assert rel_err(call(x, w, interpret=gpu_interpreter()), ref) <= TOLERANCES["matmul", "float32"].bound


def test_the_numpy_twin_is_the_reference():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((6, 64)) * 2.0 ** rng.integers(-30, 30, (6, 1))).astype(np.float32)
    values, byte = mx_rows(x)
    want = pk.quantize_mx(jnp.asarray(x), backend="reference")
    np.testing.assert_array_equal(byte, np.asarray(want.scale_NKb))
    np.testing.assert_array_equal(values.view(np.uint8), np.asarray(want.values_NK).view(np.uint8))


def test_why_not_names_the_width():
    assert "K = 96" in why_not(96) and why_not(128) is None
