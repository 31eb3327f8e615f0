"""The codec: sound to codes and back."""

from fishjax.codec.codec import Codec
from fishjax.codec.quantizer import Quantized, Quantizer, VectorQuantizer

__all__ = ["Codec", "Quantized", "Quantizer", "VectorQuantizer"]
