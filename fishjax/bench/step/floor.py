"""Bytes that a step must move: what no program for this model and this policy can avoid reading."""

from __future__ import annotations

from typing import Any

from flax import nnx

from fishjax.engine.memory import num_bytes

from ..cases import STREAM_BYTES_PER_S
from .rig import Rig


def floor_bytes(rig: Rig) -> int:
    """Weights once, the fast transformer's once for each of its passes, live keys and values, the codec and its state.

    The fast transformer makes a pass for each code but the first (positions 0 and 1 go together). Left out: rows of
    embedding tables, activations, what is written into the cache.
    """
    config, model, codec = rig.case.configs[0], rig.model, rig.codec
    slow = _bytes(model.slow.layers) + _bytes(model.slow.norm) + num_bytes(rig.head)
    fast = sum(_bytes(part) for part in (model.fast.layers, model.fast.norm, model.fast.output))
    live = num_bytes(rig.state.cache) * int(rig.case.lengths_B.sum()) // (rig.case.slots * rig.case.max_len)
    quantizer = codec.quantizer
    sound = _bytes(quantizer.post_module) + _bytes(quantizer.upsample) + _bytes(codec.decoder)
    state = num_bytes(rig.codec_state) + num_bytes(rig.codec_state.tails_BN)  # read; the tails are written, too
    return slow + (config.num_codebooks - 1) * fast + live + sound + state


def floor_ms(rig: Rig) -> float:
    """Milliseconds for them at the streaming rate measured on one H200."""
    return floor_bytes(rig) / STREAM_BYTES_PER_S * 1e3


def _bytes(module: Any) -> int:
    return num_bytes(nnx.state(module))
