"""Proto to domain and back: parse, check, hand over, stream. Thin on purpose; `call.py` keeps the books."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor

import fishjax
from fishjax.audio.encode import AudioFormat, StreamEncoder
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import DeadlineExceeded, InvalidRequest
from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc
from fishjax.text.prompt import Reference

from .call import Call, Calls, Context
from .config import ServerConfig
from .contract import Speech
from .desk import Desk
from .incoming import Incoming
from .keys import KeyRing
from .mailbox import Mailbox
from .metrics import Metrics
from .plan import Priority
from .references import ReferenceReader
from .request import Clip, Finished, SpeechRequest
from .session import ReaderPace, Session
from .voices import Voice, VoiceStore, check_voice_id, clips_digest

logger = logging.getLogger(__name__)

FORMATS = {
    tts_pb2.AUDIO_FORMAT_UNSPECIFIED: AudioFormat.PCM_S16LE,
    tts_pb2.PCM_S16LE: AudioFormat.PCM_S16LE,
    tts_pb2.WAV: AudioFormat.WAV,
}
_PRIORITIES = {
    tts_pb2.PRIORITY_UNSPECIFIED: None,
    tts_pb2.REALTIME: Priority.REALTIME,
    tts_pb2.STANDARD: Priority.STANDARD,
    tts_pb2.BATCH: Priority.BATCH,
}
_FORMAT_TO_PROTO = {AudioFormat.PCM_S16LE: tts_pb2.PCM_S16LE, AudioFormat.WAV: tts_pb2.WAV}
_NUM_CHANNELS = 1


class TtsServicer(tts_pb2_grpc.TtsServicer):
    """The rpcs of `fishjax.rpc.v1.Tts`."""

    def __init__(
        self,
        speech: Speech,
        desk: Desk[Mailbox],
        executor: Executor,
        references: ReferenceReader,
        voices: VoiceStore,
        keys: KeyRing,
        calls: Calls,
        incoming: Incoming,
        metrics: Metrics,
        config: ServerConfig,
        clock: Callable[[], float],
    ):
        self._speech = speech
        self._desk = desk
        self._executor = executor
        self._references = references
        self._voices = voices
        self._keys = keys
        self._calls = calls
        self._incoming = incoming
        self._metrics = metrics
        self._config = config
        self._clock = clock

    async def Synthesize(self, request: tts_pb2.SynthesizeRequest, context: Context) -> None:
        """Speak a text: header, audio messages, summary."""
        async with self._calls.answering(context, "Synthesize") as call:
            asked = self._parse(request, check_text(request.text, self._config), call)
            del request  # and its clips, which may be megabytes
            with self._keys.using(call.key, self._clock()):
                await self._speak(call, asked, context)

    async def SynthesizeLive(
        self, request_iterator: AsyncIterator[tts_pb2.SynthesizeLiveRequest], context: Context
    ) -> None:
        """Speak a text that arrives in pieces."""
        async with self._calls.answering(context, "SynthesizeLive") as call:
            start = await self._next_piece(request_iterator, first=True)
            if start is None or not start.HasField("start"):
                raise InvalidRequest("the first message of SynthesizeLive must be 'start'")
            asked = self._parse(start.start, None, call)
            del start  # and its clips
            with self._keys.using(call.key, self._clock()):
                await self._speak(call, asked, context, self._pieces(request_iterator))

    async def _pieces(self, messages: AsyncIterator[tts_pb2.SynthesizeLiveRequest]) -> AsyncIterator[str | None]:
        """Text, or None for a flush, up to the end of the stream."""
        while (message := await self._next_piece(messages)) is not None:
            match message.WhichOneof("event"):
                case "text":
                    yield message.text
                case "flush":
                    yield None
                case "end":
                    return
                case "start":
                    raise InvalidRequest("'start' came twice: start a new call for a new speech")
                case None:
                    raise InvalidRequest("a message of SynthesizeLive is empty: send text, flush or end")

    async def _next_piece(
        self, messages: AsyncIterator[tts_pb2.SynthesizeLiveRequest], *, first: bool = False
    ) -> tts_pb2.SynthesizeLiveRequest | None:
        patience_s = self._config.max_silence_s
        try:
            if first:  # which has the clips
                return await self._incoming.read(anext(messages, None), patience_s)
            async with asyncio.timeout(patience_s):
                return await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"nothing came for {patience_s:g} s: end the call with its text") from None

    def _parse(
        self, message: tts_pb2.SynthesizeRequest | tts_pb2.LiveStart, text: str | None, call: Call
    ) -> SpeechRequest:
        return parse(message, text, call, self._speech, self._voices, self._config)

    async def _speak(
        self, call: Call, request: SpeechRequest, context: Context, pieces: AsyncIterator[str | None] | None = None
    ) -> None:
        arrived_s, priority = call.arrived_s, request.priority.name
        call.figures["priority"] = priority
        engine = self._speech.engine
        encoder = StreamEncoder(request.audio_format, engine.sample_rate_hz)
        pace = ReaderPace(self._config.slow_reader_s, self._clock)
        first_audio_s = None
        num_frames = 0
        async with Session(request, self._speech, self._desk, self._executor, self._read, self._clock) as session:
            header = self._header(request, session.reference_frames)
            await pace.write(context.write(tts_pb2.SynthesizeResponse(header=header)), 0.0)
            if pieces is not None:
                session.read_text(pieces, self._config.max_text_bytes)
            async for sound in session.sound():
                if sound.waited:
                    pace.caught_up()
                if first_audio_s is None:
                    first_audio_s = self._clock()
                    assert session.started_s is not None, "a slot comes before sound"
                    self._metrics.first_sound.labels(call.rpc, priority).observe(first_audio_s - arrived_s)
                    self._metrics.queue_wait.labels(call.rpc, priority).observe(session.started_s - arrived_s)
                audio = tts_pb2.Audio(
                    data=encoder.encode(sound.audio_T), first_frame=sound.first_frame, num_frames=sound.num_frames
                )
                await pace.write(
                    context.write(tts_pb2.SynthesizeResponse(audio=audio)), sound.audio_T.size / engine.sample_rate_hz
                )
                num_frames += sound.num_frames
            finished, started_s = session.finished, session.started_s
        assert finished is not None and started_s is not None, "sound() ends with both, or raises"
        assert finished.num_frames == num_frames, f"sent {num_frames} of {finished.num_frames} frames"
        summary = tts_pb2.Summary(
            finish_reason=finish_reason_to_proto(finished),  # pyright: ignore[reportArgumentType] enum values are ints
            num_frames=num_frames,
            audio_seconds=self._seconds(num_frames),
            queue_ms=1000 * (started_s - arrived_s),
            first_audio_ms=None if first_audio_s is None else 1000 * (first_audio_s - arrived_s),
            total_ms=1000 * (self._clock() - arrived_s),
            num_preemptions=finished.num_saves,
        )
        await pace.write(context.write(tts_pb2.SynthesizeResponse(summary=summary)), 0.0)
        call.outcome = finished.reason
        call.figures |= {
            "num_frames": num_frames,
            "queue_ms": summary.queue_ms,
            "first_audio_ms": summary.first_audio_ms,
            "total_ms": summary.total_ms,
            "num_preemptions": summary.num_preemptions,
        }
        if pieces is None:  # else the text sets the pace
            took_s = max(self._clock() - started_s, 1e-6)
            self._metrics.real_time_factor.labels(priority).observe(summary.audio_seconds / took_s)

    async def _read(self, clips: tuple[Clip, ...]) -> Sequence[Reference]:
        with self._incoming.hold(_num_bytes(clips)):
            return await self._references.read(clips)

    def _header(self, request: SpeechRequest, reference_frames: int) -> tts_pb2.Header:
        engine = self._speech.engine
        return tts_pb2.Header(
            request_id=request.request_id,
            sample_rate_hz=engine.sample_rate_hz,
            num_channels=_NUM_CHANNELS,
            format=_FORMAT_TO_PROTO[request.audio_format],
            model=engine.model_name,
            seed=request.sampling.seed,
            samples_per_frame=engine.samples_per_frame,
            reference_seconds=self._seconds(reference_frames),
        )

    def _seconds(self, num_frames: int) -> float:
        return num_frames * self._speech.engine.samples_per_frame / self._speech.engine.sample_rate_hz

    async def GetServerInfo(
        self, request: tts_pb2.GetServerInfoRequest, context: Context
    ) -> tts_pb2.GetServerInfoResponse:
        """The model, the limits and the load."""
        async with self._calls.answering(context, "GetServerInfo"):
            return self._info()
        return tts_pb2.GetServerInfoResponse()  # the caller went away

    def _info(self) -> tts_pb2.GetServerInfoResponse:
        engine, config = self._speech.engine, self._config
        slots_busy, queue_length = self._desk.load()
        default = self._speech.default_sampling()
        return tts_pb2.GetServerInfoResponse(
            version=fishjax.__version__,
            model=engine.model_name,
            sample_rate_hz=engine.sample_rate_hz,
            num_channels=_NUM_CHANNELS,
            samples_per_frame=engine.samples_per_frame,
            num_codebooks=engine.num_codebooks,
            num_slots=engine.num_slots,
            max_len=engine.max_len,
            max_queue=config.max_queue,
            slots_busy=slots_busy,
            queue_length=queue_length,
            formats=list(_FORMAT_TO_PROTO.values()),
            default_sampling=tts_pb2.Sampling(
                temperature=default.temperature,
                top_p=default.top_p,
                top_k=default.top_k,
                max_frames=default.max_frames,
            ),
            max_text_bytes=config.max_text_bytes,
            max_references=config.max_references,
            max_message_bytes=config.max_message_bytes,
            max_batch_queue=config.max_batch_queue,
            max_voices=config.max_voices,
            max_reference_seconds=self._seconds(engine.references.max_frames),
        )

    async def CreateVoice(self, request: tts_pb2.CreateVoiceRequest, context: Context) -> tts_pb2.CreateVoiceResponse:
        """Encode clips once, and store them."""
        async with self._calls.answering(context, "CreateVoice") as call:
            clips = check_clips(request.references, self._config)
            if not clips:
                raise InvalidRequest("a voice needs at least one reference")
            if request.voice_id:
                check_voice_id(request.voice_id)
            with self._incoming.hold(_num_bytes(clips)):
                digest = await asyncio.get_running_loop().run_in_executor(self._executor, clips_digest, clips)
                voice_id = request.voice_id or f"voice-{digest[:20]}"
                if (voice := self._voices.find(voice_id, digest)) is None:
                    with self._keys.using(call.key, self._clock()):
                        references = await self._references.read(clips)
                    voice = await self._voices.add(Voice(voice_id, digest, tuple(references)))
            logger.info("voice %s: %d clips", voice.voice_id, len(voice.references))
            return tts_pb2.CreateVoiceResponse(voice=self._voice_to_proto(voice))
        return tts_pb2.CreateVoiceResponse()  # the caller went away

    async def ListVoices(self, request: tts_pb2.ListVoicesRequest, context: Context) -> tts_pb2.ListVoicesResponse:
        """All stored voices, by name."""
        async with self._calls.answering(context, "ListVoices"):
            return tts_pb2.ListVoicesResponse(voices=[self._voice_to_proto(voice) for voice in self._voices.all()])
        return tts_pb2.ListVoicesResponse()  # the caller went away

    async def DeleteVoice(self, request: tts_pb2.DeleteVoiceRequest, context: Context) -> tts_pb2.DeleteVoiceResponse:
        """Forget a voice."""
        async with self._calls.answering(context, "DeleteVoice"):
            await self._voices.delete(request.voice_id)
            logger.info("voice %s: deleted", request.voice_id)
        return tts_pb2.DeleteVoiceResponse()

    def _voice_to_proto(self, voice: Voice) -> tts_pb2.Voice:
        return tts_pb2.Voice(voice_id=voice.voice_id, audio_seconds=self._seconds(voice.num_frames))


def check_text(text: str, config: ServerConfig) -> str:
    """The text as it came. Raises InvalidRequest if it is blank or too long."""
    if not text.strip():
        raise InvalidRequest("there is no text to speak: 'text' is empty or blank")
    if (num_bytes := len(text.encode("utf-8"))) > config.max_text_bytes:
        raise InvalidRequest(
            f"the text has {num_bytes} bytes; the longest one may have {config.max_text_bytes}: send it in parts"
        )
    return text


def parse(
    message: tts_pb2.SynthesizeRequest | tts_pb2.LiveStart,
    text: str | None,
    call: Call,
    speech: Speech,
    voices: VoiceStore,
    config: ServerConfig,
) -> SpeechRequest:
    """Check everything but the text. Raises InvalidRequest, VoiceNotFound or NotAllowed with a sentence."""
    if message.voice_id and message.references:
        raise InvalidRequest("the request has a voice_id and references: send one or the other")
    if message.format not in FORMATS:
        names = " or ".join(audio_format.name for audio_format in AudioFormat)
        raise InvalidRequest(f"format {message.format} cannot be streamed: ask for {names}")
    if message.priority not in _PRIORITIES:
        raise InvalidRequest(f"priority {message.priority} is unknown: ask for REALTIME, STANDARD or BATCH")
    return SpeechRequest(
        request_id=call.request_id,
        text=text,
        clips=list(check_clips(message.references, config)),
        voice=voices.get(message.voice_id).references if message.voice_id else (),
        sampling=_sampling(message.sampling, speech),
        audio_format=FORMATS[message.format],
        priority=call.key.priority(_PRIORITIES[message.priority]),
        deadline_s=None if call.remaining_s is None else call.arrived_s + call.remaining_s,
    )


def check_clips(references: Sequence[tts_pb2.Reference], config: ServerConfig) -> tuple[Clip, ...]:
    """Reference clips, not decoded yet. Raises InvalidRequest."""
    if len(references) > config.max_references:
        raise InvalidRequest(f"there are {len(references)} references; at most {config.max_references} can be used")
    for number, reference in enumerate(references, start=1):
        if not reference.audio:
            raise InvalidRequest(f"reference {number} has no audio: send the bytes of a whole sound file")
        if not reference.transcript.strip():
            raise InvalidRequest(f"reference {number} has no transcript: say what is spoken in the clip")
    return tuple(Clip(reference.audio, reference.transcript) for reference in references)


def _num_bytes(clips: Sequence[Clip]) -> int:
    return sum(len(clip.audio) for clip in clips)


def _sampling(message: tts_pb2.Sampling, speech: Speech) -> SamplingParams:
    """The fields that are set, the model's defaults for the others, and a seed of our own if there is none."""
    default = speech.default_sampling(seed=secrets.randbits(32))
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    return dataclasses.replace(default, **given)


def finish_reason_to_proto(finished: Finished) -> int:
    """The enum value of the same name."""
    return tts_pb2.FinishReason.Value(f"FINISH_REASON_{finished.reason.upper()}")
