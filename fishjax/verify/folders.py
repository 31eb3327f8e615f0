"""What a folder of recorded numbers holds, known by its content and not by its name."""

from __future__ import annotations

from pathlib import Path

from fishjax.config import read_json


def model_folders(folder: Path) -> list[Path]:
    """The DualAR model folders that `expected.safetensors` of this folder speaks of: itself or its children."""
    if not (folder / "expected.safetensors").is_file():
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    return [place for place in (folder, *children) if is_dual_ar_config(place / "config.json")]


def is_dual_ar_config(path: Path) -> bool:
    """Whether `path` is the config of a DualAR model, in either published layout."""
    if not path.is_file():
        return False
    raw = read_json(path)
    return "text_config" in raw or raw.get("model_type") == "dual_ar" or {"vocab_size", "n_fast_layer"} <= raw.keys()


def is_codec_config(path: Path) -> bool:
    """Whether `path` is the config of a codec."""
    return path.is_file() and {"encoder_dim", "decoder_rates"} <= read_json(path).keys()
