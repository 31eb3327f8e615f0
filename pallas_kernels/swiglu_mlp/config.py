"""Tile choices of the persistent Hopper kernel, and whether all its blocks fit on the device at once."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import BLOCK

SHARED_BYTES = 227 * 1024
RESERVED = 2048
"""Shared memory that barriers, alignment and the driver take per block."""
NUM_SMS = 132
NUM_GPCS = 8
"""A cluster lies in one of these groups of SMs, so each may leave splits - 1 places empty."""
MAX_BLOCKS_PER_SM = 2
"""One warpgroup may use up to 255 registers a thread, so the register file holds two blocks for certain."""


@dataclass(frozen=True, slots=True)
class Config:
    """How the block is cut.

    splits: blocks of one cluster that share the K of a gate/up tile (128 columns of F). stages: depth of the ring of
    128 x 128 weight tiles; it runs on into w_down's tiles before the barrier.
    """

    splits: int = 2
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config means for one shape: blocks, and how w_down's tiles are dealt to them."""

    blocks: int
    gate_steps: int
    down_tiles: int
    down_splits: int
    down_steps: int


def plan(config: Config, D: int, F: int) -> Plan:
    """Deal the work: gate/up tile t, split r is block t * splits + r; w_down tile j % tiles, split j // tiles."""
    blocks, down_tiles = F // BLOCK * config.splits, D // BLOCK
    down_splits = max(1, min(blocks // down_tiles, F // BLOCK))
    gate_steps, down_steps = (-(-k // s) for k, s in ((D // BLOCK, config.splits), (F // BLOCK, down_splits)))
    return Plan(blocks, gate_steps, down_tiles, down_splits, down_steps)


def shared_bytes(config: Config, M: int, D: int, F: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    p = plan(config, D, F)
    steps = max(p.gate_steps, p.down_steps)
    ring = config.stages * BLOCK * BLOCK
    pushed = (config.splits - 1) * 2 * BLOCK * M * 4
    scales = (p.gate_steps + 3 + p.down_steps) * max(M, 32) * 4 + 3 * 4 * (max(D, F) // BLOCK + 32)
    return ring + pushed + steps * M * BLOCK + M * BLOCK * 5 + scales


def can_run(config: Config, M: int, D: int, F: int) -> str | None:
    """None when the kernel can run, else the reason. M as padded to 8."""
    if M % 8 or not 8 <= M <= 64:
        return f"M = {M} rows are not a multiple of 8 from 8 to 64"
    if D % BLOCK or F % BLOCK:
        return f"D = {D} and F = {F} must be multiples of {BLOCK}"
    if not 1 <= config.splits <= min(8, D // BLOCK):
        return f"splits = {config.splits} is not in 1 ... {min(8, D // BLOCK)}"
    if config.stages < 2 or config.stages % 2:
        return f"stages = {config.stages} must be even: gate and up tiles come in pairs"
    if plan(config, D, F).blocks < D // BLOCK:
        return f"{plan(config, D, F).blocks} blocks are fewer than the {D // BLOCK} tiles of w_down"
    # A block that waits at the grid barrier for one that cannot start waits for ever: all must be resident.
    used = shared_bytes(config, M, D, F) + RESERVED
    resident = NUM_SMS * min(MAX_BLOCKS_PER_SM, SHARED_BYTES // used) - NUM_GPCS * (config.splits - 1)
    if (blocks := plan(config, D, F).blocks) > resident:
        return f"{blocks} blocks of {used} bytes of shared memory are more than the {resident} the device holds at once"
    return None


def configs_to_try(M: int, D: int, F: int) -> list[Config]:
    """Every sensible config that can run, the deepest ring first."""
    found = [Config(splits, stages) for splits in (2, 3, 1, 4) for stages in (8, 6, 4, 2)]
    deepest: dict[int, Config] = {}
    for config in found:
        if can_run(config, M, D, F) is None:
            deepest.setdefault(config.splits, config)
    return list(deepest.values())
