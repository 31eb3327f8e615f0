"""Tile choices of the Hopper kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..types import BLOCK

SHARED_BYTES = 227 * 1024
"""Shared memory one block may take on compute capability 9.0."""
NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class Config:
    """How one matmul is cut.

    tile_n: weight rows of a block (64 or 128): the row side of wgmma.
    splits: blocks that share the K of one tile.
    stages: depth of the ring of 128-wide K steps in shared memory.
    combine: where the splits' partial sums meet, in a fixed order: "cluster" pushes them to the first block over
      distributed shared memory (at most 8 splits); "sum" writes them out for one more fused kernel.
    early: start loading weights before the kernel that makes x has ended (programmatic dependent launch).
    """

    tile_n: int = 64
    splits: int = 1
    stages: int = 6
    combine: Literal["cluster", "sum"] = "cluster"
    early: bool = False


def scale_rows_of(num_steps: int, splits: int) -> int:
    """Rows of x's scales one block holds: its steps, rounded up to 4 so that 8 tokens make whole 128-byte lines."""
    return (-(-num_steps // splits) + 3) // 4 * 4


def shared_bytes(config: Config, M: int, K: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    ring = config.stages * (config.tile_n + M) * BLOCK
    pushed = (config.splits - 1) * config.tile_n * M * 4 if config.combine == "cluster" else 0
    scales = scale_rows_of(K // BLOCK, config.splits) * M * 4 + (K // BLOCK + 31) // 32 * 128
    return ring + pushed + scales + config.tile_n * M * 4


def can_run(config: Config, M: int, N: int, K: int) -> str | None:
    """None when the kernel can run x (M, K) with a prepared weight (N, K), else the reason. M as padded to 8."""
    if M % 8 or not 8 <= M <= 128:
        return f"M = {M} rows a tile is not a multiple of 8 from 8 to 128"
    if config.tile_n not in (64, 128) or N % config.tile_n:
        return f"N = {N} is not a multiple of tile_n = {config.tile_n} (64 or 128); prepare_weights pads to 64"
    if K % BLOCK:
        return f"K = {K} is not a multiple of {BLOCK}"
    if not 1 <= config.splits <= K // BLOCK:
        return f"splits = {config.splits} does not fit the {K // BLOCK} blocks of K = {K}"
    if config.combine == "cluster" and config.splits > 8:
        return f"splits = {config.splits} is more than the 8 blocks of a cluster"
    if config.stages < 1:
        return f"stages = {config.stages} must be at least 1"
    if (used := shared_bytes(config, M, K)) > SHARED_BYTES - 4096:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - 4096}"
    return None


def default_config(M: int, N: int, K: int) -> Config:
    """A config that fills the device about twice over; measured choices go to tuned/<device>.json instead."""
    tile_n = 128 if N % 128 == 0 and N // 128 >= NUM_SMS else 64
    splits = next((s for s in (1, 2, 4) if N // tile_n * s >= 2 * NUM_SMS), 8)
    splits = max(1, min(splits, K // BLOCK // 2))
    steps = K // BLOCK // splits
    # Two blocks to an SM: at most 72 KB of ring and 32 KB of what the other splits push.
    stages = max(2, min(6, steps, 72 * 1024 // ((tile_n + M) * BLOCK)))
    while splits > 1 and (splits - 1) * tile_n * M * 4 > 32 * 1024:
        splits //= 2
    return Config(tile_n, splits, stages)


def configs_to_try(M: int, N: int, K: int) -> list[Config]:
    """What the tuner times: splits that make half a wave to eight waves of blocks, rings for 1 ... 3 blocks an SM."""
    found = []
    for tile_n in (64, 128):
        for splits in (1, 2, 4, 8):
            if not NUM_SMS // 2 <= -(-N // tile_n) * splits <= 8 * NUM_SMS:
                continue
            for combine in ("cluster", "sum") if splits > 1 else ("cluster",):
                for blocks_per_sm in (1, 2, 3):
                    config = Config(tile_n, splits, 1, combine)
                    room = SHARED_BYTES // blocks_per_sm - 4096 - shared_bytes(config, M, K)
                    stages = min(12, K // BLOCK // splits, 1 + room // ((tile_n + M) * BLOCK))
                    found.append(dataclasses.replace(config, stages=stages))
    return list(dict.fromkeys(c for c in found if c.stages >= 2 and can_run(c, M, N, K) is None))
