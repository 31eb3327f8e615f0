"""A prompt read in chunks between the steps of others: bounded pieces, the same codes, at any moment interruptible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishjax.engine.chunks import cut, widths
from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams

IM_END = 422  # of the golden tokenizer
WILD = SamplingParams(temperature=1.3, top_p=0.95, top_k=30, seed=11)
LONG = 200  # columns: seven chunks of at most 32


@pytest.fixture(scope="module")
def small_chunks(golden_model, golden_codec) -> Engine:
    engine = Engine(
        golden_model, golden_codec, im_end_id=IM_END, num_slots=4, max_len=256, max_reference_s=0.5, chunk_columns=32
    )
    engine.warmup()
    return engine


def codes(engine: Engine, slot: int, num_frames: int, beside: tuple[int, ...] = ()) -> np.ndarray:
    made = []
    for _ in range(num_frames):
        frame = engine.step([slot, *beside]).result()
        if frame.is_end_B[slot]:
            break
        made.append(frame.codes_BK[slot])
    return np.array(made)


@pytest.fixture(scope="module")
def alone(small_chunks, prompt):
    """Codes of the long prompt with nobody else there."""
    small_chunks.insert(small_chunks.prefill(prompt(2, LONG), WILD), 0)
    made = codes(small_chunks, 0, 12)
    small_chunks.free(0)
    assert len(made) > 6
    return made


@given(num_columns=st.integers(0, 300), start=st.integers(0, 50), bound=st.sampled_from([16, 32, 100, 256]))
def test_chunks_are_the_prompt_in_order_none_longer_than_the_bound(num_columns, start, bound):
    columns_CT = np.arange(2 * num_columns, dtype=np.int32).reshape(2, num_columns)
    allowed = widths(1024, bound)
    chunks = cut(columns_CT, start, None, allowed)
    assert all(chunk.columns_1KT.shape[2] in allowed and chunk.columns_1KT.shape[2] <= bound for chunk in chunks)
    read_CT = np.zeros((2, num_columns + bound), np.int32)
    for chunk in chunks:
        at = chunk.start - start
        read_CT[:, at : at + chunk.columns_1KT.shape[2]] = chunk.columns_1KT[0]
    np.testing.assert_array_equal(read_CT[:, :num_columns], columns_CT)
    assert len(chunks) == max(1, -(-num_columns // allowed[-1]))


def test_widths_are_no_longer_than_a_slot_needs():
    assert widths(16, 256) == [16]
    assert widths(100, 256) == [16, 32, 64, 128]
    assert widths(4096, 256) == [16, 32, 64, 128, 256]


def test_a_long_prompt_between_the_steps_of_others_gives_the_codes_it_gives_alone(small_chunks, prompt, alone):
    """One chunk, one step of the neighbours, and so on: neither hears anything of the other."""
    engine = small_chunks
    engine.insert(engine.prefill(prompt(3), WILD), 1)
    undisturbed = codes(engine, 1, 20)
    engine.insert(engine.prefill(prompt(3), WILD), 1)
    beside = list(codes(engine, 1, 3))
    engine.insert(prefix := engine.prefill(prompt(2, LONG), WILD), 2)
    assert prefix.num_chunks == 7
    for _ in range(prefix.num_chunks):
        engine.read(2)
        frame = engine.step([1]).result()
        assert not frame.is_end_B[1]
        beside.append(frame.codes_BK[1])
    np.testing.assert_array_equal(codes(engine, 2, 12, beside=(1,)), alone)
    np.testing.assert_array_equal(beside, undisturbed[: len(beside)])
    engine.free(1), engine.free(2)


def test_larger_chunks_give_the_same_codes(engine, prompt, alone):
    """Sums over other shapes may differ in their last bit, and no code does: the prompt in chunks of 64."""
    engine.insert(prefix := engine.prefill(prompt(2, LONG), WILD), 0)
    assert prefix.num_chunks == 4
    np.testing.assert_array_equal(codes(engine, 0, 12), alone)
    engine.free(0)


def test_a_request_whose_prompt_is_half_read_moves_to_another_slot(small_chunks, prompt, alone):
    engine = small_chunks
    engine.insert(engine.prefill(prompt(2, LONG), WILD), 0)
    for _ in range(4):
        engine.read(0)
    saved = engine.extract(0)
    assert saved.num_chunks == 3
    engine.insert(engine.prefill(prompt(4, 90), WILD), 0)
    codes(engine, 0, 2)
    engine.insert(saved, 3)
    np.testing.assert_array_equal(codes(engine, 3, 12, beside=(0,)), alone)
    engine.free(0), engine.free(3)


def test_a_slot_that_is_freed_while_its_prompt_is_read_is_as_good_as_new(small_chunks, prompt, alone):
    engine = small_chunks
    engine.insert(engine.prefill(prompt(5, 240), WILD), 2)
    engine.read(2)
    engine.free(2)
    engine.step([]).result()
    engine.insert(engine.prefill(prompt(2, LONG), WILD), 2)
    np.testing.assert_array_equal(codes(engine, 2, 12), alone)
    engine.free(2)


def test_nothing_compiles_while_chunks_are_read(small_chunks, prompt, compiles):
    engine = small_chunks
    for length in (2, 17, 33, 64, 65, 100, 256):
        engine.insert(prefix := engine.prefill(prompt(length, length), WILD), 1)
        for _ in range(prefix.num_chunks):
            engine.read(1)
            engine.step([]).result()
        engine.step([1]).result()
        engine.free(1)
    assert compiles.count == 0
