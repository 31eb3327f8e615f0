"""Put named arrays onto an nnx module, strictly: what is missing, extra or misshapen is named in one error.

Place in the flow: loaders translate published names into module paths and call `assign`. A path is the
attribute names and list indices joined by dots, e.g. `slow.layers.0.attention.wqkv.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fishjax.errors import WeightsError
from fishjax.weights.files import FLOAT_TYPES

_MAX_NAMED = 20


def parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Path -> the variable at that path, for every variable of `module` (also of an `nnx.eval_shape` module)."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(str(part) for part in path): variable for path, variable in flat}


def assign(module: nnx.Module, arrays: Mapping[str, Any], *, source: str) -> None:
    """Set every variable of `module` from `arrays` (path -> NumPy or JAX array), cast to the variable's dtype.

    `module` may come from `nnx.eval_shape`; it is changed in place, and only when all of `arrays` fits.
    `source` says in messages where the arrays came from. Raises `WeightsError` that names every missing,
    extra and misshapen array at once.
    """
    wanted = parameters(module)
    missing = sorted(wanted.keys() - arrays.keys())
    extra = sorted(arrays.keys() - wanted.keys())
    misshapen = [
        f"{path} is {tuple(arrays[path].shape)}, should be {tuple(variable.shape)}"
        for path, variable in sorted(wanted.items())
        if path in arrays and tuple(arrays[path].shape) != tuple(variable.shape)
    ]
    raise_if_wrong(source, missing=missing, extra=extra, misshapen=misshapen)
    flat = [
        (path, variable.replace(jnp.asarray(arrays[".".join(map(str, path))], dtype=variable.dtype)))
        for path, variable in nnx.to_flat_state(nnx.state(module))
    ]
    nnx.update(module, nnx.from_flat_state(flat))


def mistyped(tensors: Mapping[str, Any]) -> list[str]:
    """Those of some named tensors (arrays or `StoredTensor`) that are not weights by their type, in words."""
    return [
        f"{name} is {tensor.dtype}, should be one of {', '.join(FLOAT_TYPES)}"
        for name, tensor in sorted(tensors.items())
        if str(tensor.dtype) not in FLOAT_TYPES
    ]


def raise_if_wrong(
    source: str, *, missing: list[str], extra: list[str], misshapen: list[str], mistyped: Sequence[str] = ()
) -> None:
    """One `WeightsError` for everything that is wrong with a set of tensors; nothing when all is well."""
    parts = [
        f"{len(names)} {kind}: {', '.join(names[:_MAX_NAMED])}{' ...' if len(names) > _MAX_NAMED else ''}"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen), ("mistyped", mistyped))
        if names
    ]
    if parts:
        raise WeightsError(f"the tensors of {source} do not fit its config: {'; '.join(parts)}")
