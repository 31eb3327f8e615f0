"""The committed stubs are what the proto generates, and its enums cover the domain's."""

import importlib.util
from pathlib import Path

import pytest

from fishjax.audio.encode import AudioFormat
from fishjax.rpc.v1 import tts_pb2
from serving.request import Finished
from serving.servicer import FORMATS, finish_reason_to_proto

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_changes_nothing(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools comes with the extra 'dev'")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(tmp_path)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert [path.name for path in generated] == ["tts_pb2.py", "tts_pb2.pyi", "tts_pb2_grpc.py"]
    for path in generated:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"{path}: run python protos/generate.py"


def test_every_finish_reason_has_its_value():
    from fishjax.engine.utterance import FinishReason

    values = {finish_reason_to_proto(Finished(reason.value, 1)) for reason in FinishReason}
    assert len(values) == len(FinishReason)
    assert tts_pb2.FINISH_REASON_UNSPECIFIED not in values


def test_every_format_has_its_value():
    assert set(FORMATS) == set(tts_pb2.AudioFormat.values())
    assert set(FORMATS.values()) == set(AudioFormat)


def test_names_that_stay_put():
    """Field names and numbers that callers rely on."""
    fields = {
        name: [field.name for field in tts_pb2.DESCRIPTOR.message_types_by_name[name].fields]
        for name in ("SynthesizeRequest", "Reference", "Sampling", "SynthesizeResponse", "Header", "Audio", "Summary")
    }
    assert fields["SynthesizeRequest"] == ["text", "voice_id", "references", "format", "sampling", "priority"]
    assert fields["Reference"] == ["audio", "transcript"]
    assert fields["Sampling"] == ["temperature", "top_p", "top_k", "seed", "max_frames"]
    assert fields["SynthesizeResponse"] == ["header", "audio", "summary"]
    assert fields["Header"][:5] == ["request_id", "sample_rate_hz", "num_channels", "format", "model"]
    assert fields["Audio"] == ["data", "first_frame", "num_frames"]
    assert fields["Summary"] == [
        *("finish_reason", "num_frames", "audio_seconds", "queue_ms", "first_audio_ms", "total_ms"),
        "num_preemptions",
    ]
    assert all(field.has_presence for field in tts_pb2.Sampling.DESCRIPTOR.fields)
    assert (tts_pb2.PCM_S16LE, tts_pb2.WAV) == (1, 2)
    assert (tts_pb2.REALTIME, tts_pb2.STANDARD, tts_pb2.BATCH) == (1, 2, 3)
