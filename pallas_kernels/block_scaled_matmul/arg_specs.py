"""The S2-Pro shapes of this op: one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One projection: N output rows, K summed columns."""

    name: str
    N: int
    K: int


SPECS = (
    MatmulSpec("wqkv", 6144, 2560),
    MatmulSpec("wo", 2560, 4096),
    MatmulSpec("gate_up", 19456, 2560),
    MatmulSpec("down", 2560, 9728),
    MatmulSpec("head", 4097, 2560),
    MatmulSpec("fast_output", 4096, 2560),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""M: active slots of a step (the fast transformer's first pass has two rows a slot)."""
