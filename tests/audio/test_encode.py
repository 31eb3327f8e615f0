"""Samples to bytes and back, at the edges of the range."""

import io
import struct
import wave

import numpy as np
import pytest
import soundfile

from fishjax.audio.encode import AudioFormat, StreamEncoder, pcm_s16le, wav_header, write_wav
from fishjax.errors import EngineFailed


def test_samples_are_rounded_and_clipped_not_wrapped():
    audio = np.array([0.0, 1.0, -1.0, 1.5, -1.5, 1e9, -np.inf, 0.5 / 32767, 0.7 / 32767], np.float32)
    samples = np.frombuffer(pcm_s16le(audio), "<i2")
    assert samples.tolist() == [0, 32767, -32767, 32767, -32768, 32767, -32768, 0, 1]


def test_not_a_number_is_not_sound():
    with pytest.raises(EngineFailed, match="NaN"):
        pcm_s16le(np.array([0.0, np.nan], np.float32))


def test_streaming_header_has_unknown_sizes():
    header = wav_header(44100)
    assert len(header) == 44
    assert struct.unpack("<4sI8sIHHIIHH4sI", header) == (
        *(b"RIFF", 0xFFFFFFFF, b"WAVEfmt ", 16, 1, 1, 44100, 88200, 2, 16, b"data", 0xFFFFFFFF),
    )


@pytest.mark.parametrize("cut", [44 + 2, 44 + 1000, 44 + 2001])
def test_a_stream_cut_off_anywhere_still_plays(cut):
    encoder = StreamEncoder(AudioFormat.WAV, 22050)
    audio = np.linspace(-1, 1, 2048, dtype=np.float32)
    data = encoder.encode(audio[:500]) + encoder.encode(audio[500:])
    assert len(data) == 44 + 2 * 2048  # one header
    samples, rate = soundfile.read(io.BytesIO(data[:cut]), dtype="int16")
    assert rate == 22050
    assert samples.tolist() == np.rint(audio * 32767).astype(int).tolist()[: (cut - 44) // 2]


def test_pcm_has_no_header():
    assert StreamEncoder(AudioFormat.PCM_S16LE, 22050).encode(np.zeros(3)) == bytes(6)


def test_written_file_knows_its_length(tmp_path):
    write_wav(tmp_path / "a.wav", [np.zeros(10), np.ones(5)], 8000)
    with wave.open(str(tmp_path / "a.wav")) as sound:
        assert (sound.getnframes(), sound.getframerate(), sound.getnchannels()) == (15, 8000, 1)
        assert np.frombuffer(sound.readframes(15), "<i2").tolist() == [0] * 10 + [32767] * 5
