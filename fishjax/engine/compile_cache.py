"""Compiled programs that outlive the process: a restart with the same model, sizes and device compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def default_folder() -> Path:
    """`JAX_COMPILATION_CACHE_DIR`, else `fishjax/compiled` in the user's folder of caches."""
    if own := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fishjax" / "compiled"


def keep_compiled(folder: Path) -> None:
    """Keep every program that this process compiles from now on in `folder`, and take it from there if it is there.

    JAX makes the folder; one that cannot be written costs a warning and the time to compile.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
