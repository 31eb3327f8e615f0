"""quantize_blocks: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import BLOCK, BlockScaled
from . import mosaic_sm90, mosaic_sm100, reference

KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}


def quantize_blocks(
    x: jax.Array, block: tuple[int, int] = (1, BLOCK), *, backend: _dispatch.Backend | str | None = None
) -> BlockScaled:
    """Quantise to FP8 e4m3 with one float32 scale per block.

    Args:
      x: (N, K) floating point, K a multiple of 128.
      block: (1, 128), one scale per row and 128 columns (activations), or (128, 128) (weights; any N).
      backend: None, "reference" or "mosaic" (activations: block (1, 128)).

    Returns:
      BlockScaled: values (N, K), scale (N, K / 128) or (ceil(N / 128), K / 128). NaN and infinities become NaN.

    Raises:
      ValueError: the shape or the block is not one of these.
      NotImplementedError: the back end asked for cannot run.
    """
    if block not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"quantize_blocks: block {block} is neither (1, 128) nor (128, 128)")
    if x.ndim != 2:
        raise ValueError(f"quantize_blocks: x must be a matrix (N, K), got shape {x.shape}")
    if x.shape[1] % BLOCK or not x.shape[1]:
        raise ValueError(f"quantize_blocks: K must be a multiple of {BLOCK}, got K = {x.shape[1]} (shape {x.shape})")
    kernel = _dispatch.choose("quantize_blocks", backend, KERNELS, lambda kernel: kernel.why_not(block))
    if kernel:
        values_MK, scale_KbM = kernel.quantize_rows(x)
        return BlockScaled(values_MK[: x.shape[0]], scale_KbM[: x.shape[1] // BLOCK, : x.shape[0]].T)
    return reference.quantize_blocks(x, block)
