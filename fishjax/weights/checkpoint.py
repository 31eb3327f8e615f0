"""Orbax trees keyed by module path, written one tensor at a time and restored straight onto the device.

A parameter `slow.layers.0.attention.wqkv.weight` is the array at that path of a nested dict; a quantised one is a
dict of its arrays there (`values_NK` and its scales). Any Orbax reads these folders; this file adds two things:
a tree may hold tensors that do not exist yet (`LazyArray`), and restoring is strict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from fishjax.errors import WeightsError
from fishjax.weights.assign import parameters, raise_if_wrong
from fishjax.weights.quantize import replace_values

# Read and written in pieces of at most this size, so that reading uses every core. Not compressed: weights hardly
# shrink, and unpacking would cost most of the time to ready.
_CHUNK_BYTES = 64 << 20
# Host memory that restoring may use for pieces on their way to the device.
_RESTORE_GB = 2


@dataclass(frozen=True)
class LazyArray:
    """A leaf to be written; `read()` makes it when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes once it is made."""
        return self.size * self.dtype.itemsize


class _LazyArrayHandler(ocp.type_handlers.NumpyHandler):
    """Stores a LazyArray as the NumPy array that it makes; one exists at a time."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for commit in await super().serialize([value.read()], [info], [arg]):
                commit.result()
        return []


def lazy_leaves(path: str, abstract: Any, make: Callable[[], Any]) -> dict[str, LazyArray]:
    """The arrays of one parameter, which `make` gives when the first of them is read; each is let go once read.

    `abstract` has the structure, shapes and dtypes of what `make` returns: an array or a quantised pytree.
    """
    parts: dict[str, np.ndarray] = {}

    def take(name: str) -> np.ndarray:
        if not parts:
            parts.update({key: np.asarray(leaf) for key, leaf in _named_leaves(path, make()).items()})
        return parts.pop(name)

    return {
        name: LazyArray(tuple(leaf.shape), np.dtype(leaf.dtype), lambda name=name: take(name))
        for name, leaf in _named_leaves(path, abstract).items()
    }


def write_tree(folder: Path, leaves: Mapping[str, LazyArray]) -> None:
    """Write an Orbax tree; keys are dotted paths. `folder` must not exist. Raises WeightsError when writing fails."""
    tree = _nested(leaves)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (LazyArray, _LazyArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
        except ValueError as error:  # what TensorStore raises when a disk is full or refuses
            raise WeightsError(f"cannot write {folder}: {_system_words(error)}") from error


def save_module(folder: Path, module: nnx.Module) -> None:
    """Write every parameter of a module, as it is. `folder` must not exist."""
    leaves: dict[str, LazyArray] = {}
    for path, variable in parameters(module).items():
        value = variable.get_value()
        leaves |= lazy_leaves(path, value, lambda value=value: value)
    write_tree(folder, leaves)


def restore_module(folder: Path, module: nnx.Module, *, sharding: jax.sharding.Sharding | None = None) -> None:
    """Fill an abstract module (`nnx.eval_shape`) from a tree, in place; arrays go straight onto the device.

    `sharding` None: the first device of the default back end. Raises WeightsError when the folder is missing, damaged,
    or does not hold exactly the module's arrays with their shapes and types (all faults named at once).
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not there: the model folder is incomplete, convert it again")
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = {path: variable.get_value() for path, variable in parameters(module).items()}
    wanted = {name: leaf for path, value in values.items() for name, leaf in _named_leaves(path, value).items()}
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_RESTORE_GB)
    with ocp.Checkpointer(handler) as checkpointer:
        stored = _flat(_or_damaged(folder, lambda: checkpointer.metadata(folder.absolute()).item_metadata.tree))
        raise_if_wrong(
            str(folder),
            missing=sorted(wanted.keys() - stored.keys()),
            extra=sorted(stored.keys() - wanted.keys()),
            misshapen=[
                f"{name} is {_describe(stored[name])}, should be {_describe(leaf)}"
                for name, leaf in sorted(wanted.items())
                if name in stored and _describe(stored[name]) != _describe(leaf)
            ],
        )
        target = _nested({n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in wanted.items()})
        args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
        restored = _flat(_or_damaged(folder, lambda: checkpointer.restore(folder.absolute(), args=args)))
    rebuilt: dict[str, Any] = {}
    for path, value in values.items():
        names = _named_leaves(path, value)
        rebuilt[path] = jax.tree.unflatten(jax.tree.structure(value), [restored[name] for name in names])
    replace_values(module, rebuilt)


def _or_damaged(folder: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # Orbax and TensorStore raise a dozen kinds for a damaged folder
        raise WeightsError(f"{folder} is damaged or incomplete, convert it again: {_first_line(error)}") from error


def _system_words(error: Exception) -> str:
    """What the operating system said, at the end of TensorStore's long message."""
    match = re.search(r"([^:]+) \[os_error_code=", str(error))
    return match[1].strip() if match else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _named_leaves(path: str, value: Any) -> dict[str, Any]:
    """Dotted path -> array, in the order of the pytree: the parameter itself, or the arrays of a quantised one."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {".".join([path, *(key.name for key in keys)]): leaf for keys, leaf in leaves}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, node in tree.items():
        flat |= _flat(node, f"{prefix}{key}.") if isinstance(node, Mapping) else {f"{prefix}{key}": node}
    return flat


def _describe(array: Any) -> str:
    return f"{np.dtype(array.dtype).name} {tuple(array.shape)}"
