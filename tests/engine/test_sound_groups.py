"""Sound of several frames in one call: the same samples, whenever the groups are made, and the first frame at once."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fishjax.codec import Codec
from fishjax.engine.engine import SINGLE_FRAMES, Engine, sound_group_for
from fishjax.engine.sampling_params import SamplingParams

IM_END = 422  # of the golden tokenizer
WILD = SamplingParams(temperature=1.3, top_p=0.95, top_k=30, seed=5)
GROUP = 4
FRAMES = 17  # four by themselves, three groups and a frame


@pytest.fixture(scope="module")
def grouping(golden_model, golden_codec) -> Engine:
    engine = Engine(
        golden_model, golden_codec, im_end_id=IM_END, num_slots=3, max_len=256, max_reference_s=0.5, sound_group=GROUP
    )
    engine.warmup()
    return engine


class Listener:
    """One slot's frames; a group of them becomes sound when `patience` frames wait, GROUP to 2 GROUP - 1."""

    def __init__(self, engine: Engine, slot: int, patience: int = GROUP):
        self.engine, self.slot, self.patience = engine, slot, patience
        self.codes: list[np.ndarray] = []
        self.audio: list[np.ndarray] = []
        self.waiting = 0

    def hear(self, frame) -> None:
        assert not frame.is_end_B[self.slot]
        self.codes.append(frame.codes_BK[self.slot])
        if frame.has_sound_B[self.slot]:
            self.audio.append(frame.audio_Bs[self.slot])
            return
        self.waiting += 1
        if self.waiting >= self.patience:
            self.sound(GROUP)

    def sound(self, num_frames: int) -> None:
        self.audio += list(self.engine.sound([self.slot]).result()[self.slot, :num_frames])
        self.waiting -= num_frames

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        while self.waiting:
            self.sound(min(GROUP, self.waiting))
        self.engine.free(self.slot)
        return np.array(self.codes), np.array(self.audio)


@pytest.fixture(scope="module")
def mine(prompt):
    return prompt(2)


@pytest.fixture(scope="module")
def alone(grouping, mine):
    """Codes and samples of a request with nobody else there, each group as soon as it is whole."""
    grouping.insert(grouping.prefill(mine, WILD), 0)
    listener = Listener(grouping, 0)
    for _ in range(FRAMES):
        listener.hear(grouping.step([0]).result())
    return listener.finish()


def check_same(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_it_is_the_whole_decode_of_the_codes_and_these_are_no_others(alone, engine, golden_codec, mine):
    codes, audio = alone
    assert len(audio) == FRAMES
    whole = np.asarray(jax.jit(Codec.decode)(golden_codec, codes.T[None]))[0]
    np.testing.assert_allclose(audio.reshape(-1), whole.reshape(-1), atol=1e-4)
    engine.insert(engine.prefill(mine, WILD), 2)
    ungrouped = [engine.step([2]).result() for _ in range(FRAMES)]
    engine.free(2)
    np.testing.assert_array_equal(codes, [frame.codes_BK[2] for frame in ungrouped])
    np.testing.assert_allclose(audio, [frame.audio_Bs[2] for frame in ungrouped], atol=1e-5)


def test_the_first_frames_have_their_sound_at_once(grouping, mine):
    grouping.insert(grouping.prefill(mine, WILD), 1)
    has_sound = [grouping.step([1]).result().has_sound_B.tolist() for _ in range(SINGLE_FRAMES + 1)]
    assert has_sound == [[False, True, False]] * SINGLE_FRAMES + [[False] * 3]
    grouping.free(1)


@pytest.mark.parametrize("patience", [5, 6, 7])
def test_samples_do_not_depend_on_when_a_group_is_made_or_on_neighbours(grouping, prompt, mine, alone, patience):
    grouping.insert(grouping.prefill(prompt(3), WILD), 0)
    neighbour = Listener(grouping, 0)
    for _ in range(patience):
        neighbour.hear(grouping.step([0]).result())
    grouping.insert(grouping.prefill(mine, WILD), 2)
    listener = Listener(grouping, 2, patience)
    for index in range(FRAMES):
        with_neighbour = index % 3 != 1
        frame = grouping.step([2, 0] if with_neighbour else [2]).result()
        listener.hear(frame)
        if with_neighbour and index < 6:
            neighbour.hear(frame)
    check_same(listener.finish(), alone)
    neighbour.engine.free(0)


def test_a_request_moves_in_the_middle_of_a_group(grouping, golden_codec, prompt, mine, alone):
    grouping.insert(grouping.prefill(mine, WILD), 0)
    listener = Listener(grouping, 0)
    for _ in range(SINGLE_FRAMES + GROUP + 2):
        listener.hear(grouping.step([listener.slot]).result())
    saved = grouping.extract(0)
    grouping.insert(grouping.prefill(prompt(3), WILD), 0)  # whoever comes next finds nothing of it
    other = Listener(grouping, 0)
    for _ in range(SINGLE_FRAMES + GROUP):
        other.hear(grouping.step([0]).result())
    grouping.insert(saved, 1)
    listener.slot = 1
    for _ in range(FRAMES - len(listener.codes)):
        listener.hear(grouping.step([1]).result())
    check_same(listener.finish(), alone)
    codes, audio = other.finish()
    whole = np.asarray(jax.jit(Codec.decode)(golden_codec, codes.T[None]))[0]
    np.testing.assert_allclose(audio.reshape(-1), whole.reshape(-1), atol=1e-4)


def test_a_segment_after_one_that_was_left_in_the_middle_of_a_group(grouping, prompt, mine, alone):
    grouping.insert(grouping.prefill(prompt(3), WILD), 2)
    for _ in range(SINGLE_FRAMES + 3):
        grouping.step([2]).result()
    grouping.insert(grouping.prefill(mine, WILD), 2)
    listener = Listener(grouping, 2)
    for _ in range(FRAMES):
        listener.hear(grouping.step([2]).result())
    check_same(listener.finish(), alone)


def test_servers_with_few_slots_on_a_gpu_group(monkeypatch):
    assert sound_group_for(1) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [sound_group_for(num_slots) for num_slots in (1, 16, 17, 64)] == [4, 4, 1, 1]


def test_nothing_compiles_for_groups(grouping, mine, compiles):
    for slot in (0, 1):
        grouping.insert(grouping.prefill(mine, WILD), slot)
    for _ in range(SINGLE_FRAMES + GROUP):
        grouping.step([0, 1]).result()
    grouping.sound([0, 1]).result()
    grouping.insert(grouping.extract(0), 2)
    grouping.step([2]).result()
    for slot in range(3):
        grouping.free(slot)
    assert compiles.count == 0
