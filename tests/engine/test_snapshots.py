"""A voice is read once and copied after: the same keys, values, codes and samples, bit for bit, within its budget."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.snapshots import Snapshots, VoiceKey

IM_END = 422  # of the golden tokenizer
WILD = SamplingParams(temperature=1.3, top_p=0.95, top_k=30, seed=11)
MAX_LEN = 200  # the second block of a voice begins at 128, and has to begin before
VOICE = 150


@pytest.fixture(scope="module")
def make_engine(golden_model, golden_codec):
    def make(voice_bytes: int, warm: bool = True) -> Engine:
        engine = Engine(
            golden_model,
            golden_codec,
            im_end_id=IM_END,
            num_slots=3,
            max_len=MAX_LEN,
            max_reference_s=0.5,
            chunk_columns=32,
            voice_bytes=voice_bytes,
        )
        if warm:
            engine.warmup()
        return engine

    return make


@pytest.fixture(scope="module")
def keeping(make_engine) -> Engine:
    return make_engine(1 << 20)


@pytest.fixture(scope="module")
def voiced(prompt):
    """voiced(voice, text): a prompt whose first VOICE columns are those of a voice."""
    return lambda voice, text: np.concatenate([prompt(voice, VOICE), prompt(text, 21)], axis=1)


def speak(engine: Engine, slot: int, columns_CT: np.ndarray, voice_length: int = VOICE, num_frames: int = 10):
    """Live keys and values, codes and sound of a prompt; and how many chunks were read for it."""
    prefix = engine.prefill(columns_CT, WILD, voice_length=voice_length)
    engine.insert(prefix, slot)
    while engine.extract(slot).unread:
        engine.read(slot)
    live = columns_CT.shape[1] - 1
    kv = [np.asarray(leaf)[:, :, :live] for leaf in jax.tree.leaves(engine.extract(slot).saved[0].cache)]
    frames = []
    for _ in range(num_frames):
        frame = engine.step([slot]).result()
        if frame.is_end_B[slot]:
            break
        frames.append((frame.codes_BK[slot], frame.audio_Bs[slot]))
    engine.free(slot)
    codes, audio = (np.array(part) for part in zip(*frames, strict=True))
    return [*kv, codes, audio], prefix.num_chunks


def check_same(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_read_copied_or_never_kept_it_is_the_same_bit_for_bit(keeping, make_engine, voiced):
    without, chunks = speak(make_engine(0), 0, voiced(1, 2))
    assert len(without[-1]) > 5
    before = keeping.voices.hits, keeping.voices.misses
    first, chunks_first = speak(keeping, 1, voiced(1, 2))
    speak(keeping, 2, voiced(1, 3))
    again, chunks_again = speak(keeping, 0, voiced(1, 2))
    assert (keeping.voices.hits, keeping.voices.misses) == (before[0] + 2, before[1] + 1)
    assert (chunks, chunks_first, chunks_again) == (6, 6, 1)
    check_same(first, without)
    check_same(again, without)


def test_another_voice_is_another_voice(keeping, voiced):
    (*_, mine, _), _ = speak(keeping, 0, voiced(1, 2))
    (*_, other, _), _ = speak(keeping, 1, voiced(8, 2))
    assert mine.shape != other.shape or np.any(mine != other)


def test_a_copy_leaves_the_neighbours_alone(keeping, voiced, prompt):
    alone, _ = speak(keeping, 0, prompt(7, 60), voice_length=0)
    speak(keeping, 1, voiced(1, 2))
    keeping.insert(keeping.prefill(prompt(7, 60), WILD), 0)
    codes = []
    for index in range(4):
        keeping.insert(keeping.prefill(voiced(1, index), WILD, voice_length=VOICE), 1)
        codes.append(keeping.step([0, 1]).result().codes_BK[0])
    np.testing.assert_array_equal(codes, alone[-2][:4])
    keeping.free(0), keeping.free(1)


def test_two_that_read_a_new_voice_at_once_keep_it_once(keeping, voiced):
    before = keeping.voices.num_bytes
    for slot in (0, 1):
        keeping.insert(prefix := keeping.prefill(voiced(5, slot), WILD, voice_length=VOICE), slot)
        assert prefix.num_chunks == 6
    for _ in range(6):
        keeping.read(0), keeping.read(1)
    assert keeping.prefill(voiced(5, 3), WILD, voice_length=VOICE).num_chunks == 1
    kept = keeping.voices.num_bytes - before
    assert kept == sum(leaf.nbytes for leaf in jax.tree.leaves(keeping.extract(0).saved[0].cache)) * 2 * 128 // MAX_LEN
    keeping.free(0), keeping.free(1)


def test_a_request_that_moves_while_its_voice_is_read_keeps_it_too(keeping, voiced):
    keeping.insert(keeping.prefill(voiced(6, 1), WILD, voice_length=VOICE), 0)
    keeping.read(0), keeping.read(0)
    saved = keeping.extract(0)
    keeping.insert(keeping.prefill(voiced(1, 2), WILD, voice_length=VOICE), 0)
    keeping.insert(saved, 2)
    keeping.step([0, 2]).result()
    (*_, copied, _), chunks = speak(keeping, 1, voiced(6, 2))
    (*_, read, _), _ = speak(keeping, 0, voiced(6, 2), voice_length=0)
    assert chunks == 1
    np.testing.assert_array_equal(copied, read)
    keeping.free(0), keeping.free(2)


def test_a_voice_shorter_than_a_chunk_is_just_read(keeping, prompt):
    before = keeping.voices.misses
    assert keeping.prefill(prompt(1, 30), WILD, voice_length=15).num_chunks == 1
    assert keeping.voices.misses == before


def test_nothing_compiles_for_voices(make_engine, voiced, compiles):
    engine = make_engine(1 << 20)
    compiled = compiles.count
    for voice in (1, 2, 1):
        engine.insert(engine.prefill(voiced(voice, 3), WILD, voice_length=VOICE), 0)
        engine.step([0]).result()
        engine.free(0)
    assert compiles.count == compiled
    assert (engine.voices.hits, engine.voices.misses) == (1, 2)


def key(name: int, length: int) -> VoiceKey:
    return VoiceKey(bytes([name]), length)


def test_what_was_used_longest_ago_goes_first_and_the_budget_holds():
    kept = Snapshots(max_bytes=55, block_bytes=10, block_columns=128)

    def add(name, length):
        starts = kept.make_room(key(name, length))
        if starts:
            kept.add(key(name, length), tuple(starts))
        assert kept.num_bytes <= 55
        return starts

    assert add(1, 256) == [0, 128] and add(2, 129) == [0, 128]
    assert add(1, 256) == []  # it is here
    assert kept.find(key(1, 256)) == (0, 128)
    assert add(3, 1) == [0] and kept.num_bytes == 50
    assert add(4, 128) == [0] and kept.num_bytes == 40
    assert kept.find(key(2, 129)) is None
    assert kept.find(key(1, 256)) and kept.find(key(3, 1)) and kept.find(key(4, 128))
    assert add(5, 6 * 128) == [] and kept.num_bytes == 40  # larger than all there is: nobody goes for it
    assert add(6, 5 * 128) == [0, 128, 256, 384, 512] and kept.num_bytes == 50
    assert (kept.hits, kept.misses) == (4, 1)


def test_a_key_is_the_content_of_its_columns():
    columns_CT = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert VoiceKey.of(columns_CT) == VoiceKey.of(np.asfortranarray(columns_CT))
    other_CT = columns_CT.copy()
    other_CT[2, 3] += 1
    assert len({VoiceKey.of(c) for c in (columns_CT, other_CT, columns_CT[:, :3], columns_CT.reshape(4, 3))}) == 4
