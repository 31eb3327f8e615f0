"""Looks for requests and clips that a server takes badly, and keeps one of each way in which they can end.

    python tools/fuzz.py requests --seconds 60
    python tools/fuzz.py clips --seconds 60

Inputs that are known are changed a little, over and over. One that ends in a way that no input ended in before is kept
in tests/corpus/<target>/, and changed in turn; tests replay all of them. What a caller sends may be accepted or
refused with a sentence; anything else that is raised is a fault, and ends the search.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import soundfile
import typer

from fishjax.audio.read import MAX_REFERENCE_S, decode
from fishjax.errors import FishjaxError
from fishjax.rpc.v1 import tts_pb2
from serving._testing import NUM_CODEBOOKS, FakeSpeech
from serving.call import STATUS, Call
from serving.config import ServerConfig
from serving.guard import reader
from serving.servicer import check_clips, check_text, parse
from serving.voices import VoiceStore, check_voice_id

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
OUTCOMES = "outcomes.json"
_MAX_BYTES = 16_384
_CONFIG = ServerConfig()
_SPEECH = FakeSpeech()
_VOICES = VoiceStore(None, ThreadPoolExecutor(1), model_name="fake", num_codebooks=NUM_CODEBOOKS, max_voices=1)


def read_request(data: bytes) -> list[str]:
    """How a server takes these bytes as a request to speak, to speak live and to store a voice: three sentences."""
    return [_sentence(take, data) for take in (_speak, _speak_live, _store)]


def read_clip(data: bytes) -> list[str]:
    """How it takes them as a reference clip."""
    return [_sentence(_decode, data)]


def _sentence(take: Callable[[bytes], str], data: bytes) -> str:
    try:
        said = take(data)
    except FishjaxError as error:
        if STATUS[type(error)] is grpc.StatusCode.INTERNAL:
            raise
        said = str(error)
    return re.sub(r"\b\d[\d.]*", "#", said)


def _speak(data: bytes) -> str:
    message = reader(tts_pb2.SynthesizeRequest.FromString)(data)
    return _parse(message, check_text(message.text, _CONFIG))


def _speak_live(data: bytes) -> str:
    message = reader(tts_pb2.SynthesizeLiveRequest.FromString)(data)
    return _parse(message.start, None) if message.HasField("start") else str(message.WhichOneof("event"))


def _parse(message: tts_pb2.SynthesizeRequest | tts_pb2.LiveStart, text: str | None) -> str:
    request = parse(message, text, Call("id", "rpc", 0.0, None), _SPEECH, _VOICES, _CONFIG)
    return f"{request.priority.name} {request.audio_format.name} {len(request.clips)} clips"


def _store(data: bytes) -> str:
    message = reader(tts_pb2.CreateVoiceRequest.FromString)(data)
    if message.voice_id:
        check_voice_id(message.voice_id)
    return f"{len(check_clips(message.references, _CONFIG))} clips"


def _decode(data: bytes) -> str:
    clip = decode(data)
    seconds = clip.audio_T.size / clip.sample_rate_hz
    assert clip.audio_T.dtype == np.float32 and np.isfinite(clip.audio_T).all() and seconds <= MAX_REFERENCE_S
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        return f"{sound.format} {sound.subtype}"


TARGETS: dict[str, Callable[[bytes], list[str]]] = {"requests": read_request, "clips": read_clip}


def known(target: str) -> list[bytes]:
    """The inputs that are kept, and without any the ones to begin with."""
    kept = [path.read_bytes() for path in sorted((CORPUS / target).glob("*.bin"))]
    return kept or {"requests": _first_requests, "clips": _first_clips}[target]()


def _first_requests() -> list[bytes]:
    references = [tts_pb2.Reference(audio=b"RIFF", transcript="hello")]
    sampling = tts_pb2.Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=1, max_frames=9)
    request = {"format": tts_pb2.WAV, "priority": tts_pb2.BATCH, "sampling": sampling}
    messages = [
        tts_pb2.SynthesizeRequest(text="open the door", references=references, **request),
        tts_pb2.SynthesizeRequest(text="open the door", voice_id="anna", **request),
        tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart(references=references, **request)),
        tts_pb2.SynthesizeLiveRequest(text="open"),
        tts_pb2.CreateVoiceRequest(voice_id="anna", references=references),
    ]
    return [message.SerializeToString() for message in messages]


def _first_clips() -> list[bytes]:
    tone = (0.5 * np.sin(np.arange(2000) / 5)).astype(np.float32)
    kinds = [(name, subtype) for name in ("WAV", "WAVEX", "RF64", "AIFF", "AU", "CAF", "W64", "NIST", "VOC", "PAF")
             for subtype in ("PCM_16", "FLOAT")]  # fmt: skip
    kinds += [("WAV", subtype) for subtype in ("PCM_24", "ULAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "DOUBLE")]
    kinds += [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
    clips = []
    for name, subtype in kinds:
        if soundfile.check_format(name, subtype):
            file = io.BytesIO()
            soundfile.write(file, tone, 8000, format=name, subtype=subtype)
            clips.append(file.getvalue())
    return clips


_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def change(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """The bytes with one to four small changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0:
                del changed[at : min(to, at + rng.choice([1, 4, 64, 4096]))]
            case 1:
                changed[at:at] = rng.randbytes(rng.choice([1, 2, 8, 64]))
            case 2:
                changed[at : at + 1] = rng.randbytes(1)
            case 3:
                size = rng.choice([1, 2, 4])
                number = (rng.choice(_NUMBERS) % 256**size).to_bytes(size, rng.choice(["big", "little"]))
                changed[at : at + size] = number
            case 4:
                changed[at:to] = changed[at:to][:64] * rng.randint(1, 8)
            case 5:
                other = rng.choice(others)
                changed[at:] = other[rng.randrange(len(other) + 1) :]
            case 6:
                del changed[at:]
    return bytes(changed[:_MAX_BYTES])


def main(
    target: Annotated[str, typer.Argument(help="requests or clips")],
    seconds: Annotated[float, typer.Option(help="How long to look")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the changes")] = 0,
) -> None:
    """Look for new ways in which inputs end, and keep one of each."""
    folder, take, rng = CORPUS / target, TARGETS[target], random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    inputs = known(target)
    untried = inputs[::-1]
    seen: set[tuple[int, str]] = set()
    outcomes: dict[str, list[str]] = {}
    tried, until_s = 0, time.monotonic() + seconds
    last = folder / "last.tmp"
    while untried or time.monotonic() < until_s:
        is_known = bool(untried)
        data = untried.pop() if untried else change(rng.choice(inputs), inputs, rng)
        last.write_bytes(data)  # what a crash of the whole process leaves behind
        tried += 1
        way = take(data)
        if is_known or not seen.issuperset(enumerate(way)):
            seen.update(enumerate(way))
            inputs += [] if is_known else [data]
            name = f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
            (folder / name).write_bytes(data)
            outcomes[name] = way
            print(f"{tried}: {' | '.join(way)}", flush=True)
    last.unlink()
    (folder / OUTCOMES).write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    print(f"{tried} inputs ended in {len(seen)} ways")


if __name__ == "__main__":
    typer.run(main)
