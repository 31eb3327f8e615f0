"""Write a published-looking model folder of S2-Pro's size with random weights, tensor by tensor.

    python tools/make_synthetic_s2_pro.py OUT [--layers N] [--seed S] [--no-codec]

For measuring what needs the real size and no real voice: conversion, loading, speed. The folder holds a nested
`config.json`, two bfloat16 shards with their index, `codec/` in float32 and a byte-level `tokenizer.json` whose special
tokens have S2-Pro's ids. 10.7 GB on disk; memory stays under 1.5 GB.
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


def model_config(num_layers: int = 36) -> dict:
    """The nested `config.json`; fewer layers make a smaller folder of the same widths."""
    shared = {"n_head": 32, "n_local_heads": 8, "head_dim": 128, "dim": 2560, "intermediate_size": 9728}
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
            "text_dim": 2560,
            "n_layer": 4,
            "attention_qkv_bias": False,
            "attention_qk_norm": False,
            "attention_o_bias": False,
        },
    }


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, arrays: Iterator[np.ndarray]):
    """A safetensors file whose arrays come one at a time, in the order of `shapes`."""
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
            file.write(array.astype(dtype, copy=False).view(np.uint8).reshape(-1).data)


def random_arrays(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Float32 arrays of sane size: matrices 1/sqrt(width), vectors near one (biases near zero)."""
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1 or name.endswith("alpha"):
            array = 0.02 * array + (0.0 if name.endswith("bias") else 1.0)
        else:
            array *= np.float32(np.prod(shape[1:]) ** -0.5)
        yield array


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-codec", action="store_true", help="leave the codec out")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True)
    rng = np.random.default_rng(options.seed)

    raw = model_config(options.layers)
    (out / "config.json").write_text(json.dumps(raw, indent=2))
    shapes = public_shapes(ModelConfig.from_dict(raw))
    dtype = np.dtype(ml_dtypes.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}, {}]
    used = 0
    for name, shape in shapes.items():
        used += int(np.prod(shape)) * dtype.itemsize
        shards[0 if used <= SHARD_BYTES else 1][name] = shape
    shards = [shard for shard in shards if shard]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(out / file_name, shard, dtype, random_arrays(shard, rng))
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": used}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer().save(str(out / "tokenizer.json"))
    if not options.no_codec:
        (out / "codec").mkdir()
        (out / "codec" / "config.json").write_text(json.dumps(_CODEC_CONFIG, indent=2))
        books = codec_shapes(abstract_codec(CodecConfig.from_dict(_CODEC_CONFIG)))
        write_safetensors(out / "codec" / "model.safetensors", books, np.dtype(np.float32), random_arrays(books, rng))


if __name__ == "__main__":
    main()
