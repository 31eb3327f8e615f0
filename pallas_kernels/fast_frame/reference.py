"""One frame of the fast transformer, sampling included: the formula.

    position 0 holds the slow hidden state, position 1 the embedding of code 0, position k + 1 that of code k
    a layer:   x += attention(norm(x)),  x += swiglu(norm(x));   a position attends to itself and those before it
    logits of code k (k = 1 ... C - 1) come from position k;     code k is drawn from them, see `draw`

Every matmul quantises its left operand 1 x 128, as `block_scaled_matmul` does; everything else is float32, but queries,
keys, values and the attention's weights, which are rounded to bfloat16. Queries and keys lie in half-split order (see
`weights`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._reference import linear, rms_norm
from ..swiglu_mlp.reference import swiglu_mlp
from ..types import BLOCK
from .weights import FastWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """How each slot draws: temperature_B > 0, top_p_B, top_k_B int32 (>= 1), gumbel_CBN (C - 1, B, codes) float32.

    gumbel = -log(-log u) of a uniform u for every code: its largest score wins.
    """

    temperature_B: jax.Array
    top_p_B: jax.Array
    top_k_B: jax.Array
    gumbel_CBN: jax.Array


def fast_frame(
    hidden_BD: jax.Array, semantic_B: jax.Array, weights: FastWeights, draws: Draws
) -> tuple[jax.Array, jax.Array]:
    """codes_BC int32 (code 0 as given) and the logits they were drawn from, (C - 1, B, codes) float32."""
    codes, logits, past = [semantic_B.astype(jnp.int32)], [], [()] * weights.num_layers
    x_BD = hidden_BD.astype(jnp.float32)
    for position in range(weights.rope_C2h.shape[0]):
        if position:
            x_BD = weights.embeddings_ND[codes[-1]].astype(jnp.float32)
        for layer in range(weights.num_layers):
            x_BD, past[layer] = _layer(x_BD, weights, layer, position, past[layer])
        if position:
            logits_BN = linear(rms_norm(x_BD, weights.norms_ID[-1], weights.eps), weights.head.layer(0))
            logits.append(logits_BN[:, : weights.num_codes])
            codes.append(draw(logits[-1], draws, position))
    return jnp.stack(codes, axis=1), jnp.stack(logits)


def draw(logits_BN: jax.Array, draws: Draws, position: int) -> jax.Array:
    """Code of `position`: argmax of (logit - best) / temperature + gumbel over the survivors, codes_B int32.

    Candidates in order of their logits, equal ones by number; one survives if it is the best, or if its rank is below
    top_k and the probabilities up to and with it do not exceed top_p (1: no limit).
    """
    logits_BN = logits_BN.astype(jnp.float32)
    order_BN = jnp.argsort(-logits_BN, axis=-1, stable=True)
    ranked_BN = jnp.take_along_axis(logits_BN, order_BN, axis=-1)
    cumulative_BN = jnp.cumsum(jax.nn.softmax(ranked_BN, axis=-1), axis=-1)
    rank_N = jnp.arange(logits_BN.shape[1])
    inside_BN = (cumulative_BN <= draws.top_p_B[:, None]) | (draws.top_p_B[:, None] >= 1.0)
    keep_BN = (inside_BN & (rank_N < draws.top_k_B[:, None])) | (rank_N == 0)
    gumbel_BN = jnp.take_along_axis(draws.gumbel_CBN[position - 1], order_BN, axis=-1)
    scores_BN = (ranked_BN - ranked_BN[:, :1]) / draws.temperature_B[:, None] + gumbel_BN
    winner_B1 = jnp.argmax(jnp.where(keep_BN, scores_BN, -jnp.inf), axis=-1, keepdims=True)
    return jnp.take_along_axis(order_BN, winner_B1, axis=-1)[:, 0].astype(jnp.int32)


def _layer(x_BD: jax.Array, weights: FastWeights, layer: int, position: int, past: tuple) -> tuple[jax.Array, tuple]:
    H, G = weights.heads
    attention_norm_D, ffn_norm_D = weights.norms_ID[2 * layer], weights.norms_ID[2 * layer + 1]
    heads_BHd = linear(rms_norm(x_BD, attention_norm_D, weights.eps), weights.wqkv.layer(layer))
    heads_BHd = heads_BHd.reshape(len(x_BD), -1, BLOCK)
    q_BHd, k_BGd, v_BGd = jnp.split(heads_BHd, [H, H + G], axis=1)
    q_BHd, k_BGd = (_rotate(part, weights.rope_C2h[position]) for part in (q_BHd, k_BGd))
    past = (*past, (_bf16(k_BGd), _bf16(v_BGd)))
    k_BGSd, v_BGSd = (jnp.stack([pair[i] for pair in past], axis=2) for i in range(2))
    q_BGRd = _bf16(q_BHd).reshape(len(x_BD), G, H // G, BLOCK)
    logits_BGRS = jnp.einsum("bgrd,bgsd->bgrs", q_BGRd, k_BGSd, precision="highest") * BLOCK**-0.5
    weight_BGRS = jnp.exp(logits_BGRS - jnp.max(logits_BGRS, axis=-1, keepdims=True))
    o_BGRd = jnp.einsum("bgrs,bgsd->bgrd", _bf16(weight_BGRS), v_BGSd, precision="highest")
    o_BGRd /= jnp.sum(weight_BGRS, axis=-1)[..., None]
    x_BD = x_BD + linear(o_BGRd.reshape(len(x_BD), -1), weights.wo.layer(layer))
    normed_BD = rms_norm(x_BD, ffn_norm_D, weights.eps)
    return x_BD + swiglu_mlp(normed_BD, weights.w_gate_up.layer(layer), weights.w_down.layer(layer)), past


def _rotate(x_BHd: jax.Array, rope_2h: jax.Array) -> jax.Array:
    low, high = jnp.split(x_BHd, 2, axis=-1)
    cosine, sine = rope_2h
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _bf16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
