"""Parity with the recorded numbers in stages, and what the engine relies on: rows, chunks, slots."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from fishjax.config import ModelConfig, TransformerConfig
from fishjax.model.block import attend_masked
from fishjax.model.cache import attend_cached, init_cache, write
from fishjax.model.dual_ar import DualAR, candidate_ids, select_frames, slice_head
from fishjax.model.layers import rope_table
from fishjax.weights.load import load_dual_ar

IM_END = 422


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model(golden) -> DualAR:
    return load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1]


@pytest.fixture(scope="module")
def expected(golden) -> dict[str, np.ndarray]:
    return load_file(golden / "dualar_tiny" / "expected.safetensors")


def assert_close(actual, expected, tolerance: float = 2e-4):
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    worst = np.max(np.abs(np.asarray(actual, np.float64) - expected)) / max(1.0, np.max(np.abs(expected)))
    assert worst <= tolerance


@jax.jit
def extend(model: DualAR, x_BTD: jax.Array, start_B: jax.Array, cache):
    """`slow.extend` as one program: operation by operation, each would be compiled by itself."""
    return model.slow.extend(x_BTD, start_B, cache)


def columns(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.int32)[None]


def test_embedding_scales_frames_in_generation_only(model, expected):
    prompt = columns(expected["prompt0"])
    train, generation = (np.asarray(model.slow.embed(prompt, generation=flag))[0] for flag in (False, True))
    is_frame = (expected["prompt0"][0] >= 432) & (expected["prompt0"][0] <= 495)
    assert is_frame.any() and (~is_frame).any()
    np.testing.assert_allclose(generation[is_frame], train[is_frame] / np.sqrt(5.0), rtol=1e-6)
    np.testing.assert_array_equal(generation[~is_frame], train[~is_frame])
    tables = np.asarray(model.slow.codebook_embeddings.weight[...]).reshape(4, 64, -1)
    t = int(np.argmax(is_frame))
    by_hand = np.asarray(model.slow.embeddings.weight[...])[expected["prompt0"][0, t]]
    by_hand = by_hand + sum(tables[k, expected["prompt0"][1 + k, t]] for k in range(4))
    np.testing.assert_allclose(train[t], by_hand, rtol=1e-5, atol=1e-6)


def test_prefill_cache_and_step(model, expected):
    prompt, length = columns(expected["prompt0"]), expected["prompt0"].shape[1]
    cache = init_cache(model.config, 1, 128)
    start = jnp.zeros(1, jnp.int32)
    hidden, cache = extend(model, model.slow.embed(prompt, generation=True), start, cache)
    assert_close(cache.k_BGSd[0][0, :, :length], expected["prefill.k_cache_layer0"])
    assert_close(cache.v_BGSd[-1][0, :, :length], expected["prefill.v_cache_last"])
    assert_close(model.fast_hidden(hidden)[0], expected["prefill.hidden_all"])
    assert_close(model.slow.logits(hidden)[0], expected["prefill.logits_all"])
    assert_close(model.fast_input(hidden[:, -1]), expected["prefill.hidden_projected"])
    x = model.slow.embed(columns(expected["step.column"]), generation=True)
    hidden, _ = extend(model, x, start + length, cache)
    assert_close(model.slow.logits(hidden[0]), expected["step.logits"])
    assert_close(model.fast_input(hidden[0]), expected["step.hidden_projected"])


def test_fast_passes_two_rows_first_then_one_by_one(model, expected):
    projected = jnp.asarray(expected["prefill.hidden_projected"])
    ids = jnp.asarray(expected["fast.input_ids"], jnp.int32)
    assert_close(model.fast.forward(projected, ids[None])[0], expected["fast.logits"])
    logits, cache = model.fast.start(projected, ids[:1])
    assert_close(logits[0], expected["fast.logits"][1])
    for k in range(1, len(ids)):
        logits, cache = model.fast.step(ids[k : k + 1], cache)
        assert_close(logits[0], expected["fast.logits"][k + 1])
    codes = model.fast.frame(projected, ids[:1], lambda k, _: ids[k : k + 1] if k < len(ids) else jnp.array([7]))
    np.testing.assert_array_equal(codes[0], [*expected["fast.input_ids"], 7])


def test_train_forward(model, expected):
    mask = expected["train.key_padding_mask"]
    inputs = jnp.asarray(expected["train.inp"], jnp.int32)
    hidden, logits = jax.jit(DualAR.train_logits)(model, inputs, jnp.asarray(mask))
    assert_close(np.asarray(logits)[~mask], expected["train.token_logits_valid"])
    frames = select_frames(model.config, hidden, expected["train.labels"])
    assert_close(model.fast_logits(*frames), expected["train.codebook_logits"])


def test_train_forward_with_biases_and_untied_head(golden):
    _, model = load_dual_ar(golden / "dualar_bias")
    expected = load_file(golden / "dualar_bias" / "expected.safetensors")
    hidden, logits = jax.jit(DualAR.train_logits)(model, jnp.asarray(expected["inp"], jnp.int32))
    assert_close(logits, expected["token_logits"])
    assert_close(
        model.fast_logits(*select_frames(model.config, hidden, expected["labels"])), expected["codebook_logits"]
    )


def test_gradients_are_finite_and_reach_every_parameter(model, expected):
    inputs = jnp.asarray(expected["train.inp"][:2], jnp.int32)
    labels, mask = expected["train.labels"][:2], jnp.asarray(expected["train.key_padding_mask"][:2])

    def loss(model: DualAR) -> jax.Array:
        hidden, logits = model.train_logits(inputs, mask)
        frames = select_frames(model.config, hidden, labels)
        token_loss = -jax.nn.log_softmax(logits)[jnp.arange(2)[:, None], jnp.arange(mask.shape[1]), labels[:, 0] % 512]
        code_loss = -jnp.take_along_axis(jax.nn.log_softmax(model.fast_logits(*frames)), frames[1][..., None], -1)
        return jnp.where(mask, 0.0, token_loss).sum() + code_loss.sum()

    for path, gradient in nnx.to_flat_state(jax.device_get(nnx.jit(nnx.grad(loss))(model))):
        assert np.isfinite(gradient[...]).all(), path
        assert np.abs(gradient[...]).max() > 0, path


def test_chunks_at_per_slot_positions_equal_the_whole(model, expected):
    prompt = expected["prompt0"]
    whole, _ = jax.jit(DualAR.generate_forward)(model, columns(prompt))
    cache = init_cache(model.config, 2, 128)
    # Slot 0 is behind slot 1 by 10 columns; both end with the same prompt.
    x = model.slow.embed(jnp.asarray(np.stack([prompt[:, :30], prompt[:, :30]]), jnp.int32), generation=True)
    _, cache = extend(model, x, jnp.zeros(2, jnp.int32), cache)
    x = model.slow.embed(jnp.asarray(np.stack([prompt[:, 20:60], prompt[:, 30:70]]), jnp.int32), generation=True)
    hidden, cache = extend(model, x, jnp.array([20, 30]), cache)
    assert_close(hidden[0], whole[0, 20:60], 1e-5)
    assert_close(hidden[1], whole[0, 30:70], 1e-5)


def test_a_slot_does_not_depend_on_the_others(model):
    def step(neighbour_scale: float) -> tuple[jax.Array, jax.Array]:
        cache = init_cache(model.config, 3, 64)
        fill = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(1).normal(size=a.shape), a.dtype), cache)
        fill = jax.tree.map(lambda a: a.at[jnp.array([0, 2])].multiply(neighbour_scale), fill)
        column = np.zeros((3, 5, 1), np.int32)
        column[:, 0, 0] = [3, 440, int(abs(neighbour_scale)) + 5]
        column[1, 1:, 0] = [8, 1, 2, 3]
        x = model.slow.embed(jnp.asarray(column), generation=True)
        hidden, _ = extend(model, x, jnp.array([int(abs(neighbour_scale)), 17, 50]), fill)
        logits, _ = model.fast.start(model.fast_input(hidden[:, 0]), jnp.array([int(abs(neighbour_scale)), 8, 1]))
        return model.slow.logits(hidden)[1], logits[1]

    for alone, crowded in zip(step(1.0), step(-30.0), strict=True):
        np.testing.assert_array_equal(alone, crowded)


def test_rows_outside_the_cache_are_dropped(model):
    cache = init_cache(model.config, 2, 8)
    rows = jnp.ones((2, 3, 2, 16))
    k, v = write(cache.k_BGSd[0], cache.v_BGSd[0], rows, 2 * rows, jnp.array([6, 8]))
    np.testing.assert_array_equal(k[0, 0, :, 0], [0, 0, 0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(v, 2 * k)
    assert not np.any(k[1])


def test_fp8_rows_written_one_by_one_are_those_written_at_once(model):
    cache = init_cache(model.config, 2, 8, jnp.float8_e4m3fn)
    k, v = jax.random.normal(jax.random.key(0), (2, 2, 3, 2, 16), jnp.bfloat16)
    start = jnp.array([2, 6])
    at_once = write(cache.k_BGSd[0], cache.v_BGSd[0], k, v, start)
    halves = cache.k_BGSd[0], cache.v_BGSd[0]
    for t in range(3):
        halves = write(*halves, k[:, t : t + 1], v[:, t : t + 1], start + t)
    assert np.any(halves[0].values_BGSd[1, :, 7]) and not np.any(halves[0].values_BGSd[1, :, :6])
    for one_by_one, together in zip(jax.tree.leaves(halves), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(one_by_one, together)


def test_cache_writes_in_place_when_donated(model):
    step = jax.jit(
        lambda model, x, start, cache: model.slow.extend(x, start, cache)[1], donate_argnums=3, keep_unused=True
    )
    cache = init_cache(model.config, 2, 64)
    before = cache.k_BGSd[0].unsafe_buffer_pointer()
    after = step(model, jnp.ones((2, 1, 64)), jnp.array([3, 5]), cache)
    assert after.k_BGSd[0].unsafe_buffer_pointer() == before


def test_fp8_cache_is_near_and_reads_what_it_wrote(model, expected):
    prompt = expected["prompt0"]
    x = model.slow.embed(columns(prompt), generation=True)
    exact, _ = extend(model, x, jnp.zeros(1, jnp.int32), init_cache(model.config, 1, 128))
    cache = init_cache(model.config, 1, 128, jnp.float8_e4m3fn)
    _, cache = extend(model, x[:, :-1], jnp.zeros(1, jnp.int32), cache)
    near, _ = extend(model, x[:, -1:], jnp.array([prompt.shape[1] - 1]), cache)
    error = jnp.linalg.norm(near[0, 0] - exact[0, -1]) / jnp.linalg.norm(exact[0, -1])
    assert 1e-4 < error < 0.1


def test_one_token_attention_equals_the_kernel_reference():
    from pallas_kernels import decode_attention

    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 1, 8, 16), (3, 2, 40, 16), (3, 2, 40, 16)))
    start = jnp.array([0, 11, 39])
    np.testing.assert_allclose(
        attend_cached(q, k, v, start)[:, 0], decode_attention(q[:, 0], k, v, start + 1), rtol=1e-5, atol=1e-6
    )


def test_sliced_head_gives_the_same_logits(model, expected):
    hidden, logits = jax.jit(DualAR.generate_forward)(model, columns(expected["prompt1"]))
    ids = candidate_ids(model.config, IM_END)
    assert ids[0] == 432 and ids[-2] == 495 and ids[-1] == IM_END and len(ids) == 65
    np.testing.assert_allclose(
        model.slow.logits(hidden, slice_head(model, IM_END)), logits[..., ids], rtol=1e-5, atol=1e-5
    )


def test_padded_rows_stay_finite():
    slow = TransformerConfig(num_layers=1, dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16)
    config = ModelConfig(slow, slow, 64, 2, 8, 8, 15)
    model = DualAR(config, rngs=nnx.Rngs(0))
    mask = jnp.array([[True, True, False, False]])  # left padding: the first rows see nothing
    hidden, logits = jax.jit(DualAR.train_logits)(model, jnp.zeros((1, 3, 4), jnp.int32), mask)
    assert np.isfinite(logits).all() and np.isfinite(hidden).all()


@pytest.mark.parametrize("field", ["norm_fastlayer_input", "tie_word_embeddings"])
def test_options_change_the_result(model, field):
    slow = dataclasses.replace(model.config.slow, num_layers=1)
    config = dataclasses.replace(model.config, slow=slow)
    other = dataclasses.replace(config, **{field: not getattr(config, field)})
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 60, (1, 5, 6)), jnp.int32)
    results = []
    for c in (config, other):
        hidden, logits = jax.jit(DualAR.train_logits)(DualAR(c, rngs=nnx.Rngs(0)), prompt)
        results.append(np.asarray(hidden if field == "norm_fastlayer_input" else logits))
    assert np.max(np.abs(results[0] - results[1])) > 1e-2


def test_rope_table_is_exact(expected):
    table = rope_table(2688, 16, 1e6)
    assert table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(table[expected["rope.rows"]].astype(np.float32), expected["rope.table"])


@pytest.mark.parametrize("num_slots", [1, 16])
def test_the_fast_attention_runs_in_bfloat16_for_any_number_of_slots(num_slots):
    """One query over the ten positions of a frame: from eight slots on, XLA's CPU refused the product as it was."""
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((num_slots, 1, 4, 64), (num_slots, 2, 10, 64), (num_slots, 2, 10, 64))
    )
    mask = jnp.ones((1, 1, 10), bool)
    found = jax.jit(lambda *qkv: attend_masked(*qkv, mask, score_dtype=jnp.bfloat16))(q, k, v)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)  # query heads 0 and 1 read head 0
    weights = np.exp(np.einsum("bthd,bhsd->bhts", q, k) / 8)
    wanted = np.einsum("bhts,bhsd->bthd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=0.03)  # scores up to 4 in eight bits
