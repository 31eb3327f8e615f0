"""What both trainers share: the clock, AdamW with a rate passed in, flat parameters.

Schedules run on wall-clock time, not on steps: a run of 8.5 minutes ends after 8.5 minutes on any machine, its
learning rate having come down. A stage goes on from another's weights alone: Adam's moments remember a hundred steps
at most, and the warm-up is as long. Knows nothing of speech.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

# Parameters are a flat dict "decoder.model.0.conv.weight" -> array: easy to save, cast, print and mask.
Params = dict[str, jax.Array]


@dataclass
class Clock:
    """Progress from 0 to 1 over `minutes` of wall clock since the process began."""

    minutes: float
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """Share of the time that is gone, at most 1."""
        return min(1.0, self.elapsed_s / (60 * self.minutes))


def cosine_rate(progress: float, high: float, low: float, step: int, warmup_steps: int) -> float:
    """Learning rate: linear warm-up over steps, then cosine over time from `high` to `low`."""
    rate = low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return rate * min(1.0, (step + 1) / warmup_steps)


class Log:
    """Prints lines with the time since the start, to stdout and to a file."""

    def __init__(self, path: Path, clock: Clock):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._clock = path.open("a", encoding="utf-8"), clock

    def __call__(self, line: str) -> None:
        """One line."""
        line = f"[{self._clock.elapsed_s:6.1f}s] {line}"
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, Params, nnx.State]:
    """(structure, flat trainable parameters, all else) of a module."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, {_name(path): leaf for path, leaf in _leaves(params)}, rest


def join_model(graphdef: nnx.GraphDef, params: Params, rest: nnx.State, template: nnx.State) -> nnx.Module:
    """The module again, with `params` in it; `template` is a parameter state of the same structure."""
    flat = [params[_name(path)] for path, _ in _leaves(template)]
    state = jax.tree.unflatten(jax.tree.structure(template), flat)
    return nnx.merge(graphdef, state, rest)


class Model:
    """A module taken apart once: `.params` to train, `.build(params)` inside a jitted function."""

    def __init__(self, module: nnx.Module):
        self._graphdef, self._template, self._rest = nnx.split(module, nnx.Param, ...)
        self.params: Params = {_name(path): leaf for path, leaf in _leaves(self._template)}

    def build(self, params: Params):
        """The module with these parameters."""
        return join_model(self._graphdef, params, self._rest, self._template)


def _leaves(state: nnx.State) -> list[tuple[tuple, jax.Array]]:
    return jax.tree_util.tree_flatten_with_path(state)[0]


def _name(path: tuple) -> str:
    keys = [str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", "")))) for part in path]
    return ".".join(key for key in keys if key not in ("", "value"))


def adamw(b1: float, b2: float, weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW without its rate: `apply` multiplies by the rate of the moment. Decays matrices only."""

    def matrices(params: Params) -> dict[str, bool]:
        return {name: leaf.ndim >= 2 and "codebook" not in name for name, leaf in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def apply(params: Params, updates: Params, rate: jax.Array) -> Params:
    """params - rate * updates."""
    return jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates)


def save_tensors(path: Path, tensors: Mapping[str, jax.Array | np.ndarray], dtype=None) -> None:
    """One safetensors file, written atomically; `dtype` casts floats."""
    arrays = {}
    for name, value in tensors.items():
        array = np.asarray(value if dtype is None else jnp.asarray(value).astype(dtype))
        arrays[name] = np.ascontiguousarray(array)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    partial.rename(path)


def count_parameters(params: Params) -> int:
    """Number of trainable numbers."""
    return sum(int(np.prod(leaf.shape)) for leaf in params.values())


def enable_compile_cache() -> None:
    """Compiled programs are kept between runs on the same machine."""
    jax.config.update("jax_compilation_cache_dir", os.environ.get("MINNOW_CACHE", "/tmp/minnow_xla_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def out_folder(argument: Path | None) -> Path:
    """Where results go: the argument, else $OUT, else ./out."""
    return argument or Path(os.environ.get("OUT", "out"))


def fail(message: str) -> None:
    """Ends with one sentence and exit code 2."""
    print(message, file=sys.stderr)
    raise SystemExit(2)
