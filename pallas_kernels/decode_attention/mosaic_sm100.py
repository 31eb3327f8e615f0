"""The Blackwell kernel: Hopper's (mosaic_sm90.py) on another tensor core. **Never run on a Blackwell.**

Positions, then channels, are the 128 rows of a tcgen05 product: steps of 128 positions, heads of width 128. It reads
no operand from registers, so widened FP8 keys go through shared memory.
"""

from __future__ import annotations

import functools

from .._chip import SM100
from . import mosaic_sm90

why_not = functools.partial(mosaic_sm90.why_not, chip=SM100)
decode_attention = functools.partial(mosaic_sm90.decode_attention, chip=SM100)
