"""Stored voices: references that are encoded already, under a name. In memory, and in a folder if there is one.

A voice is one file, `<voice_id>.safetensors`: the codes of each clip, and in its metadata the transcripts, the model
that the codes belong to and a digest of the clips. A file is written whole under another name first, so a crash leaves
the old voice or the new one, never half of one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fishjax.errors import InvalidRequest, VoiceExists, VoiceNotFound, VoicesFull, WeightsError
from fishjax.text.prompt import Reference

from .request import Clip

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Voice:
    """Encoded clips under a name; `digest` is that of the clips, `num_frames` counts the frames of all."""

    voice_id: str
    digest: str
    references: tuple[Reference, ...]

    @property
    def num_frames(self) -> int:
        """Frames of reference sound."""
        return sum(reference.codes_KT.shape[1] for reference in self.references)


def clips_digest(clips: Sequence[Clip]) -> str:
    """Hexadecimal SHA-256 of the content of clips: sound, words and order."""
    digest = hashlib.sha256()
    for clip in clips:
        for part in (clip.audio, clip.transcript.encode("utf-8")):
            digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def check_voice_id(voice_id: str) -> None:
    """Raises InvalidRequest for a name that a voice cannot have."""
    if not _ID.fullmatch(voice_id):
        raise InvalidRequest(
            "this voice_id cannot be used: write 1 to 64 of a-z, 0-9, '_' and '-', a letter or digit first"
        )


def open_folder(folder: Path) -> None:
    """Make the folder of voices if it is not there. Raises InvalidRequest for a place that cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidRequest("the folder of voices cannot be had: a file is in its place") from error
    except OSError as error:
        raise InvalidRequest(f"the folder of voices cannot be had: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidRequest("the folder of voices cannot be had: this user may not write in it")


class VoiceStore:
    """At most `max_voices` voices of one model. Belongs to one asyncio loop; files are written in `executor`.

    With a `folder` its voices are read at once; it is made if it is not there, now and whenever a voice is stored.
    Raises InvalidRequest for a folder that cannot be had, WeightsError for a file that is no voice of this model.
    """

    def __init__(
        self, folder: Path | None, executor: Executor, *, model_name: str, num_codebooks: int, max_voices: int
    ):
        self._folder = folder
        self._executor = executor
        self._model_name = model_name
        self._num_codebooks = num_codebooks
        self._max_voices = max_voices
        self._changing = asyncio.Lock()
        self._voices: dict[str, Voice] = {}
        if folder is not None:
            open_folder(folder)
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                self._voices[path.stem] = self._load(path)

    def get(self, voice_id: str) -> Voice:
        """Raises VoiceNotFound."""
        if (voice := self._voices.get(voice_id)) is None:
            raise VoiceNotFound("no voice with this voice_id is stored: create it, or send clips as references")
        return voice

    def find(self, voice_id: str, digest: str) -> Voice | None:
        """The voice, if it is here with this content; None if there is room for it.

        Raises VoiceExists if the name has other content, VoicesFull.
        """
        voice = self._voices.get(voice_id)
        if voice is not None and voice.digest != digest:
            raise VoiceExists("a voice with this voice_id and other clips is stored: delete it first, or take another")
        if voice is None and len(self._voices) >= self._max_voices:
            raise VoicesFull(f"{self._max_voices} voices are stored, which is the limit: delete one first")
        return voice

    def all(self) -> list[Voice]:
        """By name."""
        return [self._voices[voice_id] for voice_id in sorted(self._voices)]

    async def add(self, voice: Voice) -> Voice:
        """Store a voice; returns the stored one. Raises as `find` does."""
        async with self._changing:
            if (known := self.find(voice.voice_id, voice.digest)) is not None:
                return known
            if self._folder is not None:
                await self._in_pool(partial(_write, self._folder / f"{voice.voice_id}{_SUFFIX}", self._pack(voice)))
            self._voices[voice.voice_id] = voice
            return voice

    async def delete(self, voice_id: str) -> None:
        """Forget a voice; requests that speak with it go on. Raises VoiceNotFound."""
        async with self._changing:
            if voice_id not in self._voices:
                raise VoiceNotFound("no voice with this voice_id is stored: ListVoices names those that are")
            if self._folder is not None:
                path = self._folder / f"{voice_id}{_SUFFIX}"
                await self._in_pool(partial(path.unlink, missing_ok=True))  # somebody may have tidied up
            del self._voices[voice_id]

    async def _in_pool(self, function: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _pack(self, voice: Voice) -> bytes:
        codes = {f"codes_{i}": np.ascontiguousarray(ref.codes_KT) for i, ref in enumerate(voice.references)}
        about = {"model": self._model_name, "digest": voice.digest, "transcripts": [r.text for r in voice.references]}
        return save(codes, metadata={"fishjax_voice": json.dumps(about)})

    def _load(self, path: Path) -> Voice:
        try:
            with safe_open(path, "np") as file:
                about = json.loads((file.metadata() or {})["fishjax_voice"])
                references = tuple(
                    Reference(words, file.get_tensor(f"codes_{i}")) for i, words in enumerate(about["transcripts"])
                )
            model, digest = str(about["model"]), str(about["digest"])
            check_voice_id(path.stem)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, InvalidRequest) as error:
            raise WeightsError(f"{path.name} in the folder of voices is not a voice: remove it") from error
        if model != self._model_name or any(r.codes_KT.shape[0] != self._num_codebooks for r in references):
            raise WeightsError(
                f"{path.name} in the folder of voices was made with the model {model!r}, this is "
                f"{self._model_name!r}: give each model a folder of its own"
            )
        return Voice(path.stem, digest, references)


def _write(path: Path, data: bytes) -> None:
    """Replace a file by a whole one, and make sure that it stays."""
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
