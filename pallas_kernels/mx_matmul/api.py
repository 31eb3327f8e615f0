"""mx_matmul: the public call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import _dispatch
from ..quantize_mx.api import quantize_mx
from ..types import MX_BLOCK, MxScaled, check_fit
from . import mosaic_sm90, mosaic_sm100, reference
from .config import Config
from .config_sm100 import Config as BlackwellConfig

OP = "mx_matmul"
KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}


def mx_matmul(
    x_MK: jax.Array | MxScaled,
    w_NK: MxScaled,
    *,
    out_dtype: jnp.dtype | None = None,
    backend: _dispatch.Backend | str | None = None,
    config: Config | BlackwellConfig | None = None,
) -> jax.Array:
    """y = x w^T with OCP MXFP8 operands (e4m3 values, one E8M0 scale per 32 columns).

    Args:
      x_MK: (M, K) bfloat16 or float32, quantised inside, or already quantised. K a multiple of 32.
      w_NK: (N, K) quantised by `quantize_mx`, or prepared by `prepare_weights`; any N.
      out_dtype: type of y; None means x's type, bfloat16 when x is already quantised.
      backend: None, "reference" or "mosaic" (K a multiple of 128).
      config: tile choices of the chip's mosaic kernel; None takes the default for the shape.

    Returns:
      y_MN. Row m depends on row m of x alone.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    if not isinstance(w_NK, MxScaled):
        raise ValueError(f"{OP}: the weight must be MxScaled, got {type(w_NK).__name__}")
    if x_MK.ndim != 2:
        raise ValueError(f"{OP}: x must be a matrix (M, K), got shape {x_MK.shape}")
    width = w_NK.shape[1]
    if width % MX_BLOCK or not width:
        raise ValueError(f"{OP}: K must be a multiple of {MX_BLOCK}, got K = {width} (weight {w_NK.shape})")
    if x_MK.shape[1] != width:
        raise ValueError(f"{OP}: x {x_MK.shape} and weight {w_NK.shape} differ in K")
    check_fit(OP, x_MK, w_NK)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(x_MK, MxScaled) else x_MK.dtype
    M = x_MK.shape[0]
    kernel = None  # of no rows there is nothing to compute
    if M:
        kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(M, w_NK.shape[0], width, config))
    if kernel:
        return kernel.mx_matmul(x_MK, w_NK, jnp.dtype(out_dtype), config)
    x_MK = x_MK if isinstance(x_MK, MxScaled) else quantize_mx(x_MK, backend=_dispatch.Backend.REFERENCE)
    return reference.mx_matmul(x_MK, w_NK, jnp.dtype(out_dtype))
