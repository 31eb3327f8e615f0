"""The tiny codec of the golden data, loaded once, and its expected numbers."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from fishjax.codec import Codec
from fishjax.codec.stream import stream_decode
from fishjax.config import CodecConfig
from fishjax.weights.load_codec import load_codec


@pytest.fixture
def random_codec(monkeypatch):
    """Makes a codec as its constructor does, the same numbers with one program: JAX compiles one for each shape.

    A number that JAX draws depends on its key and its place alone, so that all shapes are the head of one long draw.
    """
    draw = jax.jit(partial(jax.random.normal, shape=(8192,)))
    monkeypatch.setattr(
        jax.random, "normal", lambda key, shape: np.asarray(draw(key))[: math.prod(shape)].reshape(shape)
    )

    def make(config: CodecConfig) -> Codec:
        graph, state = nnx.split(Codec(config, rngs=nnx.Rngs(0)))
        return nnx.merge(graph, jax.tree.map(jnp.asarray, state))

    return make


@pytest.fixture(scope="session")
def tiny(golden):
    return load_codec(golden / "codec_tiny")[1]


@pytest.fixture(scope="session")
def expected(golden):
    return load_file(golden / "codec_tiny" / "expected.safetensors")


@pytest.fixture(scope="session")
def decode(tiny):
    graph, state = nnx.split(tiny)
    jitted = jax.jit(lambda state, codes: nnx.merge(graph, state).decode(codes))
    return lambda codes: jitted(state, jnp.asarray(codes, jnp.int32))


@pytest.fixture(scope="session")
def encode(tiny):
    graph, state = nnx.split(tiny)
    jitted = jax.jit(lambda state, audio, lengths: nnx.merge(graph, state).encode(audio, lengths))
    return lambda audio, lengths=None: jitted(state, jnp.asarray(audio), lengths)


@pytest.fixture(scope="session")
def step(tiny):
    graph, state = nnx.split(tiny)
    jitted = jax.jit(lambda state, *rest: stream_decode(nnx.merge(graph, state), *rest))
    return lambda *rest: jitted(state, *rest)
