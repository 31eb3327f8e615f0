"""Decoding piece by piece, exactly: the state that a stream of frames carries from one piece to the next.

    codes (B, K, F) + state -> sound of F frames + state

The decode path is strictly causal, so frame by frame equals the whole decode: the state holds the last inputs of
every convolution, the newest `window` keys and values of every `post_module` layer, and each row's position.
Positions are absolute (the rotary table is rounded, so shifting them is only nearly neutral): a stream has a
stated longest length, `max_frames`, that its table covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import jax
import jax.numpy as jnp

from fishjax.codec.attention import KV
from fishjax.codec.codec import Codec
from fishjax.codec.layers import Tail


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodecStreamState:
    """Row b belongs to stream b; every array has the row axis first.

    `position_B` int32: frames decoded so far. `rings`: per `post_module` layer keys and values (B, window, H, d).
    `tails_BN`: past inputs of the upsampling stages and of the decoder, side by side: one array is carried over in one
    or two kernels, dozens of small ones take as many launches.
    """

    position_B: jax.Array
    rings: tuple[KV, ...]
    tails_BN: jax.Array
    max_frames: int = field(metadata={"static": True})


def init_stream(codec: Codec, batch: int, max_frames: int) -> CodecStreamState:
    """`batch` streams at silence, in the codec's own type; none may be longer than `max_frames`.

    Of `codec` only shapes and types are read: it may be abstract.
    """
    quantizer = codec.quantizer
    dtype = quantizer.post_module.norm.weight.dtype
    return CodecStreamState(
        position_B=jnp.zeros((batch,), jnp.int32),
        rings=quantizer.post_module.empty_kv(batch, dtype),
        tails_BN=_side_by_side(_silence(codec, batch)),
        max_frames=max_frames,
    )


def stream_decode(
    codec: Codec, state: CodecStreamState, codes_BKF: jax.Array, run_B: jax.Array, reset_B: jax.Array
) -> tuple[CodecStreamState, jax.Array]:
    """The next F frames of each row: (state, sound (B, F * samples_per_frame) float32 in -1..1).

    A row in `reset_B` starts from silence before its frames; a row outside `run_B` keeps its state bit for bit and
    its sound means nothing. Any F: pieces of any sizes give the samples of the whole decode.
    """
    position_B = jnp.where(reset_B, 0, state.position_B)
    # A restarted row's ring needs no clearing: places whose position is not yet reached are hidden.
    tails_BN = jnp.where(reset_B[:, None], 0, state.tails_BN)
    tails = _apart(tails_BN, jax.eval_shape(lambda: _silence(codec, tails_BN.shape[0])))
    quantizer = codec.quantizer
    z_BTC, rings = quantizer.post_module.stream_positions(
        quantizer.lookup(codes_BKF), state.rings, position_B, run_B, state.max_frames
    )
    z_BTC, expand_tail = quantizer.expand(z_BTC, tails[0])
    audio_BT1, decoder_tail = codec.decoder.stream(z_BTC, tails[1])
    return CodecStreamState(
        position_B=jnp.where(run_B, position_B + codes_BKF.shape[2], state.position_B),
        rings=rings,
        tails_BN=jnp.where(run_B[:, None], _side_by_side((expand_tail, decoder_tail)), state.tails_BN),
        max_frames=state.max_frames,
    ), audio_BT1[..., 0]


def _silence(codec: Codec, batch: int) -> tuple[Tail, Tail]:
    """The tails before any signal, as the blocks know them."""
    dtype = codec.quantizer.post_module.norm.weight.dtype
    return codec.quantizer.expand_silence(batch, dtype), codec.decoder.silence(batch, dtype)


def _side_by_side(tails: Tail) -> jax.Array:
    return jnp.concatenate([tail.reshape(tail.shape[0], -1) for tail in jax.tree.leaves(tails)], axis=1)


def _apart(tails_BN: jax.Array, like: Tail) -> Tail:
    leaves, tree = jax.tree.flatten(like)
    ends = list(accumulate(math.prod(leaf.shape[1:]) for leaf in leaves))
    pieces = jnp.split(tails_BN, ends[:-1], axis=1)
    return jax.tree.unflatten(tree, [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)])
