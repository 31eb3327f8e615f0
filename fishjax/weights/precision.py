"""The precision policy: which number format each part of the model is stored and computed in.

    slow=fp8,fast=bf16,head=bf16,kv=fp8,codec=bf16        or one word for all matmuls (slow, fast, head)

`slow`, `fast`: the Linear weights of the two transformers. FP8 words quantise those weights alone; embeddings, norms,
biases and activations are bf16 then (activations are quantised inside the matmul). `head`: the rows of the output
head that decoding may choose from; the engine slices them from the stored table and quantises the slice. `kv`: the
key/value cache. `codec`: weights and activations of the codec.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import jax
import jax.numpy as jnp

from fishjax.errors import InvalidRequest

Word = Literal["fp32", "bf16", "fp8", "mxfp8"]

MATMULS = ("slow", "fast", "head")
ALLOWED: dict[str, tuple[str, ...]] = {
    **{module: ("fp32", "bf16", "fp8", "mxfp8") for module in MATMULS},
    "kv": ("fp32", "bf16", "fp8"),
    "codec": ("fp32", "bf16"),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """One word per module. `str()` gives the text that `parse` reads. Raises InvalidRequest for a word not allowed."""

    slow: str
    fast: str
    head: str
    kv: str
    codec: str

    def __post_init__(self):
        for module, allowed in ALLOWED.items():
            if getattr(self, module) not in allowed:
                raise InvalidRequest(
                    f"precision {module}={getattr(self, module)} does not exist: "
                    f"{module} takes one of {', '.join(allowed)}"
                )

    @classmethod
    def uniform(cls, word: str) -> Precision:
        """The same word, "fp32" or "bf16", for every module."""
        return cls(slow=word, fast=word, head=word, kv=word, codec=word)

    @classmethod
    def default(cls, platform: str | None = None) -> Precision:
        """Float32 on a CPU, bf16 elsewhere. `platform` is a JAX name ("cpu", "gpu"); None: the default back end."""
        return cls.uniform("fp32" if (platform or jax.default_backend()) == "cpu" else "bf16")

    @classmethod
    def for_checkpoint(cls, text: str | None = None) -> Precision:
        """What `convert` stores when asked for `text`: modules not named are bf16, on whatever machine it runs.

        A folder is converted once and loaded elsewhere, so the converting machine must not show in it.
        """
        return cls.parse(text, cls.uniform("bf16")) if text else cls.uniform("bf16")

    @classmethod
    def parse(cls, text: str, base: Precision | None = None) -> Precision:
        """From `module=word,...` or one word. Modules not named keep `base` (None: the platform's default).

        One word sets slow, fast and head. Where slow is set and kv is not, kv takes the type of slow's activations.
        Raises InvalidRequest for an unknown module or word, and for a module named twice.
        """
        base = base or cls.default()
        chosen: dict[str, str] = {}
        items = [item.strip() for item in text.lower().split(",")]
        if len(items) == 1 and "=" not in items[0]:
            if items[0] not in ALLOWED["slow"]:
                raise InvalidRequest(
                    f"precision '{text}' does not exist: it is one of {', '.join(ALLOWED['slow'])} for all matmuls, "
                    f"or a list like slow=fp8,fast=bf16,kv=fp8"
                )
            chosen = dict.fromkeys(MATMULS, items[0])
        else:
            for item in items:
                module, equals, word = (part.strip() for part in item.partition("="))
                if not equals or module not in ALLOWED:
                    raise InvalidRequest(
                        f"precision '{text}' cannot be read at '{item}': it is a list of module=word, "
                        f"and the modules are {', '.join(ALLOWED)}"
                    )
                if module in chosen:
                    raise InvalidRequest(f"precision '{text}' names {module} twice")
                chosen[module] = word
        if "slow" in chosen and "kv" not in chosen:
            chosen["kv"] = "fp32" if chosen["slow"] == "fp32" else "bf16"
        return replace(base, **chosen)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Element type of the key/value cache, as `init_cache` takes it."""
        return jnp.dtype(jnp.float8_e4m3fn) if self.kv == "fp8" else plain_dtype(self.kv)

    @property
    def codec_dtype(self) -> jnp.dtype:
        """Type of the codec's parameters and of its stream state."""
        return plain_dtype(self.codec)


def plain_dtype(word: str) -> jnp.dtype:
    """Type of a module's activations and of all its parameters that are not quantised: float32 or bfloat16."""
    return jnp.dtype(jnp.float32 if word == "fp32" else jnp.bfloat16)
