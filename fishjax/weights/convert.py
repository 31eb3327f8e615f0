"""A published model folder -> a converted one: renamed, quantised and laid out once, restored fast ever after.

Tensor by tensor: one weight is read, quantised and written before the next one is read. The result is written beside
OUT, as OUT.partial, and gets its name when it is whole; a conversion that fails leaves nothing that loads.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fishjax.config import SpeechProfile
from fishjax.errors import WeightsError
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.assign import parameters
from fishjax.weights.checkpoint import LazyArray, lazy_leaves, save_module, write_tree
from fishjax.weights.files import StoredTensor
from fishjax.weights.load_codec import load_codec
from fishjax.weights.model_folder import (
    CODEC,
    DESCRIPTION,
    DUAL_AR,
    PROFILE,
    TOKENIZER,
    Description,
    ModelFolder,
    check_match,
    open_model_folder,
    public_tensors,
)
from fishjax.weights.precision import Precision
from fishjax.weights.quantize import encode, formats
from fishjax.weights.tiktoken_convert import write_tokenizer_json

_WRITTEN = {DESCRIPTION, TOKENIZER, PROFILE, DUAL_AR, CODEC}


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did. `peak_rss_bytes` is the most memory the process has held since it started."""

    num_tensors: int
    num_parameters: int
    bytes_in: int
    bytes_out: int
    seconds: float
    peak_rss_bytes: int


def convert(
    src: Path | str, out: Path | str, precision: Precision, progress: Callable[[str], None] | None = None
) -> ConvertReport:
    """Convert the published folder `src` into `out`. `progress` hears, in words, how far it is.

    `out` may not exist yet, be empty, or be an earlier result of this function, which is replaced. Raises WeightsError
    when it is anything else, when `src` is not whole (every faulty tensor is named), is converted already, or has a
    Linear that does not suit `precision`.
    """
    started = time.perf_counter()
    say = progress or (lambda _: None)
    source, out = open_model_folder(src), Path(out)
    if source.kind == "converted":
        raise WeightsError(f"{source.path} is converted already: convert the published folder that it was made from")
    unfinished = out.absolute().with_name(out.absolute().name + ".partial")
    _check_writable(out, source.path)
    _check_ours(unfinished)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    try:
        unfinished.mkdir(parents=True)
        num_tensors, num_parameters = _write(source, unfinished, precision, say)
        bytes_out = _size(unfinished)
        _put_in_place(unfinished, out)
    except OSError as error:
        raise WeightsError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ConvertReport(
        num_tensors=num_tensors,
        num_parameters=num_parameters,
        bytes_in=sum(_source_files(source).values()),
        bytes_out=bytes_out,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=_peak_rss(),
    )


def _write(source: ModelFolder, folder: Path, precision: Precision, say: Callable[[str], None]) -> tuple[int, int]:
    """Everything that a converted folder holds; (tensors, numbers in them). The description comes last."""
    config, model, tensors = public_tensors(source.path, precision)
    codec_place = source.codec
    profile = source.path / PROFILE
    if profile.exists():
        SpeechProfile.from_file(profile)
        shutil.copyfile(profile, folder / PROFILE)
    if (source.path / "tokenizer.json").exists():
        shutil.copyfile(source.tokenizer, folder / TOKENIZER)
    else:
        write_tokenizer_json(source.path, folder / TOKENIZER)
    Tokenizer.from_file(folder / TOKENIZER)

    # The codec first and whole (it is small): it is gone before the model's first tensor is read.
    say(f"codec: reading {codec_place.name}")
    codec_config, codec = load_codec(codec_place, precision.codec_dtype)
    check_match(config, codec_config, source.path)
    sizes = {"codec": [math.prod(v.shape) for v in parameters(codec).values()]}
    save_module(folder / CODEC, codec)
    del codec

    variables = parameters(model)
    sizes["dual_ar"] = [math.prod(v.shape) for v in variables.values()]
    leaves: dict[str, LazyArray] = {}
    for number, (path, word) in enumerate(formats(model, precision).items(), start=1):
        make = partial(_make, tensors[path], word, f"{number}/{len(variables)} {path}", say)
        leaves |= lazy_leaves(path, variables[path].get_value(), make)
    write_tree(folder / DUAL_AR, leaves)

    Description(
        model=config,
        codec=codec_config,
        precision=precision,
        source=_source_files(source),
        num_tensors={name: len(counts) for name, counts in sizes.items()},
    ).write(folder / DESCRIPTION)
    return sum(map(len, sizes.values())), sum(map(sum, sizes.values()))


def _make(tensor: StoredTensor, word: str, name: str, say: Callable[[str], None]):
    say(name)
    return encode(tensor.read(), word)


def _check_writable(out: Path, source: Path) -> None:
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise WeightsError(f"OUT ({out}) and SRC ({source}) must be two folders, neither inside the other")
    if out.exists() and not out.is_dir():
        raise WeightsError(f"{out} is a file: choose a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        if not (out / DESCRIPTION).exists():
            raise WeightsError(f"{out} is not empty and was not made by convert: choose another folder or empty it")
        _check_ours(out)


def _check_ours(folder: Path) -> None:
    """A folder may be deleted only when all it holds are names that a conversion writes."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise WeightsError(f"{folder} is in the way: remove it")
    # Orbax writes a tree as NAME.orbax-checkpoint-tmp...; one may be left by a conversion that was killed.
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name.split(".orbax-")[0] not in _WRITTEN)
    if foreign:
        raise WeightsError(f"{folder} holds '{foreign[0]}', which convert did not write: choose another folder")


def _put_in_place(unfinished: Path, out: Path) -> None:
    """Rename; an earlier result stays until the new one is whole, and comes back when renaming fails."""
    earlier = None
    if out.exists():
        if any(out.iterdir()):
            earlier = out.absolute().with_name(f"{out.absolute().name}.old-{os.getpid()}")
            out.rename(earlier)
        else:
            out.rmdir()
    try:
        unfinished.rename(out)
    except OSError:
        if earlier:
            earlier.rename(out)
        raise
    if earlier:
        shutil.rmtree(earlier)


def _source_files(source: ModelFolder) -> dict[str, int]:
    """Name relative to the folder -> bytes, of the files that a published model may consist of."""
    files: dict[str, int] = {}
    for pattern in ("*.json", "*.safetensors", "*.pth", "*.tiktoken", f"{CODEC}/*.json", f"{CODEC}/*.safetensors"):
        for path in sorted(source.path.glob(pattern)):
            files[path.relative_to(source.path).as_posix()] = path.stat().st_size
    return files


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB
