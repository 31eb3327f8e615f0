"""The Blackwell kernel: Hopper's (mosaic_sm90.py) on another tensor core. **Never run on a Blackwell.**

tcgen05 makes the product of a 128-wide step in tensor memory, from zero; the block reads it back, scales it by both
float32 scales and adds it to registers, as there. 128 rows of weights to a block, because fewer would halve the tensor
core's rate, and at most 64 tokens, whose product and sum fill its registers.
"""

from __future__ import annotations

import functools

from .._chip import SM100
from . import mosaic_sm90

why_not = functools.partial(mosaic_sm90.why_not, chip=SM100)
block_scaled_matmul = functools.partial(mosaic_sm90.block_scaled_matmul, chip=SM100)
