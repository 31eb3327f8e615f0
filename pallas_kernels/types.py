"""The quantised arrays that travel between the ops: frozen pytrees that behave enough like arrays to be parameters.

Names carry the layout: `values_NK` is one e4m3 per element, `scale_NbKb` one float32 per block of rows and 128
columns, `scale_NKb` one E8M0 byte per 32 columns of a row. `x[...]` returns the object itself, so an
`nnx.Param` may hold one and layers may write `self.weight[...]` for every kind of weight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import jax
import jax.numpy as jnp

BLOCK = 128
"""Columns that share one float32 scale (and rows too, for weights)."""
MX_BLOCK = 32
"""Columns that share one E8M0 scale."""
E4M3_MAX = 448.0
"""Largest finite e4m3 value; the format has no infinity."""


class _ArrayLike:
    """What `nnx.Param` and shape checks ask of a value."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored elements: float8_e4m3fn."""
        return jnp.dtype(jnp.float8_e4m3fn)

    def __getitem__(self, index: EllipsisType):
        if index is not Ellipsis:
            raise TypeError(f"{type(self).__name__} only takes [...]; slice its arrays instead (index {index!r})")
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BlockScaled(_ArrayLike):
    """FP8 with float32 scales: weights (one scale per 128 x 128) or activations (one per 1 x 128).

    values_NK (N, K) float8_e4m3fn; scale_NbKb (N or ceil(N / 128), >= K / 128) float32; element = value * scale.
    `num_rows` is the logical N of a prepared weight whose rows were padded; prepared scale rows may be longer
    than K / 128 (padding of whole 128-byte lines).
    """

    values_NK: jax.Array
    scale_NbKb: jax.Array
    num_rows: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical (N, K), without padding rows."""
        num_rows, width = self.values_NK.shape
        return (num_rows if self.num_rows is None else self.num_rows, width)

    @property
    def block(self) -> tuple[int, int]:
        """(1, 128) when every row has its own scales, else (128, 128)."""
        return (1 if self.scale_NbKb.shape[0] == self.values_NK.shape[0] else BLOCK, BLOCK)

    def dequantize(self) -> jax.Array:
        """The stored numbers as float32 (N, K), padding removed."""
        num_rows, width = self.shape
        scale = jnp.repeat(self.scale_NbKb[:, : width // BLOCK], BLOCK, axis=1)
        scale = jnp.repeat(scale, self.block[0], axis=0)[:num_rows]
        return self.values_NK[:num_rows].astype(jnp.float32) * scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class MxScaled(_ArrayLike):
    """OCP MXFP8: values_NK (N, K) float8_e4m3fn; scale_NKb (N, K / 32) uint8, E8M0: 2^(byte - 127), 255 is NaN.

    `num_rows` is the logical N of a prepared weight whose rows were padded; its scales lie as a kernel reads them:
    "transposed" (K / 32, N) for Hopper, "tiles" (N / 128, K / 128, 32, 16) for Blackwell (`scale_tiles`).
    """

    values_NK: jax.Array
    scale_NKb: jax.Array
    num_rows: int | None = dataclasses.field(default=None, metadata={"static": True})
    scales: Literal["rows", "transposed", "tiles"] = dataclasses.field(default="rows", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical (N, K), without padding rows."""
        num_rows, width = self.values_NK.shape
        return (num_rows if self.num_rows is None else self.num_rows, width)

    @property
    def scale_rows(self) -> jax.Array:
        """The scales as (N, K / 32), whichever way they lie; N as padded."""
        if self.scales == "tiles":
            tiles = self.scale_NKb.reshape(*self.scale_NKb.shape[:3], 4, 4)
            return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, self.values_NK.shape[1] // MX_BLOCK)
        return self.scale_NKb.T if self.scales == "transposed" else self.scale_NKb

    def dequantize(self) -> jax.Array:
        """The stored numbers as float32 (N, K), padding removed. Float32 subnormals may flush to zero."""
        num_rows, _ = self.shape
        values = self.values_NK[:num_rows].astype(jnp.float32)
        byte = jnp.repeat(self.scale_rows[:num_rows].astype(jnp.int32), MX_BLOCK, axis=1)
        # Two factors, each a normal float32, because 2^-127 alone is subnormal and would be flushed.
        half = byte // 2
        scaled = values * _power_of_two(half - 63) * _power_of_two(byte - half - 64)
        return jnp.where(byte == 255, jnp.nan, scaled)


def scale_tiles(byte_NKb: jax.Array) -> jax.Array:
    """E8M0 bytes (N, K / 32), both multiples of 128 in N and K, as Blackwell's tensor memory takes them.

    (N / 128, K / 128, 32, 16): row 32 a + i of a tile and block b of its four lie at [i, 4 a + b]. See "Scale factor A
    layout" under tcgen05.mma in the PTX manual.
    """
    N, blocks = byte_NKb.shape
    return byte_NKb.reshape(N // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1, blocks // 4, 32, 16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ScaledKV(_ArrayLike):
    """FP8 keys or values: values_BGSd float8_e4m3fn; scale_BGS float32, one per (slot, kv head, position)."""

    values_BGSd: jax.Array
    scale_BGS: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, G, S, d)."""
        return self.values_BGSd.shape

    def dequantize(self) -> jax.Array:
        """The stored numbers as float32 (B, G, S, d)."""
        return self.values_BGSd.astype(jnp.float32) * self.scale_BGS[..., None]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent as float32, exactly, for int32 exponents in -126 ... 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
