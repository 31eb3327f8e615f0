from __future__ import annotations

import numpy as np
import pytest

from fishjax.codec import Codec
from fishjax.engine.engine import Engine
from fishjax.model.dual_ar import DualAR
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import load_codec

IM_END = 422  # of the golden tokenizer


@pytest.fixture(scope="session")
def golden_model(golden) -> DualAR:
    return load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1]


@pytest.fixture(scope="session")
def golden_codec(golden) -> Codec:
    return load_codec(golden / "codec_tiny")[1]


@pytest.fixture(scope="session")
def engine(golden_model, golden_codec) -> Engine:
    """Four slots, compiled once for the whole session; tests leave its slots free."""
    engine = Engine(golden_model, golden_codec, im_end_id=IM_END, num_slots=4, max_len=256, max_reference_s=0.5)
    engine.warmup()
    return engine


@pytest.fixture(scope="session")
def prompt(golden_model):
    """Random prompts with text and frame columns: prompt(seed, length) -> int32 (C+1, T)."""
    config = golden_model.config

    def make(seed: int, length: int = 20) -> np.ndarray:
        rng = np.random.default_rng(seed)
        columns = np.zeros((config.num_codebooks + 1, length), np.int32)
        columns[0] = rng.integers(0, 256, length)
        frames = slice(length // 3, length // 2)
        codes = rng.integers(0, config.codebook_size, columns[1:, frames].shape)
        columns[1:, frames] = codes
        columns[0, frames] = config.semantic_begin_id + codes[0]
        return columns

    return make
