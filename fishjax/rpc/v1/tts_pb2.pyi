from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AudioFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIO_FORMAT_UNSPECIFIED: _ClassVar[AudioFormat]
    PCM_S16LE: _ClassVar[AudioFormat]
    WAV: _ClassVar[AudioFormat]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    REALTIME: _ClassVar[Priority]
    STANDARD: _ClassVar[Priority]
    BATCH: _ClassVar[Priority]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_RUNAWAY: _ClassVar[FinishReason]
    FINISH_REASON_EMPTY: _ClassVar[FinishReason]
AUDIO_FORMAT_UNSPECIFIED: AudioFormat
PCM_S16LE: AudioFormat
WAV: AudioFormat
PRIORITY_UNSPECIFIED: Priority
REALTIME: Priority
STANDARD: Priority
BATCH: Priority
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_RUNAWAY: FinishReason
FINISH_REASON_EMPTY: FinishReason

class Reference(_message.Message):
    __slots__ = ("audio", "transcript")
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    audio: bytes
    transcript: str
    def __init__(self, audio: _Optional[bytes] = ..., transcript: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_frames")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_frames: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_frames: _Optional[int] = ...) -> None: ...

class SynthesizeRequest(_message.Message):
    __slots__ = ("text", "voice_id", "references", "format", "sampling", "priority")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    text: str
    voice_id: str
    references: _containers.RepeatedCompositeFieldContainer[Reference]
    format: AudioFormat
    sampling: Sampling
    priority: Priority
    def __init__(self, text: _Optional[str] = ..., voice_id: _Optional[str] = ..., references: _Optional[_Iterable[_Union[Reference, _Mapping]]] = ..., format: _Optional[_Union[AudioFormat, str]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class SynthesizeResponse(_message.Message):
    __slots__ = ("header", "audio", "summary")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    header: Header
    audio: Audio
    summary: Summary
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., audio: _Optional[_Union[Audio, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("request_id", "sample_rate_hz", "num_channels", "format", "model", "seed", "samples_per_frame", "reference_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_rate_hz: int
    num_channels: int
    format: AudioFormat
    model: str
    seed: int
    samples_per_frame: int
    reference_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., sample_rate_hz: _Optional[int] = ..., num_channels: _Optional[int] = ..., format: _Optional[_Union[AudioFormat, str]] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., samples_per_frame: _Optional[int] = ..., reference_seconds: _Optional[float] = ...) -> None: ...

class Audio(_message.Message):
    __slots__ = ("data", "first_frame", "num_frames")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    first_frame: int
    num_frames: int
    def __init__(self, data: _Optional[bytes] = ..., first_frame: _Optional[int] = ..., num_frames: _Optional[int] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("finish_reason", "num_frames", "audio_seconds", "queue_ms", "first_audio_ms", "total_ms", "num_preemptions")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_AUDIO_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    num_frames: int
    audio_seconds: float
    queue_ms: float
    first_audio_ms: float
    total_ms: float
    num_preemptions: int
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., num_frames: _Optional[int] = ..., audio_seconds: _Optional[float] = ..., queue_ms: _Optional[float] = ..., first_audio_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class SynthesizeLiveRequest(_message.Message):
    __slots__ = ("start", "text", "flush", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: LiveStart
    text: str
    flush: LiveFlush
    end: LiveEnd
    def __init__(self, start: _Optional[_Union[LiveStart, _Mapping]] = ..., text: _Optional[str] = ..., flush: _Optional[_Union[LiveFlush, _Mapping]] = ..., end: _Optional[_Union[LiveEnd, _Mapping]] = ...) -> None: ...

class LiveStart(_message.Message):
    __slots__ = ("voice_id", "references", "format", "sampling", "priority")
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    voice_id: str
    references: _containers.RepeatedCompositeFieldContainer[Reference]
    format: AudioFormat
    sampling: Sampling
    priority: Priority
    def __init__(self, voice_id: _Optional[str] = ..., references: _Optional[_Iterable[_Union[Reference, _Mapping]]] = ..., format: _Optional[_Union[AudioFormat, str]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class LiveFlush(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Voice(_message.Message):
    __slots__ = ("voice_id", "audio_seconds")
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    voice_id: str
    audio_seconds: float
    def __init__(self, voice_id: _Optional[str] = ..., audio_seconds: _Optional[float] = ...) -> None: ...

class CreateVoiceRequest(_message.Message):
    __slots__ = ("voice_id", "references")
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    voice_id: str
    references: _containers.RepeatedCompositeFieldContainer[Reference]
    def __init__(self, voice_id: _Optional[str] = ..., references: _Optional[_Iterable[_Union[Reference, _Mapping]]] = ...) -> None: ...

class CreateVoiceResponse(_message.Message):
    __slots__ = ("voice",)
    VOICE_FIELD_NUMBER: _ClassVar[int]
    voice: Voice
    def __init__(self, voice: _Optional[_Union[Voice, _Mapping]] = ...) -> None: ...

class ListVoicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVoicesResponse(_message.Message):
    __slots__ = ("voices",)
    VOICES_FIELD_NUMBER: _ClassVar[int]
    voices: _containers.RepeatedCompositeFieldContainer[Voice]
    def __init__(self, voices: _Optional[_Iterable[_Union[Voice, _Mapping]]] = ...) -> None: ...

class DeleteVoiceRequest(_message.Message):
    __slots__ = ("voice_id",)
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    voice_id: str
    def __init__(self, voice_id: _Optional[str] = ...) -> None: ...

class DeleteVoiceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "sample_rate_hz", "num_channels", "samples_per_frame", "num_codebooks", "num_slots", "max_len", "max_queue", "slots_busy", "queue_length", "formats", "default_sampling", "max_text_bytes", "max_references", "max_message_bytes", "max_batch_queue", "max_voices", "max_reference_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    NUM_CODEBOOKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_BUSY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_VOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_REFERENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    sample_rate_hz: int
    num_channels: int
    samples_per_frame: int
    num_codebooks: int
    num_slots: int
    max_len: int
    max_queue: int
    slots_busy: int
    queue_length: int
    formats: _containers.RepeatedScalarFieldContainer[AudioFormat]
    default_sampling: Sampling
    max_text_bytes: int
    max_references: int
    max_message_bytes: int
    max_batch_queue: int
    max_voices: int
    max_reference_seconds: float
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., sample_rate_hz: _Optional[int] = ..., num_channels: _Optional[int] = ..., samples_per_frame: _Optional[int] = ..., num_codebooks: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_len: _Optional[int] = ..., max_queue: _Optional[int] = ..., slots_busy: _Optional[int] = ..., queue_length: _Optional[int] = ..., formats: _Optional[_Iterable[_Union[AudioFormat, str]]] = ..., default_sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_text_bytes: _Optional[int] = ..., max_references: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_batch_queue: _Optional[int] = ..., max_voices: _Optional[int] = ..., max_reference_seconds: _Optional[float] = ...) -> None: ...
