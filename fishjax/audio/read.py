"""A caller's sound file to mono float samples at the model's rate; each fault in it is an InvalidRequest with a reason.

The bytes come from outside: lengths, channels and rates are limited before anything of that size is allocated, and
at most MAX_REFERENCE_S seconds are ever decoded, however small the file is.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

from fishjax.errors import InvalidRequest

MIN_REFERENCE_S = 0.2
MAX_REFERENCE_S = 60.0
_MAX_CHANNELS = 8
_MIN_RATE_HZ, _MAX_RATE_HZ = 4_000, 384_000
_BLOCK_SAMPLES = 65_536


@dataclass(frozen=True, slots=True)
class Clip:
    """Mono float32 samples (T,) at the rate of the file they came from."""

    audio_T: np.ndarray
    sample_rate_hz: int

    def at(self, sample_rate_hz: int) -> np.ndarray:
        """The samples at another rate, float32 (T,)."""
        if self.sample_rate_hz == sample_rate_hz:
            return self.audio_T
        return np.ascontiguousarray(soxr.resample(self.audio_T, self.sample_rate_hz, sample_rate_hz), np.float32)


def read_reference(data: bytes, sample_rate_hz: int) -> np.ndarray:
    """A whole sound file -> float32 (T,) at `sample_rate_hz`, channels averaged. Errors as in `decode`."""
    return decode(data).at(sample_rate_hz)


def decode(data: bytes) -> Clip:
    """A whole WAV, FLAC, MP3 or OGG file, channels averaged.

    Raises InvalidRequest for bytes that are no sound file, a clip shorter than 0.2 s or longer than 60 s, more than
    8 channels, a rate outside 4 kHz..384 kHz, or samples that are not finite.
    """
    if not data:
        raise InvalidRequest("the reference audio is empty: send the bytes of a whole sound file")
    try:
        with soundfile.SoundFile(_Bytes(data)) as sound:
            source_rate_hz = sound.samplerate
            _check_header(sound)
            mono_T = _read_mono(sound)
    except (soundfile.LibsndfileError, ValueError, TypeError) as error:
        # soundfile's own words name the stream object, which tells a caller nothing.
        raise InvalidRequest(
            f"the reference audio ({len(data)} bytes) cannot be decoded: send a whole WAV, FLAC, MP3 or OGG file"
        ) from error
    seconds = mono_T.size / source_rate_hz
    if seconds < MIN_REFERENCE_S:
        raise InvalidRequest(
            f"the reference audio lasts {seconds:.2f} s; a voice needs at least {MIN_REFERENCE_S} s, "
            "and 5 s to 10 s are better"
        )
    if seconds > MAX_REFERENCE_S:
        raise InvalidRequest(
            f"the reference audio is longer than {MAX_REFERENCE_S:.0f} s: cut the clip, and its transcript with it"
        )
    if not np.isfinite(mono_T).all():
        raise InvalidRequest("the reference audio holds samples that are not finite numbers")
    return Clip(mono_T, source_rate_hz)


class _Bytes(io.BytesIO):
    """A file that stays where it is when a broken header points before its start.

    soundfile seeks inside a callback of C, where an error becomes a traceback on stderr and no exception.
    """

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def _check_header(sound: soundfile.SoundFile) -> None:
    if sound.channels > _MAX_CHANNELS:
        raise InvalidRequest(f"the reference audio has {sound.channels} channels; at most {_MAX_CHANNELS} can be mixed")
    if not _MIN_RATE_HZ <= sound.samplerate <= _MAX_RATE_HZ:
        raise InvalidRequest(
            f"the reference audio is sampled at {sound.samplerate} Hz; {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz can be read"
        )


def _read_mono(sound: soundfile.SoundFile) -> np.ndarray:
    """All samples, or one more than the longest clip has."""
    left = int(MAX_REFERENCE_S * sound.samplerate) + 1
    blocks = [np.zeros(0, np.float32)]
    while left > 0:
        block_TC = sound.read(min(left, _BLOCK_SAMPLES), dtype="float32", always_2d=True)
        if not len(block_TC):
            break
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused in the end
            blocks.append(block_TC.mean(axis=1))
        left -= len(block_TC)
    return np.concatenate(blocks)
