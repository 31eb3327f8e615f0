"""Streaming equals decoding the whole: every chunk size, slots that start, stop and pause at their own times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fishjax.codec.stream import init_stream

FRAMES = 50
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def codes():
    """Four streams of 50 frames; the attention window is 6."""
    rng = np.random.default_rng(7)
    return np.concatenate(
        [rng.integers(0, 64, (4, 1, FRAMES)), rng.integers(0, 32, (4, 3, FRAMES))], axis=1, dtype=np.int32
    )


@pytest.fixture(scope="module")
def whole(decode, codes):
    return np.asarray(decode(codes))


def rows(state, row):
    return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(state)]


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 5, 25, 50])
def test_chunks_with_staggered_resets_and_pauses(tiny, step, codes, whole, chunk):
    """Each slot plays the streams in its own order, pauses at random and restarts in the middle of some."""
    rng = np.random.default_rng(chunk)
    state = init_stream(tiny, 3, FRAMES)
    spf = tiny.config.samples_per_frame
    stream, at, checked = [0, 1, 2], [0, 0, 0], [0, 0, 0]
    fresh = [True, True, True]
    for _ in range(max(8, 3 * FRAMES // chunk)):
        run, reset = rng.random(3) < 0.7, np.zeros(3, bool)
        for slot in range(3):
            if at[slot] == FRAMES or (at[slot] and rng.random() < 0.04):
                stream[slot], at[slot], fresh[slot] = int(rng.integers(4)), 0, True
            # A slot that does not run may be told to reset: it must not.
            reset[slot] = fresh[slot] if run[slot] else rng.random() < 0.3
        fed = rng.integers(0, 32, (3, 4, chunk)).astype(np.int32)  # what a paused slot is given must not matter
        for slot in np.flatnonzero(run):
            fed[slot] = codes[stream[slot], :, at[slot] : at[slot] + chunk]
        before = [rows(state, slot) for slot in range(3)]
        state, sound = step(state, jnp.asarray(fed), jnp.asarray(run), jnp.asarray(reset))
        assert sound.shape == (3, chunk * spf) and sound.dtype == jnp.float32
        for slot in range(3):
            if not run[slot]:
                assert same(before[slot], rows(state, slot))
                continue
            wanted = whole[stream[slot], at[slot] * spf : (at[slot] + chunk) * spf]
            np.testing.assert_allclose(np.asarray(sound)[slot], wanted, atol=TOLERANCE)
            at[slot], fresh[slot] = at[slot] + chunk, False
            checked[slot] += chunk
    assert min(checked) >= FRAMES


def test_chunks_of_mixed_sizes(tiny, step, codes, whole):
    state, pieces, at = init_stream(tiny, 4, FRAMES), [], 0
    run = jnp.ones(4, bool)
    for chunk in (1, 5, 25, 2, 5, 5, 5, 2):
        state, sound = step(state, jnp.asarray(codes[:, :, at : at + chunk]), run, ~run)
        pieces.append(np.asarray(sound))
        at += chunk
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=TOLERANCE)
    np.testing.assert_array_equal(state.position_B, FRAMES)


def test_the_recorded_waveform_frame_by_frame(tiny, step, expected):
    codes, run = jnp.asarray(expected["random.codes"], jnp.int32), jnp.ones(2, bool)
    state, pieces = init_stream(tiny, 2, 12), []
    for frame in range(12):
        state, sound = step(state, codes[:, :, frame : frame + 1], run, ~run)
        pieces.append(np.asarray(sound))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected["random.waveform"][:, 0], atol=2e-5)


def test_neighbours_do_not_matter(tiny, step, codes):
    """Slot 1's sound is the same bits whatever the others do."""
    run, sounds = jnp.ones(3, bool), []
    for neighbours in ((0, 2), (3, 0)):
        state = init_stream(tiny, 3, FRAMES)
        mine = []
        for at in range(0, 10):
            fed = codes[[neighbours[0], 1, neighbours[1]], :, at : at + 1]
            state, sound = step(state, jnp.asarray(fed), run, jnp.asarray([at % 3 == 0, False, False]))
            mine.append(np.asarray(sound)[1])
        sounds.append(mine)
    np.testing.assert_array_equal(sounds[0], sounds[1])


def test_nothing_of_an_earlier_stream_is_left_after_a_reset(tiny, step, codes, whole):
    state, run = init_stream(tiny, 3, FRAMES), jnp.ones(3, bool)
    dirty = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1000), state)
    fed = jnp.asarray(codes[:3, :, :1])
    (clean, clean_sound), (after, sound) = step(state, fed, run, ~run), step(dirty, fed, run, run)
    np.testing.assert_array_equal(sound, clean_sound)
    np.testing.assert_allclose(sound, whole[:3, : sound.shape[1]], atol=TOLERANCE)
    np.testing.assert_array_equal(after.position_B, clean.position_B)
    assert same(jax.tree.leaves(after.tails_BN), jax.tree.leaves(clean.tails_BN))


def test_a_slot_moves_to_another_row_and_goes_on(tiny, step, codes, whole):
    """One row of every leaf is all there is to a stream."""
    state, run, spf = init_stream(tiny, 3, FRAMES), jnp.ones(3, bool), tiny.config.samples_per_frame
    for at in range(9):
        state, _ = step(state, jnp.asarray(codes[:3, :, at : at + 1]), run, ~run)
    moved = jax.tree.map(lambda leaf: leaf[jnp.array([2, 0, 1])], state)
    _, sound = step(moved, jnp.asarray(codes[[2, 0, 1], :, 9:10]), run, ~run)
    np.testing.assert_allclose(sound, whole[[2, 0, 1], 9 * spf : 10 * spf], atol=TOLERANCE)
