"""The shapes of minnow, in the public `config.json` layouts, and the folders that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from fishjax.codec import Codec
from fishjax.weights import load_codec as published
from fishjax.weights.codec_names import codec_to_public
from tools.minnow.training import Model, Params, save_tensors

CODEC: dict[str, Any] = {
    "sample_rate": 22050,
    "encoder_dim": 16,
    "encoder_rates": [2, 4, 4, 8],
    "decoder_dim": 256,
    "decoder_rates": [8, 4, 4, 2],
    "encoder_transformer_layers": [0, 0, 0, 0],
    "decoder_transformer_layers": [0, 0, 0, 0],
    "latent": 192,
    "semantic_codebook_size": 512,
    "codebook_size": 512,
    "n_codebooks": 9,
    "codebook_dim": 8,
    "downsample_factor": [2, 2],
    "module": {
        "n_layer": 1,
        "n_head": 3,
        "dim": 192,
        "intermediate_size": 576,
        "head_dim": 64,
        "window_size": 128,
    },
    "general_head_dim": 64,
    "encoder_window": 512,
    "norm_eps": 1e-5,
    "rope_base": 10000,
}

# The kind of decoder that learns many times faster; `--new-spectral-decoder` puts it behind a codec's books.
SPECTRAL_DECODER = {"decoder": "spectral", "decoder_dim": 256, "decoder_layers": 7}

# `--smoke`: everything runs, nothing is learnt well.
SMOKE_CODEC = {**CODEC, "encoder_dim": 8, "decoder_dim": 64, "latent": 128}
SMOKE_CODEC["module"] = {**CODEC["module"], "dim": 128, "n_head": 2, "intermediate_size": 128}


def dual_ar(vocab_size: int, semantic_begin_id: int, semantic_end_id: int, *, smoke: bool = False) -> dict[str, Any]:
    """minnow's nested (S2) `config.json`, or a smaller one of the same kind."""
    return {
        "model_type": "fish_qwen3_omni",
        "semantic_start_token_id": semantic_begin_id,
        "semantic_end_token_id": semantic_end_id,
        "text_config": {
            "vocab_size": vocab_size,
            "n_layer": 2 if smoke else 6,
            "n_head": 4,
            "n_local_heads": 2,
            "head_dim": 64,
            "dim": 256,
            "intermediate_size": 256 if smoke else 640,
            "rope_base": 10000,
            "norm_eps": 1e-5,
            "max_seq_len": 2048,
            "tie_word_embeddings": True,
            "attention_qkv_bias": False,
            "attention_o_bias": False,
            "attention_qk_norm": True,
        },
        "audio_decoder_config": {
            "vocab_size": CODEC["codebook_size"],
            "num_codebooks": 1 + CODEC["n_codebooks"],
            "n_layer": 1 if smoke else 2,
            "dim": 256,
            "n_head": 4,
            "n_local_heads": 2,
            "head_dim": 64,
            "intermediate_size": 256 if smoke else 512,
            "attention_qkv_bias": False,
            "attention_qk_norm": True,
            "attention_o_bias": False,
            "text_dim": 256,
        },
    }


def write_json(path: Path, value: Any) -> None:
    """A small JSON file, one key a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def save_codec(folder: Path, model: Model, params: Params, raw_config: dict[str, Any]) -> None:
    """The public codec folder: `config.json` and folded bfloat16 `model.safetensors`."""
    write_json(folder / "config.json", raw_config)
    codec = model.build({name: value.astype(jnp.bfloat16) for name, value in params.items()})
    save_tensors(folder / "model.safetensors", codec_to_public(codec))


def load_codec(folder: Path) -> tuple[Codec, dict[str, Any]]:
    """A float32 codec from such a folder, and its raw config."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return published.load_codec(folder)[1], raw
