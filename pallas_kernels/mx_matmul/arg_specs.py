"""The S2-Pro shapes of this op, those of `block_scaled_matmul`: one list for tests, tuning and benchmarks."""

from ..block_scaled_matmul.arg_specs import SPECS, MatmulSpec

__all__ = ["ROWS", "SPECS", "MatmulSpec"]

ROWS = (1, 8, 16, 32, 64, 128)
"""M: active slots of a step (the fast transformer's first pass has two rows a slot)."""
