"""The two transformers of a decode step through kernels that hold many operations each.

    slow: between_attentions ─► q, k, v ─► append_kv, attention ─► between_attentions ─► ...
    fast: fast_frame, its draws included

Kernels are asked for by name, come they first or not: who steps in this way wants no references in their place.
The same functions as `SlowTransformer.extend` of one column and `FastTransformer.frame`, for weights in FP8 blocks;
the residual stays float32 from layer to layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.config import Fused
from fishjax.model.block import Block, cached_rope_table
from fishjax.model.cache import KVCache, attend_cached, write
from fishjax.model.dual_ar import DualAR
from fishjax.model.fast import FastTransformer
from fishjax.model.layers import FusedFeedForward
from fishjax.model.slow import SlowTransformer
from pallas_kernels import (
    After,
    Before,
    BlockScaled,
    Draws,
    FastLayer,
    FastWeights,
    between_attentions,
    chip_backend,
    fast_frame,
    fast_weights,
)
from pallas_kernels.append_kv import api as append
from pallas_kernels.append_kv import config as append_limits
from pallas_kernels.between_attentions import api as between
from pallas_kernels.fast_frame import api as frame
from pallas_kernels.fast_frame import config as frame_layout

# Traced and lowered once for all layers.
_between_attentions = jax.jit(between_attentions, static_argnames=("eps", "backend"))
_BLOCK = 128


def why_not(model: DualAR, num_slots: int, fused: Fused) -> str | None:
    """None when `model`, prepared, can be stepped in this way, else what it has that the kernels do not know."""
    if fused == "none":
        return None
    config, fast = model.config, model.config.fast
    parts = [("slow", config.slow, model.slow.layers), ("fast", fast, model.fast.layers)]
    for name, part, layers in parts if fused == "both" else parts[:1]:
        if not all(isinstance(w, BlockScaled) for layer in layers for w in _weights(layer)):
            return f"the {name} transformer's weights are not FP8 with 128 x 128 scales"
        if part.qkv_bias or part.o_bias:
            return f"the {name} transformer's projections have biases"
    if reason := append_limits.can_run(config.slow.num_kv_heads, config.slow.head_dim):
        return f"the slow transformer's keys and values: {reason}"
    if fused == "slow":
        return None
    if fast.qk_norm:
        return "the fast transformer normalises queries and keys"
    if fast.head_dim != _BLOCK:
        return f"the fast transformer's heads are {fast.head_dim} wide, not {_BLOCK}"
    if not isinstance(model.fast.output.weight[...], BlockScaled):
        return "the fast transformer's head is not FP8 with 128 x 128 scales"
    sizes = (fast.dim, fast.num_heads, fast.num_kv_heads, fast.ffn_dim, fast.num_layers)
    codes = -(-config.codebook_size // _BLOCK) * _BLOCK
    return frame_layout.why_not(
        frame_layout.plan(frame_layout.Config(), num_slots, *sizes, C=config.num_codebooks, codes=codes)
    )


def _weights(layer: Block) -> list:
    """Of one prepared block."""
    feed_forward = layer.feed_forward
    inner = [feed_forward.w_gate_up, feed_forward.w_down] if isinstance(feed_forward, FusedFeedForward) else [None]
    return [w if w is None else w[...] for w in (layer.attention.wqkv.weight, layer.attention.wo.weight, *inner)]


def _value(param: nnx.Param) -> jax.Array:
    return param[...]


def slow_step(slow: SlowTransformer, x_BD: jax.Array, start_B: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """One more column of each slot, as `SlowTransformer.extend`: (hidden_BD pre-norm, cache)."""
    table_B1d2 = jnp.asarray(cached_rope_table(cache.max_len, slow.config.slow.head_dim, slow.config.slow.rope_base))
    table_B1d2 = table_B1d2[start_B[:, None]]
    options = {"eps": slow.config.slow.norm_eps, "backend": chip_backend(between.KERNELS)}
    keys, values = [], []

    def attend(q_B1Hd: jax.Array, k_B1Gd: jax.Array, v_B1Gd: jax.Array) -> jax.Array:
        layer = len(keys)
        halves = cache.k_BGSd[layer], cache.v_BGSd[layer]
        k_BGSd, v_BGSd = write(*halves, k_B1Gd, v_B1Gd, start_B, backend=chip_backend(append.KERNELS))
        keys.append(k_BGSd)
        values.append(v_BGSd)
        return attend_cached(q_B1Hd, k_BGSd, v_BGSd, start_B)

    B, o_BK, before = len(x_BD), None, None
    # M: as many tokens as the kernel works on, so that no layer pads and cuts.
    x_DM = jnp.pad(x_BD.T.astype(jnp.float32), ((0, 0), (0, between.whole_tokens(B) - B)))
    for layer in slow.layers:
        wqkv, wo, w_gate_up, w_down = _weights(layer)
        after = After(_value(layer.attention_norm.weight), wqkv)
        x_DM, qkv_MN = _between_attentions(x_DM, o_BK, before, after, **options)
        o_BK = layer.attention.mix(qkv_MN[:B, None], table_B1d2, attend)[:, 0]
        before = Before(wo, _value(layer.ffn_norm.weight), w_gate_up, w_down)
    x_DM, _ = _between_attentions(x_DM, o_BK, before, None, **options)
    return x_DM[:, :B].T.astype(x_BD.dtype), KVCache(k_BGSd=tuple(keys), v_BGSd=tuple(values))


def frame_codes(hidden_BD: jax.Array, semantic_B: jax.Array, weights: FastWeights, draws: Draws) -> jax.Array:
    """The codes of one frame, as `FastTransformer.frame` with the sampler: (B, C) int32."""
    return fast_frame(hidden_BD, semantic_B, weights, draws, backend=chip_backend(frame.KERNELS))


def frame_weights(fast: FastTransformer) -> FastWeights:
    """What `fast_frame` reads, a copy of the fast transformer's weights in its own layout."""
    config = fast.config.fast
    layers = []
    for layer in fast.layers:
        wqkv, wo, w_gate_up, w_down = _weights(layer)
        norms = _value(layer.attention_norm.weight), _value(layer.ffn_norm.weight)
        layers.append(FastLayer(norms[0], wqkv, wo, norms[1], w_gate_up, w_down))
    head = fast.output.weight[...]
    assert isinstance(head, BlockScaled)  # why_not has said so
    return fast_weights(
        layers,
        _value(fast.embeddings.weight),
        _value(fast.norm.weight),
        head,
        jnp.asarray(cached_rope_table(fast.config.num_codebooks, config.head_dim, config.rope_base)),
        config.norm_eps,
    )
