"""SynthesizeLive over a real connection: with an engine of numbers for its rules, with minnow for its sound."""

import asyncio

import grpc
import numpy as np
import pytest

from fishjax.client import Client
from fishjax.errors import InvalidRequest
from fishjax.rpc.v1 import tts_pb2
from fishjax.text.split import split_for_speech
from serving._testing import PATIENCE_S, FakeEngine, frame_level

FLUSH = tts_pb2.SynthesizeLiveRequest(flush=tts_pb2.LiveFlush())
END = tts_pb2.SynthesizeLiveRequest(end=tts_pb2.LiveEnd())


def start(seed=1, **fields):
    sampling = tts_pb2.Sampling(seed=seed, **fields.pop("sampling", {}))
    return tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart(sampling=sampling, **fields))


def text(piece):
    return tts_pb2.SynthesizeLiveRequest(text=piece)


async def rest(call):
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    return answers


async def speak(running, *messages):
    """All samples and the summary of messages that are sent at once."""
    answers = await running.say_live(*messages)
    kinds = [answer.WhichOneof("event") for answer in answers]
    assert kinds == ["header"] + ["audio"] * (len(kinds) - 2) + ["summary"]
    data = b"".join(answer.audio.data for answer in answers)
    assert sum(answer.audio.num_frames for answer in answers) == answers[-1].summary.num_frames
    return np.frombuffer(data, "<i2"), answers[-1].summary


async def frames(call, num):
    """So many frames, and not one more, are ready to be read."""
    got = 0
    while got < num:
        answer = await asyncio.wait_for(call.read(), PATIENCE_S)
        got += answer.audio.num_frames
    assert got == num
    return got


async def refused(running, *messages):
    with pytest.raises(grpc.RpcError) as caught:
        await speak(running, *messages)
    return caught.value


async def idle(running):
    async with asyncio.timeout(PATIENCE_S):
        while running.server._loop.desk.load() != (0, 0):
            await asyncio.sleep(0.001)


def expected_samples(seed, num_frames, samples_per_frame=4):
    levels = np.repeat([frame_level(seed, frame) for frame in range(num_frames)], samples_per_frame)
    return np.rint(levels.astype(np.float32) * 32767).astype(np.int16)


async def test_a_sentence_is_spoken_when_the_next_begins_and_a_flush_speaks_what_is_there(serve):
    async with serve() as running:
        call = running.tts.SynthesizeLive(timeout=PATIENCE_S)
        await call.write(start(seed=5))
        assert (await call.read()).header.seed == 5  # before any text
        await call.write(text("One two thr"))
        await call.write(text("ee."))
        await call.write(text(" Four"))
        await frames(call, 3)
        await call.write(text(" five"))
        await call.write(FLUSH)
        await frames(call, 2)
        await call.write(text("Six seven eight."))
        await call.done_writing()
        answers = await rest(call)
        summary = answers[-1].summary
        assert (summary.num_frames, summary.finish_reason) == (8, tts_pb2.FINISH_REASON_STOP)
        assert sum(answer.audio.num_frames for answer in answers) == 3
        # One conversation: later prompts follow what the slot holds already.
        prefills = [entry[1:] for entry in running.engine.trace if entry[0] == "prefill"]
        assert [first_frame for *_, first_frame in prefills] == [0, 3, 5]
        assert [kept > 0 for kept, *_ in prefills] == [False, True, True]


@pytest.mark.parametrize("ending", [[END], [], [END, text("Unheard words.")], [FLUSH, END]])
async def test_how_a_text_ends(serve, ending):
    async with serve() as running:
        samples, summary = await speak(running, start(seed=2), text("One two. Three"), text(" four"), *ending)
        np.testing.assert_array_equal(samples, expected_samples(2, 4))
        assert summary.finish_reason == tts_pb2.FINISH_REASON_STOP
        await idle(running)


async def test_two_callers_at_once_in_one_slot_each(serve):
    async with serve(FakeEngine(num_slots=2)) as running:

        async def one(seed):
            samples, _ = await speak(running, start(seed), text("One two. Three"), text(" four. "), text("Five."))
            np.testing.assert_array_equal(samples, expected_samples(seed, 5))

        await asyncio.gather(*(one(seed) for seed in range(12)))
        await idle(running)


