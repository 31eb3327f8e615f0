"""prepare_weights: lay a quantised weight out for the kernels, once, at load. References read both layouts."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from . import _dispatch
from .types import BLOCK, NAN_SCALE, BlockScaled, MxScaled, register_tiles, scale_tiles

ROW_MULTIPLE = 128
"""Rows of a block scale, of Blackwell's tensor-core instruction, and of two of Hopper's: the weight is its row side."""
LINE = 32
"""Float32 per 128 bytes, the least a bulk copy moves."""
OPS = ("block_scaled_matmul", "mx_matmul", "swiglu_mlp")


Weight = TypeVar("Weight", jax.Array, BlockScaled, MxScaled)


def prepare_weights(w: Weight, op: str, capability: str | None = None) -> Weight:
    """Pad and lay out a weight for the kernel of `op`; its logical shape stays what it was.

    BlockScaled: rows padded with zeros to a multiple of 128 (4,097 -> 4,224), scale rows to whole
    128-byte lines. MxScaled: rows padded likewise, with byte 127 (scale 1) for the new rows, and laid out as the chip's
    kernel reads them (`MxScaled`); left as it is where K is no multiple of 128, for the reference alone. Arrays are
    returned as they are. Already prepared weights are returned unchanged.

    Args:
      w: (N, K) weight.
      op: "block_scaled_matmul", "mx_matmul" or "swiglu_mlp".
      capability: compute capability of the GPU that will read it, "9.0" or "10.0"; None means the default device's,
        and Hopper's where that is neither.

    Raises:
      ValueError: the op's name is unknown, or a BlockScaled weight has other scales than one per 128 x 128.
    """
    if op not in OPS:
        raise ValueError(f"prepare_weights: op {op!r} is not one of {', '.join(OPS)}")
    capability = capability or _dispatch.gpu_capability()
    if isinstance(w, BlockScaled):
        if w.scale_NbKb.shape[0] != -(-w.values_NK.shape[0] // BLOCK):
            raise ValueError(
                f"prepare_weights: the weight {w.shape} needs one scale per 128 x 128, got {w.scale_NbKb.shape}"
            )
        rows = _pad(w.values_NK, ROW_MULTIPLE, 1)
        scale_NbKb = w.scale_NbKb[: -(-w.shape[0] // BLOCK)]
        wanted = -(-rows.shape[0] // BLOCK)
        scale_NbKb = jnp.pad(scale_NbKb, ((0, wanted - scale_NbKb.shape[0]), (0, 0)), constant_values=1.0)
        return dataclasses.replace(w, values_NK=rows, scale_NbKb=_pad(scale_NbKb, 1, LINE), num_rows=w.shape[0])
    if isinstance(w, MxScaled):
        layout = "tiles" if capability == _dispatch.BLACKWELL else "registers"
        if w.layout == layout or w.shape[1] % BLOCK:
            return w
        values, bytes_ = _pad(w.value_rows, ROW_MULTIPLE, 1), w.scale_rows
        bytes_ = jnp.pad(bytes_, ((0, values.shape[0] - bytes_.shape[0]), (0, 0)), constant_values=127)
        if layout == "tiles":
            scale = scale_tiles(bytes_)
        else:
            largest = jnp.where(jnp.any(jnp.isnan(values), axis=1), NAN_SCALE, jnp.max(bytes_, axis=1))
            scale = jnp.concatenate([bytes_.T, largest.astype(jnp.uint8)[None]])
            values = register_tiles(values)
        return dataclasses.replace(w, values_NK=values, scale_NKb=scale, num_rows=w.shape[0], layout=layout)
    return w


def rows_of_prepared(N: int) -> int:
    """Rows of a prepared weight of N rows."""
    return -(-N // ROW_MULTIPLE) * ROW_MULTIPLE


def _pad(x: jax.Array, row_multiple: int, column_multiple: int) -> jax.Array:
    more = (-x.shape[0] % row_multiple, -x.shape[1] % column_multiple)
    return jnp.pad(x, ((0, more[0]), (0, more[1]))) if any(more) else x  # a pad by nothing is an operation, too
