"""The memory that an engine says it needs is the memory that it takes."""

import gc

import jax
import numpy as np
import pytest

from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest
from fishjax.model.cache import init_cache
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import load_codec

IM_END = 422  # of the golden tokenizer


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize(("num_slots", "max_len"), [(1, 64), (3, 64), (3, 256)])
def test_what_is_predicted_is_what_is_taken(golden, num_slots, max_len):
    before = live_bytes()
    model, codec = load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1], load_codec(golden / "codec_tiny")[1]
    voice_bytes = 20 * sum(half.nbytes for half in jax.tree.leaves(init_cache(model.config, 1, max_len)))
    engine = Engine(
        model,
        codec,
        im_end_id=IM_END,
        num_slots=num_slots,
        max_len=max_len,
        max_reference_s=0.5,
        voice_bytes=voice_bytes,
    )
    engine.warmup()
    for voice in range(45):
        columns = np.full((engine.num_codebooks + 1, 20), voice, np.int32)
        engine.insert(engine.prefill(columns, SamplingParams(), voice_length=18), 0)
        engine.read(0)
    assert 0.95 * voice_bytes <= engine.voices.num_bytes <= voice_bytes == engine.memory.voices
    # The busiest moment: all voices are there, every slot's request is taken out, others' prompts are read there, and a
    # clip is.
    columns = np.zeros((engine.num_codebooks + 1, 20), np.int32)
    for slot in range(num_slots):
        engine.insert(engine.prefill(columns, SamplingParams()), slot)
    engine.step(range(num_slots)).result()
    on_their_way = [engine.extract(slot) for slot in range(num_slots)]
    for slot in range(num_slots):
        engine.insert(engine.prefill(columns, SamplingParams()), slot)
        engine.read(slot)
    clip = engine.references.encode(engine.references.cut(np.ones(9, np.float32))[0])
    assert live_bytes() - before == pytest.approx(engine.memory.total, rel=0.05)
    assert len(on_their_way) == num_slots and clip is not None


def test_parts_grow_with_what_they_are_for(golden_model, golden_codec):
    def plan(num_slots, max_len):
        return Engine(golden_model, golden_codec, im_end_id=IM_END, num_slots=num_slots, max_len=max_len).memory

    small, wide, long = plan(2, 64), plan(4, 64), plan(2, 128)
    assert small.weights == wide.weights == long.weights > 0
    assert (wide.slots, wide.sound) == (2 * small.slots, 2 * small.sound)
    assert 1.9 * small.slots < long.slots < 2 * small.slots
    assert long.sound == small.sound


def test_too_little_memory_is_an_error_that_names_the_numbers(golden_model, golden_codec, monkeypatch):
    def engine():
        return Engine(golden_model, golden_codec, im_end_id=IM_END, num_slots=2, max_len=64)

    needed = engine().memory.total
    monkeypatch.setattr("fishjax.engine.memory.device_limit", lambda: needed)
    assert engine().memory.total == needed
    monkeypatch.setattr("fishjax.engine.memory.device_limit", lambda: needed - 1)
    before = live_bytes()
    with pytest.raises(InvalidRequest, match=r"gives \d+\.\d MiB.*needs \d+\.\d MiB.*fewer --slots"):
        engine()
    assert live_bytes() == before
