"""Published tensors onto the module and back, in every spelling, and what is said of wrong ones."""

from __future__ import annotations

import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fishjax.config import CodecConfig
from fishjax.errors import WeightsError
from fishjax.weights.assign import parameters
from fishjax.weights.codec_names import assign_public, codec_to_public, public_shapes, weight_norm_shapes
from fishjax.weights.load_codec import abstract_codec, load_codec


@pytest.fixture(scope="module")
def stored(golden):
    return load_file(golden / "codec_tiny" / "model.safetensors")


def assert_same(left, right):
    left, right = parameters(left), parameters(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        np.testing.assert_array_equal(np.asarray(value[...]), np.asarray(right[path][...]), err_msg=path)


def reload(codec, tensors):
    fresh = abstract_codec(codec.config)
    assign_public(fresh, tensors, source="here")
    return fresh


def test_module_to_public_to_module_is_bit_for_bit(tiny, tmp_path, golden):
    public = codec_to_public(tiny)
    assert {name: value.shape for name, value in public.items()} == public_shapes(tiny)
    assert_same(reload(tiny, public), tiny)
    shutil.copy(golden / "codec_tiny" / "config.json", tmp_path)
    save_file(public, tmp_path / "model.safetensors")
    assert_same(load_codec(tmp_path)[1], tiny)


def test_public_layout_is_the_published_one(tiny, stored):
    """Folded weights against the formula, from the pairs as they are stored."""
    public = codec_to_public(tiny)
    for name in ("encoder.block.1.block.4", "decoder.model.2.block.1"):
        g = stored[f"{name}.conv.parametrizations.weight.original0"].astype(np.float64)
        v = stored[f"{name}.conv.parametrizations.weight.original1"].astype(np.float64)
        wanted = g * v / np.sqrt((v**2).sum(axis=(1, 2), keepdims=True))
        np.testing.assert_allclose(public[f"{name}.conv.weight"], wanted, rtol=1e-6)
    for name in ("decoder.model.1.block.0.alpha", "quantizer.upsample.0.0.conv.weight"):
        np.testing.assert_array_equal(public[name], stored[name])
    assert {name: value.shape for name, value in stored.items()} == weight_norm_shapes(tiny)


def test_prefix_and_buffers_are_dropped(tiny, stored):
    spelled = {f"generator.{name}": value for name, value in stored.items()}
    spelled["generator.quantizer.pre_module.freqs_cis"] = np.zeros((4, 2))
    spelled["quantizer.post_module.causal_mask"] = np.zeros((4, 4), bool)
    assert_same(reload(tiny, spelled), tiny)


def test_type_of_the_parameters(golden):
    values = parameters(load_codec(golden / "codec_tiny", jnp.bfloat16)[1]).values()
    assert {value.dtype for value in values} == {jnp.dtype(jnp.bfloat16)}


def test_everything_wrong_is_named_at_once(tiny, stored):
    wrong = dict(stored)
    del wrong["quantizer.quantizer.quantizers.1.codebook.weight"]
    del wrong["decoder.model.0.conv.parametrizations.weight.original0"]
    wrong["quantizer.post_module.norm.weight"] = np.ones(65, np.float32)
    wrong["encoder.block.0.conv.parametrizations.weight.original1"] = np.ones((8, 1, 5), np.float32)
    wrong["decoder.model.9.alpha"] = np.ones((1, 6, 1), np.float32)
    with pytest.raises(WeightsError) as raised:
        reload(tiny, wrong)
    message = str(raised.value)
    assert "2 missing: decoder.model.0.conv.weight, quantizer.quantizer.quantizers.1.codebook.weight" in message
    assert "2 extra: decoder.model.0.conv.parametrizations.weight.original1, decoder.model.9.alpha" in message
    assert "encoder.block.0.conv.weight is (8, 1, 5), should be (8, 1, 7)" in message
    assert "quantizer.post_module.norm.weight is (65,), should be (64,)" in message


def test_a_failed_load_changes_nothing(tiny, stored):
    before = codec_to_public(tiny)
    with pytest.raises(WeightsError):
        assign_public(tiny, {name: value + 1 for name, value in list(stored.items())[1:]}, source="here")
    after = codec_to_public(tiny)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_missing_places(tmp_path):
    with pytest.raises(WeightsError, match=r"no codec at .*nowhere"):
        load_codec(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"cannot read .*config.json"):
        load_codec(tmp_path)


def test_a_pth_without_torch_is_one_clear_sentence(tmp_path, monkeypatch):
    (tmp_path / "codec.pth").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WeightsError, match=r"codec.pth needs torch: install fishjax\[convert\]"):
        load_codec(tmp_path / "codec.pth")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "generator."])
def test_pth_with_and_without_wrapper_and_prefix(tiny, stored, golden, tmp_path, wrapped, prefix):
    torch = pytest.importorskip("torch", reason="torch only serves to read .pth files (extra convert)")
    tensors = {prefix + name: torch.from_numpy(value) for name, value in stored.items()}
    tensors[prefix + "quantizer.pre_module.freqs_cis"] = torch.zeros(3, dtype=torch.bfloat16)
    torch.save({"state_dict": tensors} if wrapped else tensors, tmp_path / "model.pth")
    shutil.copy(golden / "codec_tiny" / "config.json", tmp_path)
    assert_same(load_codec(tmp_path)[1], tiny)
    # Alone, without a config, a .pth is the published codec; these shapes are not.
    with pytest.raises(WeightsError, match="misshapen"):
        load_codec(tmp_path / "model.pth")


def test_published_shapes_are_what_a_bare_pth_means():
    shapes = weight_norm_shapes(abstract_codec(CodecConfig()))
    assert len(shapes) == 535
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 391_430_530
