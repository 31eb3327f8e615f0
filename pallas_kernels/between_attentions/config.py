"""How the matmuls between two attentions are laid over the blocks."""

from __future__ import annotations

from .._chain import Chain, Config, chain, even, tokens_of
from ..types import BLOCK


def configs_to_try() -> list[Config]:
    """What the tuner times, of any shape; an H200 has 132 SMs, and none may be without a block."""
    return [Config(x_stages=stages) for stages in (2, 4, 6, 8)]


def plan(config: Config, rows: int, D: int, K: int, N: int, F: int) -> Chain:
    """The chain for `rows` tokens: wo (D, K), gate and up (2F, D), down (D, F), wqkv (N, D); 0 where they are not."""
    kb, blocks, matmuls = D // BLOCK, config.blocks, {}
    if K:
        matmuls["wo"] = even(kb, K // BLOCK, blocks)
        matmuls["gate_up"] = even(F // BLOCK, kb, blocks, mats=2)
        matmuls["down"] = even(kb, F // BLOCK, blocks)
    if N:
        matmuls["qkv"] = even(N // BLOCK, kb, blocks)
    return chain(tokens_of(rows), D, matmuls, config.blocks, config.x_stages, own_bytes=0)
