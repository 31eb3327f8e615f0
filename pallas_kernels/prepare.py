"""prepare_weights: lay a quantised weight out for the kernels, once, at load. References read both layouts."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from .types import BLOCK, BlockScaled, MxScaled

ROW_MULTIPLE = 64
"""Rows of one tensor-core instruction: the weight is its row side."""
LINE = 32
"""Float32 per 128 bytes, the least a bulk copy moves."""
OPS = ("block_scaled_matmul", "mx_matmul", "swiglu_mlp")


Weight = TypeVar("Weight", jax.Array, BlockScaled, MxScaled)


def prepare_weights(w: Weight, op: str) -> Weight:
    """Pad and lay out a weight for the kernel of `op`; its logical shape stays what it was.

    BlockScaled: rows padded with zeros to a multiple of 64 (4,097 -> 4,160), scale rows to whole 128-byte lines.
    MxScaled: rows padded to a multiple of 64, with byte 127 (scale 1) for the new rows, scales transposed to
    (K / 32, N). Arrays are returned as they are. Already prepared weights are returned unchanged.

    Args:
      w: (N, K) weight.
      op: "block_scaled_matmul", "mx_matmul" or "swiglu_mlp".

    Raises:
      ValueError: the op's name is unknown.
    """
    if op not in OPS:
        raise ValueError(f"prepare_weights: op {op!r} is not one of {', '.join(OPS)}")
    if isinstance(w, BlockScaled):
        rows = _pad(w.values_NK, ROW_MULTIPLE, 1)
        scale_NbKb = w.scale_NbKb[: -(-w.shape[0] // BLOCK)]
        wanted = -(-rows.shape[0] // BLOCK)
        scale_NbKb = jnp.pad(scale_NbKb, ((0, wanted - scale_NbKb.shape[0]), (0, 0)), constant_values=1.0)
        return dataclasses.replace(w, values_NK=rows, scale_NbKb=_pad(scale_NbKb, 1, LINE), num_rows=w.shape[0])
    if isinstance(w, MxScaled):
        rows = _pad(w.values_NK, ROW_MULTIPLE, 1)
        new_rows = rows.shape[0] - w.values_NK.shape[0]
        scale_KbN = jnp.pad(w.scale_KbN, ((0, 0), (0, new_rows)), constant_values=127)
        return dataclasses.replace(w, values_NK=rows, scale_NKb=scale_KbN, num_rows=w.shape[0], transposed=True)
    return w


def _pad(x: jax.Array, row_multiple: int, column_multiple: int) -> jax.Array:
    more = (-x.shape[0] % row_multiple, -x.shape[1] % column_multiple)
    return jnp.pad(x, ((0, more[0]), (0, more[1]))) if any(more) else x  # a pad by nothing is an operation, too
