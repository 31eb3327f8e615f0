"""Promises of a busy server, kept by minnow over a real connection: seeds, load, memory, no compiling."""

import asyncio
import gc
import io
import random
import tracemalloc

import grpc
import jax
import numpy as np
import pytest
import soundfile

from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S

TEXTS = [
    "now",
    "open the red door",
    "find the old lamp please now",
    "three seven one four two nine zero five. Close the gate.",
]


async def speak(running, text, *, voice_id="", priority=tts_pb2.STANDARD, **sampling):
    request = tts_pb2.SynthesizeRequest(
        text=text, voice_id=voice_id, priority=priority, sampling=tts_pb2.Sampling(**sampling)
    )
    answers = [answer async for answer in running.tts.Synthesize(request, timeout=PATIENCE_S)]
    return b"".join(answer.audio.data for answer in answers)


async def speak_live(running, text, **sampling):
    messages = [
        tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart(sampling=tts_pb2.Sampling(**sampling))),
        *(tts_pb2.SynthesizeLiveRequest(text=word) for word in text),
    ]
    return b"".join(answer.audio.data for answer in await running.say_live(*messages))


async def leave(running, text, after):
    """Go away after so many messages."""
    call = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text=text), timeout=PATIENCE_S)
    for _ in range(after):
        await call.read()
    call.cancel()


async def idle(running):
    async with asyncio.timeout(PATIENCE_S):
        while running.server._loop.desk.load() != (0, 0):
            await asyncio.sleep(0.01)


async def device_bytes_at_rest(running):
    """What a server holds whose requests are over and whose last step is read.

    Its slots are free before that step is: work is done between two steps, so the second piece comes after it.
    """
    await idle(running)
    for _ in range(2):
        await asyncio.wrap_future(running.server._loop.desk.run(lambda: None))
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


async def test_a_seed_means_the_same_samples_on_every_path(serve_minnow, clip):
    text = "open the red door"
    async with serve_minnow() as running:
        wanted = await speak(running, text, seed=5, max_frames=12)
        assert await speak(running, text, seed=5, max_frames=12) == wanted
        assert await speak(running, text, seed=5, max_frames=12, priority=tts_pb2.BATCH) == wanted
        assert await speak(running, text, seed=5, max_frames=12, priority=tts_pb2.REALTIME) == wanted
        assert await speak_live(running, text, seed=5, max_frames=12) == wanted
        # With a neighbour, in whichever slot.
        pair = await asyncio.gather(*(speak(running, text, seed=5, max_frames=12) for _ in range(2)))
        assert pair == [wanted, wanted]
        others = {await speak(running, text, seed=seed, max_frames=12) for seed in (6, 7, 8)}
        assert len(others | {wanted}) == 4
        await running.tts.CreateVoice(
            tts_pb2.CreateVoiceRequest(
                voice_id="v", references=[tts_pb2.Reference(audio=clip, transcript="close the gate")]
            )
        )
        voiced = await speak(running, text, voice_id="v", seed=5, max_frames=12)
        assert await speak(running, text, voice_id="v", seed=5, max_frames=12) == voiced != wanted


async def test_sampling_fields_have_their_effect(serve_minnow):
    text = "three seven one"
    async with serve_minnow() as running:

        async def distinct(**sampling):
            return len({await speak(running, text, seed=seed, max_frames=6, **sampling) for seed in range(4)})

        assert await distinct(top_k=1) == 1  # greedy, whatever the seed
        assert await distinct(top_p=1e-6) == 1  # the best candidate alone
        assert await distinct(temperature=1.9, top_p=1.0, top_k=500) == 4
        greedy = await speak(running, text, top_k=1, max_frames=6)
        assert await speak(running, text, temperature=0.01, top_p=1.0, max_frames=6, seed=3) == greedy


