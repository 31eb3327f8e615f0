"""Float samples to bytes: signed 16-bit little-endian, bare or behind a RIFF header that streams.

Knows nothing of requests or gRPC. Both formats are written frame by frame: what has been written always plays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import numpy as np

from fishjax.errors import EngineFailed

BYTES_PER_SAMPLE = 2
_FULL_SCALE = 32767
_UNKNOWN_SIZE = 0xFFFFFFFF
_HEADER_AFTER_RIFF_SIZE = 36  # bytes of a 44-byte header that the RIFF size counts


class AudioFormat(StrEnum):
    """Formats that truly stream."""

    PCM_S16LE = "pcm_s16le"
    WAV = "wav"


def pcm_s16le(audio: np.ndarray) -> bytes:
    """Float samples in -1..1, any shape -> int16 little-endian bytes: rounded, and clipped instead of wrapped.

    Raises EngineFailed for a sample that is not a number.
    """
    scaled = np.rint(np.asarray(audio, np.float32) * np.float32(_FULL_SCALE))
    if np.isnan(scaled).any():
        raise EngineFailed("the samples hold NaN: the model's weights may, too")
    return np.clip(scaled, -_FULL_SCALE - 1, _FULL_SCALE).astype("<i2").tobytes()


def wav_header(sample_rate_hz: int, num_channels: int = 1, num_samples: int | None = None) -> bytes:
    """A 44-byte RIFF header for int16 samples; with `num_samples` (per channel) None the sizes are 0xFFFFFFFF."""
    block = num_channels * BYTES_PER_SAMPLE
    data_size = _UNKNOWN_SIZE if num_samples is None else num_samples * block
    riff_size = _UNKNOWN_SIZE if num_samples is None else data_size + _HEADER_AFTER_RIFF_SIZE
    if max(data_size, riff_size) > _UNKNOWN_SIZE:
        raise ValueError(f"{num_samples} samples are too many for a WAV file: it holds 4 GiB")
    pcm_tag, bits = 1, 8 * BYTES_PER_SAMPLE
    form = struct.pack("<HHIIHH", pcm_tag, num_channels, sample_rate_hz, sample_rate_hz * block, block, bits)
    return (
        b"RIFF"
        + struct.pack("<I", riff_size)
        + b"WAVEfmt "
        + struct.pack("<I", len(form))
        + form
        + b"data"
        + struct.pack("<I", data_size)
    )


class StreamEncoder:
    """Encodes one mono stream, piece by piece; a header, if the format has one, opens the first piece."""

    def __init__(self, audio_format: AudioFormat, sample_rate_hz: int):
        self._head = wav_header(sample_rate_hz) if audio_format is AudioFormat.WAV else b""

    def encode(self, audio_T: np.ndarray) -> bytes:
        """The bytes of the next samples, float32 in -1..1."""
        head, self._head = self._head, b""
        return head + pcm_s16le(audio_T)


def write_wav(path: Path, frames: Iterable[np.ndarray], sample_rate_hz: int) -> None:
    """Write a finished mono WAV file (its sizes are known) from pieces of float samples in -1..1."""
    data = b"".join(pcm_s16le(frame) for frame in frames)
    path.write_bytes(wav_header(sample_rate_hz, num_samples=len(data) // BYTES_PER_SAMPLE) + data)
