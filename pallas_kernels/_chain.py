"""How a chain of block-scaled matmuls is laid over the blocks of a persistent kernel: sizes and shapes, plain data.

A block has at most one piece of a matmul: 128 weight rows by some steps of K (two tiles a step for gate and up). See
`_persistent` for what walks along it.
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
    """Choices of a persistent kernel, each at least 1. `blocks`: all resident at once, one per SM.

    `splits_*`: parts of K. `x_stages`: activation tiles in flight.
    """

    blocks: int = 132
    splits_qkv: int = 2
    splits_wo: int = 6
    splits_down: int = 6
    x_stages: int = 4

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ValueError(f"{self}: nothing may be less than 1")


@dataclass(frozen=True)
class Matmul:
    """A weight of `tiles` * 128 rows; its K in `splits` parts of together `steps` blocks of 128.

    `from_end`: pieces are dealt from the last block on, so that blocks without one here have one there.
    `mats`: weight tiles of a step, `tiles` * 128 rows apart (2: gate and up).
    """

    tiles: int
    steps: int
    splits: int = 1
    from_end: bool = False
    mats: int = 1

    @property
    def most(self) -> int:
        """Steps of the longest piece."""
        return -(-self.steps // self.splits)

    @property
    def scale_rows(self) -> int:
        """Rows of activation scales that a piece reads: whole register loads for any number of tokens from 8 on."""
        return -(-self.most // 16) * 16


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
        """Of the matmul that reads most."""
        return max(m.scale_rows for m in self.matmuls.values())

    @property
    def partial_shape(self) -> tuple[int, int, int]:
        """Of the array that holds parts of K: (splits, rows, M)."""
        split = [m for m in self.matmuls.values() if m.mats == 1]
        return max(m.splits for m in split), max(m.tiles for m in split) * BLOCK, self.M

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
    x_stages = min(x_stages, max(m.most for m in matmuls.values()))
    empty = Chain(M, D, matmuls, blocks, x_stages, stages=0)
    left = SHARED_BYTES - shared_bytes(empty) - own_bytes
    return Chain(M, D, matmuls, blocks, x_stages, stages=max(0, left // TILE_BYTES))


def shared_bytes(c: Chain) -> int:
    """Bytes of `Scratch`, rounded up."""
    x = c.x_stages * c.M * BLOCK + 2 * c.scale_rows * c.M * 4
    tasks = 2 * c.tm * BLOCK * (4 + 2 + 1) + 2 * c.groups * 64 * 4 + 2 * REDUCED * 4
    return c.stages * TILE_BYTES + x + tasks + _RESERVED


def can_run(c: Chain) -> str | None:
    """None when a block holds its part of the chain, else the reason."""
    if c.M > MAX_TOKENS:
        return f"{c.M} rows; the kernel holds {MAX_TOKENS}"
    for name, m in c.matmuls.items():
        if m.tiles * m.splits > c.blocks:
            return f"{name} has {m.tiles * m.splits} pieces for {c.blocks} blocks"
        if m.splits > m.steps:
            return f"{name}: {m.splits} splits of {m.steps} steps"
    if c.stages < 2 * max(m.mats for m in c.matmuls.values()):
        return f"shared memory has room for {c.stages} weight tiles beside the rest"
    return None
