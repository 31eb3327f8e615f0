"""Weights laid out for decoding: the same numbers, once, of real and of abstract models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.model.layers import FusedFeedForward
from fishjax.speech import assemble
from fishjax.weights.assign import parameters
from fishjax.weights.load import load_dual_ar
from fishjax.weights.model_folder import load_model
from fishjax.weights.precision import Precision
from fishjax.weights.prepare import prepare, prepared
from fishjax.weights.quantize import abstract_model, apply_precision
from pallas_kernels import BlockScaled, MxScaled
from pallas_kernels._testing import rel_err

FP32 = Precision.default("cpu")


def loaded(folders, text):
    model = load_dual_ar(folders["nested"])[1]
    apply_precision(model, Precision.parse(text, FP32))
    return model


@pytest.mark.parametrize("text", ["fp32", "slow=fp8,fast=mxfp8", "slow=mxfp8,fast=fp8"])
def test_a_prepared_block_computes_the_same(folders, text):
    published, model = loaded(folders, text), loaded(folders, text)
    prepare(model)
    for part, width in (("slow", 256), ("fast", 128)):
        old, new = (getattr(m, part).layers[0] for m in (published, model))
        assert isinstance(new.feed_forward, FusedFeedForward)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, width)), jnp.float32)
        for before, after in ((old.feed_forward, new.feed_forward), (old.attention.wqkv, new.attention.wqkv)):
            assert rel_err(np.asarray(after(x)), np.asarray(before(x), np.float64)) < 1e-5


def test_gate_and_up_are_not_exchanged(folders):
    published, model = loaded(folders, "fp32"), loaded(folders, "fp32")
    prepare(model)
    old, new = published.slow.layers[1].feed_forward, model.slow.layers[1].feed_forward
    wanted = np.concatenate([old.w1.weight[...], old.w3.weight[...]])
    np.testing.assert_array_equal(new.w_gate_up[...], wanted)
    np.testing.assert_array_equal(new.w_down[...], old.w2.weight[...])


def test_quantised_weights_are_as_kernels_read_them_and_stay_so(folders):
    model = loaded(folders, "slow=fp8,fast=mxfp8")
    prepare(model)
    quantised = {p: v.get_value() for p, v in parameters(model).items() if p.endswith(("weight", "gate_up", "down"))}
    quantised = {p: v for p, v in quantised.items() if isinstance(v, BlockScaled | MxScaled)}
    assert len(quantised) == 2 * 4 + 1 * 4 + 2
    for value in quantised.values():
        assert value.num_rows == value.shape[0] and value.values_NK.shape[0] % 64 == 0
        assert not isinstance(value, BlockScaled) or value.scale_NbKb.shape[1] % 32 == 0
    before = jax.tree.leaves(nnx.state(model))
    prepare(model)
    for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("text", ["fp32", "slow=fp8,fast=mxfp8"])
def test_an_abstract_model_has_the_same_shapes(folders, text):
    model = loaded(folders, text)
    prepare(model)
    abstract = nnx.eval_shape(prepared, abstract_model(model.config, Precision.parse(text, FP32)))
    described = [[(a.shape, a.dtype) for a in jax.tree.leaves(nnx.state(m))] for m in (model, abstract)]
    assert described[0] == described[1] and jax.tree.structure(nnx.state(model)) == jax.tree.structure(
        nnx.state(abstract)
    )


def test_an_assembled_engine_reads_prepared_weights(folders):
    model = load_model(folders["nested"], "slow=fp8")
    assemble(model, num_slots=1, max_len=64, model_name="x")
    assert isinstance(model.dual_ar.slow.layers[0].feed_forward, FusedFeedForward)
