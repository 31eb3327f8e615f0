"""The quantised arrays that travel between the ops: frozen pytrees that behave enough like arrays to be parameters.

Names carry the layout: `values_NK` is one e4m3 per element, `scale_NbKb` one float32 per block of rows and 128
columns, `scale_NKb` one E8M0 byte per 32 columns of a row. `x[...]` returns the object itself, so an
`nnx.Param` may hold one and layers may write `self.weight[...]` for every kind of weight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
"""Columns that share one float32 scale (and rows too, for weights)."""
MX_BLOCK = 32
"""Columns that share one E8M0 scale."""
NAN_SCALE = 255
"""The E8M0 byte that makes its columns NaN."""
F32_MAX = float(jnp.finfo(jnp.float32).max)
"""What is not larger in magnitude is finite: kernels have no `isfinite`."""
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

    def misfit(self) -> str | None:
        """None when the arrays are of the types and shapes that the layout asks for, else what they are."""
        raise NotImplementedError

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

    def misfit(self) -> str | None:
        """None when there is a scale for every block, else what the arrays are."""
        rows, width = self.values_NK.shape[:2] if self.values_NK.ndim == 2 else (0, 0)
        fits = self.scale_NbKb.ndim == 2 and self.scale_NbKb.shape[0] in (rows, -(-rows // BLOCK))
        if fits and self.scale_NbKb.shape[1] >= -(-width // BLOCK):
            return _misfit(self.values_NK, self.scale_NbKb, jnp.float32)
        return _described(self.values_NK, self.scale_NbKb)

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

    `num_rows` is the logical N of a prepared weight whose rows were padded. It lies as a kernel reads it:
    "registers", for Hopper: values in tiles (`register_tiles`), scales (K / 32 + 1, N), of which the last row is the
    largest byte of each row of the weight, 255 where one of its elements is NaN;
    "tiles", for Blackwell: values in rows, scales (N / 128, K / 128, 32, 16) (`scale_tiles`).
    """

    values_NK: jax.Array
    scale_NKb: jax.Array
    num_rows: int | None = dataclasses.field(default=None, metadata={"static": True})
    layout: Literal["rows", "registers", "tiles"] = dataclasses.field(default="rows", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical (N, K), without padding rows."""
        num_rows, width = self.values_NK.shape
        return (num_rows if self.num_rows is None else self.num_rows, width)

    def misfit(self) -> str | None:
        """None when there is a scale for every block, else what the arrays are."""
        rows, width = self.values_NK.shape if self.values_NK.ndim == 2 else (0, 0)
        wanted = {
            "rows": (rows, width // MX_BLOCK),
            "registers": (width // MX_BLOCK + 1, rows),
            "tiles": (rows // 128, width // 128, 32, 16),
        }[self.layout]
        if self.scale_NKb.shape == wanted:
            return _misfit(self.values_NK, self.scale_NKb, jnp.uint8)
        return _described(self.values_NK, self.scale_NKb)

    @property
    def value_rows(self) -> jax.Array:
        """The values as (N, K), whichever way they lie; N as padded."""
        return rows_of_register_tiles(self.values_NK) if self.layout == "registers" else self.values_NK

    @property
    def scale_rows(self) -> jax.Array:
        """The scales as (N, K / 32), whichever way they lie; N as padded."""
        if self.layout == "tiles":
            tiles = self.scale_NKb.reshape(*self.scale_NKb.shape[:3], 4, 4)
            return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, self.values_NK.shape[1] // MX_BLOCK)
        return self.scale_NKb[:-1].T if self.layout == "registers" else self.scale_NKb

    def dequantize(self) -> jax.Array:
        """The stored numbers as float32 (N, K), padding removed. Float32 subnormals may flush to zero."""
        num_rows, _ = self.shape
        values = self.value_rows[:num_rows].astype(jnp.float32)
        byte = jnp.repeat(self.scale_rows[:num_rows].astype(jnp.int32), MX_BLOCK, axis=1)
        low, high = scale_halves(byte)
        return values * low * high


def scale_halves(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float32 whose product is 2^(byte - 127), the first the larger or equal; NaN for byte 255. `byte`: int32.

    Each is a normal number, where 2^-127 alone is not and would be flushed.
    """
    low = lax.shift_right_logical(byte, 1)
    nan = byte == NAN_SCALE
    return jnp.where(nan, jnp.nan, _power_of_two(low - 63)), jnp.where(nan, jnp.nan, _power_of_two(byte - low - 64))


def register_tiles(values_NK: jax.Array) -> jax.Array:
    """e4m3 (N, K), multiples of 64 and 128, as the threads of a Hopper warpgroup hold them to widen them: (N, K).

    The 64 K bytes of 64 rows are K / 128 tiles of 8,192 bytes, one after the other. Bytes 2048 i + 16 t ... + 15 of a
    tile are what thread t has of columns 32 i ... 32 i + 31 when 64 x 16 operands of wgmma are in registers
    ("wgmma.mma_async: register fragments" in the PTX manual): four words, (first or second 16 columns) x (row g or
    g + 8), each of two pairs of columns that alternate, so that two masks and a shift make bfloat16 of them.
    """
    N, K = values_NK.shape
    n, k, warp, half, g, i, c, b, q, e = N // 64, K // 128, 4, 2, 8, 4, 2, 2, 4, 2
    split = values_NK.reshape(n, warp, half, g, k, i, c, b, q, e)
    return split.transpose(0, 4, 5, 1, 3, 8, 6, 2, 9, 7).reshape(N, K)


def rows_of_register_tiles(values_NK: jax.Array) -> jax.Array:
    """The inverse of `register_tiles`."""
    N, K = values_NK.shape
    n, k, warp, half, g, i, c, b, q, e = N // 64, K // 128, 4, 2, 8, 4, 2, 2, 4, 2
    tiles = values_NK.reshape(n, k, i, warp, g, q, c, half, e, b)
    return tiles.transpose(0, 3, 7, 4, 1, 2, 6, 9, 5, 8).reshape(N, K)


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

    def misfit(self) -> str | None:
        """None when there is a scale for every row, else what the arrays are."""
        if self.scale_BGS.shape == self.values_BGSd.shape[:3]:
            return _misfit(self.values_BGSd, self.scale_BGS, jnp.float32)
        return _described(self.values_BGSd, self.scale_BGS)

    def dequantize(self) -> jax.Array:
        """The stored numbers as float32 (B, G, S, d)."""
        return self.values_BGSd.astype(jnp.float32) * self.scale_BGS[..., None]


def check_fit(op: str, *operands: object) -> None:
    """Raise ValueError unless each quantised operand has its scales: a kernel would read past the end of too few."""
    for operand in operands:
        if isinstance(operand, _ArrayLike) and (found := operand.misfit()):
            raise ValueError(
                f"{op}: {type(operand).__name__} needs float8_e4m3fn and a scale for every block, got {found}"
            )


def _misfit(values: jax.Array, scale: jax.Array, wanted: Any) -> str | None:
    fits = (values.dtype, scale.dtype) == (jnp.float8_e4m3fn, wanted)
    return None if fits else _described(values, scale)


def _described(values: jax.Array, scale: jax.Array) -> str:
    return f"values {values.dtype}{values.shape} with scales {scale.dtype}{scale.shape}"


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent as float32, exactly, for int32 exponents in -126 ... 127."""
    return lax.bitcast_convert_type(lax.shift_left(exponent + 127, 23), jnp.float32)
