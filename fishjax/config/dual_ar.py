"""The DualAR model: its two transformers and how they are joined, from either public layout of `config.json`.

The flat "dual_ar" of S1 and the nested "fish_qwen3_omni" of S2 both become `ModelConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fishjax.errors import WeightsError

from .fields import check_whole, flag, positive, read, reader, whole
from .files import read_config
from .layouts import FLAT_DEFAULTS, flatten_nested
from .transformer import TransformerConfig

PromptLayout = Literal["chat", "interleave"]
Fused = Literal["none", "slow", "both"]
"""Which of the two transformers step through kernels that hold many operations each, see `fishjax.model.fused`."""
# Fields of `TransformerConfig` and what the flat layout calls them.
_SIZES = {
    "dim": "dim",
    "num_heads": "n_head",
    "num_kv_heads": "n_local_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
}
_SWITCHES = {"qkv_bias": "attention_qkv_bias", "o_bias": "attention_o_bias", "qk_norm": "attention_qk_norm"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DualAR model: the slow and the fast transformer and how they are joined."""

    slow: TransformerConfig
    fast: TransformerConfig
    vocab_size: int
    num_codebooks: int
    codebook_size: int
    semantic_begin_id: int
    semantic_end_id: int
    max_seq_len: int = 2048
    tie_word_embeddings: bool = True
    scale_codebook_embeddings: bool = False
    norm_fastlayer_input: bool = False
    prompt_layout: PromptLayout = "chat"

    def __post_init__(self):
        positive(self, "vocab_size", "num_codebooks", "codebook_size", "max_seq_len")
        whole(self, "semantic_begin_id", "semantic_end_id")
        flag(self, "tie_word_embeddings", "scale_codebook_embeddings", "norm_fastlayer_input")
        if self.prompt_layout not in get_args(PromptLayout):
            raise WeightsError(
                f"prompt_layout must be one of {', '.join(get_args(PromptLayout))}, not {self.prompt_layout!r}"
            )
        if self.num_codebooks < 2:
            raise WeightsError(f"num_codebooks ({self.num_codebooks}) must be at least 2")
        if not 0 <= self.semantic_begin_id <= self.semantic_end_id < self.vocab_size:
            raise WeightsError(
                f"semantic ids {self.semantic_begin_id}..{self.semantic_end_id} do not lie in a vocabulary "
                f"of {self.vocab_size}"
            )

    @property
    def has_fast_projection(self) -> bool:
        """Whether `fast_project_in` exists (it is the identity when both widths agree)."""
        return self.fast.dim != self.slow.dim

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a parsed public `config.json`, flat or nested. Unknown keys are ignored."""
        if "text_config" in raw or raw.get("model_type") == "fish_qwen3_omni":
            return cls._from_flat(flatten_nested(raw), layout="chat")
        return cls._from_flat(dict(raw), layout=raw.get("prompt_layout", "interleave"))

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a `config.json`; a wrong file is a `WeightsError` that names it."""
        return read_config(path, cls.from_dict)

    @classmethod
    def _from_flat(cls, flat: dict[str, Any], *, layout: PromptLayout) -> ModelConfig:
        get = reader({**FLAT_DEFAULTS, **{k: v for k, v in flat.items() if v is not None}})
        num_heads, dim = get("n_head"), get("dim")
        for name, value in (("n_head", num_heads), ("dim", dim)):
            check_whole(name, value, 1)
        num_kv_heads = get("n_local_heads")
        # An explicit null head_dim means dim / n_head; an absent one means the class default, 64.
        head_dim = dim // num_heads if flat.get("head_dim", 64) is None else get("head_dim")
        own = {
            "num_kv_heads": num_heads if num_kv_heads == -1 else num_kv_heads,
            "head_dim": head_dim,
            "ffn_dim": flat.get("intermediate_size") or _default_ffn_dim(dim),
        }
        slow = read(TransformerConfig, get, own, num_layers="n_layer", num_heads="n_head", **_SWITCHES)
        # Of the fast one the file says what differs from the slow one; 0 says nothing, false does.
        said = {ours: flat.get(f"fast_{theirs}") for ours, theirs in (_SIZES | _SWITCHES).items()}
        said = {name: value for name, value in said.items() if value is False or value not in (None, 0)}
        fast = dataclasses.replace(slow, num_layers=get("n_fast_layer"), **said)
        return read(cls, get, {"slow": slow, "fast": fast, "prompt_layout": layout})


def s2_pro(num_layers: int = 36) -> ModelConfig:
    """Shapes of S2-Pro, whose codec is `CodecConfig()`; fewer slow layers make a smaller model of the same widths."""
    slow = TransformerConfig(
        num_layers, 2560, num_heads=32, num_kv_heads=8, head_dim=128, ffn_dim=9728, rope_base=1e6, norm_eps=1e-6,
        qk_norm=True,
    )  # fmt: skip
    return ModelConfig(
        slow=slow,
        fast=dataclasses.replace(slow, num_layers=4, qk_norm=False),
        vocab_size=155776,
        num_codebooks=10,
        codebook_size=4096,
        semantic_begin_id=151678,
        semantic_end_id=155773,
        max_seq_len=32768,
        scale_codebook_embeddings=True,
        norm_fastlayer_input=True,
    )


def _default_ffn_dim(dim: int) -> int:
    return -(-(8 * dim // 3) // 256) * 256
