"""Stored voices and the cache of clips: what is kept, for how long, and what is never read or encoded twice."""

import asyncio
import gc
import io
import itertools
import os
import shutil
import subprocess
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import soundfile

from fishjax.audio.read import read_reference
from fishjax.client import Client
from fishjax.errors import InvalidRequest, VoiceExists, VoiceNotFound, VoicesFull, WeightsError
from fishjax.rpc.v1 import tts_pb2
from fishjax.text.prompt import Reference
from serving._testing import PATIENCE_S, FakeEngine
from serving.request import Clip
from serving.voices import Voice, VoiceStore, check_voice_id, clips_digest


def clip(seconds=1.0, level=0.0, rate=22050) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(round(seconds * rate), level, np.float32), rate, format="WAV")
    return buffer.getvalue()


def references(*clips):
    return [tts_pb2.Reference(audio=audio, transcript=words) for audio, words in clips]


def voice(name, level=0, words="hello"):
    codes_KT = np.full((3, 5), level, np.int32)
    return Voice(name, clips_digest([Clip(bytes([level]), words)]), (Reference(words, codes_KT),) * 2)


@pytest.fixture
def store():
    with ThreadPoolExecutor(1) as executor:

        def make(folder=None, model_name="fake", num_codebooks=3, max_voices=3):
            return VoiceStore(
                folder, executor, model_name=model_name, num_codebooks=num_codebooks, max_voices=max_voices
            )

        yield make


async def test_what_is_stored_is_found_until_it_is_deleted(store):
    voices = store()
    for name in ("b", "a"):
        await voices.add(voice(name))
    assert [v.voice_id for v in voices.all()] == ["a", "b"]
    assert voices.get("a").num_frames == 10
    await voices.delete("a")
    for missing in ("a", "", "../b"):
        with pytest.raises(VoiceNotFound):
            voices.get(missing)
        with pytest.raises(VoiceNotFound):
            await voices.delete(missing)
    assert [v.voice_id for v in voices.all()] == ["b"]


async def test_a_name_belongs_to_one_content(store):
    voices = store(max_voices=1)
    first = await voices.add(voice("a", 1))
    assert await voices.add(voice("a", 1)) is first
    with pytest.raises(VoiceExists, match="delete it first"):
        await voices.add(voice("a", 2))
    with pytest.raises(VoiceExists):
        await voices.add(voice("a", 1, "other words"))
    with pytest.raises(VoicesFull, match="1 voices are stored"):
        await voices.add(voice("b", 1))


async def test_a_folder_keeps_voices(store, tmp_path):
    folder = tmp_path / "new" / "voices"
    voices = store(folder)
    await voices.add(voice("anna", 4, "Grüße"))
    await voices.add(voice("bob", 5))
    await voices.delete("bob")
    assert [path.name for path in folder.iterdir()] == ["anna.safetensors"]
    (folder / ".bob.safetensors.0a1b2c3d").write_bytes(b"half a voice")  # of a crash
    again = store(folder)
    assert [v.voice_id for v in again.all()] == ["anna"]
    kept, first = again.get("anna"), voices.get("anna")
    assert kept.digest == first.digest
    assert [r.text for r in kept.references] == ["Grüße"] * 2
    for a, b in zip(kept.references, first.references, strict=True):
        np.testing.assert_array_equal(a.codes_KT, b.codes_KT)


