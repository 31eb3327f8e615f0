"""Tile choices of the kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..block_scaled_matmul.config import RESERVED_BYTES, SHARED_BYTES

GROUP = 8
"""Slots that lie interleaved: a row is a step of one of them."""
ROWS = 64
"""Of one warpgroup: the row side of wgmma."""
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Config:
    """How one convolution is cut.

    cols: output channels of a block, a multiple of 32 up to 256.
    depth: input channels of one step of the ring, a multiple of 32.
    stages: depth of the ring.
    warpgroups: of a block, each with 64 rows of its own; they share the weights.
    """

    cols: int
    depth: int
    stages: int = 3
    warpgroups: int = 2

    @property
    def rows(self) -> int:
        """Of a block."""
        return ROWS * self.warpgroups


@dataclass(frozen=True, slots=True)
class Shape:
    """Slots B, steps T, input and output channels I and O, taps; `period`: channels after which the bias repeats."""

    B: int
    T: int
    I: int  # noqa: E741
    O: int  # noqa: E741
    taps: int
    period: int


def piece_of(shape: Shape, config: Config) -> int:
    """Rows that one copy brings: a block's, or as many of them as surely lie in one group of slots."""
    return math.gcd(GROUP * shape.T, config.rows)


def shared_bytes(config: Config, residual: bool) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out).

    A finished tile lies where the ring was; what is added to it must be there before, and lies beside the ring.
    """
    ring = config.stages * (config.rows + config.cols) * config.depth * _ITEM
    tile = config.rows * config.cols * _ITEM
    return ring + tile if residual else max(ring, tile)


def can_run(config: Config, shape: Shape, residual: bool) -> str | None:
    """None when the kernel can run this convolution, else the reason."""
    if shape.B % GROUP:
        return f"{shape.B} slots are not a multiple of {GROUP}"
    if config.warpgroups not in (1, 2, 4) or (shape.B * shape.T) % config.rows:
        return f"{shape.B} slots of {shape.T} steps are not whole blocks of {config.rows}"
    if config.depth % 32 or shape.I % config.depth:
        return f"{shape.I} input channels are not a multiple of depth = {config.depth}, itself one of 32"
    if config.cols % 32 or not 0 < config.cols <= 256 or shape.O % config.cols or shape.period % config.cols:
        return f"{shape.O} output channels in groups of {shape.period} are not a multiple of cols = {config.cols}"
    if config.stages < 2:
        return f"stages = {config.stages} must be at least 2"
    if (used := shared_bytes(config, residual)) > SHARED_BYTES - RESERVED_BYTES:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - RESERVED_BYTES}"
    return None


def default_config(shape: Shape, residual: bool) -> Config:
    """Two blocks on an SM, so that one multiplies while the other begins or ends."""
    cols = next((c for c in (128, 96, 64) if shape.O % c == shape.period % c == 0), 32)
    depth = next((d for d in (64, 96) if shape.I % d == 0), 32)
    warpgroups = next((w for w in (2, 1) if shape.B * shape.T % (ROWS * w) == 0), 1)
    most = (SHARED_BYTES - 2 * RESERVED_BYTES) // 2
    stages = next((s for s in (6, 5, 4, 3) if shared_bytes(Config(cols, depth, s, warpgroups), residual) <= most), 2)
    return Config(cols, depth, stages, warpgroups)


def configs_to_try(shape: Shape, residual: bool) -> list[Config]:
    """What the tuner times."""
    found = [
        Config(cols, depth, stages, warpgroups)
        for cols in (96, 128, 192, 256)
        for depth in (32, 64, 96, 128)
        for stages in (2, 3, 4)
        for warpgroups in (1, 2, 4)
    ]
    return [config for config in found if can_run(config, shape, residual) is None]
