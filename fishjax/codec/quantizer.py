"""Latents to codes and back: fewer steps, a transformer, one semantic book, then residual books on what is left.

Each book (`VectorQuantizer`) offers its pieces (`in_proj`, `nearest`, `codebook`, `out_proj`), so that a trainer
can put its own gradient between them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.layers import CausalConv, CausalTransposedConv, ConvNeXt, Tail, chain_silence, run_chain
from fishjax.codec.transformer import WindowTransformer
from fishjax.config import CodecConfig
from fishjax.model.layers import Embedding, Linear


class Quantized(NamedTuple):
    """What `Quantizer.quantize` found: codes, their sum in latent space, and what each book looked at."""

    codes_BKT: jax.Array
    """int32, semantic book first."""
    z_q_BTC: jax.Array
    """Sum of the projected entries of all books used."""
    latents_BTE: jax.Array
    """The `in_proj` outputs of all books used, one after the other: E = books * codebook_dim."""


class VectorQuantizer(nnx.Module):
    """One book: project to `codebook_dim`, take the nearest entry by cosine, project back."""

    def __init__(self, dim: int, codebook_size: int, codebook_dim: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.in_proj = Linear(dim, codebook_dim, use_bias=True, dtype=dtype, rngs=rngs)
        self.codebook = Embedding(codebook_size, codebook_dim, dtype=dtype, rngs=rngs)
        self.out_proj = Linear(codebook_dim, dim, use_bias=True, dtype=dtype, rngs=rngs)

    def similarity(self, latent_BTE: jax.Array) -> jax.Array:
        """Cosine of each latent with each entry: (B, T, entries) float32."""
        entries_NE = _unit(self.codebook.weight[...])
        return jnp.einsum("bte,ne->btn", _unit(latent_BTE), entries_NE, precision=jax.lax.Precision.HIGHEST)

    def nearest(self, latent_BTE: jax.Array) -> jax.Array:
        """The entry of largest cosine, the first of equals: (B, T) int32."""
        return jnp.argmax(self.similarity(latent_BTE), axis=-1).astype(jnp.int32)

    def lookup(self, codes_BT: jax.Array) -> jax.Array:
        """Codes to latent space: (B, T, dim). Codes past the last entry mean the last entry."""
        codes_BT = jnp.minimum(codes_BT, self.codebook.weight.shape[0] - 1)
        return self.out_proj(self.codebook(codes_BT))


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


class Books(nnx.Module):
    """A list of books, under the published name `quantizers`."""

    def __init__(self, dim: int, num_books: int, size: int, codebook_dim: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.quantizers = nnx.List(
            [VectorQuantizer(dim, size, codebook_dim, dtype=dtype, rngs=rngs) for _ in range(num_books)]
        )


class Quantizer(nnx.Module):
    """Between encoder and decoder: `encode` to codes, `decode` from codes."""

    def __init__(self, config: CodecConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        dim, make = config.latent_dim, {"dtype": dtype, "rngs": rngs}
        self.semantic_quantizer = Books(dim, 1, config.semantic_codebook_size, config.codebook_dim, **make)
        self.quantizer = Books(
            dim, config.num_residual_codebooks, config.residual_codebook_size, config.codebook_dim, **make
        )
        self.downsample = nnx.List(
            [
                nnx.List([CausalConv(dim, dim, factor, stride=factor, **make), ConvNeXt(dim, **make)])
                for factor in config.downsample_factors
            ]
        )
        self.pre_module = WindowTransformer(config.transformer, dim, **make)
        self.post_module = WindowTransformer(config.transformer, dim, **make)
        self.upsample = nnx.List(
            [
                nnx.List([CausalTransposedConv(dim, dim, factor, factor, **make), ConvNeXt(dim, **make)])
                for factor in reversed(config.downsample_factors)
            ]
        )

    def books(self) -> list[VectorQuantizer]:
        """All books, the semantic one first: the order of codes."""
        return [*self.semantic_quantizer.quantizers, *self.quantizer.quantizers]

    def encode(self, z_BTC: jax.Array, num_quantizers: int | None = None) -> Quantized:
        """Encoder output (B, T * prod(downsample_factors), C) to codes of T frames."""
        return self.quantize(self.pre_module(self.shrink(z_BTC)), num_quantizers)

    def shrink(self, z_BTC: jax.Array) -> jax.Array:
        """Encoder steps to frames: the downsample stages."""
        for stage in self.downsample:
            z_BTC, _ = run_chain(stage, z_BTC, None)
        return z_BTC

    def quantize(self, z_BTC: jax.Array, num_quantizers: int | None = None) -> Quantized:
        """Output of `pre_module` to codes; `num_quantizers` limits the residual books."""
        rest, codes, latents = z_BTC, [], []
        for book in self.books()[: None if num_quantizers is None else 1 + num_quantizers]:
            latent = book.in_proj(rest)
            code = book.nearest(latent)
            rest = rest - book.lookup(code)
            codes.append(code)
            latents.append(latent)
        z_q = self.lookup(jnp.stack(codes, axis=1))
        return Quantized(jnp.stack(codes, axis=1), z_q, jnp.concatenate(latents, axis=-1))

    def lookup(self, codes_BKT: jax.Array) -> jax.Array:
        """Sum over the books of their projected entries: (B, T, C). Fewer rows use the first books."""
        books = self.books()[: codes_BKT.shape[1]]
        return sum(
            (book.lookup(codes_BKT[:, i]) for i, book in enumerate(books[1:], 1)), books[0].lookup(codes_BKT[:, 0])
        )

    def decode(self, codes_BKT: jax.Array) -> jax.Array:
        """Codes of T frames to decoder input (B, T * prod(downsample_factors), C)."""
        return self.expand(self.post_module(self.lookup(codes_BKT)), None)[0]

    def expand(self, z_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """Frames to encoder steps: the upsample stages, as a stream."""
        tails = []
        for index, stage in enumerate(self.upsample):
            z_BTC, next_tail = run_chain(stage, z_BTC, None if tail is None else tail[index])
            tails.append(next_tail)
        return z_BTC, tuple(tails)

    def expand_silence(self, batch: int, dtype) -> Tail:
        """The tail of `expand` before any signal."""
        return tuple(chain_silence(stage, batch, dtype) for stage in self.upsample)
