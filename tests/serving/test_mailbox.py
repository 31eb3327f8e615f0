"""How many frames make a message: one for a listener who has nothing, more for one with sound ahead, never too late."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S, FakeEngine, frame_level
from serving.mailbox import MAX_FRAMES, Mailbox, Playback
from serving.request import Finished, Frame, Started

FRAME_S = 0.0464


def frame(index):
    return Frame(index, np.zeros(1, np.float32))


async def test_a_frame_is_taken_at_once_and_brings_those_behind_it():
    box = Mailbox()
    box.put(Started(0.0))
    for index in range(20):
        box.put(frame(index))
    box.put(Finished("stop", 20))
    assert await box.take(4) == [Started(0.0)]
    assert [event.index for event in await box.take()] == list(range(MAX_FRAMES))
    assert [event.index for event in await box.take()] == list(range(MAX_FRAMES, 20))
    assert await box.take() == [Finished("stop", 20)]


async def test_it_waits_for_as_many_as_are_wanted():
    box = Mailbox()
    taking = asyncio.create_task(box.take(3, PATIENCE_S))
    for index in range(2):
        box.put(frame(index))
        await asyncio.sleep(0.01)
        assert not taking.done()
    box.put(frame(2))
    assert len(await taking) == 3


@pytest.mark.parametrize("num_first", [0, 1])
async def test_the_end_waits_for_nobody(num_first):
    box = Mailbox()
    taking = asyncio.create_task(box.take(9, PATIENCE_S))
    await asyncio.sleep(0)
    for index in range(num_first):
        box.put(frame(index))
    box.put(Finished("stop", num_first))
    async with asyncio.timeout(PATIENCE_S / 2):
        assert len(await taking) == 1
        if num_first:
            assert await box.take(9, PATIENCE_S) == [Finished("stop", 1)]


async def test_after_a_while_one_is_enough():
    box = Mailbox()
    box.put(frame(0))
    assert len(await box.take(9, 0.02)) == 1
    taking = asyncio.create_task(box.take(9, 0.02))
    await asyncio.sleep(0.05)
    assert not taking.done()
    box.put(frame(1))
    async with asyncio.timeout(PATIENCE_S / 2):
        assert len(await taking) == 1


def test_half_of_what_is_ahead():
    playback = Playback(FRAME_S)
    assert playback.next_message(0.0, 16) == (1, 0.0)
    playback.send(1, 10.0)
    assert playback.next_message(10.0, 16) == (1, pytest.approx(FRAME_S / 2))
    playback.send(9, 10.0)
    assert playback.next_message(10.0, 16) == (5, pytest.approx(5 * FRAME_S))
    assert playback.next_message(10.0, 3)[0] == 3
    assert playback.next_message(10.0 + 8 * FRAME_S, 16) == (1, pytest.approx(FRAME_S))
    assert playback.next_message(99.0, 16) == (1, 0.0)
    playback.send(2, 99.0)
    assert playback.next_message(99.0, 16) == (1, pytest.approx(FRAME_S))


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 0.04), min_size=1, max_size=200))
def test_frames_that_are_made_in_time_are_never_sent_too_late(takes_s):
    """Each frame is made within the time of one: whatever is held together, the listener does not run dry."""
    playback, made_s, waiting, dry_s = Playback(FRAME_S), 0.0, 0, None
    wanted, patience_s, asked_s = 1, 0.0, 0.0
    for take_s in takes_s:
        made_s += take_s
        waiting += 1
        ready_s = made_s if waiting >= wanted else None
        if ready_s is None and made_s > asked_s + patience_s:
            ready_s = max(asked_s + patience_s, made_s)
        if ready_s is None:
            continue
        if dry_s is not None:
            assert ready_s <= dry_s
        playback.send(waiting, ready_s)
        dry_s = (ready_s if dry_s is None else dry_s) + waiting * FRAME_S
        waiting, asked_s = 0, ready_s
        wanted, patience_s = playback.next_message(ready_s, MAX_FRAMES)


async def test_fast_speech_goes_in_few_messages(serve):
    """100 frames of 46 ms, one every 3 ms: each could go alone; the first does."""
    async with serve(FakeEngine(num_slots=1, samples_per_frame=1024, max_len=300)) as running:
        running.engine.gate.close()
        request = tts_pb2.SynthesizeRequest(text="w " * 100, sampling=tts_pb2.Sampling(seed=3))
        call = running.tts.Synthesize(request, timeout=PATIENCE_S)
        await call.read()

        async def make():
            for _ in range(100):
                running.engine.gate.allow(1)
                await asyncio.sleep(0.003)
            running.engine.gate.open()

        making, audio = asyncio.create_task(make()), []
        while (answer := await call.read()).HasField("audio"):
            audio.append(answer.audio)
        await making
        assert audio[0].num_frames == 1
        assert sum(message.num_frames for message in audio) == 100
        assert len(audio) < 25
        samples = np.frombuffer(b"".join(message.data for message in audio), "<i2").reshape(100, 1024)
        levels = np.array([frame_level(3, index) for index in range(100)], np.float32)
        np.testing.assert_array_equal(samples[:, 0], np.rint(levels * 32767))
