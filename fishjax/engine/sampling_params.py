"""What a caller may ask of sampling, checked where it enters."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from fishjax.errors import InvalidRequest

_MAX_INT32 = 2**31 - 1
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Raises InvalidRequest when a value is out of range.

    temperature: 0 < t < 2, acts on the entries that top_p and top_k leave. top_p: 0 < p <= 1, judged at
    temperature 1. top_k: at least 1; 1 is greedy. seed: 0 .. 2^32 - 1; the same seed gives the same codes.
    max_frames: frames after which the request is stopped, at least 1; None: only the model's own limit a segment.
    """

    temperature: float = 0.8
    top_p: float = 0.8
    top_k: int = 30
    seed: int = 0
    max_frames: int | None = None

    def __post_init__(self):
        _check_real("temperature", self.temperature, "above 0 and below 2", lambda value: 0 < value < 2)
        _check_real("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        _check_integer("top_k", self.top_k, 1, _MAX_INT32)
        _check_integer("seed", self.seed, 0, _MAX_SEED)
        if self.max_frames is not None:
            _check_integer("max_frames", self.max_frames, 1, _MAX_INT32)


def _check_real(name: str, value: object, limits: str, inside) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and inside(value)):  # type: ignore[arg-type]
        raise InvalidRequest(f"{name} must be {limits}, not {value!r}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and low <= value <= high):  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be a whole number in {low}..{high}, not {value!r}")
