"""The voice that ships, through the process that serves it: a recogniser must hear what was asked for."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import wave
from pathlib import Path

import grpc
import numpy as np
import pytest

from fishjax.bench.gate.judge import hear, word_errors
from fishjax.bench.gate.tables import baseline_row
from fishjax.bench.gate.texts import CLOSED_VOCABULARY, gate_texts
from fishjax.bench.gate.verdict import rates
from fishjax.bench.report import BASELINES
from fishjax.client import Client
from fishjax.config import SpeechProfile
from fishjax.rpc.v1 import tts_pb2
from fishjax.speech import MINNOW
from tools.minnow.texts import closed_prompts

NUM_TEXTS = 24
# Word error rate of the greedy voice on the gate's first 24 prompts, as it was frozen. This guards against getting
# worse; the slack is two standard errors, since another processor rounds otherwise.
FROZEN_WER, _ = rates(baseline_row(json.loads((BASELINES / "cpu" / "gate.json").read_text())), NUM_TEXTS)
SLACK = 0.05


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("serving") / "log.txt").open("w")
    command = [sys.executable, "-m", "serving", "--slots", "3", "--max-len", "512", "--port", str(port)]
    server = subprocess.Popen(command, stderr=log)
    with Client(f"127.0.0.1:{port}") as client:
        client.wait_ready(timeout_s=240)
        yield client
    server.terminate()
    assert server.wait(timeout=60) == 0


def say(client: Client, text: str, **sampling) -> tuple[np.ndarray, tts_pb2.Summary]:
    speech = client.synthesize(text, **sampling)
    samples = np.concatenate([chunk.samples for chunk in speech])
    assert speech.summary is not None
    return samples.astype(np.float32) / 32768, speech.summary


def test_a_recogniser_hears_prompts_that_were_never_trained_on(client):
    rate_hz = client.server_info().sample_rate_hz
    texts = gate_texts(NUM_TEXTS)
    assert not set(texts) & set(closed_prompts(4000, seed=5))
    errors = words = 0
    for text in texts:
        audio, summary = say(client, text, top_k=1)
        assert len(audio) == summary.num_frames * 1024
        errors += word_errors(text.split(), hear(audio, rate_hz).split())
        words += len(text.split())
    assert errors / words <= FROZEN_WER + SLACK


def test_it_knows_what_it_was_taught():
    profile = SpeechProfile.from_file(MINNOW / "generation_config.json")
    assert profile.vocabulary == CLOSED_VOCABULARY
    assert profile.untaught("Hello, open the red door please") == ["hello"]


def test_what_the_readme_says_is_heard(client):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    texts = re.findall(r'(?:TEXT=|fishjax say |synthesize\()"([^"]+)"', readme)
    assert len(texts) == 3
    rate_hz = client.server_info().sample_rate_hz
    assert [hear(say(client, text, top_k=1)[0], rate_hz) for text in texts] == texts


def test_the_same_seed_gives_the_same_samples_and_another_gives_others(client):
    first, _ = say(client, "open the gate", seed=7)
    again, _ = say(client, "open the gate", seed=7)
    other, _ = say(client, "open the gate", seed=8)
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or np.any(first != other)


def test_at_once_or_one_at_a_time_the_samples_are_the_same(client):
    texts = ["open the red door", "three seven one", "please find the lamp", "close the window now"]
    alone = [say(client, text, seed=index)[0] for index, text in enumerate(texts)]
    streams = [client.synthesize(text, seed=index) for index, text in enumerate(texts)]
    for stream, wanted in zip(streams, alone, strict=True):
        samples = np.concatenate([chunk.samples for chunk in stream]).astype(np.float32) / 32768
        np.testing.assert_array_equal(samples, wanted)


def test_one_word_is_a_second_of_speech_not_a_minute_of_noise(client):
    audio, summary = say(client, "now", top_k=1)
    assert 0.2 <= len(audio) / 22050 <= 2.5
    assert summary.finish_reason in (tts_pb2.FINISH_REASON_STOP, tts_pb2.FINISH_REASON_RUNAWAY)


def test_spaces_tabs_and_newlines_are_one_space(client):
    plain, _ = say(client, "open the door", seed=3)
    spaced, _ = say(client, "  open\t the \n\n door ", seed=3)
    np.testing.assert_array_equal(plain, spaced)


def test_a_reference_clip_is_taken(client, tmp_path):
    clip, _ = say(client, "find the blue box", seed=2)
    path = tmp_path / "clip.wav"
    with wave.open(str(path), "wb") as writer:
        writer.setnchannels(2)  # stereo, another rate: both are accepted
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes(np.repeat((clip[::2] * 32767).astype(np.int16), 2).tobytes())
    audio, summary = say(client, "open the door", references=[(path, "find the blue box")], seed=1)
    assert summary.num_frames > 0
    without, _ = say(client, "open the door", seed=1)
    assert audio.shape != without.shape or np.any(audio != without)


def test_bytes_that_are_no_sound_are_refused_with_a_sentence(client):
    with pytest.raises(grpc.RpcError) as caught:
        say(client, "open the door", references=[(b"not a sound file", "open")])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(caught.value.details()) > 20
