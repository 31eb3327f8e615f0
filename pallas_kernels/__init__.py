"""The fast operations of speech decoding. Each works alone; nothing here imports fishjax."""

from ._dispatch import Backend
from .block_scaled_matmul.api import block_scaled_matmul
from .decode_attention.api import decode_attention, quantize_kv
from .linear import matmul
from .mx_matmul.api import mx_matmul
from .prepare import prepare_weights
from .quantize_blocks.api import quantize_blocks
from .quantize_mx.api import quantize_mx
from .swiglu_mlp.api import swiglu_mlp
from .types import BlockScaled, MxScaled, ScaledKV

__all__ = [
    "Backend",
    "BlockScaled",
    "MxScaled",
    "ScaledKV",
    "block_scaled_matmul",
    "decode_attention",
    "matmul",
    "mx_matmul",
    "prepare_weights",
    "quantize_blocks",
    "quantize_kv",
    "quantize_mx",
    "swiglu_mlp",
]
