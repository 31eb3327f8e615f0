"""The S2-Pro shape of this op (slow and fast transformers share it): one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """One feed-forward block: model width D, inner width F."""

    name: str
    D: int
    F: int


SPECS = (MlpSpec("s2_pro", 2560, 9728),)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
