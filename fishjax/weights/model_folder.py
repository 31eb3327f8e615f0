"""Model folders: the one place that knows their layouts, and how either kind becomes modules.

public     config.json, model weights, tokenizer.json, codec/ or codec.pth (, generation_config.json)
converted  fishjax.json, tokenizer.json, dual_ar/, codec/ (, generation_config.json): what `convert` writes
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec import Codec
from fishjax.config import (
    CodecConfig,
    CodecTransformerConfig,
    ModelConfig,
    SpeechProfile,
    TransformerConfig,
    read_json,
)
from fishjax.errors import InvalidRequest, WeightsError
from fishjax.model.dual_ar import DualAR
from fishjax.weights.checkpoint import restore_module
from fishjax.weights.files import read_checkpoint
from fishjax.weights.load import match_public, read_model_config
from fishjax.weights.load_codec import abstract_codec, load_codec
from fishjax.weights.precision import Precision
from fishjax.weights.quantize import abstract_model, apply_precision, encode, formats, replace_values

DESCRIPTION, TOKENIZER, PROFILE, DUAL_AR, CODEC = (
    "fishjax.json",
    "tokenizer.json",
    "generation_config.json",
    "dual_ar",
    "codec",
)
"""Everything that a converted folder holds."""
FORMAT, FORMAT_VERSION = "fishjax-model", 1
_CODEC_SAID_LATER = {"decoder": "waveform", "decoder_layers": 0}
"""What folders do not say that were converted when there was one kind of decoder."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds a model, and which kind it is."""

    path: Path
    kind: Literal["public", "converted"]

    @property
    def tokenizer(self) -> Path:
        """Its `tokenizer.json`. Raises WeightsError when there is none."""
        path = self.path / TOKENIZER
        if path.exists():
            return path
        if (self.path / "tokenizer.tiktoken").exists():
            raise WeightsError(f"{self.path} has a tokenizer.tiktoken and no {TOKENIZER}: convert the folder first")
        raise WeightsError(f"{self.path} has no {TOKENIZER}: a model cannot read text without it")

    @property
    def codec(self) -> Path:
        """Its codec: the folder `codec`, or `codec.pth`. Raises WeightsError when there is neither."""
        places = [self.path / CODEC] if self.kind == "converted" else [self.path / CODEC, self.path / "codec.pth"]
        found = next((place for place in places if place.exists()), None)
        if found is None:
            absent = " and no ".join(place.name for place in places)
            raise WeightsError(f"{self.path} has no {absent}: a model cannot make sound without a codec")
        return found

    @property
    def profile(self) -> SpeechProfile:
        """How the model likes to be used."""
        return SpeechProfile.from_file(self.path / PROFILE)


def open_model_folder(path: Path | str) -> ModelFolder:
    """Look at a folder. Raises WeightsError when it is not there or holds no model."""
    path = Path(path)
    if not path.is_dir():
        raise WeightsError(f"there is no model folder at {path}")
    if (path / DESCRIPTION).exists():
        return ModelFolder(path, "converted")
    if (path / "config.json").exists():
        return ModelFolder(path, "public")
    raise WeightsError(
        f"{path} is no model folder: it has neither config.json (published) nor {DESCRIPTION} (converted)"
    )


