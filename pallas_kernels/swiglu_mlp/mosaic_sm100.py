"""The Blackwell kernels: Hopper's (mosaic_sm90.py) on another tensor core. **Never run on a Blackwell.**

A block owns a whole group of 128 columns of F, gate and up, the rows of two tcgen05 products: nothing is passed between
blocks. At most 32 tokens, whose two products and two sums fill its registers.
"""

from __future__ import annotations

import functools

from .._chip import SM100
from . import mosaic_sm90

why_not = functools.partial(mosaic_sm90.why_not, chip=SM100)
swiglu_mlp = functools.partial(mosaic_sm90.swiglu_mlp, chip=SM100)
