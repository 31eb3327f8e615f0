"""The fast operations of speech decoding. Each works alone; nothing here imports fishjax."""

from pallas_kernels.linear import matmul

__all__ = ["matmul"]