@dataclass(frozen=True, slots=True)
class Description:
    """What `fishjax.json` says of a converted folder."""

    model: ModelConfig
    codec: CodecConfig
    precision: Precision
    source: dict[str, int]  # file name -> bytes, of the folder it was made from
    num_tensors: dict[str, int]  # "dual_ar", "codec" -> parameters, a quantised one counted once

    def write(self, path: Path) -> None:
        """Write `fishjax.json`."""
        raw = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        raw["precision"] = str(self.precision)
        path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Description:
        """Read `fishjax.json`. Raises WeightsError when it is not one that this version understands."""
        raw = read_json(path)
        if raw.get("format") != FORMAT:
            raise WeightsError(f"{path} does not describe a converted model")
        if raw.get("format_version") != FORMAT_VERSION:
            raise WeightsError(
                f"{path} has format version {raw.get('format_version')} and this fishjax reads {FORMAT_VERSION}: "
                f"convert the published folder again"
            )
        try:
            model = {name: raw["model"][name] for name in _names(ModelConfig)}
            said = {**_CODEC_SAID_LATER, **raw["codec"]}
            codec = {name: _tuples(said[name]) for name in _names(CodecConfig)}
            for part in ("slow", "fast"):
                model[part] = TransformerConfig(**model[part])
            codec["transformer"] = CodecTransformerConfig(**codec["transformer"])
            return cls(
                model=ModelConfig(**model),
                codec=CodecConfig(**codec),
                precision=Precision.parse(raw["precision"]),
                source=dict(raw["source"]),
                num_tensors=dict(raw["num_tensors"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidRequest) as error:
            raise WeightsError(f"{path} is damaged, convert the model again: {error}") from error


@dataclass(frozen=True)
class LoadedModel:
    """A model folder in memory. `precision` is what it was loaded in; the engine applies its `head` and `kv`."""

    config: ModelConfig
    dual_ar: DualAR
    codec: Codec
    tokenizer: Path
    profile: SpeechProfile
    precision: Precision


def load_model(folder: Path | str, precision: Precision | str | None = None) -> LoadedModel:
    """Load either kind of folder onto the default device.

    `precision` None: as it was converted, or the platform's default for a published folder; a text is read on top of
    that (`Precision.parse`). A converted folder may be loaded in another precision as long as no weight that is
    quantised already would change. Raises WeightsError for a folder that is not whole, InvalidRequest for a precision
    that does not exist.
    """
    place = open_model_folder(folder)
    tokenizer, codec_place, profile = place.tokenizer, place.codec, place.profile
    if place.kind == "converted":
        description = Description.read(place.path / DESCRIPTION)
        stored, config, codec_config = description.precision, description.model, description.codec
        chosen = _chosen(precision, stored)
        model = abstract_model(config, stored)
        restore_module(place.path / DUAL_AR, model)
        apply_precision(model, chosen)
        codec = abstract_codec(codec_config, stored.codec_dtype)
        restore_module(codec_place, codec)
        if chosen.codec != stored.codec:
            codec = _cast(codec, chosen)
    else:
        chosen = _chosen(precision, Precision.default())
        config, model = _load_public(place.path, chosen)
        _, codec = load_codec(codec_place, chosen.codec_dtype)
    check_match(config, codec.config, place.path)
    return LoadedModel(config, model, codec, tokenizer, profile, chosen)


def public_tensors(folder: Path, precision: Precision) -> tuple[ModelConfig, DualAR, dict[str, Any]]:
    """(config, the abstract model in the policy's formats, path -> its published tensor, unread).

    Raises WeightsError for a folder that does not fit its config, or a Linear that does not suit the policy.
    """
    config = read_model_config(folder)
    source, tensors = read_checkpoint(folder)
    model = abstract_model(config, precision)
    return config, model, match_public(model, tensors, source=str(source))


def check_match(config: ModelConfig, codec: CodecConfig, folder: Path) -> None:
    """Raise WeightsError unless model and codec speak the same number of codebooks."""
    if config.num_codebooks != codec.num_codebooks:
        raise WeightsError(
            f"{folder}: the model speaks {config.num_codebooks} codebooks and its codec {codec.num_codebooks}"
        )


def _load_public(folder: Path, precision: Precision) -> tuple[ModelConfig, DualAR]:
    config, model, tensors = public_tensors(folder, precision)
    words = formats(model, precision)
    # Each tensor is cast on the host, or quantised, as it comes in: the whole model is never there in its published
    # type, and no program is compiled for the sake of a cast.
    replace_values(model, {p: jax.tree.map(jnp.asarray, encode(tensors[p].read(), w)) for p, w in words.items()})
    return config, model


def _chosen(precision: Precision | str | None, base: Precision) -> Precision:
    if precision is None:
        return base
    return precision if isinstance(precision, Precision) else Precision.parse(precision, base)


def _cast(codec: Codec, precision: Precision) -> Codec:
    graph, state = nnx.split(codec)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(precision.codec_dtype), state))


def _names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else dict(value) if isinstance(value, Mapping) else value
