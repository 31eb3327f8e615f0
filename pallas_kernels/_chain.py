"""How a chain of block-scaled matmuls is laid over the blocks of a persistent kernel: sizes and shapes, plain data.

A block has at most one piece of a matmul: so many steps of 128 rows by 128 of K, counted through all tiles of rows (two
weight tiles a step for gate and up), as many as its neighbours have. See `_persistent` for what walks along it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._mosaic import LINE, REDUCED
from .types import BLOCK

HALF = BLOCK // 2
TILE_BYTES = BLOCK * BLOCK + 4 * LINE
"""Of the ring: a weight tile and the line of scales that its scale is in."""
SHARED_BYTES = 227 * 1024
MAX_TOKENS = 64
_RESERVED = 4 * 1024  # barriers


@dataclass(frozen=True)
class Config:
    """Choices of a persistent kernel, each at least 1.

    blocks: all resident at once, one per SM. x_stages: activation tiles in flight.
    """

    blocks: int = 132
    x_stages: int = 4

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ValueError(f"{self}: nothing may be less than 1")


@dataclass(frozen=True)
class Matmul:
    """A weight of `tiles` * 128 rows whose K has `steps` blocks of 128; a block's piece is `piece` steps in a row.

    A piece ends in the tile that it began in or in the next one. `mats`: weight tiles of a step, `tiles` * 128 rows
    apart (2: gate and up).
    """

    tiles: int
    steps: int
    piece: int
    mats: int = 1

    @property
    def parts(self) -> int:
        """The most pieces that meet in one tile."""
        return max(self.last(tile) - self.first(tile) + 1 for tile in range(self.tiles))

    @property
    def crosses(self) -> bool:
        """Whether a piece may begin in one tile and end in the next."""
        return self.piece < self.steps

    @property
    def scale_rows(self) -> int:
        """Activation scales of a piece in one tile: whole register loads for any number of tokens from 8 on."""
        return -(-self.piece // 16) * 16

    def first(self, tile: Any) -> Any:
        """The block whose piece has the tile's first step."""
        return tile * self.steps // self.piece

    def last(self, tile: Any) -> Any:
        """The block whose piece has the tile's last step."""
        return ((tile + 1) * self.steps - 1) // self.piece


def even(tiles: int, steps: int, blocks: int, mats: int = 1) -> Matmul:
    """Every block has the same number of steps, the last ones perhaps fewer; tiles are summed by who reads them."""
    return Matmul(tiles, steps, -(-tiles * steps // blocks), mats)


def whole(tiles: int, steps: int) -> Matmul:
    """A block has a whole tile, the others nothing."""
    return Matmul(tiles, steps, steps)


@dataclass(frozen=True)
class Chain:
    """The matmuls of a kernel by name, for M tokens and a residual of width D, over `blocks` blocks."""

    M: int
    D: int
    matmuls: dict[str, Matmul]
    blocks: int
    x_stages: int
    stages: int

    @property
    def tm(self) -> int:
        """Tokens of one task."""
        return min(self.M, 16)

    @property
    def groups(self) -> int:
        """Tasks' groups of tokens."""
        return self.M // self.tm

    @property
    def scale_rows(self) -> int:
        """Of the piece that needs most, in both of its tiles."""
        return max(m.scale_rows * (1 + m.crosses) for m in self.matmuls.values())

    @property
    def partial_shape(self) -> tuple[int, int, int]:
        """Of the array that holds parts of K: (parts, rows, M)."""
        matmuls = self.matmuls.values()
        return max(m.parts for m in matmuls), max(m.tiles * m.mats for m in matmuls) * BLOCK, self.M

    def scale_struct(self, width: int) -> jax.ShapeDtypeStruct:
        """Scales of quantised activations of `width`: (width / 128 or more, M) float32."""
        return jax.ShapeDtypeStruct((max(-(-width // BLOCK // 16) * 16, self.scale_rows), self.M), jnp.float32)

    def quantised(self, width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Quantised activations of `width`: (M, width) e4m3 and their scales."""
        return jax.ShapeDtypeStruct((self.M, width), jnp.float8_e4m3fn), self.scale_struct(width)

    def residual(self) -> Residual:
        """The shapes of a `Residual`."""
        struct = jax.ShapeDtypeStruct
        x, squares = struct((self.D, self.M), jnp.float32), struct((self.D // BLOCK, self.M), jnp.float32)
        return Residual(x, squares, *self.quantised(self.D))


class Residual(NamedTuple):
    """The residual stream between blocks: x_DM float32, its squares' sums, and h = x * weight, quantised."""

    x: Any
    squares: Any
    h: Any
    h_scale: Any


def tokens_of(rows: int) -> int:
    """Rows rounded up to whole tasks: 8, or a multiple of 16."""
    return 8 if rows <= 8 else -(-rows // 16) * 16


def chain(M: int, D: int, matmuls: dict[str, Matmul], blocks: int, x_stages: int, own_bytes: int) -> Chain:
    """A chain with as deep a ring as shared memory holds beside `own_bytes` of the kernel's own."""
    x_stages = min(x_stages, max(m.piece for m in matmuls.values()))
    empty = Chain(M, D, matmuls, blocks, x_stages, stages=0)
    left = SHARED_BYTES - shared_bytes(empty) - own_bytes
    return Chain(M, D, matmuls, blocks, x_stages, stages=max(0, left // TILE_BYTES))


def shared_bytes(c: Chain) -> int:
    """Bytes of `Scratch`, rounded up."""
    x = c.x_stages * c.M * BLOCK + 2 * c.scale_rows * c.M * 4
    tasks = 2 * c.tm * BLOCK * (4 + 2 + 1) + 2 * REDUCED * 4
    return c.stages * TILE_BYTES + x + tasks + _RESERVED


def can_run(c: Chain) -> str | None:
    """None when a block holds its part of the chain, else the reason."""
    if c.M > MAX_TOKENS:
        return f"{c.M} rows; the kernel holds {MAX_TOKENS}"
    for name, m in c.matmuls.items():
        if m.tiles > c.blocks:
            return f"{name} has {m.tiles} tiles for {c.blocks} blocks"
    if c.stages < 2 * max(m.mats for m in c.matmuls.values()):
        return f"shared memory has room for {c.stages} weight tiles beside the rest"
    return None
