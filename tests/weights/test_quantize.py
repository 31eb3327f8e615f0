from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.errors import WeightsError
from fishjax.model.dual_ar import DualAR, slice_head
from fishjax.model.layers import Linear
from fishjax.weights.assign import parameters
from fishjax.weights.load import load_dual_ar
from fishjax.weights.precision import Precision
from fishjax.weights.quantize import abstract_model, apply_precision, encode, formats, quantize_head
from pallas_kernels import BlockScaled, MxScaled
from pallas_kernels._testing import rel_err

FP32 = Precision.default("cpu")
FORMATS = {"fp8": BlockScaled, "mxfp8": MxScaled}
# One e4m3 rounding of an element is at most 2^-4 of it, 2^-4 / sqrt(3) on average; both operands are rounded once.
QUANTISATION = 0.05


def policy(text: str) -> Precision:
    return Precision.parse(text, FP32)


@pytest.fixture
def model(folders) -> DualAR:
    return load_dual_ar(folders["nested"])[1]


def test_only_linears_of_both_transformers_are_quantised(model):
    words = formats(model, policy("slow=fp8,fast=mxfp8"))
    slow = {path.removeprefix("slow.layers.0.") for path, word in words.items() if word == "fp8" and ".0." in path}
    assert slow == {"attention.wqkv.weight", "attention.wo.weight", *(f"feed_forward.w{i}.weight" for i in (1, 2, 3))}
    assert sum(word == "fp8" for word in words.values()) == 10
    fast = {path for path, word in words.items() if word == "mxfp8"}
    assert len(fast) == 7 and {"fast.project_in.weight", "fast.output.weight"} < fast
    assert words["fast.project_in.bias"] == words["slow.embeddings.weight"] == words["slow.norm.weight"] == "bf16"


def test_the_head_of_an_untied_model_stays_a_table(small_config):
    untied = dataclasses.replace(small_config, tie_word_embeddings=False)
    words = formats(nnx.eval_shape(lambda: DualAR(untied, rngs=nnx.Rngs(0))), policy("fp8"))
    assert words["slow.output.weight"] == "bf16"


@pytest.mark.parametrize("word", FORMATS)
def test_quantised_linear_is_its_dequantised_self(model, word):
    linear = model.slow.layers[0].feed_forward.w1
    plain_NK = np.asarray(linear.weight[...])
    x_MK = np.random.default_rng(1).standard_normal((5, plain_NK.shape[1])).astype(np.float32)
    apply_precision(model, policy(f"slow={word}"))
    weight = linear.weight[...]
    assert isinstance(weight, FORMATS[word])
    dequantised = np.asarray(weight.dequantize(), np.float64)
    assert rel_err(dequantised, plain_NK) < QUANTISATION
    # The same activations quantised by hand, the product in float64: only accumulation is left.
    x_dequantised = np.asarray(encode_rows(x_MK, word), np.float64)
    assert rel_err(linear(jnp.asarray(x_MK)), x_dequantised @ dequantised.T) < 1e-5
    assert rel_err(linear(jnp.asarray(x_MK)), x_MK.astype(np.float64) @ plain_NK.T) < 2 * QUANTISATION


def encode_rows(x_MK: np.ndarray, word: str) -> jax.Array:
    from pallas_kernels import quantize_blocks, quantize_mx

    return (quantize_blocks(jnp.asarray(x_MK)) if word == "fp8" else quantize_mx(jnp.asarray(x_MK))).dequantize()


def test_a_transposed_scale_grid_is_seen(model):
    """The planted layout bug: the same numbers, the scales laid out the wrong way round."""
    weight = encode(model.slow.layers[0].attention.wo.weight[...], "fp8")
    plain = np.asarray(model.slow.layers[0].attention.wo.weight[...])
    assert weight.scale_NbKb.shape == (2, 2)
    broken = dataclasses.replace(weight, scale_NbKb=weight.scale_NbKb.T)
    assert rel_err(weight.dequantize(), plain) < QUANTISATION
    assert rel_err(broken.dequantize(), plain) > 10 * QUANTISATION


