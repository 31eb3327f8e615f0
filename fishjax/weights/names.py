"""Their DualAR names -> ours: one table, read in both directions.

Three spellings are known. *Flat* (S1) names are `layers.0...`, `fast_layers.0...`; *nested* (S2) ones carry
`text_model.model.` or `audio_decoder.`; ours are module paths, `slow.` or `fast.` before the flat name without
its `fast_`. Older checkpoints hold `wq`, `wk`, `wv` apart: their rows are joined, in this order, to `wqkv`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fishjax.errors import WeightsError

Layout = Literal["flat", "nested"]

# Nested prefix -> flat prefix, the first that fits.
_NESTED_TO_FLAT = (
    ("text_model.model.", ""),
    ("audio_decoder.codebook_embeddings.", "codebook_embeddings."),
    ("audio_decoder.", "fast_"),
)
# Our prefix -> flat prefix.
_OURS_TO_FLAT = (("slow.", ""), ("fast.", "fast_"))

_FUSED, _SEPARATE = ".attention.wqkv.weight", tuple(f".attention.{part}.weight" for part in ("wq", "wk", "wv"))


def layout_of(names: Iterable[str]) -> Layout:
    """Which spelling a checkpoint uses."""
    return "nested" if any(name.startswith(("text_model.", "audio_decoder.")) for name in names) else "flat"


def to_ours(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Module path -> the checkpoint's names whose rows, joined, make it. Dropped names do not appear.

    In a flat checkpoint whose names start with `model.`, every `model.` is removed; names that contain `audio_`
    (a projector that the model does not have) are dropped. Raises WeightsError when two names mean one tensor.
    """
    names = list(names)
    if layout_of(names) == "nested":
        flat_of = {name: _nested_to_flat(name) for name in names}
    else:
        strip = bool(names) and names[0].startswith("model.")
        flat_of = {name: name.replace("model.", "") if strip else name for name in names}
        flat_of = {name: flat for name, flat in flat_of.items() if "audio_" not in flat}
    sources: dict[str, str] = {}
    for name, flat in flat_of.items():
        if flat in sources:
            raise WeightsError(f"tensors '{sources[flat]}' and '{name}' both mean '{flat}'")
        sources[flat] = name
    return {_flat_to_ours(flat): parts for flat, parts in _fuse(sources).items()}


def to_public(path: str, layout: Layout = "nested") -> str:
    """The published name of one of our module paths."""
    ours, flat_prefix = next(pair for pair in _OURS_TO_FLAT if path.startswith(pair[0]))
    flat = flat_prefix + path.removeprefix(ours)
    if layout == "flat":
        return flat
    # From the most special flat prefix to the empty one.
    nested, prefix = max((pair for pair in _NESTED_TO_FLAT if flat.startswith(pair[1])), key=lambda pair: len(pair[1]))
    return nested + flat.removeprefix(prefix)


def _nested_to_flat(name: str) -> str:
    for nested, flat in _NESTED_TO_FLAT:
        if name.startswith(nested):
            return flat + name.removeprefix(nested)
    return name


def _flat_to_ours(flat: str) -> str:
    return "fast." + flat.removeprefix("fast_") if flat.startswith("fast_") else "slow." + flat


def _fuse(sources: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Flat name -> source names; a complete wq, wk, wv becomes wqkv, an incomplete one stays (and is reported)."""
    fused: dict[str, tuple[str, ...]] = {flat: (name,) for flat, name in sources.items()}
    for flat in sources:
        stem = flat.removesuffix(_SEPARATE[0])
        parts = [stem + ending for ending in _SEPARATE]
        if stem != flat and all(part in sources for part in parts) and stem + _FUSED not in sources:
            fused[stem + _FUSED] = tuple(sources[part] for part in parts)
            for part in parts:
                del fused[part]
    return fused
