"""What no caller can mean is refused with a sentence, and nothing has changed: not a slot, not a frame."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest

PARAMS = SamplingParams(seed=3, temperature=1.3, top_p=0.95, top_k=30)


@pytest.fixture
def busy(engine: Engine, prompt):
    """Slot 1 speaks and the others are empty; its frames are what they would have been. Nothing ran for the rest."""
    engine.insert(engine.prefill(prompt(2), PARAMS), 1)
    wanted = [engine.step([1]).result().codes_BK[1] for _ in range(6)]
    for slot in range(engine.num_slots):
        engine.free(slot)
    engine.insert(engine.prefill(prompt(2), PARAMS), 1)
    codes = [engine.step([1]).result().codes_BK[1] for _ in range(3)]
    before = jax.tree.leaves(engine._rows)
    yield engine
    assert all(a is b for a, b in zip(before, jax.tree.leaves(engine._rows), strict=True)), "the device was set to work"
    codes += [engine.step([1]).result().codes_BK[1] for _ in range(3)]
    np.testing.assert_array_equal(codes, wanted)
    engine.free(1)


@pytest.mark.parametrize("slot", [-1, 4, 1000])
@pytest.mark.parametrize("verb", ["step", "sound", "read", "extract", "free", "insert"])
def test_a_slot_that_is_not_there(busy, prompt, verb, slot):
    arguments = {"step": ([1, slot],), "sound": ([slot],), "insert": (busy.prefill(prompt(3), PARAMS), slot)}
    with pytest.raises(InvalidRequest, match=rf"there is no slot {slot}: this engine has 0\.\.3"):
        getattr(busy, verb)(*arguments.get(verb, (slot,)))


@pytest.mark.parametrize("verb", ["step", "sound"])
def test_a_slot_named_twice(busy, verb):
    with pytest.raises(InvalidRequest, match=r"named twice: \[1, 1\]"):
        getattr(busy, verb)([1, 1])


@pytest.mark.parametrize("verb", ["step", "sound", "read", "extract", "insert"])
def test_an_empty_slot(busy, prompt, verb):
    """Freed a moment ago, or never filled; what follows on columns finds none there."""
    follows = busy.prefill(prompt(3), PARAMS, prefix_length=8)
    arguments = {"step": ([1, 2],), "sound": ([2],), "insert": (follows, 2)}
    with pytest.raises(InvalidRequest, match="slot 2 is empty: insert a prompt first"):
        getattr(busy, verb)(*arguments.get(verb, (2,)))


def test_to_free_an_empty_slot_is_no_mistake(busy):
    busy.free(2)
    busy.free(2)


def test_nothing_left_to_read_and_no_sound_left_to_make(busy):
    with pytest.raises(InvalidRequest, match="the prompt in slot 1 is read: step it"):
        busy.read(1)
    with pytest.raises(InvalidRequest, match="slot 1 has no frames whose sound is not made"):
        busy.sound([1])


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((5, 0), {}, r"\(5, one or more\) columns .* not \(5, 0\)"),
        ((4, 6), {}, r"not \(4, 6\)"),
        ((5,), {}, r"not \(5,\)"),
        ((5, 6), {"prefix_length": -1}, "6 columns cannot follow -1"),
        ((5, 6), {"voice_length": 6}, "6 of a voice"),
        ((5, 6), {"voice_length": -2}, "-2 of a voice"),
    ],
)
def test_columns_that_are_no_prompt(busy, shape, options, says):
    with pytest.raises(InvalidRequest, match=says):
        busy.prefill(np.zeros(shape, np.int32), PARAMS, **options)
