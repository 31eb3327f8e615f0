"""Clips piece by piece: the codec's own codes, beside steps, nothing compiled anew, and no more than is used."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fishjax.codec import Codec
from fishjax.engine.references import PIECE_FRAMES
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest


def clip(num_samples: int, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.2, size=num_samples).astype(np.float32)


@pytest.mark.parametrize("num_samples", [1, 3000, 96 * PIECE_FRAMES, 96 * (3 * PIECE_FRAMES) + 1])
def test_codes_are_those_of_the_codec(engine, golden_codec, num_samples):
    assert engine.samples_per_frame == 96
    audio_T = clip(num_samples)
    whole_1KT, lengths_1 = jax.jit(Codec.encode)(golden_codec, audio_T[None])
    codes_KT = engine.references.encode_whole(audio_T)
    assert codes_KT.dtype == np.int32 and codes_KT.shape == (engine.num_codebooks, int(lengths_1[0]))
    np.testing.assert_array_equal(codes_KT, np.asarray(whole_1KT)[0, :, : codes_KT.shape[1]])


def test_clips_are_encoded_beside_each_other_and_beside_steps(engine, prompt, compiles):
    references = engine.references
    clips = [clip(5000, seed=1), clip(4000, seed=2)]
    alone = [references.encode_whole(audio_T) for audio_T in clips]
    engine.insert(engine.prefill(prompt(2), SamplingParams(seed=3)), 0)
    compiled = compiles.count
    made, before = ([], []), [None, None]
    for turn in zip(*(references.cut(audio_T) for audio_T in clips), strict=False):
        for number, piece in enumerate(turn):
            before[number] = references.encode(piece, before[number])
            engine.step([0]).result()
            made[number].append(before[number].result())
    engine.free(0)
    assert compiles.count == compiled
    for codes, whole_KT in zip(made, alone, strict=True):
        assert len(codes) > 2
        pieces_KT = np.concatenate(codes, axis=1)
        np.testing.assert_array_equal(pieces_KT, whole_KT[:, : pieces_KT.shape[1]])


def test_no_piece_is_longer_than_the_bound_and_what_is_too_long_is_cut(engine):
    longest = engine.references.max_frames * engine.samples_per_frame
    assert engine.references.max_frames == round(0.5 * engine.frame_rate_hz)
    pieces = engine.references.cut(np.arange(longest + 50, dtype=np.float32))
    assert {piece.audio_1T.shape for piece in pieces} == {(1, PIECE_FRAMES * engine.samples_per_frame)}
    assert sum(piece.num_frames for piece in pieces) == engine.references.max_frames
    heard_T = np.concatenate([piece.audio_1T[0] for piece in pieces])
    np.testing.assert_array_equal(heard_T[:longest], np.arange(longest))
    assert not heard_T[longest:].any()


@pytest.mark.parametrize("shape", [(), (1, 500), (500, 2)])
def test_more_than_one_channel_is_refused(engine, shape):
    with pytest.raises(InvalidRequest, match=r"one channel, shape \(T,\), not \("):
        engine.references.cut(np.zeros(shape, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(engine, value):
    audio_T = clip(500)
    audio_T[300] = value
    with pytest.raises(InvalidRequest, match="NaN or infinite"):
        engine.references.cut(audio_T)


def test_an_empty_clip_is_refused(engine):
    with pytest.raises(InvalidRequest, match="empty"):
        engine.references.cut(np.zeros(0, np.float32))
