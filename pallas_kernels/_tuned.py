"""Measured tile choices: `<op>/tuned/<device>.json` maps a shape key to the fields of the op's Config.

Read here, written only by the tuner of the benchmarks. Absent file or key: the op's default_config.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).parent
_BUCKETS = (8, 16, 32, 64, 128)


def device_name() -> str:
    """Folder-friendly name of the default device: "nvidia-h200"."""
    return jax.devices()[0].device_kind.lower().replace(" ", "-")


def bucket(rows: int) -> int:
    """The row count under which a choice is filed: the next of 8, 16, 32, 64, 128."""
    return next((b for b in _BUCKETS if rows <= b), _BUCKETS[-1])


@functools.cache
def _table(op: str, device: str) -> dict[str, dict[str, Any]]:
    path = _ROOT / op / "tuned" / f"{device}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def lookup(op: str, *key: int | str) -> dict[str, Any] | None:
    """The Config fields measured best for a shape on the default device, or None. Key parts join with "x"."""
    return _table(op, device_name()).get("x".join(map(str, key)))
