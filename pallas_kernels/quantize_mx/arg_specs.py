"""The S2-Pro shapes of this op, those of `quantize_blocks`: one list for tests, tuning and benchmarks."""

from ..quantize_blocks.arg_specs import ROWS, SPECS, QuantizeSpec

__all__ = ["ROWS", "SPECS", "QuantizeSpec"]
