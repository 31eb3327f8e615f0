"""Public DualAR folders: both layouts, every spelling, strictness."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fishjax.errors import WeightsError
from fishjax.weights.assign import parameters
from fishjax.weights.load import dual_ar_to_public, load_dual_ar, read_model_config
from fishjax.weights.names import to_ours, to_public


@pytest.fixture
def flat(golden, tmp_path):
    """A writable copy of the flat folder, and a function that rewrites its tensors."""
    folder = tmp_path / "flat"
    shutil.copytree(golden / "dualar_tiny" / "s1_layout", folder)

    def rewrite(change):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors) or tensors, folder / "model.safetensors")
        return folder

    return rewrite


def same(a, b) -> bool:
    a, b = parameters(a), parameters(b)
    return a.keys() == b.keys() and all(np.array_equal(a[path][...], b[path][...]) for path in a)


@pytest.fixture(scope="module")
def model(golden):
    return load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1]


def test_both_layouts_give_the_same_parameters(golden, model):
    config, other = load_dual_ar(golden / "dualar_tiny" / "s1_layout")
    assert same(model, other)
    assert config.slow == model.config.slow and config.fast == model.config.fast
    weight = parameters(other)["slow.layers.0.attention.wqkv.weight"][...]
    parts = load_file(golden / "dualar_tiny" / "s1_layout" / "model.safetensors")
    joined = np.concatenate([parts[f"layers.0.attention.w{x}.weight"] for x in "qkv"])
    np.testing.assert_array_equal(weight, joined)


def test_public_round_trip(golden, model, tmp_path):
    public = dual_ar_to_public(model)
    stored = {}
    for shard in sorted((golden / "dualar_tiny" / "s2_layout").glob("*.safetensors")):
        stored |= load_file(shard)
    assert public.keys() == stored.keys()
    assert all(np.array_equal(public[name], stored[name]) for name in stored)
    save_file(public, tmp_path / "model.safetensors")
    shutil.copy(golden / "dualar_tiny" / "s2_layout" / "config.json", tmp_path)
    assert same(load_dual_ar(tmp_path)[1], model)


def test_model_prefix_is_stripped_everywhere_and_audio_dropped(flat, model):
    folder = flat(lambda t: {f"model.{k}": v for k, v in t.items()} | {"model.audio_projector.weight": np.ones((2, 2))})
    assert same(load_dual_ar(folder)[1], model)


def test_dtype_and_bfloat16_files(flat, model):
    folder = flat(lambda t: {k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()})
    loaded = parameters(load_dual_ar(folder, jnp.bfloat16)[1])
    for path, variable in parameters(model).items():
        assert loaded[path][...].dtype == jnp.bfloat16
        np.testing.assert_array_equal(loaded[path][...], variable[...].astype(jnp.bfloat16))


def test_missing_extra_and_misshapen_are_named_together(flat):
    def change(tensors):
        del tensors["norm.weight"], tensors["layers.0.attention.wk.weight"]
        tensors["fast_layers.7.ffn_norm.weight"] = np.ones(3, np.float32)
        tensors["fast_output.weight"] = np.ones((3, 4), np.float32)

    with pytest.raises(WeightsError) as error:
        load_dual_ar(flat(change))
    message = str(error.value)
    for part in (
        "missing: layers.0.attention.wqkv.weight, norm.weight",
        "extra: fast_layers.7.ffn_norm.weight, layers.0.attention.wq.weight, layers.0.attention.wv.weight",
        "fast_output.weight is (3, 4), should be (64, 48)",
    ):
        assert part in message


def test_separate_parts_that_do_not_fit_are_misshapen(flat):
    with pytest.raises(WeightsError, match=r"misshapen: layers.0.attention.wqkv.weight"):
        load_dual_ar(flat(lambda t: t | {"layers.0.attention.wk.weight": np.ones((32, 63), np.float32)}))


def test_two_names_for_one_tensor_are_refused():
    with pytest.raises(WeightsError, match=r"both mean 'norm.weight'"):
        to_ours(["text_model.model.norm.weight", "norm.weight"])


@pytest.mark.parametrize(
    ("path", "flat", "nested"),
    [
        ("slow.embeddings.weight", "embeddings.weight", "text_model.model.embeddings.weight"),
        ("slow.codebook_embeddings.weight", "codebook_embeddings.weight", "audio_decoder.codebook_embeddings.weight"),
        ("fast.embeddings.weight", "fast_embeddings.weight", "audio_decoder.embeddings.weight"),
        ("fast.layers.3.ffn_norm.weight", "fast_layers.3.ffn_norm.weight", "audio_decoder.layers.3.ffn_norm.weight"),
        ("fast.project_in.bias", "fast_project_in.bias", "audio_decoder.project_in.bias"),
    ],
)
def test_names_both_ways(path, flat, nested):
    assert (to_public(path, "flat"), to_public(path, "nested")) == (flat, nested)
    assert to_ours([flat]) == {path: (flat,)}
    assert to_ours([nested]) == {path: (nested,)}


def test_a_tokenizer_beside_the_weights_overrides_the_semantic_ids(golden, flat):
    folder = flat(lambda t: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"semantic_begin_id": 1, "semantic_end_id": 2}))
    assert read_model_config(folder).semantic_begin_id == 1
    shutil.copy(golden / "prompt_format" / "tokenizer.json", folder)
    read = read_model_config(folder)
    assert (read.semantic_begin_id, read.semantic_end_id) == (432, 495)


def test_index_and_shards_must_agree(golden, tmp_path):
    folder = tmp_path / "nested"
    shutil.copytree(golden / "dualar_tiny" / "s2_layout", folder)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["weight_map"]["text_model.model.norm.weight"]
    index_path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"not in the index \['text_model.model.norm.weight'\]"):
        load_dual_ar(folder)


def test_an_index_may_not_point_outside_its_folder(golden, tmp_path):
    (tmp_path / "config.json").write_bytes((golden / "dualar_tiny" / "s1_layout" / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(WeightsError, match="outside its folder"):
        load_dual_ar(tmp_path)


@pytest.mark.parametrize("dtype", [np.int32, bool, ml_dtypes.float8_e4m3fn])
def test_tensors_that_are_no_weights_by_their_type_are_named(flat, dtype):
    """Casting them would load, and speak noise."""
    folder = flat(lambda t: t.update({"norm.weight": t["norm.weight"].astype(dtype)}))
    with pytest.raises(WeightsError, match=r"1 mistyped: norm.weight is .*, should be one of float64, float32"):
        load_dual_ar(folder)


def test_an_index_must_map_names_to_files(golden, tmp_path):
    (tmp_path / "config.json").write_bytes((golden / "dualar_tiny" / "s1_layout" / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 7}}')
    with pytest.raises(WeightsError, match="no 'weight_map' from tensor names to file names"):
        load_dual_ar(tmp_path)


@pytest.mark.parametrize("damage", ["no weights", "cut", "no config"])
def test_unreadable_folders_say_which_file(flat, damage):
    folder = flat(lambda t: None)
    path = folder / ("config.json" if damage == "no config" else "model.safetensors")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    else:
        path.unlink()
    with pytest.raises(WeightsError, match=path.name):
        load_dual_ar(folder)


@pytest.mark.parametrize("wrapped", [False, True])
def test_pth_with_and_without_wrapper(golden, flat, model, wrapped):
    torch = pytest.importorskip("torch")
    folder = flat(lambda t: None)
    tensors = {k: torch.from_numpy(v) for k, v in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save({"state_dict": tensors} if wrapped else tensors, folder / "model.pth")
    assert same(load_dual_ar(folder)[1], model)


def test_pth_without_torch_says_what_to_install(flat, monkeypatch):
    folder = flat(lambda t: None)
    (folder / "model.safetensors").rename(folder / "model.pth")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(WeightsError, match=r"fishjax\[convert\]"):
        load_dual_ar(folder)
