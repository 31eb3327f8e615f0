"""between_attentions: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from .._chain import Config, tokens_of
from ..types import BLOCK, check_fit
from . import mosaic_sm90, reference
from .reference import After, Before

OP = "between_attentions"
KERNELS = {_dispatch.HOPPER: mosaic_sm90}
whole_tokens = tokens_of


def between_attentions(
    x_DM: jax.Array,
    o_MK: jax.Array | None,
    before: Before | None,
    after: After | None,
    *,
    eps: float,
    backend: _dispatch.Backend | str | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Output projection, residual, SwiGLU block, residual; then norm and wqkv of the next layer.

    Args:
      x_DM: (D, M) float32, the residual, a column a token.
      o_MK: (M, K) floating point, the attention's output; the kernel rounds it to bfloat16. None before the first one.
        It may have fewer rows than x has columns: the others are there for the kernel, which works on `whole_tokens`
        of them and pads x otherwise, and what becomes of them means nothing.
      before: weights of the layer that attended; None with o_MK.
      after: weights of the layer that attends next; None after the last one. K, N, D, F are multiples of 128.
      eps: of both norms.
      backend: None, "reference" or "mosaic" (M up to 64).
      config: layout of the kernel; None takes the default.

    Returns:
      (x_DM float32, qkv_MN bfloat16 or None). Column and row m depend on token m alone.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(x_DM, o_MK, before, after)
    D, M = x_DM.shape
    kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(M, D, before, after, config))
    if kernel:
        return kernel.between_attentions(x_DM, o_MK, before, after, eps, config)
    return reference.between_attentions(x_DM, o_MK, before, after, eps)


def check_operands(x_DM, o_MK, before: Before | None, after: After | None) -> None:
    """Raise ValueError naming the shapes unless they fit."""
    D, M = x_DM.shape
    if (o_MK is None) != (before is None) or (before is None and after is None):
        raise ValueError(f"{OP}: o goes with `before`, and one of `before` and `after` must be there")
    wanted, found = {}, {}
    if before is not None and o_MK is not None:
        F, K = before.w_down.shape[1], o_MK.shape[1]
        wanted |= {
            "o": (min(M, len(o_MK)), K),
            "wo": (D, K),
            "ffn_norm": (D,),
            "w_gate_up": (2 * F, D),
            "w_down": (D, F),
        }
        found |= {"o": o_MK.shape, "wo": before.wo.shape, "ffn_norm": before.ffn_norm_D.shape}
        found |= {"w_gate_up": before.w_gate_up.shape, "w_down": before.w_down.shape}
    if after is not None:
        wanted |= {"norm": (D,), "wqkv": (after.wqkv.shape[0], D)}
        found |= {"norm": after.norm_D.shape, "wqkv": after.wqkv.shape}
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{OP}: {name} is {found[name]}, {shape} fits the rest")
        if name.startswith("w") and any(side % BLOCK for side in shape):
            raise ValueError(f"{OP}: {name} is {shape}; sides must be multiples of {BLOCK}")
    weights = [] if before is None else [before.wo, before.w_gate_up, before.w_down]
    check_fit(OP, *weights, *([] if after is None else [after.wqkv]))
