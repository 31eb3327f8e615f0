"""decode_attention: the public call, and quantize_kv, which makes what its FP8 form reads."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import ScaledKV, check_fit
from . import mosaic_sm90, mosaic_sm100, reference
from .config import Config

OP = "decode_attention"
KERNELS = {_dispatch.HOPPER: mosaic_sm90, _dispatch.BLACKWELL: mosaic_sm100}


def decode_attention(
    q_BHd: jax.Array,
    k_cache: jax.Array | ScaledKV,
    v_cache: jax.Array | ScaledKV,
    lengths_B: jax.Array,
    *,
    scale: float | None = None,
    backend: _dispatch.Backend | str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Attention of one query position per slot over that slot's live positions, grouped heads.

    Args:
      q_BHd: (B, H, d) bfloat16 or float32 queries.
      k_cache: (B, G, S, d) bfloat16 or float32, or ScaledKV; H a multiple of G, query head h reads kv head h / (H / G).
      v_cache: like k_cache.
      lengths_B: (B,) int32, live positions of each slot; 0 gives a row of zeros, more than S counts as S.
      scale: factor on the logits; None means d ** -0.5.
      backend: None, "reference" or "mosaic" (bfloat16 q; cache bfloat16 or ScaledKV; d 128, or 64 on Hopper).
      config: tile choices of the mosaic kernel; None takes the default for the shape.

    Returns:
      o_BHd in q's type. A slot's row depends on that slot alone, and not on what lies past its length.

    Raises:
      ValueError: kinds or shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(q_BHd, k_cache, v_cache, lengths_B)
    factor = q_BHd.shape[2] ** -0.5 if scale is None else scale
    kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(q_BHd, k_cache, config))
    if kernel:
        return kernel.decode_attention(q_BHd, k_cache, v_cache, lengths_B, factor, config)
    return reference.decode_attention(q_BHd, k_cache, v_cache, lengths_B, factor)


def check_operands(q_BHd, k_cache, v_cache, lengths_B) -> None:
    """Raise ValueError naming kinds and shapes unless they fit."""
    if q_BHd.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"{OP}: q {q_BHd.shape}, k {k_cache.shape}, v {v_cache.shape} are not (B, H, d), 2 x (B, G, S, d)"
        )
    if isinstance(k_cache, ScaledKV) != isinstance(v_cache, ScaledKV):
        raise ValueError(f"{OP}: k and v must be of one kind, got {type(k_cache).__name__}, {type(v_cache).__name__}")
    check_fit(OP, k_cache, v_cache)
    B, H, d = q_BHd.shape
    G = k_cache.shape[1]
    if 0 in (H, *k_cache.shape[1:]):
        raise ValueError(f"{OP}: q {q_BHd.shape} and k {k_cache.shape} must have heads, positions and a width")
    if k_cache.shape[0] != B or k_cache.shape[3] != d or H % G:
        raise ValueError(f"{OP}: q {q_BHd.shape} does not fit k {k_cache.shape}: same B and d, H a multiple of G")
    if lengths_B.shape != (B,):
        raise ValueError(f"{OP}: lengths must be ({B},), got {lengths_B.shape}")


def quantize_kv(x_BGSd: jax.Array) -> ScaledKV:
    """Quantise keys or values (B, G, S, d) to FP8 with one float32 scale per (slot, kv head, position)."""
    if x_BGSd.ndim != 4:
        raise ValueError(f"quantize_kv: x must be (B, G, S, d), got shape {x_BGSd.shape}")
    return reference.quantize_kv(x_BGSd)
