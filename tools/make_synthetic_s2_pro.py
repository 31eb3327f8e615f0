"""Write a published-looking model folder of S2-Pro's size with random weights, tensor by tensor.

    python tools/make_synthetic_s2_pro.py OUT [--layers N] [--tiny] [--seed S] [--no-codec]

For measuring what needs the real size and no real voice: conversion, loading, speed. The folder holds a nested
`config.json`, two bfloat16 shards with their index, `codec/` in float32 and a byte-level `tokenizer.json` whose special
tokens have S2-Pro's ids. 10.7 GB on disk; memory stays under 1.5 GB. `--tiny` has the same files, names and tokens at
the least widths that FP8 and the fused kernels can take: for trying the commands that the real size is made for.

Numbers are drawn once: every tensor is cut from one block of them, at an offset of its own and scaled to its width.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fishjax.config import CodecConfig, ModelConfig
from fishjax.weights.codec_names import public_shapes as codec_shapes
from fishjax.weights.load import public_shapes
from fishjax.weights.load_codec import abstract_codec

SEMANTIC_BEGIN, NUM_SEMANTIC, VOCAB_SIZE = 151678, 4096, 155776
# The ids before the semantic ones; what lies between is filled with tokens that no text makes.
SPECIALS = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151669: "<|pad|>",
    151670: "<|phoneme_start|>",
    151671: "<|phoneme_end|>",
    151672: "<|text|>",
    151673: "<|voice|>",
    151674: "<|interleave|>",
    151675: "<|audio_start|>",
    151676: "<|audio_end|>",
    151677: "<|audio_pad|>",
}
SHARD_BYTES = 4_990_000_000  # of the first shard, as published
BLOCK_SIZE = 4_194_301  # numbers; a prime, so that no two rows of a matrix begin at the same one
_CODEC_CONFIG = {
    "sample_rate": 44100,
    "encoder_dim": 64,
    "encoder_rates": [2, 4, 8, 8],
    "encoder_transformer_layers": [0, 0, 0, 4],
    "decoder_dim": 1536,
    "decoder_rates": [8, 8, 4, 2],
    "latent": 1024,
    "semantic_codebook_size": 4096,
    "codebook_size": 1024,
    "n_codebooks": 9,
    "codebook_dim": 8,
    "downsample_factor": [2, 2],
    "module": {"n_layer": 8, "n_head": 16, "dim": 1024, "intermediate_size": 3072, "head_dim": 64, "window_size": 128},
}
_TINY_CODEC_CONFIG = _CODEC_CONFIG | {
    "encoder_dim": 8,
    "decoder_dim": 64,
    "latent": 64,
    "module": {"n_layer": 2, "n_head": 2, "dim": 64, "intermediate_size": 128, "head_dim": 32, "window_size": 128},
}


def model_config(num_layers: int = 36, *, tiny: bool = False) -> dict:
    """The nested `config.json`; fewer layers make a smaller folder of the same widths, `tiny` the widths small."""
    shared = {"n_head": 32, "n_local_heads": 8, "head_dim": 128, "dim": 2560, "intermediate_size": 9728}
    if tiny:
        shared = {"n_head": 2, "n_local_heads": 1, "head_dim": 128, "dim": 128, "intermediate_size": 256}
    shared |= {"rope_base": 1000000, "norm_eps": 1e-06}
    return {
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "pad_token_id": 151669,
        "audio_pad_token_id": 151677,
        "semantic_start_token_id": SEMANTIC_BEGIN,
        "semantic_end_token_id": SEMANTIC_BEGIN + NUM_SEMANTIC - 1,
        "text_config": {
            **shared,
            "vocab_size": VOCAB_SIZE,
            "n_layer": num_layers,
            "max_seq_len": 32768,
            "tie_word_embeddings": True,
            "attention_qk_norm": True,
        },
        "audio_decoder_config": {
            **shared,
            "vocab_size": 4096,
            "num_codebooks": 10,
            "text_dim": shared["dim"],
            "n_layer": 4,
            "attention_qkv_bias": False,
            "attention_qk_norm": False,
            "attention_o_bias": False,
        },
    }


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, arrays: Iterator[np.ndarray]):
    """A safetensors file whose arrays, of type `dtype`, come one at a time, in the order of `shapes`."""
    code = {"bfloat16": "BF16", "float32": "F32"}[dtype.name]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            file.write(array.view(np.uint8).reshape(-1).data)


class Noise:
    """Arrays of sane size: matrices 1/sqrt(width), vectors near one (biases near zero)."""

    def __init__(self, seed: int, dtype: np.dtype):
        self._rng = np.random.default_rng(seed)
        self._block_N = self._rng.standard_normal(BLOCK_SIZE, dtype=np.float32)
        self._dtype = dtype
        self._scaled: dict[tuple[float, float], np.ndarray] = {}

    def arrays(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
        """One a name, in order."""
        for name, shape in shapes.items():
            if len(shape) == 1 or name.endswith("alpha"):
                yield self._cut(shape, 0.02, 0.0 if name.endswith("bias") else 1.0)
            else:
                yield self._cut(shape, float(np.prod(shape[1:])) ** -0.5, 0.0)

    def _cut(self, shape: tuple[int, ...], scale: float, mean: float) -> np.ndarray:
        if (scale, mean) not in self._scaled:
            self._scaled[scale, mean] = (np.float32(scale) * self._block_N + np.float32(mean)).astype(self._dtype)
        scaled_N, size = self._scaled[scale, mean], int(np.prod(shape))
        offset = int(self._rng.integers(BLOCK_SIZE))
        rounds = -(-(offset + size) // BLOCK_SIZE)
        return np.concatenate([scaled_N[offset:], *[scaled_N] * (rounds - 1)])[:size].reshape(shape)


def make_tokenizer() -> Tokenizer:
    """Bytes as ids 0..255, unreachable tokens up to the specials, then S2-Pro's special tokens at their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"<|unused:{i}|>": i for i in range(len(alphabet), min(SPECIALS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [SPECIALS.get(i, f"<|reserved:{i}|>") for i in range(min(SPECIALS), SEMANTIC_BEGIN)]
    names += [f"<|semantic:{i}|>" for i in range(NUM_SEMANTIC)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def main() -> None:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--layers", type=int, default=36, help="layers of the slow transformer [default: 36]")
    parser.add_argument("--tiny", action="store_true", help="small widths; the rest as ever")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-codec", action="store_true", help="leave the codec out")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True)

    raw = model_config(options.layers, tiny=options.tiny)
    (out / "config.json").write_text(json.dumps(raw, indent=2))
    shapes = public_shapes(ModelConfig.from_dict(raw))
    dtype = np.dtype(ml_dtypes.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}, {}]
    used = 0
    for name, shape in shapes.items():
        used += int(np.prod(shape)) * dtype.itemsize
        shards[0 if used <= SHARD_BYTES else 1][name] = shape
    shards = [shard for shard in shards if shard]
    weight_map, noise = {}, Noise(options.seed, dtype)
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(out / file_name, shard, dtype, noise.arrays(shard))
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": used}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer().save(str(out / "tokenizer.json"))
    if not options.no_codec:
        (out / "codec").mkdir()
        raw_codec = _TINY_CODEC_CONFIG if options.tiny else _CODEC_CONFIG
        (out / "codec" / "config.json").write_text(json.dumps(raw_codec, indent=2))
        books = codec_shapes(abstract_codec(CodecConfig.from_dict(raw_codec)))
        codec_noise = Noise(options.seed + 1, np.dtype(np.float32))
        write_safetensors(out / "codec" / "model.safetensors", books, np.dtype(np.float32), codec_noise.arrays(books))


if __name__ == "__main__":
    main()
