"""The same frame in plain bfloat16 jnp: no kernels of ours, greedy, one jitted program with donated caches.

What a careful user gets from XLA alone: layers unrolled, gate and up joined, head sliced, ten fast passes, attention
over the whole cache behind a mask. Written apart from the model on purpose: it must not become faster or slower with
it. The codec is the engine's own, in the same program: it has no kernels, and the peer may have the better of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec import Codec
from fishjax.codec.stream import CodecStreamState, stream_decode
from fishjax.config import ModelConfig, TransformerConfig
from fishjax.model.dual_ar import DualAR
from fishjax.model.layers import rope_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PeerState:
    """Live columns, the next column (B, C+1), per layer keys and values (B, G, S, d), the codec's stream."""

    length_B: jax.Array
    column_BK: jax.Array
    caches: tuple[tuple[jax.Array, jax.Array], ...]
    codec: CodecStreamState


class Both(nnx.Module):
    """Model and codec, so that one program takes the weights of both."""

    def __init__(self, model: DualAR, codec: Codec):
        self.model, self.codec = model, codec


def peer_step(both: Both, head_ND: jax.Array, state: PeerState) -> tuple[PeerState, tuple[jax.Array, jax.Array]]:
    """One frame of every slot, greedy: (state, (codes_BK int32, audio (B, samples) float32))."""
    model, config = both.model, both.model.config
    x_BD = _embed(model, config, state.column_BK)
    table = jnp.asarray(rope_table(state.caches[0][0].shape[2], config.slow.head_dim, config.slow.rope_base))
    caches = []
    for layer, cache in zip(model.slow.layers, state.caches, strict=True):
        x_BD, cache = _block(layer, config.slow, x_BD, table[state.length_B], cache, state.length_B)
        caches.append(cache)
    normed_BD = _norm(x_BD, model.slow.norm.weight[...], config.slow.norm_eps)
    semantic_B = jnp.argmax(normed_BD @ head_ND.T, axis=-1).astype(jnp.int32)
    first_B = jnp.minimum(semantic_B, config.codebook_size - 1)
    codes_BK = _fast(model, config, normed_BD if config.norm_fastlayer_input else x_BD, first_B)
    every_B = jnp.ones(first_B.shape, bool)
    codec, audio_Bs = stream_decode(both.codec, state.codec, codes_BK[:, :, None], every_B, ~every_B)
    column_BK = jnp.concatenate([config.semantic_begin_id + semantic_B[:, None], codes_BK], axis=1)
    stepped = PeerState(state.length_B + 1, column_BK, tuple(caches), codec)
    return stepped, (codes_BK, audio_Bs.astype(jnp.float32))


def _embed(model: DualAR, config: ModelConfig, column_BK: jax.Array) -> jax.Array:
    token_B, books_C = column_BK[:, 0], config.codebook_size * jnp.arange(config.num_codebooks)
    x_BD = model.slow.embeddings.weight[...][token_B]
    codes_BD = model.slow.codebook_embeddings.weight[...][column_BK[:, 1:] + books_C].sum(axis=1).astype(x_BD.dtype)
    frame_BD = x_BD + codes_BD
    if config.scale_codebook_embeddings:
        frame_BD = frame_BD / math.sqrt(config.num_codebooks + 1)
    is_frame_B = (token_B >= config.semantic_begin_id) & (token_B <= config.semantic_end_id)
    return jnp.where(is_frame_B[:, None], frame_BD, x_BD)