async def test_nothing_compiles_while_serving(serve_minnow, compiles, clip):
    """Whatever is asked, from the first request on."""
    async with serve_minnow() as running:
        compiled = compiles.count
        reference = [tts_pb2.Reference(audio=clip, transcript="close the gate")]
        await running.tts.CreateVoice(tts_pb2.CreateVoiceRequest(voice_id="v", references=reference))
        await asyncio.gather(
            *(speak(running, text, seed=1, max_frames=20) for text in TEXTS),
            *(speak(running, TEXTS[1], voice_id="v", priority=tts_pb2.BATCH) for _ in range(3)),
            speak_live(running, TEXTS[3], max_frames=20),
            *(leave(running, TEXTS[2], after) for after in range(4)),
        )
        await idle(running)
        assert compiles.count == compiled


async def test_four_times_as_many_callers_as_slots_leave_the_server_well(serve_minnow):
    async with serve_minnow() as running:
        wanted = await speak(running, TEXTS[1], seed=4, max_frames=10)
        before = await device_bytes_at_rest(running)  # the default voice is kept from here on

        async def caller(number):
            rng = random.Random(number)
            for turn in range(4):
                if rng.random() < 0.3:
                    await leave(running, rng.choice(TEXTS), rng.randrange(4))
                else:
                    text, seed = (TEXTS[1], 4) if turn % 2 else (rng.choice(TEXTS), number)
                    data = await speak(running, text, seed=seed, max_frames=10, priority=rng.choice([1, 2, 3]))
                    if turn % 2:
                        assert data == wanted

        await asyncio.gather(*(caller(number) for number in range(8)))
        await idle(running)
        assert await speak(running, TEXTS[1], seed=4, max_frames=10) == wanted
        assert await device_bytes_at_rest(running) == before


async def test_many_requests_leave_device_memory_identical(serve_minnow, recwarn):
    """500 of random lengths and classes, a fifth of which go away: each lets go of all it had."""
    rng = random.Random(0)
    async with serve_minnow() as running:
        await speak(running, TEXTS[0], max_frames=1)
        before = await device_bytes_at_rest(running)  # the default voice is kept from here on

        async def one():
            if rng.random() < 0.2:
                await leave(running, rng.choice(TEXTS), rng.randrange(3))
            else:
                await speak(running, rng.choice(TEXTS), max_frames=rng.randint(1, 3), priority=rng.choice([1, 2, 3]))

        for _ in range(50):
            await asyncio.gather(*(one() for _ in range(10)))
        assert await device_bytes_at_rest(running) == before
    assert not [warning for warning in recwarn if "donat" in str(warning.message).lower()]


async def test_a_thousand_callers_that_go_away_leave_host_memory_flat(serve):
    async with serve() as running:

        async def crowd(num):
            for start in range(0, num, 50):
                await asyncio.gather(*(leave(running, "w " * 30, (start + i) % 4) for i in range(50)))
            await idle(running)
            for kept_for_tests in (running.engine.trace, running.engine.runs, running.speech.utterances):
                kept_for_tests.clear()
            gc.collect()

        tracemalloc.start()
        try:
            await crowd(1000)  # until NumPy's and asyncio's free lists are full
            before = tracemalloc.get_traced_memory()[0]
            await crowd(1000)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 1000 * 100  # not even 100 bytes a caller


async def test_twice_the_capacity_is_refused_at_once_and_the_rest_is_served(serve_minnow):
    """Two slots and a queue of two: of eight at once four are spoken, four are told when to come back."""
    async with serve_minnow(max_queue=2) as running:
        results = await asyncio.gather(
            *(speak(running, TEXTS[3], seed=1, max_frames=20) for _ in range(8)), return_exceptions=True
        )
        spoken = [result for result in results if isinstance(result, bytes)]
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert (len(spoken), len(refused)) == (4, 4)
        assert len(set(spoken)) == 1
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0


@pytest.fixture(scope="module")
def clip():

    buffer = io.BytesIO()
    noise = 0.1 * np.random.default_rng(0).standard_normal(22050).astype(np.float32)
    soundfile.write(buffer, noise, 22050, format="WAV")
    return buffer.getvalue()
