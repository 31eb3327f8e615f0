"""Shapes of the models: frozen, hashable dataclasses read from a public `config.json`.

Place in the flow: everything below takes one of these; nothing here knows weights, JAX or text.
The two public layouts (flat "dual_ar" of S1, nested "fish_qwen3_omni" of S2) both become `ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fishjax.errors import WeightsError

PromptLayout = Literal["chat", "interleave"]
_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """One decoder-only transformer: the slow one (over frames) or the fast one (over codebooks)."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        _positive(self, "num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
        _real(self, "rope_base", "norm_eps")
        _flag(self, "qkv_bias", "o_bias", "qk_norm")
        if self.num_heads % self.num_kv_heads:
            raise WeightsError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.dim % self.num_heads:
            raise WeightsError(f"dim ({self.dim}) must be a multiple of num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise WeightsError(f"head_dim ({self.head_dim}) must be even: rotary pairs")

    @property
    def qkv_dim(self) -> int:
        """Rows of `wqkv`: all query heads, then key heads, then value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


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
        _positive(self, "vocab_size", "num_codebooks", "codebook_size", "max_seq_len")
        _whole(self, "semantic_begin_id", "semantic_end_id")
        _flag(self, "tie_word_embeddings", "scale_codebook_embeddings", "norm_fastlayer_input")
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
            return cls._from_flat(_flatten_nested(raw), layout="chat")
        return cls._from_flat(dict(raw), layout=raw.get("prompt_layout", "interleave"))

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a `config.json`; a wrong file is a `WeightsError` that names it."""
        return _from_file(path, cls.from_dict)

    @classmethod
    def _from_flat(cls, flat: dict[str, Any], *, layout: PromptLayout) -> ModelConfig:
        get = _reader({**_FLAT_DEFAULTS, **{k: v for k, v in flat.items() if v is not None}})
        num_heads, dim = get("n_head"), get("dim")
        for name, value in (("n_head", num_heads), ("dim", dim)):
            _check_whole(name, value, 1)
        num_kv_heads = get("n_local_heads")
        # An explicit null head_dim means dim / n_head; an absent one means the class default, 64.
        head_dim = dim // num_heads if flat.get("head_dim", 64) is None else get("head_dim")
        slow = TransformerConfig(
            num_layers=get("n_layer"),
            dim=dim,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads == -1 else num_kv_heads,
            head_dim=head_dim,
            ffn_dim=flat.get("intermediate_size") or _default_ffn_dim(dim),
            rope_base=get("rope_base"),
            norm_eps=get("norm_eps"),
            qkv_bias=get("attention_qkv_bias"),
            o_bias=get("attention_o_bias"),
            qk_norm=get("attention_qk_norm"),
        )

        def fast_or_slow(name: str, inherited: Any) -> Any:
            value = flat.get(name)
            return inherited if value in (None, 0) and value is not False else value

        fast = TransformerConfig(
            num_layers=get("n_fast_layer"),
            dim=fast_or_slow("fast_dim", slow.dim),
            num_heads=fast_or_slow("fast_n_head", slow.num_heads),
            num_kv_heads=fast_or_slow("fast_n_local_heads", slow.num_kv_heads),
            head_dim=fast_or_slow("fast_head_dim", slow.head_dim),
            ffn_dim=fast_or_slow("fast_intermediate_size", slow.ffn_dim),
            rope_base=slow.rope_base,
            norm_eps=slow.norm_eps,
            qkv_bias=fast_or_slow("fast_attention_qkv_bias", slow.qkv_bias),
            o_bias=fast_or_slow("fast_attention_o_bias", slow.o_bias),
            qk_norm=fast_or_slow("fast_attention_qk_norm", slow.qk_norm),
        )
        return cls(
            slow=slow,
            fast=fast,
            vocab_size=get("vocab_size"),
            num_codebooks=get("num_codebooks"),
            codebook_size=get("codebook_size"),
            semantic_begin_id=get("semantic_begin_id"),
            semantic_end_id=get("semantic_end_id"),
            max_seq_len=get("max_seq_len"),
            tie_word_embeddings=get("tie_word_embeddings"),
            scale_codebook_embeddings=get("scale_codebook_embeddings"),
            norm_fastlayer_input=get("norm_fastlayer_input"),
            prompt_layout=layout,
        )


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


@dataclass(frozen=True, slots=True)
class CodecTransformerConfig:
    """A windowed causal transformer inside the codec (multi-head, no grouped heads)."""

    num_layers: int
    dim: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    window: int
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self):
        _positive(self, "num_layers", "dim", "num_heads", "head_dim", "ffn_dim", "window")
        _real(self, "norm_eps", "rope_base")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The causal DAC variant: encoder, residual quantiser with a semantic book, decoder. Defaults: published."""

    sample_rate_hz: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    encoder_transformer_layers: tuple[int, ...] = (0, 0, 0, 4)
    encoder_window: int = 512
    encoder_head_dim: int = 64
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    latent_dim: int = 1024
    semantic_codebook_size: int = 4096
    residual_codebook_size: int = 1024
    num_residual_codebooks: int = 9
    codebook_dim: int = 8
    downsample_factors: tuple[int, ...] = (2, 2)
    transformer: CodecTransformerConfig = field(
        default_factory=lambda: CodecTransformerConfig(
            num_layers=8, dim=1024, num_heads=16, head_dim=64, ffn_dim=3072, window=128
        )
    )

    def __post_init__(self):
        _positive(
            self, "sample_rate_hz", "encoder_dim", "encoder_window", "encoder_head_dim", "decoder_dim", "latent_dim"
        )
        _positive(self, "semantic_codebook_size", "residual_codebook_size", "num_residual_codebooks", "codebook_dim")
        for name in ("encoder_rates", "decoder_rates", "downsample_factors"):
            _whole_numbers(self, name, 1)
        _whole_numbers(self, "encoder_transformer_layers", 0)
        if len(self.encoder_transformer_layers) != len(self.encoder_rates):
            raise WeightsError("encoder_transformer_layers needs one entry per encoder rate")
        if _product(self.encoder_rates) != _product(self.decoder_rates):
            raise WeightsError(
                f"encoder rates {self.encoder_rates} and decoder rates {self.decoder_rates} differ in hop"
            )

    @property
    def hop_length(self) -> int:
        """Samples per encoder step."""
        return _product(self.encoder_rates)

    @property
    def samples_per_frame(self) -> int:
        """Samples per frame of codes (2,048 in the published codec)."""
        return self.hop_length * _product(self.downsample_factors)

    @property
    def num_codebooks(self) -> int:
        """The semantic book and the residual books."""
        return 1 + self.num_residual_codebooks

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Entries of each book, semantic first."""
        return (self.semantic_codebook_size, *(self.residual_codebook_size,) * self.num_residual_codebooks)

    def num_frames(self, num_samples: int) -> int:
        """Frames that hold `num_samples` samples; the last may be part silence."""
        return -(-num_samples // self.samples_per_frame)

    @property
    def frame_rate_hz(self) -> float:
        """Frames per second of sound (21.533 in the published codec)."""
        return self.sample_rate_hz / self.samples_per_frame

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CodecConfig:
        """From a parsed codec `config.json`."""
        get = _reader(raw)
        if not isinstance(get("module"), Mapping):
            raise WeightsError(f"module must be an object, not {get('module')!r}")
        module = _reader(get("module"), prefix="module.")
        norm_eps, rope_base = raw.get("norm_eps", 1e-5), raw.get("rope_base", 10000.0)
        return cls(
            sample_rate_hz=get("sample_rate"),
            encoder_dim=get("encoder_dim"),
            encoder_rates=_tuple(get("encoder_rates")),
            encoder_transformer_layers=_tuple(get("encoder_transformer_layers")),
            encoder_window=raw.get("encoder_window", 512),
            encoder_head_dim=raw.get("general_head_dim", 64),
            decoder_dim=get("decoder_dim"),
            decoder_rates=_tuple(get("decoder_rates")),
            latent_dim=get("latent"),
            semantic_codebook_size=get("semantic_codebook_size"),
            residual_codebook_size=get("codebook_size"),
            num_residual_codebooks=get("n_codebooks"),
            codebook_dim=get("codebook_dim"),
            downsample_factors=_tuple(get("downsample_factor")),
            transformer=CodecTransformerConfig(
                num_layers=module("n_layer"),
                dim=module("dim"),
                num_heads=module("n_head"),
                head_dim=module("head_dim"),
                ffn_dim=module("intermediate_size"),
                window=module("window_size"),
                norm_eps=norm_eps,
                rope_base=rope_base,
            ),
        )

    @classmethod
    def from_file(cls, path: Path) -> CodecConfig:
        """From a codec `config.json`; a wrong file is a `WeightsError` that names it."""
        return _from_file(path, cls.from_dict)


@dataclass(frozen=True, slots=True)
class SpeechProfile:
    """How a model likes to be used: `generation_config.json` beside its `config.json`; absent fields keep these."""

    temperature: float = 0.8
    top_p: float = 0.8
    top_k: int = 30
    segment_bytes: int = 200  # long text is spoken in segments of at most so many UTF-8 bytes
    max_segment_frames: int = 1024
    max_history_segments: int | None = None  # None: as many as fit a slot
    max_reference_s: float = 30.0  # a reference clip is trimmed to this
    keep_tags: bool = True  # [laugh] and the like reach the model; False: it was trained without, they are dropped

    def __post_init__(self):
        _real(self, "temperature", below=2)
        _real(self, "top_p", at_most=1)
        _positive(self, "top_k", "segment_bytes", "max_segment_frames")
        _real(self, "max_reference_s")
        _flag(self, "keep_tags")
        if self.max_history_segments is not None:
            _whole(self, "max_history_segments")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SpeechProfile:
        """From a parsed `generation_config.json`. Unknown keys are ignored."""
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})

    @classmethod
    def from_file(cls, path: Path) -> SpeechProfile:
        """From a `generation_config.json`; one that is not there gives the defaults, a wrong one is a WeightsError."""
        return _from_file(path, cls.from_dict) if path.exists() else cls()