async def test_a_write_that_fails_leaves_nothing_behind(store, tmp_path, monkeypatch):
    voices = store(tmp_path)

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        await voices.add(voice("a"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VoiceNotFound):
        voices.get("a")


async def test_a_folder_that_somebody_has_tidied_up(serve, tmp_path):
    """A voice whose file is gone can be deleted, and the next one makes the folder again."""
    folder = tmp_path / "voices"
    async with serve(voices=folder) as running:
        for name in ("anna", "bob"):
            create = tts_pb2.CreateVoiceRequest(voice_id=name, references=references((clip(), "x")))
            await running.tts.CreateVoice(create)
        (folder / "anna.safetensors").unlink()
        await running.tts.DeleteVoice(tts_pb2.DeleteVoiceRequest(voice_id="anna"))
        shutil.rmtree(folder)
        await running.tts.DeleteVoice(tts_pb2.DeleteVoiceRequest(voice_id="bob"))
        await running.tts.CreateVoice(create)
        assert [path.name for path in folder.iterdir()] == ["bob.safetensors"]
        assert [v.voice_id for v in (await running.tts.ListVoices(tts_pb2.ListVoicesRequest())).voices] == ["bob"]
        error = await refused(running.tts.DeleteVoice(tts_pb2.DeleteVoiceRequest(voice_id="anna")))
        assert error.details() == "no voice with this voice_id is stored: ListVoices names those that are"


@pytest.mark.parametrize("data", [b"", b"not a voice"])
def test_a_file_that_is_no_voice_is_named(store, tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=r"x\.safetensors in the folder of voices is not a voice") as caught:
        store(tmp_path)
    assert str(tmp_path) not in str(caught.value)


async def test_a_voice_of_another_model_is_refused(store, tmp_path):
    await store(tmp_path).add(voice("a"))
    with pytest.raises(WeightsError, match="made with the model 'fake', this is 'other'"):
        store(tmp_path, model_name="other")
    with pytest.raises(WeightsError):
        store(tmp_path, num_codebooks=10)


@pytest.mark.parametrize("name", ["", "A", ".a", "a/b", "a.b", "a" * 65, "ä", "-a", "a\n"])
def test_names_that_a_voice_cannot_have(name):
    with pytest.raises(InvalidRequest, match="a-z, 0-9"):
        check_voice_id(name)


def test_the_digest_tells_sound_words_and_order_apart():
    a, b = Clip(b"a", "x"), Clip(b"b", "y")
    contents = [[a], [b], [a, b], [b, a], [Clip(b"a", "y")], [Clip(b"ax", "")], []]
    assert len({clips_digest(content) for content in contents}) == len(contents)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def speak(running, voice_id="", clips=(), text="one two", seed=1):
    request = tts_pb2.SynthesizeRequest(
        text=text, voice_id=voice_id, references=references(*clips), sampling=tts_pb2.Sampling(seed=seed)
    )
    answers = [answer async for answer in running.tts.Synthesize(request, timeout=PATIENCE_S)]
    return b"".join(answer.audio.data for answer in answers)


def num_encoded(running):
    return [entry[0] for entry in running.engine.trace].count("reference")


async def test_a_voice_is_encoded_once_and_spoken_with(serve):
    clips = [(clip(1.0), "first"), (clip(0.5), "second")]
    async with serve() as running:
        create = tts_pb2.CreateVoiceRequest(voice_id="anna", references=references(*clips))
        made = (await running.tts.CreateVoice(create)).voice
        assert (made.voice_id, made.audio_seconds) == ("anna", pytest.approx(2 * 4 / 22050))
        assert num_encoded(running) == 2
        for _ in range(3):
            await speak(running, "anna")
            spoken = running.speech.utterances[-1].references
            assert [(r.text, r.codes_KT[0, 0]) for r in spoken] == [("first", 22050), ("second", 11025)]
        assert (await running.tts.CreateVoice(create)).voice == made
        assert num_encoded(running) == 2
        assert (await running.tts.GetServerInfo(tts_pb2.GetServerInfoRequest())).max_voices == 1000


async def test_voices_by_name(serve):
    async with serve(max_voices=2) as running:
        create, delete = running.tts.CreateVoice, running.tts.DeleteVoice
        one = references((clip(1.0), "one"))
        nameless = (await create(tts_pb2.CreateVoiceRequest(references=one))).voice.voice_id
        assert nameless.startswith("voice-")
        assert (await create(tts_pb2.CreateVoiceRequest(references=one))).voice.voice_id == nameless
        await create(tts_pb2.CreateVoiceRequest(voice_id="anna", references=one))
        listed = await running.tts.ListVoices(tts_pb2.ListVoicesRequest())
        assert [v.voice_id for v in listed.voices] == ["anna", nameless]
        other = tts_pb2.CreateVoiceRequest(voice_id="anna", references=references((clip(0.5), "two")))
        assert (await refused(create(other))).code() is grpc.StatusCode.ALREADY_EXISTS
        third = tts_pb2.CreateVoiceRequest(voice_id="carl", references=one)
        assert (await refused(create(third))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await delete(tts_pb2.DeleteVoiceRequest(voice_id="anna"))
        assert (await refused(delete(tts_pb2.DeleteVoiceRequest(voice_id="anna")))).code() is grpc.StatusCode.NOT_FOUND
        assert (await refused(speak(running, "anna"))).code() is grpc.StatusCode.NOT_FOUND
        await create(other)


BAD = {
    "no clips": (tts_pb2.CreateVoiceRequest(voice_id="a"), "at least one reference"),
    "a path for a name": (
        tts_pb2.CreateVoiceRequest(voice_id="../a", references=references((clip(), "x"))),
        "cannot be used",
    ),
    "many clips": (tts_pb2.CreateVoiceRequest(references=references((clip(), "x")) * 9), "9 references"),
    "no words": (tts_pb2.CreateVoiceRequest(references=references((clip(), " "))), "has no transcript"),
    "no sound": (tts_pb2.CreateVoiceRequest(references=references((b"", "x"))), "has no audio"),
    "noise": (
        tts_pb2.CreateVoiceRequest(references=references((clip(), "x"), (b"noise", "x"))),
        "reference 2: the reference audio (5 bytes) cannot be decoded",
    ),
    "a short clip": (tts_pb2.CreateVoiceRequest(references=references((clip(0.1), "x"))), "lasts 0.10 s"),
    "a long clip": (tts_pb2.CreateVoiceRequest(references=references((clip(61, rate=8000), "x"))), "longer than 60"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_voices_are_refused_with_a_sentence(serve, tmp_path, name):
    message, sentence = BAD[name]
    async with serve(voices=tmp_path) as running:
        error = await refused(running.tts.CreateVoice(message))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in error.details()
        assert list(tmp_path.iterdir()) == []


async def test_a_clip_is_encoded_once_whatever_its_words(serve):
    async with serve() as running:
        await speak(running, clips=[(clip(1.0), "old words")])
        await speak(running, clips=[(clip(1.0), "new words")])
        assert [r.text for r in running.speech.utterances[-1].references] == ["new words"]
        assert num_encoded(running) == 1
        await speak(running, clips=[(clip(1.5), "new words")])
        assert num_encoded(running) == 2
        create = tts_pb2.CreateVoiceRequest(voice_id="anna", references=references((clip(1.5), "x")))
        await running.tts.CreateVoice(create)
        assert num_encoded(running) == 2


async def test_many_clips_stay_within_the_budget(serve):
    async with serve(max_cached_bytes=1000) as running:
        reader = running.server._references
        for number in range(20):
            await speak(running, clips=[(clip(0.3 + 0.01 * number), "x")])
            assert reader.num_bytes <= 1000
        assert len(reader._codes) == 3  # 256 bytes and 12 bytes of codes each
        before = num_encoded(running)
        await speak(running, clips=[(clip(0.3 + 0.01 * 19), "x")])  # the latest is kept
        assert num_encoded(running) == before
        await speak(running, clips=[(clip(0.3), "x")])  # the oldest is not
        assert num_encoded(running) == before + 1


async def test_a_stored_voice_sounds_as_its_clips_do_and_outlives_the_server(serve_minnow, tmp_path):
    rng = np.random.default_rng(17)
    buffers = []
    for _ in range(2):
        buffer = io.BytesIO()
        soundfile.write(buffer, 0.1 * rng.standard_normal(22050).astype(np.float32), 22050, format="FLAC")
        buffers.append(buffer.getvalue())
    text = "open the red door."
    async with serve_minnow(voices=tmp_path) as running:
        voices = running.engine.voices
        before = voices.hits, voices.misses
        wanted = [await speak(running, clips=[(buffer, "close the gate")], text=text) for buffer in buffers]
        assert wanted[0] != wanted[1]
        assert (voices.hits, voices.misses) == (before[0], before[1] + 2)  # read once each

        def create():
            with Client(running.server.address) as client:
                for number, buffer in enumerate(buffers):
                    client.create_voice([(buffer, "close the gate")], f"voice{number}")
                client.create_voice([(buffers[0], "x")], "gone")
                client.delete_voice("gone")
                return [v.voice_id for v in client.voices()]

        assert await asyncio.to_thread(create) == ["voice0", "voice1"]
    async with serve_minnow(voices=tmp_path) as running:
        # Alternating and at once, in whatever slot: each has its own.
        heard = await asyncio.gather(*(speak(running, f"voice{number % 2}", text=text) for number in range(6)))
        assert [data == wanted[number % 2] for number, data in enumerate(heard)] == [True] * 6
        assert [await speak(running, clips=[(buffers[0], "close the gate")], text=text)] == wanted[:1]
        assert (voices.hits, voices.misses) == (before[0] + 7, before[1] + 2)  # and copied after, stored or sent


async def test_the_default_voice_is_read_once_and_copied_after(serve_minnow):
    async with serve_minnow() as running:
        first = await speak(running, text="open the red door.")
        voices = running.engine.voices
        before = voices.hits, voices.misses
        assert await speak(running, text="open the red door.") == first
        await speak(running, text="find the blue box.")
        assert (voices.hits, voices.misses) == (before[0] + 2, before[1])
        assert voices.num_bytes > 0


def resident_mb():
    pages = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return int(pages.stdout) / 1000


async def test_requests_that_wait_have_let_go_of_their_clips(serve):
    """Else a full queue would hold gigabytes: each request would keep its message and its clips, 10 MB each."""
    audio = clip(59.0, rate=88_200)
    request = tts_pb2.SynthesizeRequest(text="a b", references=references((audio, "x")))
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        calls = []
        for number in range(15):
            if number == 3:
                before_mb = resident_mb()
            calls.append(running.tts.Synthesize(request))
            assert (await calls[-1].read()).HasField("header")
        assert resident_mb() - before_mb < 12 * len(audio) / 1e6 / 2
        for call in calls:
            call.cancel()


async def test_clips_that_wait_to_be_read_are_bounded(serve):
    message = tts_pb2.SynthesizeRequest(text="a b", references=references((clip(2.0), "x")))
    create = tts_pb2.CreateVoiceRequest(references=message.references)
    async with serve(max_message_bytes=100_000, max_incoming_bytes=150_000) as running:
        running.engine.gate.close()
        ahead = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text="w " * 9), timeout=PATIENCE_S)
        await ahead.read()
        waits = asyncio.create_task(speak(running, clips=[(clip(2.0), "x")]))
        while not running.server._incoming._num_bytes:
            await asyncio.sleep(0.001)
        for call in (running.tts.Synthesize(message).read(), running.tts.CreateVoice(create)):
            error = await refused(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
        running.engine.gate.open()
        assert await waits
        assert running.server._incoming._num_bytes == 0
        await running.tts.CreateVoice(create)


async def test_what_is_refused_is_let_go_at_once(serve):
    """Not when Python next looks for cycles: it counts objects, and a few of them hold hundreds of megabytes."""
    noise, num_calls = bytes(1_000_000), 20
    message = tts_pb2.SynthesizeRequest(text="a b", references=references((noise, "x")))
    async with serve() as running:
        await refused(running.tts.Synthesize(message).read())
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(num_calls):
                await refused(running.tts.Synthesize(message).read())
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
        assert held < num_calls * len(noise) / 4


async def test_a_clip_is_encoded_in_pieces_between_the_steps_of_others(serve):
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.references.piece_samples = 1000
        running.engine.gate.close()
        speaking = asyncio.create_task(speak(running, text="w " * 30_000))
        create = tts_pb2.CreateVoiceRequest(voice_id="anna", references=references((clip(0.5), "x")))
        while running.server._loop.desk.load() != (1, 0):
            await asyncio.sleep(0.001)
        creating = asyncio.ensure_future(running.tts.CreateVoice(create))
        while not creating.done():  # step by step, else all is spoken before the clip is decoded
            running.engine.gate.allow(1)
            await asyncio.sleep(0.001)
        made = creating.result().voice
        trace = [entry for entry in running.engine.trace if entry[0] in ("step", "reference")]
        pieces = [at for at, entry in enumerate(trace) if entry[0] == "reference"]
        assert [trace[at][1:] for at in pieces] == [(1000, False), *[(1000, True)] * 10, (25, True)]
        assert made.audio_seconds == pytest.approx(12 * 4 / 22050)
        assert all("step" in [entry[0] for entry in trace[a + 1 : b]] for a, b in itertools.pairwise(pieces))
        speaking.cancel()


async def test_clips_that_wait_for_their_turn_are_not_decoded(serve, monkeypatch):
    decoding, most = [0], [0]

    def read(audio, sample_rate_hz):
        decoding[0] += 1
        most[0] = max(most[0], decoding[0])
        return read_reference(audio, sample_rate_hz)

    def forget(audio_T):
        decoding[0] -= 1
        return cut(audio_T)

    monkeypatch.setattr("serving.references.read_reference", read)
    async with serve(decode_threads=2) as running:
        cut = running.engine.references.cut
        running.engine.references.cut = forget
        await asyncio.gather(*(speak(running, clips=[(clip(0.3 + 0.01 * i), "x")]) for i in range(12)))
        assert num_encoded(running) == 12 and most[0] <= 2


async def test_what_is_used_of_a_clip_is_told(serve, caplog):
    async with serve() as running:
        info = await running.tts.GetServerInfo(tts_pb2.GetServerInfoRequest())
        assert info.max_reference_seconds == pytest.approx(1_000_000 * 4 / 22050)
        sent = references((clip(1.0), "first"), (clip(0.5), "second"))
        await running.tts.CreateVoice(tts_pb2.CreateVoiceRequest(voice_id="anna", references=sent[:1]))
        for asked, num_frames in (({"references": sent}, 2), ({"voice_id": "anna"}, 1), ({}, 0)):
            call = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text="one", **asked), timeout=PATIENCE_S)
            assert (await call.read()).header.reference_seconds == pytest.approx(num_frames * 4 / 22050)
        assert "are used" not in caplog.text
        running.engine.references.max_frames = 5513 // 2
        sent = references((clip(0.4), "first"), (clip(1.0, level=0.1), "second"))
        await running.tts.CreateVoice(tts_pb2.CreateVoiceRequest(voice_id="carl", references=sent))
        assert "reference 2: of 1.0 s the first 0.5 s are used" in caplog.text and "reference 1" not in caplog.text


async def test_the_small_voice_hears_four_seconds_of_a_longer_clip(serve_minnow):
    noise = io.BytesIO()
    soundfile.write(noise, 0.1 * np.random.default_rng(2).standard_normal(6 * 22050), 22050, format="FLAC")
    async with serve_minnow() as running:
        create = tts_pb2.CreateVoiceRequest(references=references((noise.getvalue(), "close the gate")))
        assert (await running.tts.CreateVoice(create)).voice.audio_seconds == pytest.approx(4, abs=0.05)
