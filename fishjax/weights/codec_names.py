"""Published codec tensors <-> our modules: one rule per kind of parameter.

Place in the flow: `load_codec` reads a folder or `codec.pth`, this file renames, folds weight norm and turns
layouts, `assign` puts the result onto a `Codec`. `codec_to_public` is the way back.

Published layouts (channels first) and ours (channels last):

    convolution             (out, in, k)      (k, in, out)
    transposed convolution  (in, out, k)      (k/s, in, s*out), oldest tap first (see CausalTransposedConv)
    1x1 book projection     (out, in, 1)      (out, in)
    snake alpha             (1, C, 1)         (C,)
    all else                as it is

Weight norm comes as pairs (`parametrizations.weight.original0/1` or `weight_g`/`weight_v`): w = g v / ||v||, the
norm over all axes but the first. An already folded `weight` is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from fishjax.codec.codec import Codec
from fishjax.codec.layers import CausalConv, CausalTransposedConv, Snake
from fishjax.codec.quantizer import VectorQuantizer
from fishjax.weights.assign import assign, mistyped, parameters, raise_if_wrong

_IGNORED_ENDINGS = ("freqs_cis", "causal_mask")
_NORM_PAIRS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


class _Rule:
    """How one parameter of ours is laid out in public."""

    def __init__(self, stride: int = 1, kind: str = "same"):
        self.kind, self.stride = kind, stride

    def public_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The published shape of a parameter of ours."""
        if self.kind == "conv":
            return (shape[2], shape[1], shape[0])
        if self.kind == "transposed":
            return (shape[1], shape[2] // self.stride, shape[0] * self.stride)
        if self.kind == "projection":
            return (*shape, 1)
        if self.kind == "alpha":
            return (1, *shape, 1)
        return shape

    def ours(self, public: np.ndarray) -> np.ndarray:
        """A published array in our layout."""
        if self.kind == "conv":
            return public.transpose(2, 1, 0)
        if self.kind == "transposed":
            channels_in, channels_out, k = public.shape
            taps = public.reshape(channels_in, channels_out, k // self.stride, self.stride)[:, :, ::-1]
            return taps.transpose(2, 0, 3, 1).reshape(k // self.stride, channels_in, self.stride * channels_out)
        if self.kind == "projection":
            return public[..., 0]
        if self.kind == "alpha":
            return public[0, :, 0]
        return public

    def public(self, ours: np.ndarray) -> np.ndarray:
        """An array of ours in the published layout."""
        if self.kind == "conv":
            return ours.transpose(2, 1, 0)
        if self.kind == "transposed":
            taps, channels_in, _ = ours.shape
            split = ours.reshape(taps, channels_in, self.stride, -1)[::-1]
            return split.transpose(1, 3, 0, 2).reshape(channels_in, -1, taps * self.stride)
        return ours.reshape(self.public_shape(ours.shape))


def _rules(codec: Codec) -> dict[str, _Rule]:
    """Path -> rule, for every parameter, from the module that owns it."""
    special: dict[str, _Rule] = {}
    for path, module in nnx.iter_modules(codec):
        name = ".".join(map(str, path))
        if isinstance(module, CausalTransposedConv):
            special[f"{name}.conv.weight"] = _Rule(module.stride, "transposed")
        elif isinstance(module, CausalConv):
            special[f"{name}.conv.weight"] = _Rule(kind="conv")
        elif isinstance(module, Snake):
            special[f"{name}.alpha"] = _Rule(kind="alpha")
        elif isinstance(module, VectorQuantizer):
            special[f"{name}.in_proj.weight"] = special[f"{name}.out_proj.weight"] = _Rule(kind="projection")
    return {path: special.get(path, _Rule()) for path in parameters(codec)}


def public_shapes(codec: Codec) -> dict[str, tuple[int, ...]]:
    """Published folded name -> shape, for every parameter of `codec` (also of an `nnx.eval_shape` codec)."""
    rules = _rules(codec)
    return {path: rules[path].public_shape(tuple(value.shape)) for path, value in parameters(codec).items()}


def weight_norm_shapes(codec: Codec) -> dict[str, tuple[int, ...]]:
    """Published name -> shape with weight norm in its pairs, as the original checkpoints store it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in public_shapes(codec).items():
        pair = _pair_of(name)
        if pair is None:
            shapes[name] = shape
        else:
            shapes[pair[0]] = (shape[0], *(1,) * (len(shape) - 1))
            shapes[pair[1]] = shape
    return shapes


def _pair_of(name: str) -> tuple[str, str] | None:
    """The weight-norm pair in which the original keeps this folded name; None where it has no weight norm."""
    stem = name.removesuffix(".weight")
    if stem.endswith(".conv") and not stem.startswith("quantizer."):
        return stem + _NORM_PAIRS[0][0], stem + _NORM_PAIRS[0][1]
    if stem.endswith((".in_proj", ".out_proj")) and name.endswith(".weight"):
        return stem + _NORM_PAIRS[1][0], stem + _NORM_PAIRS[1][1]
    return None


def fold_public(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Published tensors with prefix `generator.` stripped, buffers dropped and weight norm folded (float32 norm).

    Half a pair is left under its own name, so that it is reported as extra and its weight as missing.
    """
    named = {name: np.asarray(value) for name, value in _without_buffers(tensors).items()}
    folded = dict(named)
    for g_ending, v_ending in _NORM_PAIRS:
        for name, g in named.items():
            stem = name.removesuffix(g_ending)
            v = named.get(stem + v_ending)
            if stem == name or v is None or g.shape != (v.shape[0], *(1,) * (v.ndim - 1)):
                continue
            del folded[name], folded[stem + v_ending]
            folded[stem + ".weight"] = fold_weight_norm(g, v)
    return folded


def _without_buffers(tensors: Mapping[str, Any]) -> dict[str, Any]:
    named = {name.removeprefix("generator."): value for name, value in tensors.items()}
    return {name: value for name, value in named.items() if not name.endswith(_IGNORED_ENDINGS)}


def fold_weight_norm(g: np.ndarray, v: np.ndarray) -> np.ndarray:
    """g v / ||v||, the norm over all axes but the first; float32."""
    g, v = g.astype(np.float32), v.astype(np.float32)
    norm = np.sqrt(np.sum(np.square(v, dtype=np.float64), axis=tuple(range(1, v.ndim)), keepdims=True))
    return (v * (g / norm)).astype(np.float32)


def assign_public(codec: Codec, tensors: Mapping[str, Any], *, source: str) -> None:
    """Put published tensors (any of the known spellings) onto `codec`, in place.

    Raises `WeightsError` that names every missing, extra and misshapen tensor by its published name.
    """
    folded, shapes, rules = fold_public(tensors), public_shapes(codec), _rules(codec)
    raise_if_wrong(
        source,
        missing=sorted(shapes.keys() - folded.keys()),
        extra=sorted(folded.keys() - shapes.keys()),
        misshapen=[
            f"{name} is {tuple(folded[name].shape)}, should be {shape}"
            for name, shape in sorted(shapes.items())
            if name in folded and tuple(folded[name].shape) != shape
        ],
        mistyped=mistyped(_without_buffers(tensors)),
    )
    assign(codec, {name: rules[name].ours(value) for name, value in folded.items()}, source=source)


def codec_to_public(codec: Codec) -> dict[str, np.ndarray]:
    """Every parameter under its published folded name and layout, dtype kept, contiguous: ready to be saved."""
    rules = _rules(codec)
    values = {path: np.asarray(jax.device_get(value[...])) for path, value in parameters(codec).items()}
    return {path: np.ascontiguousarray(rules[path].public(value)) for path, value in values.items()}
