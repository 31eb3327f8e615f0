"""Tile choices of the kernel: a frozen Config, one function that says what it needs, one that picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._chip import SM90, Chip

SHARED_BYTES = 227 * 1024
GROUP_ROWS = 8
"""Query heads of one kv head, padded: columns of one product."""
LSE_ROW = 32
"""Float32 of one part's log-sum-exps: 128 bytes, the least a bulk copy moves."""
NUM_SMS = SM90.num_sms
MOST_OF_CLUSTER = 8
"""Blocks of a cluster that every device can start."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one layer's attention is cut.

    block_kv: positions of one step. splits: blocks that share the live positions of one (slot, kv head).
    stages: depth of the ring of key and value tiles in shared memory.
    keys_in: where the tensor core reads widened FP8 keys: registers (Hopper alone) or shared memory. "shared" is also
      what the GPU interpreter can run.
    merge: where several parts meet: in a launch of XLA's, or in the first block of their cluster (Hopper alone, at most
      8), which the GPU interpreter cannot run.
    """

    block_kv: int = 64
    splits: int = 1
    stages: int = 2
    keys_in: Literal["registers", "shared"] = "registers"
    merge: Literal["launch", "cluster"] = "launch"

    @property
    def in_cluster(self) -> bool:
        """Several parts, one launch."""
        return self.splits > 1 and self.merge == "cluster"


def shared_bytes(config: Config, d: int, kv_bytes: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    tile = config.block_kv * d
    ring = config.stages * 2 * (tile * kv_bytes + (config.block_kv * 4 if kv_bytes == 1 else 0))
    widened = tile * 2 * (2 if config.keys_in == "shared" else 1) if kv_bytes == 1 else 0
    parts = config.splits * 2 * GROUP_ROWS * d * 4 if config.in_cluster else 0
    return ring + widened + parts + GROUP_ROWS * (config.block_kv * 2 + d * (2 + 4 + 2)) + LSE_ROW * 4


def can_run(config: Config, H: int, G: int, S: int, d: int, kv_bytes: int, chip: Chip = SM90) -> str | None:
    """None when the kernel can run these shapes, else the reason. kv_bytes: 2 for bfloat16, 1 for ScaledKV."""
    if d not in chip.rows:
        return f"head width {d} is not {' or '.join(map(str, chip.rows))}"
    if H // G > GROUP_ROWS:
        return f"{H // G} query heads a kv head are more than {GROUP_ROWS}"
    if config.block_kv not in chip.rows or S % config.block_kv:
        return f"S = {S} is not a multiple of block_kv = {config.block_kv} ({' or '.join(map(str, chip.rows))})"
    if kv_bytes == 1 and config.keys_in == "registers" and chip is not SM90:
        return f"keys_in = 'registers' is not possible on compute capability {chip.capability}"
    if config.in_cluster and (chip is not SM90 or config.splits > MOST_OF_CLUSTER):
        return f"{config.splits} parts meet in a cluster of at most {MOST_OF_CLUSTER}, on compute capability 9.0 alone"
    if config.splits < 1 or config.stages < 1:
        return f"splits = {config.splits} and stages = {config.stages} must be at least 1"
    if (used := shared_bytes(config, d, kv_bytes)) > SHARED_BYTES - 4096:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - 4096}"
    return None


def default_config(B: int, G: int, S: int, chip: Chip = SM90) -> Config:
    """At least one block to an SM, none shorter than one step: more parts cost more merging than they win."""
    splits, block_kv = 1, chip.rows[0]
    while B * G * splits < chip.num_sms and 2 * splits * block_kv <= S and splits < 16:
        splits *= 2
    return Config(block_kv, splits, keys_in="registers" if chip is SM90 else "shared")


def configs_to_try(B: int, H: int, G: int, S: int, d: int, kv_bytes: int) -> list[Config]:
    """What the tuner times: half a wave to sixteen waves of blocks, none shorter than one step, rings of 2 ... 6."""
    found = [
        Config(block_kv, splits, stages, merge=merge)
        for block_kv in (64, 128)
        for splits in (1, 2, 4, 8, 16)
        for stages in (2, 3, 4, 6)
        for merge in ("launch", "cluster")[: 1 if splits == 1 else 2]
        if splits * block_kv <= S and stages <= max(2, S // block_kv // splits)
    ]
    fitting = [c for c in found if can_run(c, H, G, S, d, kv_bytes) is None]
    busy = [c for c in fitting if NUM_SMS // 2 <= B * G * c.splits <= 16 * NUM_SMS]
    return busy or fitting
