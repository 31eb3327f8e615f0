"""A causal convolution with what follows it: reference, kernel in the interpreter and on a Hopper, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._dispatch import gpu_capability
from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err
from pallas_kernels.causal_conv import config, mosaic_sm90
from pallas_kernels.causal_conv.arg_specs import SPECS, ConvSpec

INTERPRETED = pytest.mark.skipif(gpu_interpreter() is None, reason="needs the GPU interpreter of jax 0.11")
BOUND = TOLERANCES["causal_conv", "bfloat16"].bound
SMALL = (
    ConvSpec("tap by tap", 16, 32, 32, dilation=3, B=8),
    ConvSpec("a unit of few steps, whose past is longer", 8, 64, 64, dilation=9, snake=True, B=16),
    ConvSpec("a point", 8, 96, 96, taps=1, residual=True, B=16),
    ConvSpec("a part of a transposed one", 4, 64, 128, taps=2, period=64, B=16),
    ConvSpec("blocks of more than one group", 3, 32, 64, taps=3, snake=True, residual=True, B=64),
)


def operands(rng, spec):
    """Fresh numbers of a size that a sum keeps; alphas as trained codecs have them, some of them small."""

    def draw(name, shape):
        x = rng.standard_normal(shape)
        if name == "w_kIO":
            x *= (shape[0] * shape[1]) ** -0.5
        return jnp.asarray(np.exp(x) if name == "alpha_O" else x, jnp.bfloat16)

    return {name: draw(name, array.shape) for name, array in spec.arguments().items()}


def expected(past_BPI, x_BTI, w_kIO, bias_O, dilation, alpha_O=None, residual_BTO=None):
    """The formula in float64, a tap and a step at a time."""
    past, x, w, bias, alpha, residual = (
        None if a is None else np.asarray(a, np.float64)
        for a in (past_BPI, x_BTI, w_kIO, bias_O, alpha_O, residual_BTO)
    )
    seen = np.concatenate([past, x], axis=1)
    y = np.tile(bias, w.shape[2] // len(bias)) + np.stack(
        [sum(seen[:, t + k * dilation] @ w[k] for k in range(len(w))) for t in range(x.shape[1])], axis=1
    )
    if residual is not None:
        y = y + residual
    return y if alpha is None else y + np.sin(alpha * y) ** 2 / (alpha + 1e-9)


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_reference_is_the_formula(spec):
    given = operands(np.random.default_rng(), spec)
    wanted = expected(**given, dilation=spec.dilation)
    seen = np.concatenate([given["past_BPI"], given["x_BTI"]], axis=1)
    wide = {name: array.astype(jnp.float32) for name, array in given.items()}
    assert rel_err(pk.causal_conv(**wide, dilation=spec.dilation)[0], wanted) < 1e-6
    y, past = pk.causal_conv(**given, dilation=spec.dilation)
    assert y.dtype == jnp.bfloat16 and rel_err(y, wanted) < 6e-3  # it rounds after each line of the formula
    np.testing.assert_array_equal(past, seen[:, spec.T :])


@INTERPRETED
@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_interpreter_is_the_formula(spec):
    given = operands(np.random.default_rng(), spec)
    y, past = mosaic_sm90.causal_conv(**given, dilation=spec.dilation, interpret=gpu_interpreter())
    np.testing.assert_array_equal(past, pk.causal_conv(**given, dilation=spec.dilation)[1])
    assert y.dtype == jnp.bfloat16 and rel_err(y, expected(**given, dilation=spec.dilation)) < BOUND


@INTERPRETED
def test_a_slot_is_the_same_whatever_its_neighbours_hold():
    spec, rng = SMALL[1], np.random.default_rng()
    given = operands(rng, spec)
    run = functools.partial(mosaic_sm90.causal_conv, dilation=spec.dilation, interpret=gpu_interpreter())
    alone, _ = run(**given)
    others = given | {
        name: given[name].at[1:].set(jnp.nan if name == "past_BPI" else 7.0) for name in ("past_BPI", "x_BTI")
    }
    beside, _ = run(**others)
    np.testing.assert_array_equal(np.asarray(alone[0], np.float32), np.asarray(beside[0], np.float32))
    assert np.isnan(np.asarray(beside[1:], np.float32)).any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_lowers_for_cuda_as_one_kernel(spec):
    call = jax.jit(functools.partial(mosaic_sm90.causal_conv, dilation=spec.dilation))
    text = call.trace(**spec.arguments()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


def test_can_run_says_what_is_wrong():
    good = config.Shape(B=64, T=32, I=64, O=128, taps=7, period=128)
    choice = config.Config(cols=128, depth=64)
    assert config.can_run(choice, good, False) is None

    def reason(**change):
        fields = {name: change.pop(name) for name in ("B", "T", "I", "O", "period") if name in change}
        shape = config.Shape(**({"B": 64, "T": 32, "I": 64, "O": 128, "taps": 7, "period": 128} | fields))
        tiles = config.Config(**({"cols": 128, "depth": 64} | change))
        return config.can_run(tiles, shape, False)

    assert "4 slots are not a multiple of 8" in reason(B=4)
    assert "8 slots of 3 steps are not whole blocks of 128" in reason(B=8, T=3)
    assert "80 input channels are not a multiple" in reason(I=80)
    assert "96 output channels in groups of 96" in reason(O=96, period=96)
    assert "stages = 1 must be at least 2" in reason(stages=1)
    assert "shared memory" in reason(stages=9)
    given = operands(np.random.default_rng(0), SMALL[0])
    small = given["x_BTI"], given["w_kIO"], given["bias_O"]
    assert mosaic_sm90.why_not(*small, 1, False) is None
    assert "stride = 2 is not 1" in mosaic_sm90.why_not(*small, 2, False)
    assert "x is float32" in mosaic_sm90.why_not(small[0].astype(jnp.float32), *small[1:], 1, False)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_choices_fit(spec):
    given = spec.arguments()
    shape = mosaic_sm90.shape_of(given["x_BTI"], given["w_kIO"], given["bias_O"])
    choice = config.default_config(shape, spec.residual)
    assert config.can_run(choice, shape, spec.residual) is None
    assert choice in [*config.configs_to_try(shape, spec.residual), choice]
    assert all(config.can_run(c, shape, spec.residual) is None for c in config.configs_to_try(shape, spec.residual))


def test_operands_that_do_not_fit_are_refused():
    given = operands(np.random.default_rng(0), SMALL[2])
    for change, match in (
        ({"past_BPI": given["x_BTI"]}, "past must be"),
        ({"w_kIO": given["w_kIO"][:, :32]}, "x must be"),
        ({"bias_O": given["bias_O"][:50]}, "bias must be"),
        ({"residual_BTO": given["x_BTI"][:1]}, "residual must be"),
        ({"alpha_O": given["bias_O"][:1]}, "alpha must be"),
        ({"bias_O": given["bias_O"].astype(jnp.float32)}, "of one type"),
        ({"dilation": 0}, "must be positive"),
        ({"stride": 2}, "do not reach over a stride"),
    ):
        with pytest.raises(ValueError, match=match):
            pk.causal_conv(**given | change)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("spec", (*SMALL, *SPECS), ids=lambda spec: spec.name)
def test_a_hopper_computes_the_formula(spec):
    given = operands(np.random.default_rng(), spec)
    kernel = jax.jit(functools.partial(pk.causal_conv, dilation=spec.dilation, backend="mosaic"))
    y, past = kernel(**given)
    wide = {name: array.astype(jnp.float32) for name, array in given.items()}
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(functools.partial(pk.causal_conv, dilation=spec.dilation, backend="reference"))
        wanted, wanted_past = reference(**wide)
    assert rel_err(y, wanted) < BOUND
    np.testing.assert_array_equal(np.asarray(past, np.float32), np.asarray(wanted_past))
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(kernel(**given)[0], np.float32))
