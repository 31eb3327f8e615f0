"""What lies between two attentions, without a Hopper: the reference against float64, lowering, and the GPU interpreter.

The interpreter runs in processes of its own, as in `test_fast_frame`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._chain import Config
from pallas_kernels._testing import TOLERANCES, between_oracle, gpu_interpreter, rel_err, run_alone
from pallas_kernels.between_attentions import api, mosaic_sm90, reference
from pallas_kernels.between_attentions.arg_specs import SPECS
from pallas_kernels.quantize_blocks.reference import quantize_blocks

D, K, F, N = 256, 384, 384, 512
SMALL = Config(blocks=4, splits_qkv=1, splits_wo=2, splits_down=2, x_stages=2)
EPS = 1e-6
PARTS = {"between": (True, True), "first": (False, True), "last": (True, False)}


def operands(M, seed, parts="between"):
    rng = np.random.default_rng(seed)

    def quantised(rows, columns):
        values = rng.standard_normal((rows, columns)) * columns**-0.5 * np.exp(rng.standard_normal((rows, 1)))
        return quantize_blocks(jnp.asarray(values, jnp.float32), (128, 128))

    def norm():
        return jnp.asarray(1 + 0.3 * rng.standard_normal(D), jnp.float32)

    before = reference.Before(quantised(D, K), norm(), quantised(2 * F, D), quantised(D, F))
    after = reference.After(norm(), quantised(N, D))
    x, o = jnp.asarray(2 * rng.standard_normal((D, M)), jnp.float32), jnp.asarray(rng.standard_normal((M, K)))
    has_before, has_after = PARTS[parts]
    o = o.astype(jnp.bfloat16)
    return x, o if has_before else None, before if has_before else None, after if has_after else None


def dense(part):
    return (
        None if part is None else tuple(np.asarray(w.dequantize() if w.ndim == 2 else w) for w in vars(part).values())
    )


@pytest.mark.parametrize("parts", PARTS)
def test_reference_equals_float64(parts):
    x, o, before, after = operands(5, 1, parts)
    y, qkv = reference.between_attentions(x, o, before, after, EPS)
    wide = None if o is None else np.asarray(o.astype(jnp.float32))
    wanted, wanted_qkv = between_oracle(np.asarray(x), wide, dense(before), dense(after), EPS)
    assert rel_err(np.asarray(y), wanted) <= TOLERANCES["between_attentions", "float32"].bound
    assert (qkv is None) == (wanted_qkv is None)
    if qkv is not None:
        error = rel_err(np.asarray(qkv.astype(jnp.float32)), wanted_qkv)
        assert error <= TOLERANCES["between_attentions", "bfloat16"].bound


def interpreted(*arguments):
    y, qkv = mosaic_sm90.between_attentions(*arguments, EPS, SMALL, gpu_interpreter())
    return np.asarray(y), None if qkv is None else np.asarray(qkv.astype(jnp.float32))


def case_equals_the_reference():
    for parts in PARTS:
        arguments = operands(3, 2, parts)
        y, qkv = interpreted(*arguments)
        wanted, wanted_qkv = reference.between_attentions(*arguments, EPS)
        assert rel_err(y, np.asarray(wanted)) <= TOLERANCES["between_attentions", "float32"].bound, parts
        if qkv is not None and wanted_qkv is not None:
            error = rel_err(qkv, np.asarray(wanted_qkv.astype(jnp.float32)))
            assert error <= TOLERANCES["between_attentions", "bfloat16"].bound, parts


def case_a_token_depends_on_itself_alone():
    x, o, before, after = operands(3, 3)
    y, qkv = interpreted(x, o, before, after)
    x, o = x.at[:, 0].set(jnp.nan).at[:, 2].set(1e4), o.at[0].set(jnp.inf)
    others, other_qkv = interpreted(x, o, before, after)
    np.testing.assert_array_equal(others[:, 1], y[:, 1])
    np.testing.assert_array_equal(other_qkv[1], qkv[1])
    assert np.isnan(others[:, 0]).all() and np.isfinite(others[:, 1:]).all()


def case_tokens_without_an_o_are_padding():
    x, o, before, after = operands(8, 5)
    y, qkv = interpreted(x, o, before, after)
    padded, padded_qkv = interpreted(x.at[:, 3:].set(0), o[:3], before, after)
    np.testing.assert_array_equal(padded[:, :3], y[:, :3])
    np.testing.assert_array_equal(padded_qkv[:3], qkv[:3])
    wanted, _ = reference.between_attentions(x, o[:3], before, after, EPS)
    assert rel_err(padded[:, :3], np.asarray(wanted[:, :3])) <= TOLERANCES["between_attentions", "float32"].bound


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(
    "case", ["equals_the_reference", "a_token_depends_on_itself_alone", "tokens_without_an_o_are_padding"]
)
def test_interpreter(case):
    assert "RACE DETECTED" not in run_alone(__file__, case)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_lowers_for_cuda(spec):
    def call(*arguments):
        return mosaic_sm90.between_attentions(*arguments, EPS)

    traced = jax.jit(call).trace(*spec.arguments())
    assert str(traced.jaxpr).count("get_global") == 1, "one counter for all grid barriers, or each waits for its own"
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_operands_that_do_not_fit_are_refused():
    x, o, before, after = operands(3, 4)
    for arguments, match in (
        ((x, None, before, after), "o goes with"),
        ((x, None, None, None), "must be there"),
        ((x, jnp.tile(o, (2, 1)), before, after), "o is"),
        ((x[:128], o, before, after), "wo is"),
    ):
        with pytest.raises(ValueError, match=match):
            api.between_attentions(*arguments, eps=EPS)
    with pytest.raises(ValueError, match="less than 1"):
        Config(splits_wo=0)
    with pytest.raises(NotImplementedError, match="compute capability"):
        api.between_attentions(x, o, before, after, eps=EPS, backend="mosaic")


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