BAD = {
    "no start": ([text("Hello.")], "first message of SynthesizeLive must be 'start'"),
    "nothing at all": ([], "must be 'start'"),
    "two starts": ([start(), start()], "'start' came twice"),
    "an empty message": ([start(), tts_pb2.SynthesizeLiveRequest()], "is empty: send text, flush or end"),
    "no text": ([start(), END], "no text to speak"),
    "blank text": ([start(), text(" \n"), FLUSH, text("\t")], "no text to speak"),
    "long text": ([start(), text("w" * 10), text("w" * 65_530)], "more than 65536 bytes"),
    "text that the model refuses": ([start(), text("unpronounceable"), FLUSH], "cannot be spoken"),
    "later text that it refuses": ([start(), text("One. Two. unpronounceable"), END], "cannot be spoken"),
    "temperature": ([start(sampling={"temperature": 2.0})], "temperature"),
    "format": ([start(format=7)], "format 7 cannot be streamed"),
    "priority": ([start(priority=7)], "priority 7"),
    "reference": ([start(references=[tts_pb2.Reference(audio=b"noise", transcript="x")])], "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_with_a_sentence(serve, name):
    messages, sentence = BAD[name]
    async with serve() as running:
        error = await refused(running, *messages)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in error.details()
        await idle(running)
        assert (await speak(running, start(), text("Hello")))[1].num_frames == 1


async def test_a_call_that_sends_nothing_is_ended(serve):
    async with serve(FakeEngine(num_slots=1), max_silence_s=0.2) as running:
        call = running.tts.SynthesizeLive(timeout=PATIENCE_S)
        await call.write(start())
        await call.write(text("One. Two"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "nothing came for 0.2 s" in caught.value.details()
        await idle(running)


@pytest.mark.parametrize("when", ["before any text", "while speaking", "while waiting for text"])
async def test_a_caller_that_goes_away_frees_its_slot(serve, caplog, when):
    async with serve(FakeEngine(num_slots=1)) as running:
        call = running.tts.SynthesizeLive(timeout=PATIENCE_S)
        await call.write(start())
        await call.read()
        if when == "while speaking":
            running.engine.gate.close()
            await call.write(text("w " * 20))
            await call.write(FLUSH)
            running.engine.gate.allow(2)
            await frames(call, 1)
        elif when == "while waiting for text":
            await call.write(text("One two. T"))
            await frames(call, 2)
        call.cancel()
        await idle(running)
        running.engine.gate.open()
        assert (await speak(running, start(3), text("Hello")))[1].num_frames == 1
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_max_frames_and_wav(serve):
    async with serve() as running:
        messages = [start(1, sampling={"max_frames": 3}, format=tts_pb2.WAV), text("One two. Three four."), END]
        samples, summary = await speak(running, *messages)
        assert (summary.finish_reason, summary.num_frames) == (tts_pb2.FINISH_REASON_LENGTH, 3)
        assert samples.size == 22 + 3 * 4  # a header of 44 bytes


async def test_a_batch_call_that_waits_for_text_gives_its_slot_up(serve):
    async with serve(FakeEngine(num_slots=1)) as running:
        call = running.tts.SynthesizeLive(timeout=PATIENCE_S)
        await call.write(start(4, priority=tts_pb2.BATCH))
        await call.read()
        await call.write(text("One two. T"))
        await frames(call, 2)
        assert (await speak(running, start(5), text("Hello you")))[1].num_frames == 2
        await call.write(text("hree."))
        await call.done_writing()
        answers = await rest(call)
        assert answers[-1].summary.num_frames == 3
        assert answers[-1].summary.num_preemptions == 1


# With minnow: each sentence is more than half of its 60 byte segments, so whole text and live text are cut alike.
SENTENCES = [
    "Open the small red door please now.",
    "Find the old green lamp please now.",
    "Three seven one four two nine zero five.",
    "Close the new garden gate please.",
]


async def test_live_speech_is_the_speech_of_the_whole_text(serve_minnow, compiles):
    whole = " ".join(SENTENCES)
    assert split_for_speech(whole, 60) == SENTENCES
    async with serve_minnow() as running:
        request = tts_pb2.SynthesizeRequest(text=whole, sampling=tts_pb2.Sampling(seed=11))
        answers = [answer async for answer in running.tts.Synthesize(request, timeout=PATIENCE_S)]
        wanted = b"".join(answer.audio.data for answer in answers)
        compiled = compiles.count
        pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]

        def talk():
            with Client(running.server.address) as client:
                speech = client.synthesize_live(iter(pieces), seed=11, timeout_s=PATIENCE_S)
                return b"".join(chunk.data for chunk in speech), speech.summary

        heard, summary = await asyncio.to_thread(talk)
        assert heard == wanted
        assert summary.num_frames == answers[-1].summary.num_frames > 4
        assert compiles.count == compiled


async def test_slow_text_and_flushes_give_the_same_sound(serve_minnow):
    """However long the slot waits for the next sentence, and whoever speaks meanwhile."""
    async with serve_minnow() as running:
        at_once, _ = await speak(running, start(12), *(text(f"{sentence} ") for sentence in SENTENCES[:3]))
        call = running.tts.SynthesizeLive(timeout=PATIENCE_S)
        await call.write(start(12))
        await call.read()
        data = b""
        for sentence in SENTENCES[:3]:
            await call.write(text(sentence))
            await call.write(FLUSH)
            data += (await call.read()).audio.data
            await asyncio.sleep(0.3)
            await speak(running, start(1, sampling={"max_frames": 3}), text("zero"))
        await call.done_writing()
        data += b"".join(answer.audio.data for answer in await rest(call))
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), at_once)


async def test_what_goes_wrong_with_the_text_is_raised_where_the_speech_is_read(serve):
    def breaks():
        yield "one two. "
        raise ZeroDivisionError("of a language model")

    def talk():
        with Client(running.server.address) as client:
            for pieces, error in ((breaks(), ZeroDivisionError), (["one. ", "x\udcff"], InvalidRequest)):
                with pytest.raises(error):
                    list(client.synthesize_live(pieces, timeout_s=PATIENCE_S))

    async with serve() as running:
        await asyncio.to_thread(talk)
