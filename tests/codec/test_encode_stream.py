"""Pieces of a signal get the codes that the whole signal gets, however it is cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.codec.encode_stream import init_encode_stream, stream_encode

FRAMES = 160
"""Of a random signal: four encoder steps each, more than the encoder's window of 512."""
MAX_FRAMES = 200
CUTS = [[4] * 50, [25] * 8, [25, 1, 4, 4, 1, 25, 25, 25, 25, 25, 25, 1, 1, 4]]
each_cut = pytest.mark.parametrize("sizes", CUTS, ids=["of 4", "of 25", "mixed"])


@pytest.fixture(scope="module")
def in_pieces(tiny):
    """Codes (K, frames) of a signal (T,) that is fed in pieces of so many frames, silence behind its end."""
    graph, weights = nnx.split(tiny)
    step = jax.jit(lambda weights, state, audio_BT: stream_encode(nnx.merge(graph, weights), state, audio_BT))
    samples = tiny.config.samples_per_frame

    def encode(audio_T, sizes):
        state, codes, at = init_encode_stream(tiny, 1, MAX_FRAMES), [], 0
        audio_1T = np.pad(audio_T, (0, sum(sizes) * samples - audio_T.size))[None]
        for size in sizes:
            state, piece_1KF = step(weights, state, jnp.asarray(audio_1T[:, at * samples : (at + size) * samples]))
            codes.append(np.asarray(piece_1KF)[0])
            at += size
        assert state.position_B.tolist() == [at]
        return np.concatenate(codes, axis=1)

    return encode


@each_cut
def test_random_signals(tiny, in_pieces, encode, sizes):
    """Loud at first and silent in the end."""
    audio_BT = np.random.default_rng(11).normal(size=(2, FRAMES * tiny.config.samples_per_frame)).astype(np.float32)
    audio_BT *= np.array([[0.1], [0.8]], np.float32) * np.linspace(1, 0, audio_BT.shape[1], dtype=np.float32) ** 2
    whole_BKT = np.asarray(encode(audio_BT)[0])
    assert len(np.unique(whole_BKT)) > 10
    for audio_T, whole_KT in zip(audio_BT, whole_BKT, strict=True):
        np.testing.assert_array_equal(in_pieces(audio_T, sizes)[:, :FRAMES], whole_KT)


@each_cut
@pytest.mark.parametrize("name", ["exact", "odd", "batch", "long"])
def test_recorded_signals(in_pieces, expected, name, sizes):
    lengths_B = expected[f"{name}.lengths"]
    for audio_T, codes_KT, length in zip(
        expected[f"{name}.audio"][:, 0], expected[f"{name}.codes"], lengths_B, strict=True
    ):
        np.testing.assert_array_equal(in_pieces(audio_T, sizes)[:, :length], codes_KT[:, :length])
