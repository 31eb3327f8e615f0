"""Verify of the codec: recorded encodes and decodes in stages, replayed; published shapes and lengths, rebuilt.

Two kinds of folder are known by what they hold, not by their name: a codec `config.json` with
`expected.safetensors` beside it, and JSON files of published shapes or lengths. Cases, modules, numbers of books
and window masks are found by the names of the entries; dimensions come from the config.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.codec import Codec
from fishjax.codec.attention import window_mask
from fishjax.codec.layers import run_chain
from fishjax.codec.stream import init_stream, stream_decode
from fishjax.config import CodecConfig
from fishjax.errors import WeightsError
from fishjax.model.layers import rope_table
from fishjax.verify.codec_published import verify_published
from fishjax.verify.compiled import compiled
from fishjax.verify.folders import is_codec_config
from fishjax.verify.report import FLOAT_TOLERANCE, FileReport, GoldenFile
from fishjax.weights.files import read_checkpoint
from fishjax.weights.load_codec import load_codec

# Two ways to the same samples in float32: summation order only.
SAME_SOUND_TOLERANCE = 1e-4

_BOOKS_ENTRY = re.compile(r"(?P<case>.+)\.codes_n_quantizers_(?P<number>\d+)")
_MASK_ENTRY = re.compile(r"window_mask_(?P<steps>\d+)")
_MODULE_ENTRY = re.compile(r"module\.(?P<path>.+)\.in")


def verify(folder: Path, root: Path) -> list[FileReport]:
    """Reports on the codec files of one folder; empty when it holds none.

    Raises WeightsError for a file that cannot be read, weights that do not fit or a module that is not there.
    """
    reports = verify_published(folder, root)
    if is_codec_config(folder / "config.json") and (folder / "expected.safetensors").is_file():
        reports += _verify_codec(folder, root)
    return reports


def _verify_codec(folder: Path, root: Path) -> list[FileReport]:
    config, codec = load_codec(folder)
    config_file = GoldenFile.open(folder / "config.json", root)
    for name in config_file.names():
        config_file.read(name)
    for name, value in (("hop_length", config.hop_length), ("frame_length", config.samples_per_frame)):
        if name in config_file:
            config_file.compare(name, value, 0)
    weights_path, tensors = read_checkpoint(folder)
    weights = GoldenFile(weights_path, tensors, root)
    for name in weights.names():
        weights.read(name)
    golden = GoldenFile.open(folder / "expected.safetensors", root)
    comparison = _Comparison(config, codec, golden)
    comparison.all()
    reports = [config_file.report(), weights.report(), golden.report()]
    if (folder / "expected.json").is_file():
        settings = GoldenFile.open(folder / "expected.json", root)
        comparison.settings(settings)
        reports.append(settings.report())
    return reports


class _Comparison:
    """All entries of one expected.safetensors. Public arrays are channels first, ours last."""

    def __init__(self, config: CodecConfig, codec: Codec, golden: GoldenFile):
        self.config, self.codec, self.golden = config, codec, golden
        self._decode_stages = compiled(_decode_stages, codec)
        self._step = compiled(stream_decode, codec)
        self._margins: dict[str, float] = {}
        self._lengths: dict[str, dict[str, Any]] = {}

    def all(self) -> None:
        """Compare everything that is there."""
        names = self.golden.names()
        for case in sorted({name.rpartition(".")[0] for name in names if name.endswith(".audio")}):
            self._encode_case(case)
        decoded = sorted({name.rpartition(".")[0] for name in names if name.endswith(".codes")})
        for case in decoded:
            self._decode_case(case)
        if decoded:
            longest = max(decoded, key=lambda case: self.golden.read(f"{case}.codes").shape[2])
            self._stream_case(longest)
        for name in names:
            if match := _MODULE_ENTRY.fullmatch(name):
                self._module(match["path"])
            elif match := _MASK_ENTRY.fullmatch(name):
                mask = window_mask(int(match["steps"]), self.config.transformer.window)
                self.golden.compare(name, np.asarray(mask), 0)
        self._rope()

    def _encode_case(self, case: str) -> None:
        golden = self.golden
        audio_B1T = golden.read(f"{case}.audio")
        lengths_name = f"{case}.audio_lengths"
        lengths = jnp.asarray(golden.read(lengths_name)) if lengths_name in golden else None
        fewer = {
            name: int(match["number"])
            for name in golden.names(f"{case}.")
            if (match := _BOOKS_ENTRY.fullmatch(name)) and match["case"] == case
        }
        everything = compiled(_encode_everything(tuple(fewer.values())), self.codec)
        (codes, frames), limited, stages = everything(jnp.asarray(audio_B1T[:, 0]), lengths)
        codes, frames = np.asarray(codes), np.asarray(frames)
        margin = np.asarray(stages.pop("code_margin"))
        self._margins[case] = float(margin.min())
        self._lengths[case] = {
            "samples": list(audio_B1T.shape),
            "codes": list(codes.shape),
            "feature_lengths": frames.tolist(),
        }
        for name, value in (("codes", codes), ("lengths", frames)):
            if f"{case}.{name}" in golden:
                golden.compare(f"{case}.{name}", value, 0)
        if f"{case}.code_margin" in golden:
            golden.compare(f"{case}.code_margin", margin, FLOAT_TOLERANCE)
        self._compare_stages(case, stages)
        for name, codes in zip(fewer, limited, strict=True):
            golden.compare(name, np.asarray(codes), 0)

    def _decode_case(self, case: str) -> None:
        codes_BKT = self.golden.read(f"{case}.codes")
        stages = self._decode_stages(jnp.asarray(codes_BKT, jnp.int32))
        sound = np.asarray(stages.pop("waveform"))[:, None]
        if case in self._lengths:
            self._lengths[case]["waveform"] = list(sound.shape)
        if f"{case}.waveform" in self.golden:
            self.golden.compare(f"{case}.waveform", sound, FLOAT_TOLERANCE)
        self._compare_stages(case, stages)

    def _compare_stages(self, case: str, stages: Mapping[str, jax.Array]) -> None:
        for stage, value_BTC in stages.items():
            if f"{case}.{stage}" in self.golden:
                value_BCT = np.asarray(value_BTC).transpose(0, 2, 1)
                self.golden.compare(f"{case}.{stage}", value_BCT, FLOAT_TOLERANCE)

    def _stream_case(self, case: str) -> None:
        """Frame by frame with carried state against the recorded whole."""
        if f"{case}.waveform" not in self.golden:
            return
        codes_BKT = jnp.asarray(self.golden.read(f"{case}.codes"), jnp.int32)
        batch, _, frames = codes_BKT.shape
        state = init_stream(self.codec, batch, frames)
        run, reset = jnp.ones((batch,), bool), jnp.zeros((batch,), bool)
        pieces = []
        for frame in range(frames):
            state, sound = self._step(state, codes_BKT[:, :, frame : frame + 1], run, reset)
            pieces.append(np.asarray(sound))
        wanted = self.golden.read(f"{case}.waveform")[:, 0]
        streamed = np.concatenate(pieces, axis=1)
        error = np.max(np.abs(streamed - wanted)) if streamed.shape == wanted.shape else np.inf
        self.golden.check(f"{case}.waveform frame by frame", error, FLOAT_TOLERANCE)

    def _module(self, path: str) -> None:
        x_BTC = jnp.asarray(self.golden.read(f"module.{path}.in").transpose(0, 2, 1))
        module: Any = self.codec
        for part in path.split("."):
            try:
                module = module[int(part)] if part.isdigit() else getattr(module, part)
            except (AttributeError, IndexError, TypeError) as error:
                raise WeightsError(f"{self.golden.name} speaks of a module '{path}' that is not there") from error
        y_BTC = compiled(_whole, module)(x_BTC)
        self.golden.compare(f"module.{path}.out", np.asarray(y_BTC).transpose(0, 2, 1), FLOAT_TOLERANCE)

    def _rope(self) -> None:
        if "rope.rows" not in self.golden:
            return
        rows, base = self.golden.read("rope.rows"), self.config.transformer.rope_base
        for name, head_dim in (
            ("rope.encoder_table", self.config.encoder_head_dim),
            ("rope.module_table", self.config.transformer.head_dim),
        ):
            if name in self.golden:
                self.golden.compare(name, rope_table(int(rows.max()) + 1, head_dim, base)[rows].astype(np.float32), 0)

    def settings(self, settings: GoldenFile) -> None:
        """The entries of expected.json: lengths and margins of the cases, the prefix properties."""
        for name in ("seed", "delay_attr"):  # delay_attr: an attribute that the original keeps and never uses
            if name in settings:
                settings.read(name)
        if "hop_length" in settings:
            settings.compare("hop_length", self.config.hop_length, 0)
        if "frame_length" in settings:
            settings.compare("frame_length", self.config.samples_per_frame, 0)
        if "lengths" in settings:
            settings.compare("lengths", {case: self._lengths.get(case) for case in settings.read("lengths")}, 0)
        if "min_code_margin" in settings:
            wanted = settings.read("min_code_margin")
            error = max((abs(wanted[case] - self._margins.get(case, np.inf)) for case in wanted), default=0.0)
            settings.check("min_code_margin", error, FLOAT_TOLERANCE, entries=["min_code_margin"])
        if "prefix_decode_max_abs_difference" in settings:
            name = "prefix_decode_max_abs_difference"
            ours = self._prefix_decode_difference()
            settings.check(name, abs(settings.read(name) - ours), SAME_SOUND_TOLERANCE, entries=[name])
        if "prefix_encode_codes_equal" in settings:
            settings.compare("prefix_encode_codes_equal", self._prefix_encode_is_equal(), 0)

    def _prefix_decode_difference(self) -> float:
        """Worst difference between decoding two thirds of the shortest case and that part of its whole decode."""
        name = min(
            (name for name in self.golden.names() if name.endswith(".codes")),
            key=lambda name: self.golden.read(name).shape[2],
        )
        codes_BKT = jnp.asarray(self.golden.read(name), jnp.int32)
        frames = max(1, 2 * codes_BKT.shape[2] // 3)
        part, whole = (
            np.asarray(self._decode_stages(codes)["waveform"]) for codes in (codes_BKT[:, :, :frames], codes_BKT)
        )
        return float(np.max(np.abs(part - whole[:, : part.shape[1]])))

    def _prefix_encode_is_equal(self) -> bool:
        """Whether the codes of two thirds of the shortest case's sound begin its recorded codes."""
        case = min(self._lengths, key=lambda case: self._lengths[case]["samples"][2])
        audio_BT = self.golden.read(f"{case}.audio")[:, 0]
        frames = max(1, 2 * (audio_BT.shape[1] // self.config.samples_per_frame) // 3)
        encode = compiled(Codec.encode, self.codec)
        codes_BKT = np.asarray(encode(jnp.asarray(audio_BT[:, : frames * self.config.samples_per_frame]))[0])
        return bool(np.array_equal(codes_BKT, self.golden.read(f"{case}.codes")[:, :, :frames]))


@functools.cache
def _encode_everything(num_quantizers: tuple[int, ...]) -> Callable[..., Any]:
    """What an encode case records, as one program, so that what the encodes share is computed once."""

    def everything(codec: Codec, audio_BT: jax.Array, lengths_B: jax.Array | None):
        limited = [codec.encode(audio_BT, lengths_B, num_quantizers=number)[0] for number in num_quantizers]
        return codec.encode(audio_BT, lengths_B), limited, _encode_stages(codec, audio_BT)

    return everything


def _whole(block: Any, x_BTC: jax.Array) -> jax.Array:
    return run_chain(block, x_BTC, None)[0] if isinstance(block, nnx.List) else block(x_BTC)


def _encode_stages(codec: Codec, audio_BT: jax.Array) -> dict[str, jax.Array]:
    """What the encode path computes on the way, by its recorded name."""
    quantizer = codec.quantizer
    audio_BT = jnp.pad(audio_BT, ((0, 0), (0, -audio_BT.shape[1] % codec.config.samples_per_frame)))
    encoded = codec.encoder(audio_BT[..., None])
    shrunk = quantizer.shrink(encoded)
    z = quantizer.pre_module(shrunk)
    found = quantizer.quantize(z)
    semantic, rest = quantizer.books()[0], quantizer.books()[1:]
    residual = sum((book.lookup(found.codes_BKT[:, i]) for i, book in enumerate(rest, start=1)), jnp.zeros_like(z))
    return {
        "encoder_out": encoded,
        "downsample_out": shrunk,
        "pre_module_out": z,
        "semantic_zq": semantic.lookup(found.codes_BKT[:, 0]),
        "residual_zq": residual,
        "latents": found.latents_BTE,
        "quantizer_z": quantizer.expand(quantizer.post_module(found.z_q_BTC), None)[0],
        "code_margin": _margins(codec, found.latents_BTE),
    }


def _margins(codec: Codec, latents_BTE: jax.Array) -> jax.Array:
    """Gap of the squared distance between unit vectors to the runner-up entry, per code: (B, K, T)."""
    books = codec.quantizer.books()
    margins = []
    for book, latent in zip(books, jnp.split(latents_BTE, len(books), axis=-1), strict=True):
        best = jax.lax.top_k(book.similarity(latent), 2)[0]
        margins.append(2 * (best[..., 0] - best[..., 1]))
    return jnp.stack(margins, axis=1)


def _decode_stages(codec: Codec, codes_BKT: jax.Array) -> dict[str, jax.Array]:
    """What the decode path computes on the way, by its recorded name."""
    quantizer = codec.quantizer
    z = quantizer.lookup(codes_BKT)
    after = quantizer.post_module(z)
    decoder_in = quantizer.expand(after, None)[0]
    return {
        "decode_zq": z,
        "decode_post_module_out": after,
        "decoder_in": decoder_in,
        "waveform": codec.decoder(decoder_in)[..., 0],
    }
