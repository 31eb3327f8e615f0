"""block_scaled_matmul: the public call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import _dispatch
from ..quantize_blocks.api import quantize_blocks
from ..types import BLOCK, BlockScaled, check_fit
from . import mosaic_sm90, mosaic_sm100, reference
from .config import Config

OP = "block_scaled_matmul"
KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}


def block_scaled_matmul(
    x_MK: jax.Array | BlockScaled,
    w_NK: BlockScaled,
    *,
    out_dtype: jnp.dtype | None = None,
    backend: _dispatch.Backend | str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """y = x w^T with FP8 operands, one float32 scale per 1 x 128 of x and per 128 x 128 of w.

    Args:
      x_MK: (M, K) bfloat16 or float32, quantised inside, or already quantised with block (1, 128).
      w_NK: (N, K) quantised with block (128, 128), or prepared by `prepare_weights`. K a multiple of 128, any N.
      out_dtype: type of y; None means x's type, bfloat16 when x is already quantised.
      backend: None, "reference" or "mosaic".
      config: tile choices of the mosaic kernel; None takes the default for the shape.

    Returns:
      y_MN. Row m depends on row m of x alone.

    Raises:
      ValueError: shapes or blocks do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(OP, x_MK, w_NK)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(x_MK, BlockScaled) else x_MK.dtype
    M, K = x_MK.shape
    kernel = None  # of no rows there is nothing to compute
    if M:
        kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(M, w_NK.shape[0], K, config))
    if kernel:
        return kernel.block_scaled_matmul(x_MK, w_NK, jnp.dtype(out_dtype), config)
    x_MK = x_MK if isinstance(x_MK, BlockScaled) else quantize_blocks(x_MK, backend=_dispatch.Backend.REFERENCE)
    return reference.block_scaled_matmul(x_MK, w_NK, jnp.dtype(out_dtype))


def check_operands(op: str, x_MK: jax.Array | BlockScaled, w_NK: BlockScaled) -> None:
    """Raise ValueError naming the shapes unless x (M, K) and w (N, K) can be multiplied."""
    if not isinstance(w_NK, BlockScaled):
        raise ValueError(f"{op}: the weight must be BlockScaled, got {type(w_NK).__name__}")
    if x_MK.ndim != 2:
        raise ValueError(f"{op}: x must be a matrix (M, K), got shape {x_MK.shape}")
    width = w_NK.shape[1]
    if width % BLOCK or not width:
        raise ValueError(f"{op}: K must be a multiple of {BLOCK}, got K = {width} (weight {w_NK.shape})")
    if x_MK.shape[1] != width:
        raise ValueError(f"{op}: x {x_MK.shape} and weight {w_NK.shape} differ in K")
    if w_NK.block != (BLOCK, BLOCK) and w_NK.shape[0] > 1:
        raise ValueError(f"{op}: the weight needs one scale per 128 x 128, its scales are {w_NK.scale_NbKb.shape}")
    if isinstance(x_MK, BlockScaled) and x_MK.block != (1, BLOCK):
        raise ValueError(f"{op}: x needs one scale per 1 x 128, its scales are {x_MK.scale_NbKb.shape}")
    check_fit(op, x_MK, w_NK)
