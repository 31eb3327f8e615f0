"""swiglu_mlp: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import BLOCK, MX_BLOCK, BlockScaled, MxScaled, check_fit
from . import mosaic_sm90, mosaic_sm100, reference
from .config import Config

OP = "swiglu_mlp"
KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}
Weight = jax.Array | BlockScaled | MxScaled


def swiglu_mlp(
    x_MD: jax.Array,
    w_gate_up: Weight,
    w_down: Weight,
    *,
    backend: _dispatch.Backend | str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """y = (silu(x w_gate^T) * (x w_up^T)) w_down^T, with no rounding of the inner activations but the FP8 one.

    Args:
      x_MD: (M, D) bfloat16 or float32.
      w_gate_up: (2F, D), F gate rows and then F up rows; an array, BlockScaled or MxScaled.
      w_down: (D, F), the same kind. With BlockScaled D and F are multiples of 128, with MxScaled of 32.
      backend: None, "reference" or "mosaic" (BlockScaled weights).
      config: tile choices of the mosaic kernel; None takes the first that fits.

    Returns:
      y_MD in x's type. Row m depends on row m of x alone.

    Raises:
      ValueError: kinds or shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    kinds = {kind for w in (w_gate_up, w_down) for kind in (BlockScaled, MxScaled) if isinstance(w, kind)}
    if (kinds and not all(isinstance(w, tuple(kinds)) for w in (w_gate_up, w_down))) or len(kinds) > 1:
        raise ValueError(
            f"{OP}: both weights must be of one kind, got {type(w_gate_up).__name__}, {type(w_down).__name__}"
        )
    if x_MD.ndim != 2:
        raise ValueError(f"{OP}: x must be a matrix (M, D), got shape {x_MD.shape}")
    dim, ffn_dim = w_down.shape
    if w_gate_up.shape != (2 * ffn_dim, dim) or x_MD.shape[1] != dim:
        raise ValueError(
            f"{OP}: x {x_MD.shape}, w_gate_up {w_gate_up.shape}, w_down {w_down.shape} are not (M, D), (2F, D), (D, F)"
        )
    multiple = BLOCK if BlockScaled in kinds else MX_BLOCK if MxScaled in kinds else 1
    if dim % multiple or ffn_dim % multiple:
        raise ValueError(f"{OP}: D and F must be multiples of {multiple}, got D = {dim}, F = {ffn_dim}")
    check_fit(OP, w_gate_up, w_down)
    M = x_MD.shape[0]
    kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(M, w_gate_up, w_down, config))
    if kernel:
        return kernel.swiglu_mlp(x_MD, w_gate_up, w_down, config)
    return reference.swiglu_mlp(x_MD, w_gate_up, w_down)
