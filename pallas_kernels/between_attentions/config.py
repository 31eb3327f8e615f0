"""How the matmuls between two attentions are laid over the blocks."""

from __future__ import annotations

from dataclasses import dataclass

from .._persistent import Chain, Matmul, chain, tokens_of
from ..types import BLOCK


@dataclass(frozen=True)
class Config:
    """Choices of the kernel. `blocks`: all resident at once, one per SM; `x_stages`: activation tiles in flight.

    `splits_*`: parts of K.
    """

    blocks: int = 132
    splits_qkv: int = 2
    splits_wo: int = 6
    splits_down: int = 6
    x_stages: int = 4


def plan(config: Config, rows: int, D: int, before: tuple[int, int] | None, qkv_rows: int | None) -> Chain:
    """The chain for `rows` tokens; `before` is (width of o, F), `qkv_rows` the rows of wqkv."""
    kb, matmuls = D // BLOCK, {}
    if before is not None:
        width, F = before
        matmuls["wo"] = Matmul(kb, width // BLOCK, config.splits_wo, from_end=True)
        matmuls["gate_up"] = Matmul(F // BLOCK, kb, mats=2)
        matmuls["down"] = Matmul(kb, F // BLOCK, config.splits_down, from_end=True)
    if qkv_rows is not None:
        matmuls["qkv"] = Matmul(qkv_rows // BLOCK, kb, config.splits_qkv, from_end=True)
    return chain(tokens_of(rows), D, matmuls, config.blocks, config.x_stages, own_bytes=0)
