"""The Blackwell kernel for activations is Hopper's: it uses no tensor core. **Never run on a Blackwell.**"""

from .mosaic_sm90 import quantize_rows, why_not

__all__ = ["quantize_rows", "why_not"]
