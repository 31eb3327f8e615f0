"""A published codec -> module with weights, strictly: a folder {config.json, model.safetensors} or a `codec.pth`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fishjax.codec import Codec
from fishjax.config import CodecConfig
from fishjax.errors import WeightsError
from fishjax.weights.codec_names import assign_public
from fishjax.weights.files import read_checkpoint, read_pth


def load_codec(place: Path | str, dtype: Any = jnp.float32) -> tuple[CodecConfig, Codec]:
    """The codec of a folder or of a bare `.pth` file (which means the published shapes), parameters in `dtype`.

    Raises WeightsError for an unreadable place, and one that names every missing, extra and misshapen tensor.
    """
    place = Path(place)
    if place.is_dir():
        config = CodecConfig.from_file(place / "config.json")
        source, tensors = read_checkpoint(place)
    elif place.exists():
        config = CodecConfig()
        source, tensors = place, read_pth(place)
    else:
        raise WeightsError(f"there is no codec at {place}")
    codec = abstract_codec(config, dtype)
    assign_public(codec, tensors, source=str(source))
    return config, codec


def abstract_codec(config: CodecConfig, dtype: Any = jnp.float32) -> Codec:
    """A codec with shapes and no weights."""
    return nnx.eval_shape(lambda: Codec(config, dtype=dtype, rngs=nnx.Rngs(0)))
