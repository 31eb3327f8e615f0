"""append_kv: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from ..types import ScaledKV, check_fit
from . import mosaic_sm90, reference

OP = "append_kv"
KERNELS = {_dispatch.HOPPER: mosaic_sm90}


def append_kv(
    k_BGd: jax.Array,
    v_BGd: jax.Array,
    k_cache: ScaledKV,
    v_cache: ScaledKV,
    positions_B: jax.Array,
    *,
    backend: _dispatch.Backend | str | None = None,
) -> tuple[ScaledKV, ScaledKV]:
    """Quantise one new key and value per slot and kv head and put them into FP8 caches at each slot's position.

    In a jitted function whose caller donates the caches this happens in place.

    Args:
      k_BGd: (B, G, d) floating point, the new keys.
      v_BGd: (B, G, d), the new values, of the same type.
      k_cache: (B, G, S, d) ScaledKV.
      v_cache: like k_cache.
      positions_B: (B,) int32. Negative ones count from the end, as NumPy's indices; below -S, or at S and beyond,
        nothing is written for the slot.
      backend: None, "reference" or "mosaic" (bfloat16; up to 32 kv heads, d 64 or 128).

    Returns:
      (k_cache, v_cache): row (b, g, positions_B[b]) is `quantize_kv` of the new one, all else as it was.

    Raises:
      ValueError: kinds or shapes do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(k_BGd, v_BGd, k_cache, v_cache, positions_B)
    kernel = _dispatch.choose(OP, backend, KERNELS, lambda kernel: kernel.why_not(k_BGd))
    run = kernel.append_kv if kernel else reference.append_kv
    return run(k_BGd, v_BGd, k_cache, v_cache, positions_B)


def check_operands(k_BGd, v_BGd, k_cache, v_cache, positions_B) -> None:
    """Raise ValueError naming kinds and shapes unless they fit."""
    if not (isinstance(k_cache, ScaledKV) and isinstance(v_cache, ScaledKV)):
        raise ValueError(f"{OP}: caches must be ScaledKV, got {type(k_cache).__name__}, {type(v_cache).__name__}")
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"{OP}: caches must be (B, G, S, d), both alike, got {k_cache.shape}, {v_cache.shape}")
    check_fit(OP, k_cache, v_cache)
    B, G, _, d = k_cache.shape
    if k_BGd.shape != (B, G, d) or (v_BGd.shape, v_BGd.dtype) != (k_BGd.shape, k_BGd.dtype):
        found = f"k {k_BGd.dtype}{k_BGd.shape}, v {v_BGd.dtype}{v_BGd.shape}"
        raise ValueError(f"{OP}: {found} must both be {(B, G, d)} and of one type for caches {k_cache.shape}")
    if positions_B.shape != (B,):
        raise ValueError(f"{OP}: positions must be ({B},), got {positions_B.shape}")