def _from_file(path: Path, parse: Callable[[Mapping[str, Any]], _Config]) -> _Config:
    """`parse` of a JSON object; what is wrong in it is said with the file's name."""
    raw = read_json(path)
    try:
        return parse(raw)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object, or say which file is wrong."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise WeightsError(f"{path} does not hold a JSON object")
    return parsed


_FLAT_DEFAULTS: dict[str, Any] = {
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


def _flatten_nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The nested S2 layout as flat keys; absent fields stay absent, so that the flat defaults apply."""
    text, audio = raw.get("text_config"), raw.get("audio_decoder_config")
    if not isinstance(text, Mapping) or not isinstance(audio, Mapping):
        raise WeightsError("a nested config needs 'text_config' and 'audio_decoder_config'")
    flat = {name: text[name] for name in (*_FLAT_DEFAULTS, "intermediate_size") if name in text}
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


def _default_ffn_dim(dim: int) -> int:
    return -(-(8 * dim // 3) // 256) * 256


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def _reader(raw: Mapping[str, Any], prefix: str = ""):
    def get(name: str) -> Any:
        if name not in raw:
            raise WeightsError(f"there is no field '{prefix}{name}'")
        return raw[name]

    return get


def _tuple(value: Any) -> tuple[Any, ...]:
    """A JSON list; anything else is left for the check of the field."""
    return tuple(value) if isinstance(value, list) else (value,)


def _positive(config: Any, *names: str) -> None:
    for name in names:
        _check_whole(name, getattr(config, name), 1)


def _whole(config: Any, *names: str) -> None:
    for name in names:
        _check_whole(name, getattr(config, name), 0)


def _whole_numbers(config: Any, name: str, least: int) -> None:
    for value in getattr(config, name):
        _check_whole(f"each of {name}", value, least)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise WeightsError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _real(config: Any, *names: str, below: float = math.inf, at_most: float = math.inf) -> None:
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < below and value <= at_most):
            limit = (
                f" and below {below:g}"
                if below < math.inf
                else f" and at most {at_most:g}"
                if at_most < math.inf
                else ""
            )
            raise WeightsError(f"{name} must be a number above 0{limit}, not {value!r}")


def _flag(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise WeightsError(f"{name} must be true or false, not {getattr(config, name)!r}")