@pytest.mark.parametrize("text", ["slow=fp8,fast=bf16", "slow=mxfp8,fast=fp8", "slow=bf16,fast=fp32"])
def test_whole_model_stays_close(model, text):
    rng = np.random.default_rng(2)
    columns = rng.integers(0, 64, (1, 5, 12)).astype(np.int32)
    columns[:, 0] += model.config.semantic_begin_id
    frames = columns[0, 1:].T
    hidden_BTD, logits_BTV = model.generate_forward(columns)
    fast = model.fast_logits(model.fast_hidden(hidden_BTD)[0], frames)
    apply_precision(model, policy(text))
    hidden_BTD, quantised_BTV = model.generate_forward(columns)
    quantised_fast = model.fast_logits(model.fast_hidden(hidden_BTD)[0], frames)
    assert hidden_BTD.dtype == jnp.bfloat16
    assert quantised_fast.dtype == (jnp.float32 if "fast=fp32" in text else jnp.bfloat16)
    errors = rel_err(quantised_BTV, logits_BTV), rel_err(quantised_fast, fast)
    assert 0 < max(errors) < 0.25, errors


def test_modules_with_quantised_weights_split_merge_and_trace(model):
    apply_precision(model, policy("fp8"))
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    linear_count, plain_count = 17, len(parameters(model)) - 17
    assert len(leaves) == 2 * linear_count + plain_count
    columns = np.full((1, 5, 3), 7, np.int32)

    @jax.jit
    def run(leaves):
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves)).generate_forward(columns)[1]

    np.testing.assert_allclose(run(leaves), model.generate_forward(columns)[1], rtol=0.05, atol=0.05)
    abstract = parameters(abstract_model(model.config, policy("fp8")))
    for path, variable in parameters(model).items():
        described = jax.tree.map(lambda a: (a.shape, a.dtype), variable.get_value())
        assert described == jax.tree.map(lambda a: (a.shape, a.dtype), abstract[path].get_value()), path


@pytest.mark.parametrize("word", ["fp32", "bf16", "fp8", "mxfp8"])
def test_sliced_head(model, word):
    head_NK = slice_head(model, im_end_id=422)
    quantised = quantize_head(head_NK, word)
    assert quantised.shape == head_NK.shape == (65, 256)  # rows that are no multiple of anything
    x_BD = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    assert rel_err(model.slow.logits(x_BD, quantised), model.slow.logits(x_BD, head_NK)) < 2 * QUANTISATION


def test_a_float32_head_gives_float32_logits(model):
    head_NK = slice_head(model, im_end_id=422)
    apply_precision(model, policy("bf16"))
    x_BD = jnp.ones((2, 256), jnp.bfloat16)
    assert model.slow.logits(x_BD, head_NK).dtype == jnp.float32
    assert model.slow.logits(x_BD, quantize_head(head_NK, "bf16")).dtype == jnp.bfloat16


def test_every_linear_that_does_not_fit_is_named(golden):
    model = load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1]
    with pytest.raises(WeightsError) as error:
        apply_precision(model, policy("slow=fp8,head=fp8"))
    named = re.findall(r"(\S+|the head) has K = (\d+), and fp8 needs a multiple of 128", str(error.value))
    assert len(named) == 3 * 5 + 1
    assert ("slow.layers.2.feed_forward.w2.weight", "96") in named and ("head", "64") in [
        (name.split()[-1], width) for name, width in named
    ]
    apply_precision(model, policy("slow=mxfp8"))  # 64 and 96 are multiples of 32
    with pytest.raises(WeightsError, match=r"fast.layers.0.attention.wqkv.weight has K = 48, and mxfp8 needs"):
        formats(model, policy("fast=mxfp8"))
    with pytest.raises(WeightsError, match="the head has K = 48"):
        quantize_head(jnp.ones((5, 48)), "fp8")


def test_what_is_quantised_cannot_change(model):
    apply_precision(model, policy("slow=fp8"))
    before = model.slow.layers[0].attention.wo.weight[...]
    apply_precision(model, policy("slow=fp8,fast=mxfp8"))
    assert np.array_equal(model.slow.layers[0].attention.wo.weight[...].values_NK, before.values_NK)
    with pytest.raises(WeightsError, match="stored as fp8 and cannot become bf16: convert the original"):
        apply_precision(model, policy("slow=bf16,fast=mxfp8"))


def test_bfloat16_weights_quantise_as_their_float32_selves():
    weight = Linear(256, 128, rngs=nnx.Rngs(0)).weight[...].astype(jnp.bfloat16)
    for word in FORMATS:
        a, b = encode(weight, word), encode(np.asarray(weight).astype(np.float32), word)
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
