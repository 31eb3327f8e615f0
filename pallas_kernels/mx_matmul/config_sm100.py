"""Tile choices of the Blackwell kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

from dataclasses import dataclass

from ..block_scaled_matmul.config import SHARED_BYTES

TILE_N = 128
"""Weight rows of a block: the row side of a block-scaled tcgen05 instruction."""
TILE_M = 32
"""Tokens of a tile are a multiple of it (jax 0.10 takes no narrower block-scaled product)."""
STEP = 128
"""Columns of K of one step of the ring: four MX blocks, the scales that tensor memory takes at once."""
SCALE_ROWS = 128
"""Rows of a tile of scales, and so the most tokens of a tile."""
SCALE_BYTES = 512
TENSOR_COLUMNS = 512
"""Columns of tensor memory that the blocks of an SM share; a block takes a power of two, 32 at least."""
NUM_SMS = 148


@dataclass(frozen=True, slots=True)
class Config:
    """How one matmul is cut.

    splits: blocks that share the K of one tile; their float32 parts are summed by XLA, in order.
    stages: depth of the ring of 128-wide K steps in shared memory.
    """

    splits: int = 1
    stages: int = 4


def shared_bytes(config: Config, M: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    return config.stages * ((TILE_N + M) * STEP + 2 * SCALE_BYTES) + TILE_N * M * 4


def can_run(config: Config, M: int, N: int, K: int) -> str | None:
    """None when the kernel can run x (M, K) with a prepared weight (N, K), else the reason. M: rows of one tile."""
    if M % TILE_M or not TILE_M <= M <= SCALE_ROWS:
        return f"M = {M} rows a tile is not a multiple of {TILE_M} from {TILE_M} to {SCALE_ROWS}"
    if N % TILE_N:
        return f"N = {N} is not a multiple of {TILE_N}; prepare_weights pads"
    if K % STEP:
        return f"K = {K} is not a multiple of {STEP}, the width of a step"
    if not 1 <= config.splits <= K // STEP:
        return f"splits = {config.splits} is not in 1 ... {K // STEP}: K = {K} has so many steps"
    if config.stages < 1:
        return f"stages = {config.stages} must be at least 1"
    if (used := M + 8 * config.stages) > TENSOR_COLUMNS:
        return f"{config} needs {used} columns of tensor memory, more than {TENSOR_COLUMNS}"
    if (used := shared_bytes(config, M)) > SHARED_BYTES - 4096:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - 4096}"
    return None


def default_config(M: int, N: int, K: int) -> Config:
    """A block to an SM or nearly, no part shorter than four steps; rings that leave room for two. Not measured."""
    splits = max(1, min(NUM_SMS // (N // TILE_N), K // STEP // 4))
    stages = next(s for s in (4, 3, 2) if 2 * shared_bytes(Config(splits, s), M) <= SHARED_BYTES or s == 2)
    return Config(splits, max(1, min(stages, K // STEP // splits)))


def configs_to_try(M: int, N: int, K: int) -> list[Config]:
    """What the tuner times: splits that make half a wave to four waves of blocks, shallow rings and deeper ones."""
    found = [
        Config(splits, stages)
        for splits in (1, 2, 3, 4, 6, 8, 12)
        if NUM_SMS // 2 <= N // TILE_N * splits <= 4 * NUM_SMS
        for stages in (2, 3, 4, 6, 8)
    ]
    return [c for c in found if c.stages <= K // STEP // c.splits and can_run(c, M, N, K) is None]
