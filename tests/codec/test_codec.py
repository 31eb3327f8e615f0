"""Whole signals: properties of encode and decode, types, gradients, the windowed attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.codec import Codec
from fishjax.codec.attention import Attention
from fishjax.codec.layers import CausalTransposedConv
from fishjax.config import CodecConfig, CodecTransformerConfig
from fishjax.errors import WeightsError
from fishjax.model.layers import rope_table

SMALL = CodecConfig(
    sample_rate_hz=8000,
    encoder_dim=4,
    encoder_rates=(2, 3),
    encoder_transformer_layers=(0, 1),
    encoder_head_dim=8,
    encoder_window=5,
    decoder_dim=16,
    decoder_rates=(3, 2),
    latent_dim=12,
    semantic_codebook_size=11,
    residual_codebook_size=7,
    num_residual_codebooks=2,
    codebook_dim=3,
    downsample_factors=(2, 3),
    transformer=CodecTransformerConfig(num_layers=1, dim=16, num_heads=2, head_dim=4, ffn_dim=20, window=3),
)


def test_decoding_a_prefix_is_the_prefix_of_the_whole(decode, expected):
    codes = expected["random.codes"]
    whole, part = np.asarray(decode(codes)), np.asarray(decode(codes[:, :, :8]))
    np.testing.assert_allclose(part, whole[:, : part.shape[1]], atol=1e-5)
    np.testing.assert_allclose(whole, expected["random.waveform"][:, 0], atol=2e-5)


def test_items_of_a_padded_batch_give_the_codes_they_give_alone(encode, expected):
    audio, lengths = expected["batch.audio"][:, 0], expected["batch.audio_lengths"]
    codes, frames = (np.asarray(part) for part in encode(audio, jnp.asarray(lengths)))
    np.testing.assert_array_equal(frames, [14, 10, 5])
    for row, length in enumerate(lengths):
        alone, (count,) = encode(audio[row : row + 1, :length])
        assert count == frames[row]
        np.testing.assert_array_equal(np.asarray(alone)[0], codes[row, :, :count])
        np.testing.assert_array_equal(np.asarray(alone)[0], expected["batch.codes"][row, :, :count])


def test_codes_past_the_end_of_a_book_mean_its_last_entry(decode, expected):
    codes = expected["clamp.codes"].copy()
    assert codes.max() >= 64
    sizes = np.array([64, 32, 32, 32])[None, :, None]
    np.testing.assert_array_equal(np.asarray(decode(codes)), np.asarray(decode(np.minimum(codes, sizes - 1))))


def test_transposed_convolution_is_the_sum_it_is_defined_as():
    layer = CausalTransposedConv(3, 2, 6, 3, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, 4, 3)).astype(np.float32)
    taps_JISO = np.asarray(layer.conv.weight[...]).reshape(2, 3, 3, 2)[::-1]
    wanted = np.zeros((1, 12, 2))
    for t in range(4):
        for j in range(min(t, 1) + 1):
            for r in range(3):
                wanted[0, 3 * t + r] += x[0, t - j] @ taps_JISO[j, :, r]
    np.testing.assert_allclose(np.asarray(layer(jnp.asarray(x))), wanted, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 8, 9, 12, 23])
def test_attention_in_blocks_equals_a_full_mask(steps):
    config = CodecTransformerConfig(num_layers=1, dim=8, num_heads=2, head_dim=4, ffn_dim=8, window=4)
    blocks = Attention(config, rngs=nnx.Rngs(1))
    x = jnp.asarray(np.random.default_rng(steps).normal(size=(2, steps, 8)), jnp.float32)
    rope = rope_table(steps, 4, 10000.0)
    q, k, v = (np.asarray(part, np.float64) for part in blocks._qkv(x, jnp.asarray(rope)[None]))
    scores = np.einsum("bthd,bshd->bhts", q, k) / 2.0
    i, j = np.arange(steps)[:, None], np.arange(steps)[None]
    scores = np.where((j <= i) & (j > i - 4), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(2, steps, 8)
    wanted = mixed @ np.asarray(blocks.wo.weight[...], np.float64).T
    np.testing.assert_allclose(np.asarray(blocks(x, jnp.asarray(rope)[None])), wanted, atol=1e-5)


def test_other_shapes_run_both_ways(random_codec):
    """A transformer narrower than the latents has projections; rates and factors in any order."""
    codec = random_codec(SMALL)
    assert SMALL.samples_per_frame == 36
    graph, state = nnx.split(codec)
    encode = jax.jit(lambda state, *rest: nnx.merge(graph, state).encode(*rest))
    decode = jax.jit(lambda state, codes: nnx.merge(graph, state).decode(codes))
    codes, frames = encode(state, jnp.ones((2, 100)), jnp.array([100, 37]))
    assert codes.shape == (2, 3, 3) and frames.tolist() == [3, 2]
    sound = decode(state, codes)
    assert sound.shape == (2, 108) and sound.dtype == jnp.float32
    np.testing.assert_allclose(sound[:, :36], decode(state, codes[:, :, :1]), atol=1e-6)


def test_fewer_books_are_the_first_books(random_codec):
    codec = random_codec(SMALL)
    z = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 12)), jnp.float32)
    every, first = codec.quantizer.quantize(z), codec.quantizer.quantize(z, num_quantizers=1)
    np.testing.assert_array_equal(first.codes_BKT, every.codes_BKT[:, :2])
    np.testing.assert_array_equal(first.latents_BTE, every.latents_BTE[..., :6])
    np.testing.assert_allclose(every.z_q_BTC, codec.quantizer.lookup(every.codes_BKT), atol=1e-6)


def test_the_first_of_equal_entries_wins(random_codec):
    codec = random_codec(SMALL)
    book = codec.quantizer.books()[0]
    entries = book.codebook.weight[...]
    book.codebook.weight[...] = entries.at[9].set(entries[4]).at[6].set(2 * entries[4])
    latents = jnp.stack([entries[4], 4 * entries[4], entries[2]])[None]
    cosine = book.similarity(latents)[0, 0]
    assert jnp.sum(cosine == cosine.max()) == 3
    assert book.nearest(latents).tolist() == [[4, 4, 2]]


def test_bfloat16_weights_give_nearly_the_same_sound(tiny, decode, expected):
    graph, state = nnx.split(tiny)
    half = jax.tree.map(lambda a: jnp.asarray(np.asarray(a).astype(jnp.bfloat16)), state)
    codes = jnp.asarray(expected["random.codes"], jnp.int32)
    sound = jax.jit(lambda state, codes: nnx.merge(graph, state).decode(codes))(half, codes)
    assert sound.dtype == jnp.float32
    error, wanted = np.asarray(sound - decode(codes)), np.asarray(decode(codes))
    # Random weights make a loud, rough signal: 8 % measured.
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < 0.15


def test_every_parameter_of_a_training_path_has_a_finite_gradient(random_codec):
    codec = random_codec(SMALL)
    graph, state = nnx.split(codec)
    audio = jnp.asarray(0.1 * np.random.default_rng(1).normal(size=(2, 72)), jnp.float32)

    def loss(state):
        codec = nnx.merge(graph, state)
        z = codec.quantizer.pre_module(codec.quantizer.shrink(codec.encoder(audio[..., None])))
        rest, total, error = z, 0.0, 0.0
        for book in codec.quantizer.books():
            latent = book.in_proj(rest)
            entry = book.codebook(book.nearest(latent))
            error = error + jnp.mean((entry - latent) ** 2)
            out = book.out_proj(latent + jax.lax.stop_gradient(entry - latent))
            rest, total = rest - out, total + out
        sound = codec.decoder(codec.quantizer.expand(codec.quantizer.post_module(total), None)[0])
        return jnp.mean((sound[..., 0] - audio) ** 2) + error

    grads = jax.tree_util.tree_leaves_with_path(jax.device_get(jax.jit(jax.grad(loss))(state)))
    wrong = [jax.tree_util.keystr(p) for p, g in grads if not np.isfinite(g).all() or not np.abs(g).max() > 0]
    assert grads and wrong == []


def test_encoder_transformer_must_be_whole_heads():
    config = CodecConfig(encoder_dim=24, encoder_head_dim=100)
    with pytest.raises(WeightsError, match="384 channels is not whole heads of 100"):
        nnx.eval_shape(lambda: Codec(config, rngs=nnx.Rngs(0)))
