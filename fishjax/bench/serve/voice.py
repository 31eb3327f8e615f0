"""The first requests of a fresh server, timed; what the very first says becomes the voice of all loads."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from fishjax.client import Client

from .call import OK, Call
from .clip import write_clip
from .plan import LISTENS

VOICE_ID = "bench"
CLIP_TEXT = "please open the small red box now one two three"
_CLIP_FRAMES = 128
"""Some seconds of sound, also from a model that does not stop by itself."""
_NUM_NEXT = 5
_NEXT_FRAMES = 8


def first_requests(address: str, clip: Path) -> list[Call]:
    """The first request, and five like it but shorter, one after the other. Leaves a clip file and VOICE_ID behind."""
    with Client(address) as client:
        client.wait_ready(60)
        first, samples_T, sample_rate_hz = _speak(client, _CLIP_FRAMES)
        others = [_speak(client, _NEXT_FRAMES)[0] for _ in range(_NUM_NEXT)]
        write_clip(clip, samples_T, sample_rate_hz)
        if VOICE_ID not in [voice.voice_id for voice in client.voices()]:
            client.create_voice([(clip, CLIP_TEXT)], VOICE_ID)
    return [first, *others]


def _speak(client: Client, max_frames: int) -> tuple[Call, np.ndarray, int]:
    call = Call("real", LISTENS, time.monotonic())
    speech = client.synthesize(CLIP_TEXT, seed=0, max_frames=max_frames)
    samples = []
    for chunk in speech:
        call.arrivals.append((time.monotonic(), chunk.num_frames))
        samples.append(chunk.samples)
    call.ended_s, call.status, call.promised = time.monotonic(), OK, True
    call.frame_s = speech.header.samples_per_frame / speech.header.sample_rate_hz
    return call, np.concatenate([np.empty(0, np.int16), *samples]), speech.header.sample_rate_hz
