"""A reference clip: speech that the server made itself, and copies of it that no cache of contents has seen."""

from __future__ import annotations

import io
import wave
from functools import cache
from pathlib import Path

import numpy as np

_LEAST_S = 1.0
_COUNTER_SAMPLES = 32


def write_clip(path: Path, samples_T: np.ndarray, sample_rate_hz: int) -> None:
    """int16 samples as a WAV file, with silence behind them up to a second."""
    silence_T = np.zeros(max(0, round(_LEAST_S * sample_rate_hz) - len(samples_T)), np.int16)
    path.write_bytes(_wav(np.concatenate([samples_T, silence_T]), sample_rate_hz))


def unique_clip(path: str, number: int) -> bytes:
    """The clip as a WAV file's bytes; its last samples' lowest bits count, which nobody hears."""
    samples_T, sample_rate_hz = _read(path)
    bits = (number >> np.arange(_COUNTER_SAMPLES)) & 1
    changed_T = samples_T.copy()
    changed_T[-_COUNTER_SAMPLES:] = (changed_T[-_COUNTER_SAMPLES:] & ~1) | bits
    return _wav(changed_T, sample_rate_hz)


@cache
def _read(path: str) -> tuple[np.ndarray, int]:
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16), file.getframerate()


def _wav(samples_T: np.ndarray, sample_rate_hz: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, sample_rate_hz, 0, "NONE", ""))
        file.writeframes(samples_T.astype("<i2").tobytes())
    return out.getvalue()
