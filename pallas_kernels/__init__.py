"""The fast operations of speech decoding. Each works alone; nothing here imports fishjax."""

from ._dispatch import Backend, chip_backend, comes_first
from .append_kv.api import append_kv
from .between_attentions.api import between_attentions
from .between_attentions.reference import After, Before
from .block_scaled_matmul.api import block_scaled_matmul
from .causal_conv.api import causal_conv
from .decode_attention.api import decode_attention, quantize_kv
from .fast_frame.api import fast_frame
from .fast_frame.reference import Draws
from .fast_frame.weights import FastLayer, FastWeights, fast_weights
from .linear import matmul
from .mx_matmul.api import mx_matmul
from .prepare import prepare_weights
from .quantize_blocks.api import quantize_blocks
from .quantize_mx.api import quantize_mx
from .swiglu_mlp.api import swiglu_mlp
from .types import BlockScaled, MxScaled, ScaledKV

__all__ = [
    "After",
    "Backend",
    "Before",
    "BlockScaled",
    "Draws",
    "FastLayer",
    "FastWeights",
    "MxScaled",
    "ScaledKV",
    "append_kv",
    "between_attentions",
    "block_scaled_matmul",
    "causal_conv",
    "chip_backend",
    "comes_first",
    "decode_attention",
    "fast_frame",
    "fast_weights",
    "matmul",
    "mx_matmul",
    "prepare_weights",
    "quantize_blocks",
    "quantize_kv",
    "quantize_mx",
    "swiglu_mlp",
]
