"""What a file of figures says about where they come from."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

SCHEMA = 1
_SMI_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def make_header(
    suite: str, device: str, versions: dict[str, str], gpu: dict[str, str] | None, notes: list[str], method: str
) -> dict[str, Any]:
    """Schema, suite, device, versions, commit, method, clocks and power cap (as `see_gpu` saw them), date (UTC)."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "device": device,
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
        "method": method,
        "gpu": gpu,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "notes": notes,
    }


def commit() -> str | None:
    """Of the checkout that this file lies in; None where there is none."""
    return _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])


def busy_note() -> str:
    """How many cores there are and how busy they are just now, for what runs on them."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} when the run began"


def see_gpu() -> dict[str, str] | None:
    """What nvidia-smi sees now: driver, clocks, power cap; None without an NVIDIA GPU."""
    line = _output(["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader", "--id=0"])
    return dict(zip(_SMI_FIELDS, (part.strip() for part in line.split(",")), strict=False)) if line else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
