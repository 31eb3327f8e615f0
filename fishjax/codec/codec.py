"""The codec as one module: sound to codes, codes to sound, whole signals. Pieces in turn: `fishjax.codec.stream`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.decoder import Decoder
from fishjax.codec.encoder import Encoder
from fishjax.codec.quantizer import Quantizer
from fishjax.codec.spectral_decoder import SpectralDecoder
from fishjax.config import CodecConfig


class Codec(nnx.Module):
    """Encoder, quantiser, decoder. Parameter paths are the published names with weight norm folded.

    `dtype` is that of the parameters and so of the activations; audio is float32 at both ends.
    """

    def __init__(self, config: CodecConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)
        self.quantizer = Quantizer(config, dtype=dtype, rngs=rngs)
        decoder = SpectralDecoder if config.decoder == "spectral" else Decoder
        self.decoder = decoder(config, dtype=dtype, rngs=rngs)

    def encode(
        self, audio_BT: jax.Array, lengths_B: jax.Array | None = None, *, num_quantizers: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Sound to codes.

        `audio_BT` is float32 mono at `config.sample_rate_hz`, rows padded on the right to one length;
        `lengths_B` (samples) says how much of each row counts. Returns codes (B, K, frames) int32 and the
        frames that count, ceil(length / samples_per_frame), int32 (B,); later frames of a row mean nothing.
        `num_quantizers` limits the residual books, K = 1 + num_quantizers.
        """
        samples_per_frame = self.config.samples_per_frame
        audio_BT = jnp.pad(audio_BT, ((0, 0), (0, -audio_BT.shape[1] % samples_per_frame)))
        if lengths_B is None:
            lengths_B = jnp.full((audio_BT.shape[0],), audio_BT.shape[1], jnp.int32)
        codes_BKT = self.quantizer.encode(self.encoder(audio_BT[..., None]), num_quantizers).codes_BKT
        frames_B = (jnp.asarray(lengths_B) + samples_per_frame - 1) // samples_per_frame
        return codes_BKT, frames_B.astype(jnp.int32)

    def decode(self, codes_BKT: jax.Array) -> jax.Array:
        """Codes (B, K, T) int to float32 sound (B, T * samples_per_frame) in -1..1.

        A code past the end of its book means the book's last entry.
        """
        return self.decoder(self.quantizer.decode(codes_BKT))[..., 0]
