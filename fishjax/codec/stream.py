"""Decoding piece by piece, exactly: the state that a stream of frames carries from one piece to the next.

    codes (B, K, F) + state -> sound of F frames + state

The decode path is strictly causal, so frame by frame equals the whole decode: the state holds the last inputs of
every convolution, the newest `window` keys and values of every `post_module` layer, and each row's position.
Positions are absolute (the rotary table is rounded, so shifting them is only nearly neutral): a stream has a
stated longest length, `max_frames`, that its table covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    `tails`: past inputs of the upsampling stages and of the decoder.
    """

    position_B: jax.Array
    rings: tuple[KV, ...]
    tails: tuple[Tail, Tail]
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
        tails=(quantizer.expand_silence(batch, dtype), codec.decoder.silence(batch, dtype)),
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
    tails = jax.tree.map(lambda tail: jnp.where(_rows(reset_B, tail), 0, tail), state.tails)
    quantizer = codec.quantizer
    z_BTC, rings = quantizer.post_module.stream_positions(
        quantizer.lookup(codes_BKF), state.rings, position_B, run_B, state.max_frames
    )
    z_BTC, expand_tail = quantizer.expand(z_BTC, tails[0])
    audio_BT1, decoder_tail = codec.decoder.stream(z_BTC, tails[1])
    new_tails = jax.tree.map(
        lambda new, old: jnp.where(_rows(run_B, new), new, old), (expand_tail, decoder_tail), state.tails
    )
    return CodecStreamState(
        position_B=jnp.where(run_B, position_B + codes_BKF.shape[2], state.position_B),
        rings=rings,
        tails=new_tails,
        max_frames=state.max_frames,
    ), audio_BT1[..., 0]


def _rows(mask_B: jax.Array, like: jax.Array) -> jax.Array:
    return mask_B.reshape(-1, *(1,) * (like.ndim - 1))
