"""The two public layouts of a DualAR `config.json`: what is absent in the flat one, and the nested one made flat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fishjax.errors import WeightsError

FLAT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "n_layer": 32,
    "n_head": 32,
    "n_local_heads": -1,
    "head_dim": 64,
    "dim": 4096,
    "rope_base": 10000.0,
    "norm_eps": 1e-5,
    "max_seq_len": 2048,
    "tie_word_embeddings": True,
    "attention_qkv_bias": False,
    "attention_o_bias": False,
    "attention_qk_norm": False,
    "codebook_size": 160,
    "num_codebooks": 4,
    "semantic_begin_id": 0,
    "semantic_end_id": 0,
    "scale_codebook_embeddings": False,
    "norm_fastlayer_input": False,
    "n_fast_layer": 4,
}


def flatten_nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The nested S2 layout as flat keys; absent fields stay absent, so that the flat defaults apply."""
    text, audio = raw.get("text_config"), raw.get("audio_decoder_config")
    if not isinstance(text, Mapping) or not isinstance(audio, Mapping):
        raise WeightsError("a nested config needs 'text_config' and 'audio_decoder_config'")
    flat = {name: text[name] for name in (*FLAT_DEFAULTS, "intermediate_size") if name in text}
    # In this layout None and absent are the same: both fall back to the flat default.
    flat = {name: value for name, value in flat.items() if value is not None}
    flat["semantic_begin_id"] = raw.get("semantic_start_token_id")
    flat["semantic_end_id"] = raw.get("semantic_end_token_id")
    flat["codebook_size"] = audio.get("vocab_size")
    flat["num_codebooks"] = audio.get("num_codebooks")
    flat["n_fast_layer"] = audio.get("n_layer")
    for name in ("dim", "n_head", "n_local_heads", "head_dim", "intermediate_size"):
        flat[f"fast_{name}"] = audio.get(name)
    for name in ("qkv_bias", "qk_norm", "o_bias"):
        flat[f"fast_attention_{name}"] = audio.get(f"attention_{name}")
    flat["scale_codebook_embeddings"] = True
    flat["norm_fastlayer_input"] = True
    return flat