def _fast(model: DualAR, config: ModelConfig, hidden_BD: jax.Array, first_B: jax.Array) -> jax.Array:
    """Codes (B, C): one pass over positions 0 and 1, then one a code."""
    fast, cfg = model.fast, config.fast
    if fast.project_in is not None:
        assert fast.project_in.bias is not None
        hidden_BD = hidden_BD @ fast.project_in.weight[...].T + fast.project_in.bias[...]
    table = jnp.asarray(rope_table(config.num_codebooks, cfg.head_dim, cfg.rope_base))
    batch, books = first_B.shape[0], config.num_codebooks
    shape = (batch, cfg.num_kv_heads, books, cfg.head_dim)
    caches = [(jnp.zeros(shape, hidden_BD.dtype), jnp.zeros(shape, hidden_BD.dtype)) for _ in fast.layers]
    embeddings = fast.embeddings.weight[...]
    codes, x_BD = [first_B], hidden_BD
    for position in range(books):
        at_B = jnp.full(batch, position)
        y_BD = x_BD
        for index, layer in enumerate(fast.layers):
            y_BD, caches[index] = _block(layer, cfg, y_BD, table[at_B], caches[index], at_B)
        if position == 0:  # its logits are not needed: code 0 is known
            x_BD = embeddings[first_B]
            continue
        logits_BN = _norm(y_BD, fast.norm.weight[...], cfg.norm_eps) @ fast.output.weight[...].T
        codes.append(jnp.argmax(logits_BN, axis=-1).astype(jnp.int32))
        x_BD = embeddings[codes[-1]]
    return jnp.stack(codes, axis=1)


def _block(layer: Any, config: TransformerConfig, x_BD, table_Bd2, cache, at_B) -> tuple[jax.Array, Any]:
    """One layer for one position of each slot."""
    attention, (k_BGSd, v_BGSd) = layer.attention, cache
    batch, heads, groups = x_BD.shape[0], config.num_heads, config.num_kv_heads
    qkv = _norm(x_BD, layer.attention_norm.weight[...], config.norm_eps) @ attention.wqkv.weight[...].T
    if config.qkv_bias:
        qkv = qkv + attention.wqkv.bias[...]
    q_BHd, k_BGd, v_BGd = jnp.split(qkv.reshape(batch, -1, config.head_dim), [heads, heads + groups], axis=1)
    if config.qk_norm:
        q_BHd = _head_norm(q_BHd, attention.q_norm.weight[...], config.norm_eps)
        k_BGd = _head_norm(k_BGd, attention.k_norm.weight[...], config.norm_eps)
    q_BHd, k_BGd = _rotate(q_BHd, table_Bd2), _rotate(k_BGd, table_Bd2)
    slots_B1, groups_G = jnp.arange(batch)[:, None], jnp.arange(groups)
    k_BGSd, v_BGSd = (c.at[slots_B1, groups_G, at_B[:, None]].set(new) for c, new in ((k_BGSd, k_BGd), (v_BGSd, v_BGd)))
    q_BGRd = q_BHd.reshape(batch, groups, -1, config.head_dim)
    scores = jnp.einsum("bgrd,bgsd->bgrs", q_BGRd, k_BGSd, preferred_element_type=jnp.float32) * config.head_dim**-0.5
    live_BS = jnp.arange(k_BGSd.shape[2]) <= at_B[:, None]
    weights = jax.nn.softmax(jnp.where(live_BS[:, None, None], scores, -jnp.inf), axis=-1).astype(x_BD.dtype)
    out = jnp.einsum("bgrs,bgsd->bgrd", weights, v_BGSd).reshape(batch, -1) @ attention.wo.weight[...].T
    x_BD = x_BD + (out + attention.wo.bias[...] if config.o_bias else out)
    normed = _norm(x_BD, layer.ffn_norm.weight[...], config.norm_eps)
    gate, up = jnp.split(normed @ layer.feed_forward.w_gate_up[...].T, 2, axis=-1)
    return x_BD + (jax.nn.silu(gate) * up) @ layer.feed_forward.w_down[...].T, (k_BGSd, v_BGSd)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def _head_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def _rotate(x_BHd: jax.Array, table_Bd2: jax.Array) -> jax.Array:
    cos, sin = (table_Bd2[:, None, :, i].astype(jnp.float32) for i in (0, 1))
    even, odd = (x_BHd[..., i::2].astype(jnp.float32) for i in (0, 1))
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x_BHd.shape).astype(x_BHd.dtype)
