"""Causality, and pieces of any sizes: what streaming and padded batches rest on, for drawn places and sizes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fishjax.codec.stream import init_stream

FRAMES = 24
EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True)
# Few sizes, since each is a program of its own; two of them are longer than the attention window of 6.
PIECES = st.lists(st.sampled_from([1, 2, 7, 11]), min_size=FRAMES, max_size=FRAMES)


def draw_codes(seed: int, batch: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = np.array([64, 32, 32, 32])[None, :, None]
    return rng.integers(0, sizes, (batch, 4, FRAMES)).astype(np.int32)


@EXAMPLES
@given(seed=st.integers(0, 99), sizes=PIECES)
def test_pieces_of_drawn_sizes_are_the_whole(tiny, step, decode, seed, sizes):
    codes, state, run, sounds, at = draw_codes(seed), init_stream(tiny, 2, FRAMES), jnp.ones(2, bool), [], 0
    for size in sizes:
        size = size if at + size <= FRAMES else 1
        if at == FRAMES:
            break
        state, sound = step(state, jnp.asarray(codes[:, :, at : at + size]), run, ~run)
        sounds.append(np.asarray(sound))
        at += size
    np.testing.assert_allclose(np.concatenate(sounds, axis=1), np.asarray(decode(codes)), atol=1e-5)


@EXAMPLES
@given(seed=st.integers(0, 99), frame=st.integers(0, FRAMES - 1))
def test_a_later_code_changes_no_earlier_sample(tiny, decode, seed, frame):
    codes, spf = draw_codes(seed), tiny.config.samples_per_frame
    changed = codes.copy()
    changed[:, :, frame:] = draw_codes(seed + 100)[:, :, frame:]
    changed[:, 0, frame] = (codes[:, 0, frame] + 1) % 64
    before, after = np.asarray(decode(codes)), np.asarray(decode(changed))
    np.testing.assert_allclose(after[:, : frame * spf], before[:, : frame * spf], atol=1e-6)
    assert np.abs(after - before)[:, frame * spf : (frame + 1) * spf].max(axis=1).min() > 1e-3


@EXAMPLES
@given(sample=st.integers(0, 1343))
def test_a_later_sample_changes_no_earlier_code(tiny, encode, expected, sample):
    audio = expected["exact.audio"][:, 0]
    changed = audio.copy()
    changed[:, sample:] = np.float32(0.5) - changed[:, sample:]
    codes, frame = np.asarray(encode(changed)[0]), sample // tiny.config.samples_per_frame
    np.testing.assert_array_equal(codes[:, :, :frame], expected["exact.codes"][:, :, :frame])


def test_encoding_whole_frames_of_the_beginning_gives_the_first_codes(tiny, encode, expected):
    """Past the reach of the encoder's attention too: the long case has more than 512 steps."""
    audio, spf = expected["long.audio"][:, 0], tiny.config.samples_per_frame
    for frames in (1, 7, 140):
        codes = np.asarray(encode(audio[:, : frames * spf])[0])
        np.testing.assert_array_equal(codes, expected["long.codes"][:, :, :frames])
