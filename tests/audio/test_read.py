"""Reference clips: what is read, what is refused, and with which reason."""

import io
import time

import numpy as np
import pytest
import soundfile

from fishjax.audio.read import read_reference
from fishjax.errors import InvalidRequest

RATE = 22050


def tone(seconds: float, rate: int, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound_file(audio: np.ndarray, rate: int, **kwargs) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, rate, **{"format": "WAV", "subtype": "FLOAT"} | kwargs)
    return buffer.getvalue()


def test_same_rate_is_untouched():
    audio = tone(0.5, RATE)
    read = read_reference(sound_file(audio, RATE), RATE)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, audio)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_other_rates_are_resampled(rate):
    read = read_reference(sound_file(tone(1.0, rate), rate), RATE)
    assert abs(read.size - RATE) <= 1
    middle = slice(2000, -2000)  # the filter's edges ring
    np.testing.assert_allclose(read[middle], tone(1.0, RATE)[: read.size][middle], atol=2e-3)


def test_stereo_is_averaged():
    left, right = tone(0.5, RATE), tone(0.5, RATE, 300.0)
    read = read_reference(sound_file(np.stack([left, right], 1), RATE), RATE)
    np.testing.assert_allclose(read, (left + right) / 2, atol=1e-7)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"format": "FLAC", "subtype": "PCM_16"},
        {"format": "OGG", "subtype": "VORBIS"},
        {"format": "MP3", "subtype": None},
    ],
)
def test_compressed_files(kwargs):
    read = read_reference(sound_file(tone(1.0, RATE), RATE, **kwargs), RATE)
    assert abs(read.size - RATE) < 2500  # MP3 pads
    assert 0.3 < np.sqrt(np.mean(read[3000:-3000] ** 2)) < 0.4  # 0.5 / sqrt(2)


@pytest.mark.parametrize("seconds", [0.2, 3.0, 30.0, 60.0])
def test_lengths_that_work(seconds):
    assert read_reference(sound_file(tone(seconds, RATE), RATE), RATE).size == round(seconds * RATE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"this is no sound", "cannot be decoded"),
        (b"RIFF\xff\xff\xff\xffWAVE", "cannot be decoded"),
        (sound_file(tone(0.5, RATE), RATE)[:20], "cannot be decoded"),
        (sound_file(np.zeros(0, np.float32), RATE), "0.00 s"),
        (sound_file(tone(0.1, RATE), RATE), r"0\.10 s; a voice needs at least 0\.2 s"),
        (sound_file(tone(61.0, 8000), 8000), "longer than 60 s"),
        (sound_file(np.zeros((RATE, 9), np.float32), RATE), "9 channels"),
        (sound_file(tone(10.0, 100), 100), "100 Hz"),
        (sound_file(np.full(RATE, np.nan, np.float32), RATE), "not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a file holds the second in which it was written
)
def test_refused_with_the_reason(data, reason):
    with pytest.raises(InvalidRequest, match=reason):
        read_reference(data, RATE)


def test_a_small_file_of_hours_is_not_decoded_whole():
    hours = sound_file(np.zeros(8000 * 3600 * 2, np.int16), 8000, format="FLAC", subtype="PCM_16")
    assert len(hours) < 2_000_000
    started = time.perf_counter()
    with pytest.raises(InvalidRequest, match="longer than 60 s"):
        read_reference(hours, RATE)
    assert time.perf_counter() - started < 10.0
