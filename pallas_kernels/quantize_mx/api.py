"""quantize_mx: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import MX_BLOCK, MxScaled
from . import reference


def quantize_mx(x: jax.Array, *, backend: _dispatch.Backend | str | None = None) -> MxScaled:
    """Quantise to OCP MXFP8: e4m3 values, one power-of-two (E8M0) scale per 32 columns.

    Args:
      x: (N, K) floating point, K a multiple of 32.
      backend: None, "reference" or "mosaic".

    Returns:
      MxScaled: values (N, K), scale (N, K / 32) uint8. A block with a NaN or an infinity gets the NaN scale 255.

    Raises:
      ValueError: the shape is not one of these.
      NotImplementedError: the back end asked for cannot run.
    """
    if x.ndim != 2:
        raise ValueError(f"quantize_mx: x must be a matrix (N, K), got shape {x.shape}")
    if x.shape[1] % MX_BLOCK or not x.shape[1]:
        raise ValueError(f"quantize_mx: K must be a multiple of {MX_BLOCK}, got K = {x.shape[1]} (shape {x.shape})")
    _dispatch.choose("quantize_mx", backend, {}, lambda _: None)
    return reference.quantize_mx(x)
