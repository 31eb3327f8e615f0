"""Giving a slot up and going on, with the engine and the voice that ship: the same codes and samples, bit for bit."""

import asyncio
import queue

import numpy as np
import pytest

from fishjax.engine.sampling_params import SamplingParams
from fishjax.rpc.v1 import tts_pb2
from fishjax.speech import load
from serving._testing import PATIENCE_S
from serving.desk import LoopState
from serving.loop import SynthesisLoop
from serving.metrics import Metrics
from serving.plan import Priority
from serving.request import Failed, Finished, Frame
from serving.scheduler import Scheduler

LONG = "open the red door please. find the blue box now. three seven one. close the garden gate."
SHORT = "lock the gate."


class Recorded:
    """An utterance whose codes are kept."""

    def __init__(self, utterance):
        self._utterance, self.codes = utterance, []

    def __getattr__(self, name):
        return getattr(self._utterance, name)

    def accept(self, codes_K, is_end):
        accepted = self._utterance.accept(codes_K, is_end)
        if accepted.keep:
            self.codes.append(codes_K.copy())
        return accepted


class Harness:
    """A loop around minnow; each request is (codes, samples, times saved)."""

    def __init__(self, speech, max_chunks_per_step=4):
        self.speech, engine, states = speech, speech.engine, queue.Queue()
        frame_s = engine.samples_per_frame / engine.sample_rate_hz
        self.loop = SynthesisLoop(
            engine,
            Scheduler(
                engine.num_slots,
                8,
                max_batch_queue=8,
                frame_s=frame_s,
                max_chunks_per_step=max_chunks_per_step,
            ),
            deliver=lambda mail: [mailbox.put(event) for mailbox, event in mail],
            on_state=states.put,
            max_unread_frames=100_000,
            metrics=Metrics(),
        )
        self.loop.start()
        assert states.get(timeout=PATIENCE_S) is LoopState.SERVING

    def ask(self, name, text, seed, priority=Priority.STANDARD, **sampling):
        mailbox = queue.Queue()
        utterance = Recorded(self.speech.utterance(text, (), SamplingParams(0.5, 0.8, 5, seed, **sampling)))
        self.loop.desk.reserve(name, priority)
        self.loop.desk.submit(name, utterance, mailbox)
        return utterance, mailbox


def frames(mailbox, num):
    """Wait for so many frames."""
    got = []
    while len(got) < num:
        event = mailbox.get(timeout=PATIENCE_S)
        assert not isinstance(event, Finished | Failed), event
        got += [event] if isinstance(event, Frame) else []
    return got


def listen(utterance, mailbox, heard=()):
    """Codes (T, K), samples (T, s) and how often it was saved."""
    heard = list(heard)
    while not isinstance(event := mailbox.get(timeout=PATIENCE_S), Finished):
        assert not isinstance(event, Failed), event
        heard += [event] if isinstance(event, Frame) else []
    assert [frame.index for frame in heard] == list(range(event.num_frames))
    return np.stack(utterance.codes), np.stack([frame.audio_s for frame in heard]), event.num_saves


@pytest.fixture
def harness(minnow):
    harness = Harness(minnow)
    yield harness
    harness.loop.stop()


@pytest.fixture(scope="module")
def grouped():
    """Minnow again, its sound made four frames at a time."""
    harness = Harness(load(num_slots=2, max_len=256, sound_group=4, warm=False))
    yield harness
    harness.loop.stop()


def check_same(one, other):
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


