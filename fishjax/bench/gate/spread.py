"""The same function with weights of very different size: so that a scale in the wrong place shows.

The blocks of a small model's weights are much alike: read the scales of one transposed, and hardly anything changes.
Here columns that follow a norm are divided by a power of two that the norm is multiplied by; so are the columns of
`w2` and `wo` by one that the rows before them, of `w3` and of the values, are multiplied by. One power for a block of
128: plain results keep every bit, and so do quantised ones whose scales lie where they should.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.model.block import Attention, Block
from fishjax.model.dual_ar import DualAR
from fishjax.model.layers import FeedForward, Linear, RMSNorm
from pallas_kernels.types import BLOCK

_LARGEST = 4
_SEED = 11


def spread(model: DualAR) -> None:
    """Multiply the blocks of a model whose weights are plain arrays by 2^-4 .. 2^4 each, in place.

    Heads keep their size, and so do rows of queries and keys, and `wo` where all values lie in one block of 128 rows
    (as in minnow): a scale misplaced there is left to the semantic agreement.
    """
    rng = np.random.default_rng(_SEED)
    for _, block in nnx.iter_modules(model):
        if isinstance(block, Block):
            assert isinstance(block.feed_forward, FeedForward)
            _spread_attention(rng, block.attention_norm, block.attention)
            _spread_feed_forward(rng, block.ffn_norm, block.feed_forward)


def _spread_attention(rng: np.random.Generator, norm: RMSNorm, attention: Attention) -> None:
    heads, groups, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    _through_norm(rng, norm, attention.wqkv)
    values = _powers(rng, groups * width)
    _scale_rows(attention.wqkv, np.concatenate([np.ones((heads + groups) * width), values]))
    # Query head h reads the values of head h // (heads / groups).
    _scale_columns(attention.wo, 1 / np.repeat(values.reshape(groups, width), heads // groups, axis=0).ravel())


def _spread_feed_forward(rng: np.random.Generator, norm: RMSNorm, feed_forward: FeedForward) -> None:
    _through_norm(rng, norm, feed_forward.w1, feed_forward.w3)
    inner = _powers(rng, feed_forward.w2.weight.shape[1])
    _scale_rows(feed_forward.w3, inner)
    _scale_columns(feed_forward.w2, 1 / inner)


def _through_norm(rng: np.random.Generator, norm: RMSNorm, *linears: Linear) -> None:
    powers = _powers(rng, norm.weight.shape[0])
    norm.weight.set_value(_times(norm.weight[...], powers))
    for linear in linears:
        _scale_columns(linear, 1 / powers)


def _scale_rows(linear: Linear, factors: np.ndarray) -> None:
    linear.weight.set_value(_times(linear.weight[...], factors[:, None]))
    if linear.bias is not None:
        linear.bias.set_value(_times(linear.bias[...], factors))


def _scale_columns(linear: Linear, factors: np.ndarray) -> None:
    linear.weight.set_value(_times(linear.weight[...], factors))


def _times(array, factors: np.ndarray):
    return array * jnp.asarray(factors, array.dtype)


def _powers(rng: np.random.Generator, size: int) -> np.ndarray:
    """A power of two for each block of 128 entries, one an entry: evenly from 2^-4 to 2^4, in a random order."""
    exponents = rng.permutation(np.rint(np.linspace(-_LARGEST, _LARGEST, -(-size // BLOCK))))
    return np.repeat(2.0**exponents, BLOCK)[:size]
