"""The engine at golden size: golden runs through slots, independence of neighbours, resume, no late compiles."""

from __future__ import annotations

import gc
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from fishjax.codec import Codec
from fishjax.engine import steps
from fishjax.engine.engine import Engine
from fishjax.engine.sampling import TOP_K_CAP
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.state import StepInputs, new_state
from fishjax.errors import InvalidRequest, PromptTooLong
from fishjax.model.dual_ar import slice_head

WILD = {"temperature": 1.3, "top_p": 0.95, "top_k": 30}


def run(engine: Engine, slot: int, num_frames: int, beside: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Codes (frames, C) and sound (frames, samples) of `slot`, until its end or `num_frames`."""
    codes, audio = [], []
    for _ in range(num_frames):
        frame = engine.step([slot, *beside]).result()
        if frame.is_end_B[slot]:
            break
        codes.append(frame.codes_BK[slot])
        audio.append(frame.audio_Bs[slot])
    return np.array(codes), np.array(audio)


@pytest.fixture(scope="module")
def expected(golden):
    return load_file(golden / "dualar_tiny" / "expected.safetensors")


@pytest.mark.parametrize("name", ["greedy", "greedy_stop"])
@pytest.mark.parametrize("slot", [0, 3])
def test_golden_greedy_runs_come_out_of_any_slot(engine, expected, golden, name, slot):
    settings = json.loads((golden / "dualar_tiny" / "expected.json").read_text())[name]
    prompt = expected[f"prompt{settings['prompt']}"].astype(np.int32)
    wanted = expected[f"{name}.seq"][1:, prompt.shape[1] :].T
    if settings["stopped"]:
        wanted = wanted[:-1]  # the end of speech is not sound
    engine.insert(engine.prefill(prompt, SamplingParams(top_k=1)), slot)
    codes, _ = run(engine, slot, settings["max_new_tokens"])
    np.testing.assert_array_equal(codes, wanted)
    engine.free(slot)


def test_sound_of_a_slot_is_the_whole_decode_of_its_codes(engine, golden_codec, prompt):
    engine.insert(engine.prefill(prompt(1), SamplingParams(seed=5, **WILD)), 1)
    codes, audio = run(engine, 1, 25)
    assert len(codes) > 5
    whole = np.asarray(jax.jit(Codec.decode)(golden_codec, codes.T[None]))[0]
    np.testing.assert_allclose(audio.reshape(-1), whole.reshape(-1), atol=1e-4)
    engine.free(1)


def test_a_request_does_not_depend_on_slot_neighbours_or_arrival(engine, prompt):
    mine, params = prompt(2), SamplingParams(seed=11, **WILD)
    engine.insert(engine.prefill(mine, params), 0)
    alone, alone_audio = run(engine, 0, 12)
    engine.free(0)
    engine.step([]).result()

    # Neighbours come before and after it, one is cancelled, and a slot is used again.
    engine.insert(engine.prefill(prompt(3, 40), SamplingParams(seed=1, **WILD)), 1)
    engine.insert(engine.prefill(prompt(4, 9), SamplingParams(seed=2, temperature=0.5, top_k=200)), 3)
    for _ in range(3):
        engine.step([1, 3]).result()
    engine.insert(engine.prefill(mine, params), 2)
    first, first_audio = run(engine, 2, 4, beside=(1, 3))
    engine.free(1)
    engine.insert(engine.prefill(prompt(5, 70), SamplingParams(seed=3, **WILD)), 1)
    engine.insert(engine.prefill(prompt(6, 33), SamplingParams(seed=4, **WILD)), 0)
    rest, rest_audio = run(engine, 2, 8, beside=(0, 1, 3))
    np.testing.assert_array_equal(np.concatenate([first, rest]), alone)
    np.testing.assert_allclose(np.concatenate([first_audio, rest_audio]), alone_audio, atol=1e-5)

    engine.free(2)
    engine.insert(engine.prefill(mine, params), 2)
    again, again_audio = run(engine, 2, 12, beside=(0, 3))
    np.testing.assert_array_equal(again, alone)
    np.testing.assert_allclose(again_audio, alone_audio, atol=1e-5)
    for slot in range(4):
        engine.free(slot)


def test_another_seed_gives_other_codes(engine, prompt):
    takes = []
    for seed in (1, 2):
        engine.insert(engine.prefill(prompt(2), SamplingParams(seed=seed, **WILD)), 0)
        takes.append(run(engine, 0, 8)[0])
        engine.free(0)
    assert takes[0].shape != takes[1].shape or np.any(takes[0] != takes[1])


def test_an_extracted_request_resumes_elsewhere_to_the_same_codes_and_sound(engine, prompt):
    params = SamplingParams(seed=21, **WILD)
    engine.insert(engine.prefill(prompt(7), params), 0)
    whole, whole_audio = run(engine, 0, 14)
    engine.free(0)

    engine.insert(engine.prefill(prompt(7), params), 1)
    first, first_audio = run(engine, 1, 6)
    saved = engine.extract(1)
    engine.free(1)
    engine.insert(engine.prefill(prompt(8), SamplingParams(seed=9, **WILD)), 1)
    run(engine, 1, 3)
    engine.insert(saved, 3)
    rest, rest_audio = run(engine, 3, 8, beside=(1,))
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)
    np.testing.assert_allclose(np.concatenate([first_audio, rest_audio]), whole_audio, atol=1e-5)
    engine.free(1)
    engine.free(3)


def test_a_prompt_read_in_two_parts_is_the_prompt_read_at_once(engine, prompt):
    columns, params = prompt(9, 75), SamplingParams(top_k=1)
    engine.insert(engine.prefill(columns, params), 0)
    at_once, _ = run(engine, 0, 10)
    engine.insert(engine.prefill(columns[:, :41], params), 1)
    engine.read(1)
    engine.insert(engine.prefill(columns[:, 40:], params, prefix_length=40), 1)
    in_parts, _ = run(engine, 1, 10)
    np.testing.assert_array_equal(in_parts, at_once)
    engine.free(0)
    engine.free(1)


def test_the_cache_of_a_spoken_segment_is_a_prefix_of_the_next_prompt(engine, golden_model, prompt):
    """Reading only what is new after a segment gives what reading the whole history gives."""
    first, params = prompt(10, 30), SamplingParams(seed=3, **WILD)
    engine.insert(engine.prefill(first, params), 2)
    codes, _ = run(engine, 2, 7)
    frames = np.concatenate([golden_model.config.semantic_begin_id + codes[:, :1], codes], axis=1).T
    spoken = np.concatenate([first, frames], axis=1).astype(np.int32)
    following = np.concatenate([spoken, prompt(11, 12)], axis=1)

    cached = spoken.shape[1] - 1  # the last frame has not been read back in
    reused = engine.prefill(following[:, cached:], params, prefix_length=cached, first_frame=len(codes))
    engine.insert(reused, 2)
    with_reuse, _ = run(engine, 2, 8)
    engine.insert(engine.prefill(following, params, first_frame=len(codes)), 0)
    from_zero, _ = run(engine, 0, 8)
    np.testing.assert_array_equal(with_reuse, from_zero)
    engine.free(0)
    engine.free(2)


@pytest.mark.parametrize("running", [[], [1]])
def test_a_slot_that_does_not_run_never_asks_for_the_full_sort(engine, prompt, monkeypatch, running):
    """Slot 0 was sampled with a large top_k; freed, paused or taken over, it costs its neighbours nothing."""
    taken, programs = [], engine._decode
    spies = {short: lambda *args, short=short: (taken.append(short), programs[short](*args))[1] for short in programs}
    monkeypatch.setattr(engine, "_decode", spies)
    engine.insert(engine.prefill(prompt(1), SamplingParams(top_k=200)), 0)
    engine.insert(engine.prefill(prompt(2), SamplingParams(top_k=TOP_K_CAP)), 1)
    engine.step([0, *running]).result()
    engine.step(running).result()
    saved = engine.extract(0)
    engine.insert(engine.prefill(prompt(3), SamplingParams(top_k=1)), 0)
    engine.step([0, *running]).result()
    engine.insert(saved, 2)
    engine.step([2, *running]).result()
    assert taken == [False, True, True, False]
    for slot in (0, 1, 2):
        engine.free(slot)


def test_the_two_decode_programs_order_as_they_say_and_neither_asks_the_device(golden_model):
    head = slice_head(golden_model, 422)
    state = jax.eval_shape(lambda: new_state(golden_model.config, 2, 64, np.float32))
    mask = jax.ShapeDtypeStruct((2,), bool)
    for short, largest in ((True, TOP_K_CAP), (False, 65)):
        bound = steps.bind(golden_model, steps.decode_step, first=(head, None), short=short)
        text = str(bound.func.trace(*bound.args, state, StepInputs(mask, mask, mask)).jaxpr)
        assert f"k={largest}" in text and f"k={largest + 1}" not in text
        assert " cond[" not in text


def test_nothing_compiles_after_warmup(engine, prompt, compiles):
    for slot, length in enumerate((2, 16, 17, 200)):
        prefix = engine.prefill(prompt(slot, length), SamplingParams(seed=slot, top_k=1 + 40 * slot))
        engine.insert(prefix, slot)
    for running in ([0], [0, 1, 2, 3], [2]):
        engine.step(running).result()
    saved = engine.extract(1)
    engine.free(1)
    engine.insert(saved, 1)
    engine.step([1]).result()
    engine.references.encode_whole(np.random.default_rng(0).normal(size=5000).astype(np.float32))
    for slot in range(4):
        engine.free(slot)
    engine.step([]).result()
    assert compiles.count == 0


def test_nothing_compiles_after_warmup_with_weights_that_were_restored(golden_model, golden_codec, prompt, compiles):
    parts = []
    for module in (golden_model, golden_codec):
        graph, weights = nnx.split(module)
        parts.append(nnx.merge(graph, jax.device_put(weights, jax.devices()[0])))  # committed, as Orbax restores them
    options = {"max_reference_s": 0.2, "sound_group": 2, "voice_bytes": 2**20}
    engine = Engine(*parts, im_end_id=422, num_slots=2, max_len=32, **options)
    engine.warmup()
    compiles.count = 0
    for slot, length in enumerate((5, 25)):
        engine.insert(engine.prefill(prompt(slot, length), SamplingParams(seed=slot), voice_length=16 * slot), slot)
    for _ in range(7):
        engine.step([0, 1]).result()
    engine.sound([0, 1]).result()
    engine.insert(engine.extract(0), 1)
    engine.step([1]).result()
    assert compiles.count == 0


def test_device_memory_is_flat_over_many_requests(engine, prompt):
    def cycle(times: int) -> None:
        for index in range(times):
            engine.insert(engine.prefill(prompt(index, 5 + index % 60), SamplingParams(seed=index)), index % 4)
            engine.step([index % 4]).result()
            engine.free(index % 4)
        gc.collect()

    cycle(8)
    before = sum(array.nbytes for array in jax.live_arrays())
    cycle(60)
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_donation_is_used(engine, prompt, recwarn):
    engine.insert(engine.prefill(prompt(1), SamplingParams()), 0)
    engine.step([0]).result()
    engine.free(0)
    assert not [warning for warning in recwarn if "donat" in str(warning.message).lower()]


def test_limits_are_named(engine, golden_model, golden_codec, prompt):
    with pytest.raises(PromptTooLong, match="256"):
        engine.prefill(prompt(1, 257), SamplingParams())
    with pytest.raises(InvalidRequest, match="slots"):
        Engine(golden_model, golden_codec, im_end_id=422, num_slots=0, max_len=256)
    with pytest.raises(InvalidRequest, match="max-len"):
        Engine(golden_model, golden_codec, im_end_id=422, num_slots=1, max_len=10_000)
