"""fast_frame: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from . import mosaic_sm90, reference
from .config import Config
from .reference import Draws
from .weights import FastWeights

OP = "fast_frame"
KERNELS = {_dispatch.HOPPER: mosaic_sm90}


def fast_frame(
    hidden_BD: jax.Array,
    semantic_B: jax.Array,
    weights: FastWeights,
    draws: Draws,
    *,
    backend: _dispatch.Backend | str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """All codes of one frame from the slow transformer's hidden state: C - 1 passes over L layers and their draws.

    Args:
      hidden_BD: (B, D) floating point, what position 0 holds; the kernel rounds it to bfloat16.
      semantic_B: (B,) int32, code 0 of each slot.
      weights: `fast_weights(...)`.
      draws: how each slot draws, and its random numbers.
      backend: None, "reference" or "mosaic" (up to 64 slots, heads of 128).
      config: layout of the kernel; None takes the default.

    Returns:
      codes_BC int32, code 0 as given. A slot's codes depend on that slot alone.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(hidden_BD, semantic_B, weights, draws)
    kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(len(hidden_BD), weights, config))
    if kernel:
        return kernel.fast_frame(hidden_BD, semantic_B, weights, draws, config)[0]
    return reference.fast_frame(hidden_BD, semantic_B, weights, draws)[0]


def check_operands(hidden_BD, semantic_B, weights: FastWeights, draws: Draws) -> None:
    """Raise ValueError naming the shapes unless they fit."""
    B, D, C = len(hidden_BD), weights.wqkv.shape[2], weights.rope_C2h.shape[0]
    if hidden_BD.shape != (B, D) or semantic_B.shape != (B,):
        raise ValueError(f"{OP}: hidden {hidden_BD.shape}, semantic {semantic_B.shape} are not (B, {D}), (B,)")
    knobs = (draws.temperature_B.shape, draws.top_p_B.shape, draws.top_k_B.shape)
    if set(knobs) != {(B,)} or draws.gumbel_CBN.shape != (C - 1, B, weights.num_codes):
        raise ValueError(
            f"{OP}: temperature, top_p, top_k {', '.join(map(str, knobs))} and gumbel {draws.gumbel_CBN.shape}"
            f" are not three times ({B},) and ({C - 1}, {B}, {weights.num_codes})"
        )
