"""How the matmuls between two attentions are laid over the blocks."""

from __future__ import annotations

import itertools

from .._chain import Chain, Config, Matmul, chain, tokens_of
from ..types import BLOCK


def configs_to_try() -> list[Config]:
    """What the tuner times, of any shape; an H200 has 132 SMs, and a piece of a matmul must not find none."""
    return [
        Config(splits_qkv=qkv, splits_wo=wo, splits_down=down)
        for qkv, wo, down in itertools.product((1, 2), (3, 6), (3, 6))
    ]


def plan(config: Config, rows: int, D: int, K: int, N: int, F: int) -> Chain:
    """The chain for `rows` tokens: wo (D, K), gate and up (2F, D), down (D, F), wqkv (N, D); 0 where they are not."""
    kb, matmuls = D // BLOCK, {}
    if K:
        matmuls["wo"] = Matmul(kb, K // BLOCK, config.splits_wo, from_end=True)
        matmuls["gate_up"] = Matmul(F // BLOCK, kb, mats=2)
        matmuls["down"] = Matmul(kb, F // BLOCK, config.splits_down, from_end=True)
    if N:
        matmuls["qkv"] = Matmul(N // BLOCK, kb, config.splits_qkv, from_end=True)
    return chain(tokens_of(rows), D, matmuls, config.blocks, config.x_stages, own_bytes=0)
