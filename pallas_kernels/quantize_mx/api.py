"""quantize_mx: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import MX_BLOCK, MxScaled
from . import mosaic_sm90, mosaic_sm100, reference

KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}


def quantize_mx(x: jax.Array, *, backend: _dispatch.Backend | str | None = None) -> MxScaled:
    """Quantise to OCP MXFP8: e4m3 values, one power-of-two (E8M0) scale per 32 columns.

    Args:
      x: (N, K) floating point, K a multiple of 32.
      backend: None, "reference" or "mosaic" (K a multiple of 128).

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
    kernel = _dispatch.choose("quantize_mx", backend, KERNELS, lambda kernel: kernel.why_not(x.shape[1]))
    if kernel:
        values_MK, byte_KbM = kernel.quantize_rows(x)
        return MxScaled(values_MK[: x.shape[0]], byte_KbM[:, : x.shape[0]].T)
    return reference.quantize_mx(x)
