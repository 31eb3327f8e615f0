"""Encoding piece by piece, exactly: the state that a signal carries from one piece of sound to the next.

    sound of F frames + state -> codes (B, K, F) + state

The encode path is strictly causal, as the decode path is (`fishjax.codec.stream`): strided convolutions and windowed
transformers, the downsample stages and `pre_module`. The state holds the last inputs of every convolution, the newest
`window` keys and values of every transformer layer, and how many frames went before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fishjax.codec.attention import KV
from fishjax.codec.codec import Codec
from fishjax.codec.layers import Chain, Tail, chain_silence, run_chain
from fishjax.codec.transformer import WindowTransformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncodeStreamState:
    """Every array has the row axis first, one row a signal.

    `position_B` int32: frames encoded so far. `tails`: past inputs of the blocks before each transformer. `rings`: of
    each transformer, per layer keys and values (B, window, H, d).
    """

    position_B: jax.Array
    tails: tuple[Tail, ...]
    rings: tuple[tuple[KV, ...], ...]
    max_frames: int = field(metadata={"static": True})


def init_encode_stream(codec: Codec, batch: int, max_frames: int) -> EncodeStreamState:
    """`batch` signals at silence; none may be longer than `max_frames`, padding of the last piece included.

    Of `codec` only shapes and types are read: it may be abstract.
    """
    dtype = codec.quantizer.pre_module.norm.weight.dtype
    stages = list(_stages(codec))
    return EncodeStreamState(
        position_B=jnp.zeros((batch,), jnp.int32),
        tails=tuple(chain_silence(blocks, batch, dtype) for blocks, _ in stages),
        rings=tuple(transformer.empty_kv(batch, dtype) for _, transformer in stages),
        max_frames=max_frames,
    )


def stream_encode(codec: Codec, state: EncodeStreamState, audio_BT: jax.Array) -> tuple[EncodeStreamState, jax.Array]:
    """The next whole frames of each signal, float32 (B, F * samples_per_frame): (state, codes (B, K, F) int32).

    Any F: pieces of any sizes give the codes of the whole encode. What is behind a signal's end changes none before.
    """
    num_frames = audio_BT.shape[1] // codec.config.samples_per_frame
    run_B = jnp.ones(audio_BT.shape[:1], bool)
    x_BTC = audio_BT[..., None].astype(codec.quantizer.pre_module.norm.weight.dtype)
    tails, rings = [], []
    for (blocks, transformer), tail, ring in zip(_stages(codec), state.tails, state.rings, strict=True):
        x_BTC, tail = run_chain(blocks, x_BTC, tail)
        steps = x_BTC.shape[1] // num_frames
        x_BTC, ring = transformer.stream_positions(
            x_BTC, ring, steps * state.position_B, run_B, steps * state.max_frames
        )
        tails.append(tail)
        rings.append(ring)
    codes_BKF = codec.quantizer.quantize(x_BTC).codes_BKT
    return EncodeStreamState(state.position_B + num_frames, tuple(tails), tuple(rings), state.max_frames), codes_BKF


def _stages(codec: Codec) -> Iterator[tuple[list[Any], WindowTransformer]]:
    """The encode path in order: blocks, and the transformer behind them; the last one is `pre_module`."""
    blocks: list[Any] = []
    for block in _blocks(codec):
        if isinstance(block, WindowTransformer):
            yield blocks, block
            blocks = []
        else:
            blocks.append(block)


def _blocks(codec: Codec) -> Iterator[Any]:
    for block in codec.encoder.block:
        # A plain chain is an encoder block: it may end in a transformer. Other chains are one block (ResidualUnit).
        yield from block.block if type(block) is Chain else [block]
    for stage in codec.quantizer.downsample:
        yield from stage
    yield codec.quantizer.pre_module
