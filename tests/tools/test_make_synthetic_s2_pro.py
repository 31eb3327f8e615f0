from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import fishjax
from fishjax.config import CodecConfig, ModelConfig, s2_pro
from fishjax.engine.sampling_params import SamplingParams
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.convert import convert
from fishjax.weights.load import public_shapes
from fishjax.weights.precision import Precision


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[2] / "tools" / "make_synthetic_s2_pro.py"
    spec = importlib.util.spec_from_file_location("make_synthetic_s2_pro", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_has_the_published_shapes(tool, golden):
    published = ModelConfig.from_file(golden / "dualar_real" / "s2_pro_config.json")
    ours = ModelConfig.from_dict(tool.model_config())
    assert ours == published == s2_pro()
    assert ModelConfig.from_dict(tool.model_config(2)) == s2_pro(2)
    assert sum(int(np.prod(shape)) for shape in public_shapes(ours).values()) == 4_561_852_416
    assert CodecConfig.from_dict(tool._CODEC_CONFIG) == CodecConfig()


def test_its_tokenizer_has_the_published_ids(tool):
    tokenizer = Tokenizer(tool.make_tokenizer().to_str())
    assert (tokenizer.semantic_begin_id, tokenizer.semantic_end_id) == (151678, 155773)
    for id_, name in tool.SPECIALS.items():
        assert tokenizer.token_id(name) == id_
    assert max(tokenizer.encode("Hello <|voice|> [laugh] 今天")) < 256


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)], ids=str)
def test_its_files_are_safetensors(tool, tmp_path, dtype):
    shapes = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 2, 2)}
    arrays = list(tool.Noise(0, dtype).arrays(shapes))
    tool.write_safetensors(tmp_path / "x.safetensors", shapes, dtype, iter(arrays))
    read = load_file(tmp_path / "x.safetensors")
    for (name, shape), array in zip(shapes.items(), arrays, strict=True):
        assert read[name].shape == shape and np.array_equal(read[name], array)


def test_its_numbers_are_normal_and_those_of_the_seed(tool, monkeypatch):
    monkeypatch.setattr(tool, "BLOCK_SIZE", 20_011)  # less than a matrix has, so that it is cut from several
    shapes = {"w.weight": (200, 400), "norm.weight": (4000,), "w.bias": (4000,), "again.weight": (200, 400)}
    dtype = np.dtype(np.float32)
    w, norm, bias, again = tool.Noise(1, dtype).arrays(shapes)
    assert abs(w.std() * 20 - 1) < 0.02 and abs(w.mean()) < 0.001
    assert abs(norm.mean() - 1) < 0.01 and abs(bias.mean()) < 0.01
    assert len(np.unique(w[:, 0])) == 200 and not np.array_equal(w, again)
    assert np.array_equal(next(tool.Noise(1, dtype).arrays(shapes)), w)
    assert not np.array_equal(next(tool.Noise(2, dtype).arrays(shapes)), w)


def test_a_tiny_one_is_converted_and_speaks(tool, tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["make", str(source), "--tiny", "--layers", "1"])
    tool.main()
    convert(source, out, Precision.for_checkpoint("slow=fp8,fast=fp8,head=fp8,kv=fp8"))
    speech = fishjax.load(out, max_len=128, fused="both", warm=False)
    utterance = speech.utterance("red", sampling=SamplingParams(seed=3, max_frames=3))
    frames = list(speech.speak(utterance))
    assert len(frames) == 3 and all(frame.shape == (2048,) and np.ptp(frame) > 0 for frame in frames)
