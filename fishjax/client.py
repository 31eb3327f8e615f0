"""A small client of the gRPC service: text in, sound out while it is being made.

    with Client("127.0.0.1:50051") as client:
        speech = client.synthesize("open the door please")
        for chunk in speech:
            play(chunk.samples, speech.header.sample_rate_hz)
        print(speech.summary.num_frames)

Text that is still being written is spoken sentence by sentence (None among the pieces: speak what is there now):

        speech = client.synthesize_live(language_model.pieces())

Errors are the service's own: `grpc.RpcError`, whose `details()` is a sentence. What cannot be sent is InvalidRequest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fishjax.errors import InvalidRequest
from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc

_MAX_MESSAGE_BYTES = 32 * 1024 * 1024


class SpeechOptions(TypedDict, total=False):
    """How to speak; what is left out, or None, takes the model's default.

    `voice_id`: a stored voice. Or `references`: clips (a sound file's bytes, or its path) with their words.
    """

    voice_id: str | None
    references: Sequence[tuple[bytes | os.PathLike[str], str]] | None
    audio_format: tts_pb2.AudioFormat | None
    priority: tts_pb2.Priority | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    max_frames: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames of sound: `data` as it came, `num_frames` of it, from the request's frame `first_frame` on."""

    data: bytes
    first_frame: int
    num_frames: int

    @property
    def samples(self) -> np.ndarray:
        """int16 (T,), for PCM_S16LE; the first chunk of a WAV has 22 samples of header."""
        return np.frombuffer(self.data, "<i2")


class SpeechStream:
    """One call: iterate over it once for its chunks. `summary` is there when the iteration is over."""

    def __init__(self, call: Any, faults: Sequence[Exception] = ()):
        self.summary: tts_pb2.Summary | None = None
        self._call = call
        self._faults = faults  # of the text that the call sends
        self._header: tts_pb2.Header | None = None

    @property
    def header(self) -> tts_pb2.Header:
        """Sample rate, format, seed and the request's id; waits for the first message. Raises grpc.RpcError."""
        if self._header is None:
            message = self._read()
            assert message is not None, "a call that ends well has a header"
            self._header = message.header
        assert self._header is not None
        return self._header

    def __iter__(self) -> Iterator[Chunk]:
        _ = self.header
        while (message := self._read()) is not None:
            match message.WhichOneof("event"):
                case "audio":
                    yield Chunk(message.audio.data, message.audio.first_frame, message.audio.num_frames)
                case "summary":
                    self.summary = message.summary

    def _read(self) -> tts_pb2.SynthesizeResponse | None:
        """The next message; None at the end. What the text itself raised goes before gRPC's words for it."""
        try:
            return next(self._call, None)
        except grpc.RpcError:
            if self._faults:
                raise self._faults[0] from None
            raise

    def cancel(self) -> None:
        """Stop the speech; the server frees its slot. An iteration under way raises grpc.RpcError (CANCELLED)."""
        self._call.cancel()


class Client:
    """A connection to a server at `target` ("host:port"), without encryption unless `credentials` say how.

    `credentials`: of `grpc.ssl_channel_credentials`. `api_key` is sent with every call.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None):
        options = [("grpc.max_send_message_length", _MAX_MESSAGE_BYTES)]
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._tts = tts_pb2_grpc.TtsStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def synthesize(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[SpeechOptions]
    ) -> SpeechStream:
        """Speak `text`; returns at once. `timeout_s` limits the whole call, in seconds. Raises InvalidRequest."""
        request = tts_pb2.SynthesizeRequest(text=_utf8(text), **_fields(options))
        return SpeechStream(self._tts.Synthesize(request, timeout=timeout_s, metadata=self._metadata))

    def synthesize_live(
        self, pieces: Iterable[str | None], *, timeout_s: float | None = None, **options: Unpack[SpeechOptions]
    ) -> SpeechStream:
        """Speak text that arrives in pieces; returns at once. `pieces` is read in another thread, as the text comes.

        Each sentence is spoken once the next one begins; None among the pieces speaks what is there. `timeout_s` limits
        the whole call, in seconds. What `pieces` raises ends the call, and is raised where the speech is read.
        """
        start = tts_pb2.LiveStart(**_fields(options))

        def messages() -> Iterator[tts_pb2.SynthesizeLiveRequest]:
            yield tts_pb2.SynthesizeLiveRequest(start=start)
            try:
                for piece in pieces:
                    if piece is None:
                        yield tts_pb2.SynthesizeLiveRequest(flush=tts_pb2.LiveFlush())
                    else:
                        yield tts_pb2.SynthesizeLiveRequest(text=_utf8(piece))
            except Exception as error:
                faults.append(error)
                raise
            yield tts_pb2.SynthesizeLiveRequest(end=tts_pb2.LiveEnd())

        faults: list[Exception] = []
        call = self._tts.SynthesizeLive(messages(), timeout=timeout_s, metadata=self._metadata)
        return SpeechStream(call, faults)

    def create_voice(
        self,
        references: Sequence[tuple[bytes | os.PathLike[str], str]],
        voice_id: str = "",
        timeout_s: float = 60.0,
    ) -> tts_pb2.Voice:
        """Store clips with their words as a voice, to be named in `synthesize`. Raises grpc.RpcError."""
        request = tts_pb2.CreateVoiceRequest(voice_id=_utf8(voice_id), references=_references(references))
        return self._tts.CreateVoice(request, timeout=timeout_s, metadata=self._metadata).voice

    def voices(self, timeout_s: float = 10.0) -> list[tts_pb2.Voice]:
        """The stored voices, by name. Raises grpc.RpcError."""
        return list(
            self._tts.ListVoices(tts_pb2.ListVoicesRequest(), timeout=timeout_s, metadata=self._metadata).voices
        )

    def delete_voice(self, voice_id: str, timeout_s: float = 10.0) -> None:
        """Forget a stored voice. Raises grpc.RpcError."""
        self._tts.DeleteVoice(tts_pb2.DeleteVoiceRequest(voice_id=voice_id), timeout=timeout_s, metadata=self._metadata)

    def server_info(self, timeout_s: float = 10.0) -> tts_pb2.GetServerInfoResponse:
        """The server's model, limits and load. Raises grpc.RpcError."""
        return self._tts.GetServerInfo(tts_pb2.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server says SERVING. Raises TimeoutError, saying what it said last."""
        serving = health_pb2.HealthCheckResponse.SERVING
        last = "nothing"
        try:
            request = health_pb2.HealthCheckRequest()
            for answer in self._health.Watch(request, timeout=timeout_s, wait_for_ready=True):  # type: ignore[attr-defined]
                last = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                if answer.status == serving:
                    return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
                raise
        raise TimeoutError(f"the server was not ready within {timeout_s:g} s; its health was last: {last}")

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields(options: SpeechOptions) -> dict[str, Any]:
    """What both kinds of request have in common. Raises TypeError for an option that there is not."""
    if unknown := options.keys() - SpeechOptions.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r} of speech")
    sampling = {name: options.get(name) for name in ("temperature", "top_p", "top_k", "seed", "max_frames")}
    return {
        "voice_id": _utf8(options.get("voice_id") or ""),
        "references": _references(options.get("references") or ()),
        "format": options.get("audio_format") or tts_pb2.PCM_S16LE,
        "priority": options.get("priority") or tts_pb2.PRIORITY_UNSPECIFIED,
        "sampling": tts_pb2.Sampling(**sampling),
    }


def _utf8(text: str) -> str:
    """The text. Raises InvalidRequest for one that has no UTF-8: half a character, of a broken escape or bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text cannot be sent: its character {error.start + 1} is a lone surrogate, half of a character"
        ) from None
    return text


def _references(clips: Sequence[tuple[bytes | os.PathLike[str], str]]) -> list[tts_pb2.Reference]:
    return [
        tts_pb2.Reference(audio=clip if isinstance(clip, bytes) else Path(clip).read_bytes(), transcript=_utf8(words))
        for clip, words in clips
    ]
