"""Tile choices of the Hopper kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

from dataclasses import dataclass

from ..block_scaled_matmul.config import NUM_SMS, RESERVED_BYTES, SHARED_BYTES, owners_of
from ..types import MX_BLOCK

ROWS = 64
"""Weight rows of a warpgroup: the row side of one wgmma."""
STEP = 128
"""Columns of K of one step of the ring."""
BLOCKS_PER_STEP = STEP // MX_BLOCK


@dataclass(frozen=True, slots=True)
class Config:
    """How one matmul is cut.

    splits: blocks of one cluster that share the K of one tile (at most 8) and add up their parts.
    stages: depth of the ring of 128-wide K steps in shared memory.
    warpgroups: of a block, 1, 2 or 4; each has 64 rows of weights, and they share the tokens.
    """

    splits: int = 1
    stages: int = 4
    warpgroups: int = 1


def shared_bytes(config: Config, M: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    rows = config.warpgroups * ROWS
    ring = config.stages * (rows * (STEP + BLOCKS_PER_STEP) + M * STEP * 2)
    share = M // owners_of(config.splits, M)
    pushed = config.splits * rows * share * 4 if config.splits > 1 else 0
    return ring + pushed + rows * share * 4


def can_run(config: Config, M: int, N: int, K: int) -> str | None:
    """None when the kernel can run x (M, K) with a prepared weight (N, K), else the reason. M as padded to 8."""
    if M % 8 or not 8 <= M <= 128:
        return f"M = {M} rows a tile is not a multiple of 8 from 8 to 128"
    if config.warpgroups not in (1, 2, 4):
        return f"warpgroups = {config.warpgroups} is not 1, 2 or 4"
    if N % ROWS:
        return f"N = {N} is not a multiple of {ROWS}; prepare_weights pads"
    if N % (ROWS * config.warpgroups):
        return f"N = {N} is not a multiple of {ROWS} rows for each of {config.warpgroups} warpgroups"
    if K % STEP:
        return f"K = {K} is not a multiple of {STEP}, the width of a step"
    if not 1 <= config.splits <= min(8, K // STEP):
        return f"splits = {config.splits} is not in 1 ... {min(8, K // STEP)}: a cluster has 8 blocks, K = {K}"
    if config.stages < 1:
        return f"stages = {config.stages} must be at least 1"
    if (used := shared_bytes(config, M)) > SHARED_BYTES - RESERVED_BYTES:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - RESERVED_BYTES}"
    return None


def default_config(M: int, N: int, K: int) -> Config:
    """Blocks for two waves, as block_scaled_matmul cuts; from 33 tokens on two warpgroups read each token once."""
    warpgroups = 2 if M > 32 and N % (2 * ROWS) == 0 else 1
    splits = next((s for s in (1, 2, 4) if N // ROWS * s >= 2 * NUM_SMS), 8)
    splits = max(1, min(splits, K // STEP // 2))
    stages = 3 if M > 32 else 4
    configs = [Config(s, max(1, min(stages, K // STEP // s)), warpgroups) for s in range(splits, 0, -1)]
    return next((c for c in configs if shared_bytes(c, M) <= SHARED_BYTES - RESERVED_BYTES), configs[-1])


def configs_to_try(M: int, N: int, K: int) -> list[Config]:
    """What the tuner times: half a wave to eight waves of warpgroups, shallow rings and deeper ones."""
    found = [
        Config(splits, stages, warpgroups)
        for splits in (1, 2, 3, 4, 6, 8)
        if NUM_SMS // 2 <= N // ROWS * splits <= 8 * NUM_SMS
        for stages in ((2, 3) if M > 32 else (3, 4))
        for warpgroups in (1, 2, 4)
    ]
    return [c for c in found if c.stages <= K // STEP // c.splits and can_run(c, M, N, K) is None]
