"""A convolution as a GPU runs it, one matmul over shifted copies: the same numbers, in one captured graph, by size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.codec import layers
from fishjax.codec.stream import init_stream, stream_decode
from pallas_kernels.causal_conv import reference


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The program of a GPU on whatever device the test has."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))


def by_hand(past, x, w, stride, dilation):
    """The definition, in float64."""
    whole = np.concatenate([past, x], axis=1).astype(np.float64)
    steps = x.shape[1] // stride
    return np.stack(
        [
            sum(whole[:, t * stride + k * dilation] @ w[k].astype(np.float64) for k in range(w.shape[0]))
            for t in range(steps)
        ],
        axis=1,
    )


@pytest.mark.parametrize(
    ("taps", "stride", "dilation", "steps"),
    [(7, 1, 1, 4), (7, 1, 9, 32), (7, 1, 9, 60), (2, 1, 1, 1), (4, 2, 1, 6), (2, 2, 1, 2), (3, 3, 2, 9), (1, 1, 1, 5)],
)
@pytest.mark.parametrize("channels", [(3, 5), (9, 1)])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_convolution_is_its_definition(request, gpu, channels, taps, stride, dilation, steps):
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    rng = np.random.default_rng(taps + steps)
    past = rng.normal(size=(2, (taps - 1) * dilation + 1 - stride, channels[0])).astype(np.float32)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((2, steps, channels[0]), (taps, *channels)))
    y = reference.convolve(jnp.asarray(past), jnp.asarray(x), jnp.asarray(w), stride, dilation)
    np.testing.assert_allclose(y, by_hand(past, x, w, stride, dilation), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_depthwise_convolution_is_its_definition(dtype):
    rng = np.random.default_rng(0)
    past, x, w = (jnp.asarray(rng.normal(size=size), dtype) for size in ((2, 6, 5), (2, 3, 5), (7, 1, 5)))
    y = layers.depthwise(past, x, w)
    past, x, w = (np.asarray(a.astype(jnp.float32)) for a in (past, x, w))
    wanted = by_hand(past, x, np.eye(5, dtype=np.float32) * w, 1, 1)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float32), wanted, atol=1e-5, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("pieces", [(1,) * 12, (5, 4, 3)])
def test_pieces_as_on_a_gpu_are_the_recorded_waveform(as_on_a_gpu, tiny, expected, pieces):
    graph, weights = nnx.split(tiny)
    step = jax.jit(lambda weights, *rest: stream_decode(nnx.merge(graph, weights), *rest))
    codes, run, state = jnp.asarray(expected["random.codes"], jnp.int32), jnp.ones(2, bool), init_stream(tiny, 2, 12)
    sounds, at = [], 0
    for size in pieces:
        state, sound = step(weights, state, codes[:, :, at : at + size], run, ~run)
        sounds.append(np.asarray(sound))
        at += size
    np.testing.assert_allclose(np.concatenate(sounds, axis=1), expected["random.waveform"][:, 0], atol=2e-5)


def convolutions(tiny, platform: str) -> int:
    """How many a step of one frame for two slots has, made for a platform."""
    graph, weights = nnx.split(tiny)
    step = jax.jit(lambda weights, *rest: stream_decode(nnx.merge(graph, weights), *rest))
    state, run = init_stream(tiny, 2, 12), jnp.ones(2, bool)
    traced = step.trace(weights, state, jnp.zeros((2, 4, 1), jnp.int32), run, run)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.convolution")


def test_a_step_for_a_gpu_has_no_convolution_up_to_a_size(monkeypatch, tiny):
    assert convolutions(tiny, "cuda") == 0
    everywhere = convolutions(tiny, "cpu")
    assert everywhere > 10
    monkeypatch.setattr(reference, "MATMUL_BYTES", 0)
    assert convolutions(tiny, "cuda") == everywhere
