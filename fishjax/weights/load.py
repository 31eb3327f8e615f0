"""A public model folder -> modules with weights, strictly and tensor by tensor.

The folder holds `config.json` (flat or nested), the weights (see `weights.files`) and, usually, the tokenizer,
whose semantic ids win over the config's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import ModelConfig, read_json
from fishjax.model.dual_ar import DualAR
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.assign import assign, mistyped, parameters, raise_if_wrong
from fishjax.weights.files import StoredTensor, read_checkpoint
from fishjax.weights.names import layout_of, to_ours, to_public

_SEMANTIC_TOKEN = re.compile(r"<\|semantic:(\d+)\|>")


def load_dual_ar(folder: Path | str, dtype: Any = jnp.float32) -> tuple[ModelConfig, DualAR]:
    """The DualAR model of a folder, every parameter in `dtype`.

    Raises WeightsError for an unreadable file, and one that names every missing, extra and misshapen tensor.
    """
    folder = Path(folder)
    config = read_model_config(folder)
    path, tensors = read_checkpoint(folder)
    model = abstract_dual_ar(config, dtype)
    assign_public(model, tensors, source=str(path))
    return config, model


def read_model_config(folder: Path) -> ModelConfig:
    """`config.json` of a folder; a tokenizer beside it overrides the semantic ids."""
    config = ModelConfig.from_file(folder / "config.json")
    ids = _semantic_ids(folder)
    if not ids:
        return config
    return dataclasses.replace(config, semantic_begin_id=min(ids), semantic_end_id=max(ids))


def abstract_dual_ar(config: ModelConfig, dtype: Any = jnp.float32) -> DualAR:
    """A DualAR with shapes and no weights."""
    return nnx.eval_shape(lambda: DualAR(config, dtype=dtype, rngs=nnx.Rngs(0)))


def assign_public(model: DualAR, tensors: Mapping[str, Any], *, source: str) -> None:
    """Put published tensors (any known spelling; arrays or `StoredTensor`) onto `model`, in place.

    Raises WeightsError that names every missing, extra and misshapen tensor by its published name.
    """
    assign(model, match_public(model, tensors, source=source), source=source)


def match_public(model: DualAR, tensors: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Module path -> its published tensor, unread, for every parameter of `model`. Errors as in `assign_public`."""
    wanted = {path: tuple(variable.shape) for path, variable in parameters(model).items()}
    sources, layout = to_ours(tensors), layout_of(tensors)
    ours = {path: _joined([tensors[name] for name in names]) for path, names in sources.items()}
    raise_if_wrong(
        source,
        missing=sorted(to_public(path, layout) for path in wanted.keys() - ours.keys()),
        extra=sorted(name for path in ours.keys() - wanted.keys() for name in sources[path]),
        misshapen=[
            f"{to_public(path, layout)} is {ours[path].shape}, should be {shape}"
            for path, shape in sorted(wanted.items())
            if path in ours and tuple(ours[path].shape) != shape
        ],
        mistyped=mistyped({name: tensors[name] for names in sources.values() for name in names}),
    )
    return ours


def dual_ar_to_public(model: DualAR) -> dict[str, np.ndarray]:
    """Every parameter under its nested (S2) published name, dtype kept: ready to be saved."""
    return {to_public(path): np.asarray(jax.device_get(value[...])) for path, value in parameters(model).items()}


def public_shapes(config: ModelConfig, layout: Any = "nested") -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor that a config asks for; allocates nothing."""
    return {to_public(path, layout): tuple(v.shape) for path, v in parameters(abstract_dual_ar(config)).items()}


def _joined(parts: list[Any]) -> Any:
    """One tensor, or several joined along their rows when it is read."""
    if len(parts) == 1:
        return parts[0]
    # Parts that cannot be joined get a shape that no parameter has, so that they are reported as misshapen.
    widths = {tuple(part.shape[1:]) for part in parts}
    rows = sum(part.shape[0] for part in parts) if all(len(part.shape) == 2 for part in parts) else -1
    shape = (rows, *widths.pop()) if len(widths) == 1 else (rows, -1)
    return StoredTensor(
        shape, str(parts[0].dtype), lambda: np.concatenate([np.asarray(part) for part in parts], axis=0)
    )


def _semantic_ids(folder: Path) -> tuple[int, ...]:
    """Ids of `<|semantic:i|>` in the tokenizer of a folder: `tokenizer.json`, else S1's `special_tokens.json`."""
    tokenizer_path, specials_path = folder / "tokenizer.json", folder / "special_tokens.json"
    if tokenizer_path.exists():
        tokenizer = Tokenizer.from_file(tokenizer_path)
        return tokenizer.semantic_begin_id, tokenizer.semantic_end_id
    if specials_path.exists():
        named = read_json(specials_path)
        return tuple(int(id_) for token, id_ in named.items() if _SEMANTIC_TOKEN.fullmatch(token))
    return ()
