from __future__ import annotations

import math

import numpy as np
import pytest

from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_frames) == (0.8, 0.8, 30, 0, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (0, -0.1, 2, 2.5, math.nan, math.inf, "1", None, True)),
        *(("top_p", v) for v in (0, -1, 1.0001, math.nan, -math.inf)),
        *(("top_k", v) for v in (0, -1, 1.5, 2**31, math.nan)),
        *(("seed", v) for v in (-1, 2**32, 0.5)),
        *(("max_frames", v) for v in (0, -5, 2**31, math.inf)),
    ],
)
def test_out_of_range_is_refused_with_the_name_and_the_value(field, value):
    with pytest.raises(InvalidRequest, match=field) as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


def test_limits_are_accepted():
    SamplingParams(temperature=1e-6, top_p=1, top_k=1, seed=2**32 - 1, max_frames=1)
    SamplingParams(temperature=np.float32(1.9), top_p=np.float64(0.5), top_k=np.int32(5), seed=np.uint32(7))
