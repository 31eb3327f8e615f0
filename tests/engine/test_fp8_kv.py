"""The FP8 cache in the engine: how near it stays to a float32 one, and that requests move with their scales.

Tolerance: e4m3 rounds an element by at most 2^-4 of it, 2^-4 / sqrt(3) = 3.6 % on average; attention averages over
positions, the residual stream carries most of the signal, and every layer adds its own: random frames come out within
4 to 6 % with minnow's trained layers, whichever its weights, and 8 % is the bound (relative, over all frames).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.model.cache import init_cache
from fishjax.speech import MINNOW
from fishjax.weights.load import load_dual_ar
from fishjax.weights.precision import Precision
from pallas_kernels import ScaledKV
from pallas_kernels._testing import rel_err

TOLERANCE = 0.08


@pytest.fixture(scope="module")
def minnow():
    return load_dual_ar(MINNOW)[1]


@pytest.fixture(params=["golden_model", "minnow"])
def model(request):
    return request.getfixturevalue(request.param)


def frames_of(config, length: int, seed: int) -> np.ndarray:
    """Random columns (2, C+1, T): some text, then frames."""
    rng = np.random.default_rng(seed)
    columns = np.zeros((2, config.num_codebooks + 1, length), np.int32)
    columns[:, 0, : length // 4] = rng.integers(0, 256, (2, length // 4))
    codes = rng.integers(0, config.codebook_size, (2, config.num_codebooks, length - length // 4))
    columns[:, 1:, length // 4 :] = codes
    columns[:, 0, length // 4 :] = config.semantic_begin_id + codes[:, 0]
    return columns


def logits_of_steps(model, columns: np.ndarray, kv_dtype, num_steps: int) -> np.ndarray:
    """A prompt read at once, then its last `num_steps` columns one by one: logits (steps, B, V)."""
    graph, state = nnx.split(model)

    @jax.jit
    def extend(state, columns_BKT, start_B, cache):
        model = nnx.merge(graph, state)
        hidden, cache = model.slow.extend(model.slow.embed(columns_BKT, generation=True), start_B, cache)
        return model.slow.logits(hidden[:, -1]), cache

    length = columns.shape[2] - num_steps
    cache = init_cache(model.config, 2, 128, kv_dtype)
    _, cache = extend(state, columns[:, :, :length], jnp.zeros(2, jnp.int32), cache)
    logits = []
    for t in range(length, columns.shape[2]):
        step, cache = extend(state, columns[:, :, t : t + 1], jnp.full(2, t, jnp.int32), cache)
        logits.append(np.asarray(step))
    return np.stack(logits)


def test_logits_stay_near_those_of_a_float32_cache(model):
    columns = frames_of(model.config, 72, seed=1)
    exact, near = (logits_of_steps(model, columns, dtype, 24) for dtype in (jnp.float32, jnp.float8_e4m3fn))
    assert 1e-5 < rel_err(near, exact.astype(np.float64)) < TOLERANCE
    # Rounding does not pile up from step to step: what is in the cache is rounded once.
    assert rel_err(near[-4:], exact[-4:].astype(np.float64)) < TOLERANCE


def test_a_scale_in_the_wrong_place_is_seen(model, monkeypatch):
    columns = frames_of(model.config, 72, seed=1)
    exact = logits_of_steps(model, columns, jnp.float32, 4)
    monkeypatch.setattr(
        ScaledKV, "dequantize", lambda kv: kv.values_BGSd.astype(jnp.float32) * kv.scale_BGS[:, ::-1, :, None]
    )
    jax.clear_caches()
    wrong = rel_err(logits_of_steps(model, columns, jnp.float8_e4m3fn, 4), exact.astype(np.float64))
    jax.clear_caches()
    assert wrong > 2 * TOLERANCE, wrong


@pytest.fixture(scope="module")
def fp8_engine(golden_model, golden_codec):
    precision = dataclasses.replace(Precision.uniform("fp32"), kv="fp8")
    return Engine(
        golden_model, golden_codec, im_end_id=422, num_slots=3, max_len=128, precision=precision, voice_bytes=1 << 20
    )


def speak(engine, slot, num_frames, beside=()):
    frames = [engine.step([slot, *beside]).result() for _ in range(num_frames)]
    return np.array([frame.codes_BK[slot] for frame in frames])


def test_a_request_moves_to_another_slot_with_its_scales(fp8_engine, prompt):
    params = SamplingParams(seed=21, temperature=1.3, top_p=0.95)
    fp8_engine.insert(fp8_engine.prefill(prompt(7), params), 0)
    whole = speak(fp8_engine, 0, 10)
    fp8_engine.free(0)
    fp8_engine.insert(fp8_engine.prefill(prompt(7), params), 1)
    first = speak(fp8_engine, 1, 4)
    saved = fp8_engine.extract(1)
    assert all(isinstance(half, ScaledKV) for half in saved.saved[0].cache.k_BGSd)
    fp8_engine.insert(fp8_engine.prefill(prompt(8), SamplingParams(seed=9)), 1)
    fp8_engine.insert(saved, 2)
    rest = speak(fp8_engine, 2, 6, beside=(1,))
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)


def test_a_voice_is_copied_with_its_scales(fp8_engine, prompt):
    takes, columns = [], prompt(7, 60)
    for slot in (0, 1):
        prefix = fp8_engine.prefill(columns, SamplingParams(seed=21), voice_length=40)
        fp8_engine.insert(prefix, slot)
        takes.append((prefix.num_chunks, speak(fp8_engine, slot, 6)))
        cache = fp8_engine.extract(slot).saved[0].cache
        takes[-1] += tuple(np.asarray(leaf)[:, :, :65].tobytes() for leaf in jax.tree.leaves(cache))
        fp8_engine.free(slot)
    (read, codes, *kv), (copied, same_codes, *same_kv) = takes
    assert (read, copied) == (2, 1) and kv == same_kv
    np.testing.assert_array_equal(codes, same_codes)


def test_the_cache_takes_about_a_quarter_of_a_float32_one(fp8_engine, golden_model, golden_codec):
    plain = Engine(golden_model, golden_codec, im_end_id=422, num_slots=3, max_len=128)
    d = golden_model.config.slow.head_dim
    assert fp8_engine.memory.slots / plain.memory.slots == pytest.approx((d + 4) / (4 * d), rel=0.01)
