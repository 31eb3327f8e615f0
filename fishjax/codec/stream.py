"""Codes to sound as they come: frame by frame, in chunks of any size, equal to decoding the whole.

`CodecStreamState` holds all that the next frame depends on: per convolution its last inputs, per layer of
`post_module` a ring of the last `window` keys and values, and the frames that each slot has had. The layers
are those of the whole decode; only their past comes from the state instead of silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.codec import Codec
from fishjax.codec.layers import KV, Tail
from fishjax.config import CodecConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodecStreamState:
    """The state of B slots. Every array has the slot as its first axis, so one slot is a row of each leaf."""

    frames_B: jax.Array
    """int32: frames decoded since the slot was reset; the absolute position of the next one."""
    tails: Tail
    """Past inputs of the convolutions of `upsample` and of the decoder, (B, steps, C) each."""
    kv: tuple[KV, ...]
    """Per `post_module` layer keys and values (B, window, H, d); position p lies in place p mod window."""
    max_frames: int = field(metadata={"static": True})
    """Longest stream of a slot in frames; the rotary table covers it."""


def init_stream(config: CodecConfig, batch: int, dtype, max_frames: int) -> CodecStreamState:
    """Silence in `batch` slots.

    `dtype` is that of the codec's weights. `max_frames` bounds one stream (a slot between two resets): frames at
    or past it are decoded with the position max_frames - 1, so the caller must stop or reset before.
    Raises `ValueError` when `max_frames` is not positive.
    """
    if max_frames < 1:
        raise ValueError(f"max_frames must be at least 1, not {max_frames}")
    codec = nnx.eval_shape(lambda: Codec(config, rngs=nnx.Rngs(0)))
    return CodecStreamState(
        frames_B=jnp.zeros((batch,), jnp.int32),
        tails=(codec.quantizer.expand_silence(batch, dtype), codec.decoder.silence(batch, dtype)),
        kv=codec.quantizer.post_module.empty_kv(batch, dtype),
        max_frames=max_frames,
    )


def stream_decode(
    codec: Codec, state: CodecStreamState, codes_BKF: jax.Array, run_B: jax.Array, reset_B: jax.Array
) -> tuple[CodecStreamState, jax.Array]:
    """The next F frames of every running slot: (state, float32 sound (B, F * samples_per_frame)).

    `run_B` bool: slots outside it keep their state bit for bit, and their row of sound means nothing.
    `reset_B` bool: a running slot starts from silence before this chunk; without `run_B` it has no effect.
    Pure and jittable; `state` may be donated.
    """
    fresh_B = run_B & reset_B
    start_B = jnp.where(fresh_B, 0, state.frames_B)
    past_expand, past_decoder = jax.tree.map(lambda a: _where_row(fresh_B, jnp.zeros_like(a), a), state.tails)

    z = codec.quantizer.lookup(codes_BKF)
    z, kv = codec.quantizer.post_module.stream_positions(z, state.kv, start_B, run_B, state.max_frames)
    z, next_expand = codec.quantizer.expand(z, past_expand)
    audio_BT1, next_decoder = codec.decoder.stream(z, past_decoder)

    next_state = CodecStreamState(
        frames_B=jnp.where(run_B, start_B + codes_BKF.shape[2], state.frames_B),
        tails=jax.tree.map(lambda new, old: _where_row(run_B, new, old), (next_expand, next_decoder), state.tails),
        kv=kv,
        max_frames=state.max_frames,
    )
    return next_state, audio_BT1[..., 0]


def _where_row(choose_B: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    return jnp.where(choose_B.reshape(-1, *(1,) * (no.ndim - 1)), yes.astype(no.dtype), no)
