"""A model small enough for tests whose widths FP8 can take: published folders in both layouts, random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fishjax.config import ModelConfig
from fishjax.weights.load import abstract_dual_ar, public_shapes
from fishjax.weights.names import to_ours, to_public

SLOW = {"dim": 256, "n_layer": 2, "n_head": 4, "n_local_heads": 2, "head_dim": 64, "intermediate_size": 384}
FAST = {"dim": 128, "n_layer": 1, "n_head": 2, "n_local_heads": 1, "head_dim": 64, "intermediate_size": 256}


def nested_config(golden: Path) -> dict:
    raw = json.loads((golden / "dualar_tiny" / "s2_layout" / "config.json").read_text())
    raw["text_config"] |= SLOW
    raw["audio_decoder_config"] |= FAST | {"text_dim": SLOW["dim"]}
    return raw


def flat_config(golden: Path) -> dict:
    raw = json.loads((golden / "dualar_tiny" / "s1_layout" / "config.json").read_text())
    raw |= SLOW | {f"fast_{name}": value for name, value in FAST.items() if name != "n_layer"}
    return raw | {"n_fast_layer": FAST["n_layer"]}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Nested names. The magnitude of matrices changes from block to block, so that a misplaced scale shows."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in public_shapes(config).items():
        array = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            blocks = [-(-size // 128) for size in shape]
            magnitude = np.repeat(np.repeat(2.0 ** rng.uniform(-4, 4, blocks), 128, 0), 128, 1)[: shape[0], : shape[1]]
            array *= magnitude.astype(np.float32) / shape[1] ** 0.5
        tensors[name] = array if len(shape) == 2 else 1 + 0.1 * array
    return tensors


@pytest.fixture(scope="session")
def folders(golden, tmp_path_factory) -> dict[str, Path]:
    """Keys nested and flat: two whole published folders with the same numbers. Copy before changing."""
    root = tmp_path_factory.mktemp("published")
    config = ModelConfig.from_dict(nested_config(golden))
    tensors = random_tensors(config)
    made = {}
    for layout, raw in (("nested", nested_config(golden)), ("flat", flat_config(golden))):
        folder = made[layout] = root / layout
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
        shutil.copyfile(golden / "prompt_format" / "tokenizer.json", folder / "tokenizer.json")
        (folder / "codec").mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(golden / "codec_tiny" / name, folder / "codec" / name)
    save_file(tensors, made["nested"] / "model.safetensors")
    ours = {path: tensors[names[0]] for path, names in to_ours(tensors).items()}
    save_file({to_public(path, "flat"): array for path, array in ours.items()}, made["flat"] / "model.safetensors")
    return made


@pytest.fixture
def nested(folders, tmp_path) -> Path:
    """A copy of the nested folder that a test may break."""
    return shutil.copytree(folders["nested"], tmp_path / "nested")


@pytest.fixture(scope="session")
def small_config(golden) -> ModelConfig:
    config = ModelConfig.from_dict(nested_config(golden))
    assert abstract_dual_ar(config).fast.project_in is not None
    return config
