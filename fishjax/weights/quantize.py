"""A precision policy applied to a DualAR, parameter by parameter.

Linear weights become what their module's word says: an array, `BlockScaled` (one float32 scale per 128 x 128) or
`MxScaled` (one power of two per 32 columns); everything else is a plain array of the activations' type. The head
stays a plain table (it is also the embedding, or is sliced at load): `quantize_head` is for the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx

from fishjax.config import ModelConfig
from fishjax.errors import WeightsError
from fishjax.model.dual_ar import DualAR
from fishjax.model.layers import Linear
from fishjax.weights.assign import parameters
from fishjax.weights.load import abstract_dual_ar
from fishjax.weights.precision import Precision, plain_dtype
from pallas_kernels import BlockScaled, MxScaled, quantize_blocks, quantize_mx
from pallas_kernels.types import BLOCK, MX_BLOCK

QuantisedWeight = jax.Array | BlockScaled | MxScaled

# Word -> (what K must be a multiple of, the quantiser). Compiled, so that a weight has the same bits however it came.
_QUANTISERS: dict[str, tuple[int, Callable[[jax.Array], BlockScaled | MxScaled]]] = {
    "fp8": (BLOCK, jax.jit(partial(quantize_blocks, block=(BLOCK, BLOCK)))),
    "mxfp8": (MX_BLOCK, jax.jit(quantize_mx)),
}
_HEAD = "slow.output.weight"
_GROUP = 16


def formats(model: DualAR, precision: Precision) -> dict[str, str]:
    """Path -> "fp32", "bf16", "fp8" or "mxfp8" for every parameter of `model` (also of an abstract one).

    Raises WeightsError that names every Linear whose K does not suit the format asked for.
    """
    linears = {
        ".".join(map(str, (*path, "weight"))) for path, module in nnx.iter_modules(model) if isinstance(module, Linear)
    } - {_HEAD}
    words: dict[str, str] = {}
    wrong: list[str] = []
    for path, variable in parameters(model).items():
        word = precision.slow if path.startswith("slow.") else precision.fast
        if path not in linears:
            words[path] = "fp32" if word == "fp32" else "bf16"
            continue
        words[path] = word
        wrong += _misfit(path, variable.shape[1], word)
    wrong += _misfit("the head", model.config.slow.dim, precision.head)
    if wrong:
        raise WeightsError(f"precision {precision} does not fit the model: {'; '.join(wrong)}")
    return words


def is_quantised(word: str) -> bool:
    """Whether a word means scaled FP8."""
    return word in _QUANTISERS


def encode(array: Any, word: str) -> Any:
    """A NumPy or JAX array in the format `word`: cast, or an (N, K) weight quantised to a pytree."""
    if is_quantised(word):
        return _QUANTISERS[word][1](array)
    return array if array.dtype == plain_dtype(word) else array.astype(plain_dtype(word))


def quantize_head(head_NK: jax.Array, word: str) -> QuantisedWeight:
    """The sliced head (candidates, D) as the policy's `head` says; any number of rows.

    Raises WeightsError when D does not suit the format.
    """
    if wrong := _misfit("the head", head_NK.shape[1], word):
        raise WeightsError(wrong[0])
    return encode(head_NK, word)


def abstract_model(config: ModelConfig, precision: Precision) -> DualAR:
    """A DualAR of shapes whose parameters already have the policy's formats. Errors as in `formats`."""
    model = abstract_dual_ar(config)
    words = formats(model, precision)
    replace_values(
        model,
        {
            path: jax.eval_shape(partial(encode, word=words[path]), jax.ShapeDtypeStruct(value.shape, value.dtype))
            for path, value in parameters(model).items()
        },
    )
    return model


def apply_precision(model: DualAR, precision: Precision) -> None:
    """Bring every parameter of a model to the policy's formats, in place. Errors as in `formats`.

    A weight that is quantised already is kept when its format is the one asked for; otherwise WeightsError: the
    numbers before quantisation are gone.
    """
    words = formats(model, precision)
    values = {path: variable.get_value() for path, variable in parameters(model).items()}
    stuck = sorted(p for p, value in values.items() if (now := _word_of(value)) and now != words[p])
    if stuck:
        raise WeightsError(
            f"{stuck[0]} and {len(stuck) - 1} others are stored as {_word_of(values[stuck[0]])} and cannot become "
            f"{words[stuck[0]]}: convert the original folder again"
        )
    # A few at a time, so that the old numbers of one group are let go before the next is made.
    todo = [path for path, value in values.items() if _word_of(value) is None]
    for first in range(0, len(todo), _GROUP):
        group = todo[first : first + _GROUP]
        replace_values(model, {path: encode(values.pop(path), words[path]) for path in group})


def replace_values(module: nnx.Module, values: Mapping[str, Any]) -> None:
    """Give variables (path -> array or quantised pytree) new values, in place, whatever they held before."""
    flat = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(nnx.state(module))}
    nnx.update(module, nnx.from_flat_state([(flat[p][0], flat[p][1].replace(v)) for p, v in values.items()]))


def _word_of(value: Any) -> str | None:
    return {BlockScaled: "fp8", MxScaled: "mxfp8"}.get(type(value))


def _misfit(name: str, width: int, word: str) -> list[str]:
    if is_quantised(word) and width % _QUANTISERS[word][0]:
        return [f"{name} has K = {width}, and {word} needs a multiple of {_QUANTISERS[word][0]}"]
    return []