def test_a_preempted_request_goes_on_to_the_same_codes_and_samples(harness, compiles):
    undisturbed = {seed: listen(*harness.ask(f"u{seed}", LONG, seed, Priority.BATCH)) for seed in (1, 2)}
    assert all(saves == 0 for *_, saves in undisturbed.values())
    compiled = compiles.count
    batch = {seed: harness.ask(f"b{seed}", LONG, seed, Priority.BATCH) for seed in (1, 2)}
    heard = {seed: [] for seed in batch}
    for round_ in range(4):  # in different frames of different segments, and in whichever slot is free
        for seed, (_, mailbox) in batch.items():
            heard[seed] += frames(mailbox, 3 + 5 * round_ + seed)
        urgent = [harness.ask(f"r{round_}{number}", SHORT, 90 + number, max_frames=8) for number in range(2)]
        for request in urgent:
            assert listen(*request)[2] == 0
    again = {seed: listen(*request, heard[seed]) for seed, request in batch.items()}
    for seed in undisturbed:
        check_same(again[seed], undisturbed[seed])
        assert again[seed][2] >= 1, "nothing was preempted: the test shows nothing"
    assert sum(saves for *_, saves in again.values()) >= 4
    assert compiles.count == compiled, "moving a request compiled something"


def test_batch_is_spoken_in_many_pieces_in_any_slot(harness):
    """Preempted as often as traffic allows, down to a frame or two at a time."""
    undisturbed = listen(*harness.ask("u", LONG, 5, Priority.BATCH))
    batch = harness.ask("b", LONG, 5, Priority.BATCH)
    heard = []
    for number in range(8):
        heard += frames(batch[1], 2)
        short = [harness.ask(f"s{number}{i}", SHORT, number, max_frames=2 + i + number % 2) for i in range(3)]
        for request in short:
            listen(*request)
    codes, audio, saves = listen(*batch, heard)
    check_same((codes, audio), undisturbed)
    assert saves >= 4


def test_with_grouped_sound_it_is_the_same_alone_beside_others_and_preempted(harness, grouped, compiles):
    ungrouped = listen(*harness.ask("u", LONG, 5))
    alone = listen(*grouped.ask("u", LONG, 5, Priority.BATCH))
    np.testing.assert_array_equal(alone[0], ungrouped[0])
    np.testing.assert_allclose(alone[1], ungrouped[1], atol=1e-5)
    compiled = compiles.count
    pair = [grouped.ask("b", LONG, 5, Priority.BATCH), grouped.ask("c", LONG, 5, Priority.BATCH)]
    heard = [[], []]
    for number in range(5):
        for mine, (_, mailbox) in zip(heard, pair, strict=True):
            mine += frames(mailbox, 3)
        for request in [grouped.ask(f"s{number}{i}", SHORT, number, max_frames=2 + 4 * i) for i in range(2)]:
            assert listen(*request)[2] == 0
    again = [listen(*request, mine) for request, mine in zip(pair, heard, strict=True)]
    for codes, audio, _ in again:
        check_same((codes, audio), alone)
    assert min(saves for *_, saves in again) >= 1 and compiles.count == compiled


async def test_over_the_wire_the_samples_are_the_same_and_the_summary_tells(serve_minnow):
    async def speak(text, seed, priority, max_frames=None):
        request = tts_pb2.SynthesizeRequest(
            text=text, priority=priority, sampling=tts_pb2.Sampling(seed=seed, max_frames=max_frames)
        )
        answers = [answer async for answer in running.tts.Synthesize(request, timeout=PATIENCE_S)]
        return b"".join(answer.audio.data for answer in answers[1:-1]), answers[-1].summary

    async with serve_minnow() as running:
        alone, summary = await speak(LONG, 7, tts_pb2.BATCH)
        assert summary.num_preemptions == 0
        batch = [asyncio.create_task(speak(LONG, 7, tts_pb2.BATCH)) for _ in range(2)]
        for number in range(4):
            await asyncio.sleep(0.2)
            urgent = (speak(SHORT, number, priority, 6) for priority in (tts_pb2.REALTIME, tts_pb2.STANDARD))
            for _, summary in await asyncio.gather(*urgent):
                assert summary.num_preemptions == 0
        spoken = [await task for task in batch]
        assert [data == alone for data, _ in spoken] == [True, True]
        assert sum(summary.num_preemptions for _, summary in spoken) >= 1
