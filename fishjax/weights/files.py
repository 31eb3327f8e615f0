"""The tensors of a checkpoint on disk, by name, read one at a time.

Looked up in a folder: `<stem>.safetensors.index.json` and its shards, `<stem>.safetensors`, then `<stem>.pth`
(read by torch with `weights_only=True` and memory-mapped). Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from fishjax.config import read_json
from fishjax.errors import WeightsError

FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
"""Types that weights are published in; FP8 and whole numbers mean a quantised copy, whose scales nobody here knows."""
_SAFETENSORS_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still on disk; `read()` (or NumPy, through `__array__`) brings it in."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's name of its type; for types that no weight has, the file's own
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The tensor in its stored type, or in `dtype`."""
        array = self.read()
        return array if dtype is None else array.astype(dtype)


def read_checkpoint(folder: Path, stem: str = "model") -> tuple[Path, dict[str, StoredTensor]]:
    """The file that was found and its tensors, in the file's order. Raises WeightsError when there is none."""
    index, single, pickled = (folder / f"{stem}{end}" for end in (".safetensors.index.json", ".safetensors", ".pth"))
    if index.exists():
        return index, _read_shards(index)
    if single.exists():
        return single, read_safetensors(single)
    if pickled.exists():
        return pickled, read_pth(pickled)
    raise WeightsError(f"{folder} holds no weights: expected {index.name}, {single.name} or {pickled.name}")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, unread."""

    def read(name: str) -> np.ndarray:
        # Opened anew for each tensor: a mapped file that stays open keeps every page it ever touched in memory.
        with safe_open(path, framework="numpy") as file:
            return file.get_tensor(name)

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    return {
        name: StoredTensor(shape, _SAFETENSORS_TYPES.get(code, str(code)), lambda name=name: read(name))
        for name, (shape, code) in kinds.items()
    }


def read_pth(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a torch checkpoint, plain or under `state_dict`. Needs torch (extra `convert`)."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise WeightsError(f"reading {path} needs torch: install fishjax[convert]") from error
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises pickle, zip, runtime and OS errors alike
        raise WeightsError(f"cannot read {path}: {error}") from error
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
        raise WeightsError(f"{path} does not hold named tensors")

    def to_numpy(tensor: Any) -> np.ndarray:
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return {
        name: StoredTensor(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda tensor=tensor: to_numpy(tensor)
        )
        for name, tensor in stored.items()
    }


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{index} has no 'weight_map' from tensor names to file names")
    shards = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise WeightsError(f"{index} names a shard outside its folder: {file_name}")
        shards[file_name] = read_safetensors(index.parent / file_name)
    lost = sorted(name for name, file_name in weight_map.items() if name not in shards[file_name])
    unlisted = sorted(
        name for file_name, shard in shards.items() for name in shard if weight_map.get(name) != file_name
    )
    if lost or unlisted:
        raise WeightsError(
            f"{index} does not match its shards: not in them {lost[:20]}, not in the index {unlisted[:20]}"
        )
    return {name: shards[file_name][name] for name, file_name in weight_map.items()}
