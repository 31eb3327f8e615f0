"""How one frame is laid over the blocks of the frame kernel."""

from __future__ import annotations

from dataclasses import dataclass

from .._chain import HALF, MAX_TOKENS, Chain, Config, Matmul, can_run, chain, tokens_of
from ..types import BLOCK

POSITIONS = 16
"""Positions that a slot's keys have room for: 4 slots fill one 64-row tile."""
SLOTS = HALF // POSITIONS
"""Slots of one attention tile."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one frame, and the matmuls of a layer and of the head ("qkv", "wo", "gate_up", "down", "head").

    slots: rounded up, so that four of them or none are in an attention tile.
    """

    H: int
    G: int
    F: int
    L: int
    C: int
    slots: int
    chain: Chain

    @property
    def paired(self) -> bool:
        """Whether positions 0 and 1 go in together: tokens `slots` ... hold position 0 in the first pass."""
        return self.slots < self.chain.M

    @property
    def columns(self) -> int:
        """Of an attention tile: 4 slots x the query heads of a kv head."""
        return SLOTS * self.H // self.G


def plan(config: Config, slots: int, D: int, H: int, G: int, F: int, L: int, C: int, codes: int) -> Plan:
    """The layout of one frame; `codes` rows of the head, padded to 128."""
    matmuls = {
        "qkv": Matmul(H + 2 * G, D // BLOCK, min(config.splits_qkv, D // BLOCK), from_end=True),
        "wo": Matmul(D // BLOCK, H, min(config.splits_wo, H), from_end=True),
        "gate_up": Matmul(F // BLOCK, D // BLOCK, mats=2),
        "down": Matmul(D // BLOCK, F // BLOCK, min(config.splits_down, F // BLOCK), from_end=True),
        "head": Matmul(codes // BLOCK, D // BLOCK),
    }
    columns = SLOTS * H // G
    attention = 2 * HALF * BLOCK * 2 + columns * (BLOCK * 2 + HALF * 2 + BLOCK * 5)
    own = attention + C * BLOCK * 4
    M = tokens_of(2 * slots)
    M = M if M <= MAX_TOKENS else tokens_of(slots)
    frame_slots = M // 2 if 2 * slots <= M else M
    return Plan(H, G, F, L, C, frame_slots, chain(M, D, matmuls, config.blocks, config.x_stages, own))


def why_not(p: Plan) -> str | None:
    """None when the kernel holds this plan, else the reason."""
    if p.C > POSITIONS:
        return f"{p.C} codebooks; the kernel has room for {POSITIONS}"
    if p.H % p.G or p.columns % 8 or p.columns > 64:
        return f"{p.H} query heads over {p.G} kv heads; the kernel wants 2, 4, 8 or 16 to one"
    return can_run(p.chain)
