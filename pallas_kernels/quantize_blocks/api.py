"""quantize_blocks: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import BLOCK, BlockScaled
from . import reference


def quantize_blocks(
    x: jax.Array, block: tuple[int, int] = (1, BLOCK), *, backend: _dispatch.Backend | str | None = None
) -> BlockScaled:
    """Quantise to FP8 e4m3 with one float32 scale per block.

    Args:
      x: (N, K) floating point, K a multiple of 128.
      block: (1, 128), one scale per row and 128 columns (activations), or (128, 128) (weights; any N).
      backend: None, "reference" or "mosaic".

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
    _dispatch.choose("quantize_blocks", backend, _dispatch.no_kernel_yet)
    return reference.quantize_blocks(x, block)
