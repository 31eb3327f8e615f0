"""The codec: encoder, quantiser and decoder, and the transformers inside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fishjax.errors import WeightsError

from .fields import check_layers, few_layers, positive, read, reader, real, whole_numbers
from .files import read_config

_DEFAULTS = {"encoder_window": 512, "general_head_dim": 64, "norm_eps": 1e-5, "rope_base": 10000.0}
_DEFAULTS |= {"decoder": "waveform", "decoder_layers": 0}
"""What a file need not say."""

_DECODERS = ("waveform", "spectral")


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
        few_layers(self)
        positive(self, "dim", "num_heads", "head_dim", "ffn_dim", "window")
        real(self, "norm_eps", "rope_base")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The causal DAC variant: encoder, residual quantiser with a semantic book, decoder. Defaults: published.

    `decoder` is its kind: "waveform" as published, or "spectral", which has `decoder_layers` blocks and one rate.
    """

    sample_rate_hz: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    encoder_transformer_layers: tuple[int, ...] = (0, 0, 0, 4)
    encoder_window: int = 512
    encoder_head_dim: int = 64
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    decoder: str = "waveform"
    decoder_layers: int = 0
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
        positive(
            self, "sample_rate_hz", "encoder_dim", "encoder_window", "encoder_head_dim", "decoder_dim", "latent_dim"
        )
        positive(self, "semantic_codebook_size", "residual_codebook_size", "num_residual_codebooks", "codebook_dim")
        for name in ("encoder_rates", "decoder_rates", "downsample_factors"):
            whole_numbers(self, name, 1)
        whole_numbers(self, "encoder_transformer_layers", 0)
        if len(self.encoder_transformer_layers) != len(self.encoder_rates):
            raise WeightsError("encoder_transformer_layers needs one entry per encoder rate")
        if self.decoder not in _DECODERS:
            raise WeightsError(f"decoder must be one of {', '.join(_DECODERS)}, not {self.decoder!r}")
        if self.decoder == "spectral":
            if len(self.decoder_rates) != 1:
                raise WeightsError(f"decoder_rates must be one number in a spectral decoder, not {self.decoder_rates}")
            check_layers("decoder_layers", self.decoder_layers)
        if math.prod(self.encoder_rates) != math.prod(self.decoder_rates):
            raise WeightsError(
                f"encoder rates {self.encoder_rates} and decoder rates {self.decoder_rates} differ in hop"
            )

    @property
    def hop_length(self) -> int:
        """Samples per encoder step."""
        return math.prod(self.encoder_rates)

    @property
    def samples_per_frame(self) -> int:
        """Samples per frame of codes (2,048 in the published codec)."""
        return self.hop_length * math.prod(self.downsample_factors)

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
        get = reader({**_DEFAULTS, **raw})
        if not isinstance(get("module"), Mapping):
            raise WeightsError(f"module must be an object, not {get('module')!r}")
        transformer = read(
            CodecTransformerConfig,
            reader(get("module"), prefix="module."),
            {"norm_eps": get("norm_eps"), "rope_base": get("rope_base")},
            num_layers="n_layer",
            num_heads="n_head",
            ffn_dim="intermediate_size",
            window="window_size",
        )
        lists = {name: _tuple(get(name)) for name in ("encoder_rates", "encoder_transformer_layers", "decoder_rates")}
        lists["downsample_factors"] = _tuple(get("downsample_factor"))
        return read(
            cls,
            get,
            {"transformer": transformer, **lists},
            sample_rate_hz="sample_rate",
            encoder_head_dim="general_head_dim",
            latent_dim="latent",
            residual_codebook_size="codebook_size",
            num_residual_codebooks="n_codebooks",
        )

    @classmethod
    def from_file(cls, path: Path) -> CodecConfig:
        """From a codec `config.json`; a wrong file is a `WeightsError` that names it."""
        return read_config(path, cls.from_dict)


def _tuple(value: Any) -> tuple[Any, ...]:
    """A JSON list; anything else is left for the check of the field."""
    return tuple(value) if isinstance(value, list) else (value,)
