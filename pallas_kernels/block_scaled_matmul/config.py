"""Tile choices of the kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

from dataclasses import dataclass

from .._chip import SM90, Chip
from ..types import BLOCK

SHARED_BYTES = 227 * 1024
"""Shared memory one block may take on compute capabilities 9.0 and 10.0."""
RESERVED_BYTES = 4096
"""Of it, for barriers and what the compiler takes."""
NUM_SMS = SM90.num_sms
FEW_TOKENS = 64
"""The most of a tile that is one warpgroup's: 128 took 27 to 34 us at S2-Pro's shapes where 64 took 8 to 18."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one matmul is cut.

    tile_n: weight rows of a warpgroup: the row side of wgmma (64 or 128) or of tcgen05 (128).
    splits: blocks of one cluster that share the K of one tile (at most 8) and add up their parts.
    stages: depth of the ring of 128-wide K steps in shared memory.
    warpgroups: of a block, 1, or on Hopper 2 or 4, each with weight rows of its own; they share the tokens.
    early: start loading weights before the kernel that makes x has ended (programmatic dependent launch).
    together: 1, or on Hopper 2 steps of K multiplied at a time: one is added up while the other is made.
    """

    tile_n: int = 64
    splits: int = 1
    stages: int = 4
    warpgroups: int = 1
    early: bool = False
    together: int = 1


def scale_rows_of(num_steps: int, splits: int) -> int:
    """Rows of x's scales one block holds: its steps, rounded up to 4 so that 8 tokens make whole 128-byte lines."""
    return (-(-num_steps // splits) + 3) // 4 * 4


def owners_of(splits: int, M: int) -> int:
    """Blocks of a cluster that add up and store a share of the tokens each: as many as get whole groups of 8."""
    return next(owners for owners in range(splits, 0, -1) if M % (8 * owners) == 0)


def rows_of(config: Config) -> int:
    """Weight rows of one block."""
    return config.tile_n * config.warpgroups


def equal_tiles(M: int, most: int) -> int:
    """Rows of one of the fewest equal tiles of at most `most` (a multiple of 32): M rows, filled up.

    A multiple of 8; above 64 of 32, so that the blocks of a cluster can share them out.
    """
    rows = -(-M // -(-M // most))
    multiple = 8 if rows <= FEW_TOKENS else 32
    return -(-rows // multiple) * multiple


def tile_of(M: int, config: Config, chip: Chip = SM90) -> int:
    """Rows of x in one tile."""
    return equal_tiles(M, FEW_TOKENS if config.warpgroups == 1 else chip.max_tokens)


def shared_bytes(config: Config, M: int, K: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    rows = rows_of(config)
    ring = config.stages * (rows + M) * BLOCK
    share = M // owners_of(config.splits, M)
    pushed = config.splits * rows * share * 4 if config.splits > 1 else 0
    scales = scale_rows_of(K // BLOCK, config.splits) * M * 4 + config.warpgroups * (K // BLOCK + 31) // 32 * 128
    return ring + pushed + scales + rows * share * 4


def can_run(config: Config, M: int, N: int, K: int, chip: Chip = SM90) -> str | None:
    """None when the kernel can run x (M, K) with a prepared weight (N, K), else the reason. M as padded to 8."""
    if M % 8 or not 8 <= M <= chip.max_tokens:
        return f"M = {M} rows a tile is not a multiple of 8 from 8 to {chip.max_tokens}"
    if config.tile_n not in chip.rows or N % config.tile_n:
        sizes = " or ".join(map(str, chip.rows))
        return f"N = {N} is not a multiple of tile_n = {config.tile_n} ({sizes}); prepare_weights pads"
    if K % BLOCK:
        return f"K = {K} is not a multiple of {BLOCK}"
    if not 1 <= config.splits <= min(8, K // BLOCK):
        return f"splits = {config.splits} is not in 1 ... {min(8, K // BLOCK)}: a cluster has 8 blocks, K = {K}"
    if config.warpgroups not in (1, 2, 4) or (config.warpgroups > 1 and chip is not SM90):
        return f"warpgroups = {config.warpgroups} is not 1, or 2 or 4 on compute capability 9.0"
    if N % rows_of(config):
        return f"N = {N} is not a multiple of tile_n = {config.tile_n} rows for each of {config.warpgroups} warpgroups"
    if config.stages < 1:
        return f"stages = {config.stages} must be at least 1"
    if config.together not in (1, 2) or (config.together == 2 and chip is not SM90):
        return f"together = {config.together} is not 1, or 2 on compute capability 9.0"
    if config.together + (config.warpgroups > 1) > min(config.stages, K // BLOCK // config.splits):
        return f"together = {config.together} wants as many stages and steps of K, and one more with several warpgroups"
    if (used := shared_bytes(config, M, K)) > SHARED_BYTES - RESERVED_BYTES:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - RESERVED_BYTES}"
    return None


def default_config(M: int, N: int, K: int, chip: Chip = SM90) -> Config:
    """For M rows of x: many small blocks, one and a half to an SM or more.

    Measured choices go to tuned/<device>.json instead.
    """
    tile_n = chip.rows[0]
    tiles = N // tile_n * -(-M // FEW_TOKENS)
    splits = next((s for s in (1, 2, 3, 4, 6) if 2 * tiles * s >= 3 * chip.num_sms), 8)
    splits = max(1, min(splits, K // BLOCK // 2))
    stages = 3 if M > 32 else 4
    return Config(tile_n, splits, max(1, min(stages, K // BLOCK // splits)))


def configs_to_try(M: int, N: int, K: int) -> list[Config]:
    """What the tuner times: half a wave to three waves of warpgroups, shallow rings (docs/kernels.md).

    Not `early`, which is for two kernels of ours that follow each other.
    """
    found = [
        Config(64, splits, stages, warpgroups, together=together)
        for splits in (1, 2, 3, 4, 6, 8)
        if NUM_SMS // 2 <= N // 64 * splits <= 3 * NUM_SMS
        for stages in ((3, 4) if M <= 16 else (2, 3) if M <= FEW_TOKENS else (3,))
        for warpgroups in ((1, 2, 4) if M > 16 else (1, 2))
        for together in ((1, 2) if M > 16 else (1,))
    ]
    return [c for c in found if c.stages <= K // BLOCK // c.splits and can_run(c, tile_of(M, c), N, K) is None]
