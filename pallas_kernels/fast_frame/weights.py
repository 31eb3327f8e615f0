"""The fast transformer's weights as the frame kernel walks them: one array for all layers of a kind.

A loop over layers needs one array to index, and the ring of weight tiles runs on from layer to layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._mosaic import LINE
from ..types import BLOCK, BlockScaled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """Weights of one kind, all layers: values_LNK (L, N, K) float8_e4m3fn, N a multiple of 128; scale_LNbKb float32.

    scale_LNbKb is (L, N / 128, K / 128 rounded up to 32), one scale per 128 x 128: whole lines, one of which travels
    with each weight tile.
    """

    values_LNK: jax.Array
    scale_LNbKb: jax.Array

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, N, K), padding rows included."""
        L, N, K = self.values_LNK.shape
        return L, N, K

    def layer(self, index: int) -> BlockScaled:
        """One layer's weight (N, K)."""
        kb = self.values_LNK.shape[2] // BLOCK
        return BlockScaled(self.values_LNK[index], self.scale_LNbKb[index, :, :kb])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FastLayer:
    """One layer: norms (D,), wqkv ((H + 2G) d, D) as in checkpoints, wo (D, H d), w_gate_up (2F, D), w_down (D, F)."""

    attention_norm_D: jax.Array
    wqkv: BlockScaled
    wo: BlockScaled
    ffn_norm_D: jax.Array
    w_gate_up: BlockScaled
    w_down: BlockScaled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FastWeights:
    """All that one frame reads. `fast_weights` makes it.

    embeddings_ND (codes, D) bfloat16; norms_ID float32 (2L + 1, D): attention and ffn norm of each layer, then the last
    one; rope_C2h (C, 2, d / 2) float32: cosines, sines; rows of wqkv's query and key heads in half-split order.
    """

    embeddings_ND: jax.Array
    norms_ID: jax.Array
    rope_C2h: jax.Array
    wqkv: Stack
    wo: Stack
    w_gate_up: Stack
    w_down: Stack
    head: Stack
    num_codes: int = dataclasses.field(metadata={"static": True})
    eps: float = dataclasses.field(metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """L."""
        return self.wqkv.shape[0]

    @property
    def heads(self) -> tuple[int, int]:
        """(query heads H, kv heads G), each 128 wide."""
        H = self.wo.shape[2] // BLOCK
        return H, (self.wqkv.shape[1] // BLOCK - H) // 2


def fast_weights(
    layers: Sequence[FastLayer],
    embeddings_ND: jax.Array,
    norm_D: jax.Array,
    head: BlockScaled,
    rope_Ch2: jax.Array,
    eps: float,
) -> FastWeights:
    """Lay the fast transformer out for the frame kernel, once, at load.

    Args:
      layers: every layer, weights quantised 128 x 128, not prepared.
      embeddings_ND: (codes, D), one table for all positions.
      norm_D: the last norm (D,).
      head: (codes, D).
      rope_Ch2: (C, d / 2, 2) cosine and sine of each position and adjacent pair.
      eps: of the norms.
    """
    H = layers[0].wo.shape[1] // BLOCK
    G = (layers[0].wqkv.shape[0] // BLOCK - H) // 2
    norms = [norm for layer in layers for norm in (layer.attention_norm_D, layer.ffn_norm_D)]
    return FastWeights(
        embeddings_ND=embeddings_ND.astype(jnp.bfloat16),
        norms_ID=jnp.stack([*norms, norm_D]).astype(jnp.float32),
        rope_C2h=jnp.moveaxis(rope_Ch2, -1, 1).astype(jnp.float32),
        wqkv=_stack([_half_split(layer.wqkv, H + G) for layer in layers]),
        wo=_stack([layer.wo for layer in layers]),
        w_gate_up=_stack([layer.w_gate_up for layer in layers]),
        w_down=_stack([layer.w_down for layer in layers]),
        head=_stack([head]),
        num_codes=head.shape[0],
        eps=eps,
    )


def _half_split(wqkv: BlockScaled, rotated: int) -> BlockScaled:
    """Rows of the first `rotated` heads with the pairs (2i, 2i + 1) moved to (i, i + 64).

    A rotation then works on two halves of a register tile; q k^T does not change. A head is one block of scales.
    """
    values = wqkv.values_NK
    pairs = values[: rotated * BLOCK].reshape(rotated, BLOCK // 2, 2, -1)
    halves = jnp.swapaxes(pairs, 1, 2).reshape(rotated * BLOCK, -1)
    return dataclasses.replace(wqkv, values_NK=jnp.concatenate([halves, values[rotated * BLOCK :]]))


def _stack(weights: Sequence[BlockScaled]) -> Stack:
    values_LNK = jnp.stack([w.values_NK for w in weights])
    scale_LNbKb = jnp.stack([w.scale_NbKb for w in weights])
    rows = -values_LNK.shape[1] % BLOCK
    return Stack(
        jnp.pad(values_LNK, ((0, 0), (0, rows), (0, 0))),
        jnp.pad(scale_LNbKb, ((0, 0), (0, 0), (0, -scale_LNbKb.shape[2] % LINE)), constant_values=1.0),
    )
