"""How a model likes to be used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .fields import flag, positive, real, whole, words
from .files import read_config


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
    vocabulary: tuple[str, ...] = ()  # the words that it was taught, lower case; none: any

    def __post_init__(self):
        real(self, "temperature", below=2)
        real(self, "top_p", at_most=1)
        positive(self, "top_k", "segment_bytes", "max_segment_frames")
        real(self, "max_reference_s")
        flag(self, "keep_tags")
        words(self, "vocabulary")
        if self.max_history_segments is not None:
            whole(self, "max_history_segments")

    def untaught(self, text: str) -> list[str]:
        """The words of a text that are not in the vocabulary, each once; none where any word will do. Tags are none."""
        spoken = re.sub(r"\[[^\]]*\]|<\|[^|]*\|>", " ", text.lower())
        found = re.findall(r"[^\W_]+(?:'[^\W_]+)*", spoken) if self.vocabulary else []
        return [word for word in dict.fromkeys(found) if word not in self.vocabulary]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SpeechProfile:
        """From a parsed `generation_config.json`. Unknown keys are ignored."""
        given = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        if isinstance(taught := given.get("vocabulary"), list):
            given["vocabulary"] = tuple(taught)
        return cls(**given)

    @classmethod
    def from_file(cls, path: Path) -> SpeechProfile:
        """From a `generation_config.json`; one that is not there gives the defaults, a wrong one is a WeightsError."""
        return read_config(path, cls.from_dict) if path.exists() else cls()
