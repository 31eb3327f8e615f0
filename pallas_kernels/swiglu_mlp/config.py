"""Tile choices of the kernel of gate and up; w_down goes through block_scaled_matmul and its own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._chip import SM90, Chip
from ..types import BLOCK

SHARED_BYTES = 227 * 1024
L2_TOKENS = 256
"""The most whose gate and up may go through L2: 2 F float32 a token, 20 MB for 256 tokens of S2-Pro."""


@dataclass(frozen=True, slots=True)
class Config:
    """How gate and up are cut.

    epilogue: SwiGLU is made where gate and up are summed, and the next two fields say how; else gate and up are one
      block_scaled_matmul, with the choices of that op.
    blocks_per_group: blocks of one cluster that share a group of 128 columns of F, the width of a scale.
    stages: depth of the ring of 128-wide steps of D in shared memory.
    early: start loading weights before the kernel that quantises x has ended (programmatic dependent launch).
    """

    blocks_per_group: Literal[1, 2] = 2
    stages: int = 4
    early: bool = False
    epilogue: bool = True


def max_tile_m(chip: Chip = SM90) -> int:
    """Rows of one tile: gate and up have a product and a sum each."""
    return chip.max_tokens // 2


def shared_bytes(config: Config, M: int, D: int) -> int:
    """Shared memory of one block, bytes (barriers and alignment left out)."""
    columns, steps = BLOCK // config.blocks_per_group, D // BLOCK
    ring = config.stages * (2 * columns + M) * BLOCK
    pushed = columns * M * 4 if config.blocks_per_group > 1 else 0
    scales = (steps + 3) // 4 * 4 * M * 4 + 2 * (steps + 31) // 32 * 128 + max(M, 32) * 4
    return ring + pushed + scales + BLOCK * M * (4 + 1)


def can_run(config: Config, M: int, D: int, F: int, chip: Chip = SM90) -> str | None:
    """None when the kernel can run, else the reason. M: rows of one tile."""
    most = max_tile_m(chip)
    if M % 8 or not 8 <= M <= most:
        return f"M = {M} rows a tile is not a multiple of 8 from 8 to {most}"
    if D % BLOCK or F % BLOCK or not D or not F:
        return f"D = {D} and F = {F} must be multiples of {BLOCK}"
    if config.blocks_per_group not in (1, 2):
        return f"blocks_per_group = {config.blocks_per_group} is neither 1 nor 2"
    if BLOCK // config.blocks_per_group not in chip.rows:
        return f"{config} is not written for compute capability {chip.capability}"
    if config.stages < 1:
        return f"stages = {config.stages} must be at least 1"
    if (used := shared_bytes(config, M, D)) > SHARED_BYTES - 4096:
        return f"{config} needs {used} bytes of shared memory, more than {SHARED_BYTES - 4096}"
    return None


def default_config(M: int, chip: Chip = SM90) -> Config:
    """A shallow ring, so that two or three blocks share an SM; measured choices go to tuned/<device>.json instead."""
    return Config(2 if chip.rows[0] < BLOCK else 1, 3 if min(M, max_tile_m(chip)) > 32 else 4)


def configs_to_try(M: int, D: int, F: int) -> list[Config]:
    """What the tuner times for M rows."""
    found = [Config(b, stages, early) for b in (2, 1) for stages in (2, 3, 4) for early in (False, True)]
    tile_m = min(-(-M // 8) * 8, max_tile_m())
    found = [c for c in found if c.stages <= D // BLOCK and can_run(c, tile_m, D, F) is None]
    return found + [Config(early=early, epilogue=False) for early in (False, True) if M <= L2_TOKENS]
