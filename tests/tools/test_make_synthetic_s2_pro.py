from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from fishjax.config import CodecConfig, ModelConfig, s2_pro
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.load import public_shapes


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


def test_its_files_are_safetensors(tool, tmp_path):
    shapes = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 2, 2)}
    for dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)):
        arrays = list(tool.random_arrays(shapes, np.random.default_rng(0)))
        tool.write_safetensors(tmp_path / "x.safetensors", shapes, dtype, iter(arrays))
        read = load_file(tmp_path / "x.safetensors")
        for (name, shape), array in zip(shapes.items(), arrays, strict=True):
            assert read[name].shape == shape and np.array_equal(read[name], array.astype(dtype))
    assert json.dumps(tool.model_config(1))
