"""A loaded model -> itself, laid out for decoding, once: gate and up rows joined, FP8 weights as kernels read them.

Checkpoints and training keep the published form; this is the last thing that happens to weights before an engine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.model.block import Block
from fishjax.model.dual_ar import DualAR
from fishjax.model.layers import FeedForward, FusedFeedForward, Linear
from fishjax.weights.quantize import QuantisedWeight
from pallas_kernels import BlockScaled, MxScaled, prepare_weights


def prepare(model: DualAR) -> None:
    """Join w1 and w3 of every block and lay out every quantised weight, in place, one at a time.

    Also of an abstract model (`nnx.eval_shape(prepared, model)`). What is prepared stays as it is.
    """
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, Block) and isinstance(module.feed_forward, FeedForward):
            module.feed_forward = _fused(module.feed_forward)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.weight = nnx.Param(prepared_weight(module.weight[...]))


def prepared(model: DualAR) -> DualAR:
    """`prepare`, as a function of a model."""
    prepare(model)
    return model


def prepared_weight(weight: QuantisedWeight) -> QuantisedWeight:
    """One weight as its kernel reads it; an array stays as it is."""
    if isinstance(weight, MxScaled):
        return prepare_weights(weight, "mx_matmul")
    return prepare_weights(weight, "block_scaled_matmul") if isinstance(weight, BlockScaled) else weight


def _fused(feed_forward: FeedForward) -> FusedFeedForward:
    w1, w3, w2 = (linear.weight[...] for linear in (feed_forward.w1, feed_forward.w3, feed_forward.w2))
    # Rows of values and rows of scales alike: FP8 needs F, the K of w2, in whole blocks, so no block has rows of both.
    w_gate_up = jax.tree.map(lambda gate, up: jnp.concatenate([gate, up]), w1, w3)
    return FusedFeedForward(prepared_weight(w_gate_up), prepared_weight(w2))
