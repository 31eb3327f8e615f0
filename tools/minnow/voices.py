"""The teachers: freely licensed speech engines that run from files alone, and what is done to their sound.

hibari (PyPI `hibari-tts` 0.2.1, Apache-2.0, weights distilled from Kokoro-82M, Apache-2.0) speaks the default voice,
`heart`. Four more speakers are heart spoken at speed s and resampled by 1/s: pitch and formants move, the tempo
stays. flite 2.2 (CMU's permissive licence) adds four, from two Debian packages unpacked into a folder.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import wave
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
from scipy import signal

SAMPLE_RATE_HZ = 22050
DEFAULT_VOICE = "heart"
SHIFTED = {"heart-90": Fraction(9, 10), "heart-110": Fraction(11, 10), "heart-120": Fraction(6, 5)}
SHIFTED["heart-130"] = Fraction(13, 10)
FLITE = ("rms", "slt", "awb", "kal16")
VOICES = (DEFAULT_VOICE, *SHIFTED, *FLITE)

_HIBARI_RATE_HZ = 24000
_RMS = 0.09  # of the speech after trimming; peaks are held below 0.95
_LEAD_S, _TAIL_S = 0.10, 0.15


class Teachers:
    """All voices in one process. `flite_root` is the folder that the Debian packages were unpacked into, or None."""

    def __init__(self, flite_root: Path | None):
        from hibari import Hibari

        self._hibari = Hibari(threads=1)
        self._flite_root = flite_root
        self.voices = VOICES if flite_root is not None else VOICES[: 1 + len(SHIFTED)]

    def speak(self, text: str, voice: str, *, seed: int, speed: float = 1.0) -> np.ndarray:
        """Speech as int16 at 22,050 Hz: trimmed to 0.1 s of lead and 0.15 s of tail, loudness set.

        `speed` 1.0 is the teacher's pace. Deterministic: same arguments, same samples.
        """
        if voice in FLITE:
            audio = self._flite(text, voice, speed)
        else:
            shift = SHIFTED.get(voice, Fraction(1))
            audio = np.asarray(self._hibari(text, speed=float(shift) * speed, seed=seed), np.float32)
            audio = resample(audio, _HIBARI_RATE_HZ / shift)
        return _finish(audio)

    def _flite(self, text: str, voice: str, speed: float) -> np.ndarray:
        if self._flite_root is None:
            raise ValueError(f"voice {voice!r} needs flite: unpack its packages and pass their folder")
        environment = dict(os.environ, LD_LIBRARY_PATH=str(self._flite_root / "usr/lib/x86_64-linux-gnu"))
        with tempfile.NamedTemporaryFile(suffix=".wav") as out:
            command = [str(self._flite_root / "usr/bin/flite"), "-voice", voice]
            command += ["--setf", f"duration_stretch={1 / speed:.3f}", "-t", text, "-o", out.name]
            subprocess.run(command, check=True, env=environment, timeout=60, stdout=subprocess.DEVNULL)
            with wave.open(out.name) as reader:
                pcm = np.frombuffer(reader.readframes(reader.getnframes()), np.int16)
                return resample(pcm.astype(np.float32) / 32768, Fraction(reader.getframerate()))


def resample(audio_T: np.ndarray, rate_hz: Fraction) -> np.ndarray:
    """From `rate_hz` (which may be a fraction) to 22,050 Hz, polyphase, float32."""
    ratio = Fraction(SAMPLE_RATE_HZ) / rate_hz
    up, down = ratio.numerator, ratio.denominator
    if up == down:
        return audio_T
    return signal.resample_poly(audio_T, up, down, window=_low_pass(up, down)).astype(np.float32)


@cache
def _low_pass(up: int, down: int) -> np.ndarray:
    longest = max(up, down)
    return signal.firwin(2 * 10 * longest + 1, 1 / longest, window=("kaiser", 5.0)).astype(np.float32)


def _finish(audio_T: np.ndarray) -> np.ndarray:
    level = np.abs(audio_T)
    loud = np.flatnonzero(level > max(0.01 * float(level.max(initial=0.0)), 1e-3))
    if loud.size < SAMPLE_RATE_HZ // 20:
        raise ValueError("the teacher made no sound")
    speech = audio_T[loud[0] : loud[-1] + 1]
    speech = speech * min(_RMS / float(np.sqrt(np.mean(speech**2))), 0.95 / float(np.abs(speech).max()))
    fade = SAMPLE_RATE_HZ // 200
    speech[:fade] *= np.linspace(0, 1, fade, dtype=np.float32)
    speech[-fade:] *= np.linspace(1, 0, fade, dtype=np.float32)
    padded = np.pad(speech, (int(_LEAD_S * SAMPLE_RATE_HZ), int(_TAIL_S * SAMPLE_RATE_HZ)))
    return np.round(padded * 32767).astype(np.int16)
