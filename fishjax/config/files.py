"""Reading of JSON files; what is wrong in one is said with its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fishjax.errors import WeightsError

_Config = TypeVar("_Config")


def read_config(path: Path, parse: Callable[[Mapping[str, Any]], _Config]) -> _Config:
    """`parse` of a JSON object; what is wrong in it is said with the file's name."""
    raw = read_json(path)
    try:
        return parse(raw)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object, or say which file is wrong."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise WeightsError(f"{path} does not hold a JSON object")
    return parsed
