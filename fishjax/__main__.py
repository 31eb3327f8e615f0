"""The command line: `python -m fishjax say | serve | convert | verify`.

Human text goes to stderr. With `--json` the last line of stdout is one JSON document. Exit codes: 0 ok,
1 failed (a check was out), 2 usage (what was asked cannot be done; one sentence says why).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fishjax.errors import FishjaxError, InvalidRequest
from fishjax.status_line import StatusLine

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Text to speech on JAX."
)

_WORDS = "fp32, bf16, fp8 or mxfp8 for all matmuls, or per module: slow=fp8,fast=bf16,head=bf16,kv=fp8,codec=bf16"
_MODELS_OWN = "the model's own"
# Package -> the extra of fishjax that brings it.
_EXTRAS = {"grpc": "serve", "grpc_health": "serve", "grpc_reflection": "serve", "soundfile": "audio", "soxr": "audio"}

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Model folder", show_default="minnow, which ships with fishjax")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line of stdout")]


@app.command()
def say(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to say")],
    output: Annotated[Path, typer.Option("-o", "--output", help="WAV file to write")] = Path("out.wav"),
    voice: Annotated[
        Path | None, typer.Option(help="A clip of the voice to follow, 0.2 s to 60 s: WAV, FLAC, MP3 or OGG")
    ] = None,
    voice_text: Annotated[str | None, typer.Option(help="What is said in the clip; goes with --voice")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same speech", min=0, max=2**32 - 1)] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 < t < 2", show_default=_MODELS_OWN)] = None,
    top_p: Annotated[float | None, typer.Option(help="0 < p <= 1", show_default=_MODELS_OWN)] = None,
    top_k: Annotated[int | None, typer.Option(help="At least 1; 1 is greedy", show_default=_MODELS_OWN)] = None,
    max_frames: Annotated[
        int | None, typer.Option(help="Stop after so many frames of 46 ms", show_default="as many as the text needs")
    ] = None,
    max_len: Annotated[int, typer.Option(help="Room for one prompt and its speech, in columns and frames")] = 1024,
    model: ModelOption = None,
    precision: Annotated[
        str | None, typer.Option(help=_WORDS, show_default="as converted, else fp32 on a CPU, bf16 on a GPU")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Speak TEXT into a WAV file."""
    from fishjax.audio.encode import write_wav
    from fishjax.engine.compile_cache import default_folder, keep_compiled
    from fishjax.engine.sampling_params import SamplingParams
    from fishjax.engine.xla_flags import set_xla_flags
    from fishjax.speech import load

    # Everything that can be wrong is looked at before the model is loaded and compiled.
    if not text.strip():
        raise InvalidRequest("there is no text to say: TEXT is empty")
    _check_output(output)
    asked: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_frames": max_frames}
    asked = {name: value for name, value in asked.items() if value is not None} | {"seed": seed}
    SamplingParams(**asked)
    clip = _read_clip(voice, voice_text)

    started = time.perf_counter()
    set_xla_flags()
    keep_compiled(default_folder())
    with StatusLine() as status:
        speech = load(model, num_slots=1, max_len=max_len, precision=precision, progress=status)
        if untaught := speech.profile.untaught(text):
            _say_to_stderr(f"this voice was not taught: {', '.join(untaught)}")
        rate_hz, samples_per_frame = speech.engine.sample_rate_hz, speech.engine.samples_per_frame
        references = [speech.reference(clip.at(rate_hz), voice_text)] if clip and voice_text else []
        utterance = speech.utterance(text, references, dataclasses.replace(speech.default_sampling(), **asked))
        ready = time.perf_counter()
        frames, first_sound = [], None
        for frame in speech.speak(utterance):
            first_sound = first_sound or time.perf_counter()
            frames.append(frame)
            status(f"speaking: {len(frames) * samples_per_frame / rate_hz:.1f} s of sound")
        done = time.perf_counter()
    if not frames or first_sound is None:
        _say_to_stderr("the model ended before its first sound: nothing was written; try another --seed")
        raise typer.Exit(1)
    try:
        write_wav(output, frames, rate_hz)
    except OSError as error:
        raise InvalidRequest(f"cannot write {output}: {error.strerror}") from error
    seconds = len(frames) * samples_per_frame / rate_hz
    result = {
        "output": str(output),
        "audio_seconds": round(seconds, 3),
        "frames": len(frames),
        "finish_reason": utterance.finish_reason.value if utterance.finish_reason else None,
        "load_seconds": round(ready - started, 3),
        "first_sound_seconds": round(first_sound - ready, 4),
        "real_time_factor": round((done - ready) / seconds, 4),
    }
    _say_to_stderr(
        f"{output}: {seconds:.2f} s of sound; first sound after {1000 * (first_sound - ready):.0f} ms; "
        f"real-time factor {(done - ready) / seconds:.2f} (loading and compiling took {ready - started:.1f} s)"
    )
    if json_output:
        print(json.dumps(result))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Public model folder: safetensors or .pth")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must be new or a converted one")],
    precision: Annotated[
        str | None, typer.Option(help=f"{_WORDS}; a module that is not named is bf16", show_default="bf16")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Convert a public model folder once: renamed, quantised by the policy, loaded fast ever after."""
    from fishjax.weights.convert import convert as run
    from fishjax.weights.precision import Precision

    # Orbax logs what each of its threads ran into, with tracebacks; our own error says it in one sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    policy = Precision.for_checkpoint(precision)
    with StatusLine() as status:
        report = run(source, out, policy, progress=status)
    _say_to_stderr(
        f"{out}: {report.num_tensors} tensors, {report.num_parameters:,} parameters, "
        f"{report.bytes_in / 1e9:.2f} GB in, {report.bytes_out / 1e9:.2f} GB out, {report.seconds:.1f} s, "
        f"at most {report.peak_rss_bytes / 1e9:.2f} GB of memory"
    )
    if json_output:
        print(json.dumps({"output": str(out), "precision": str(policy), **dataclasses.asdict(report)}))


@app.command()
def verify(
    golden_dir: Annotated[
        Path, typer.Argument(metavar="GOLDEN_DIR", help="Folder of recorded numbers, laid out like tests/golden")
    ],
    json_output: JsonOption = False,
) -> None:
    """Replay every recorded case; exit 1 when one is out of tolerance or was not compared."""
    from fishjax.verify.run import print_reports, to_json, verify_folder

    if not golden_dir.is_dir():
        raise InvalidRequest(f"there is no folder {golden_dir}: give one laid out like tests/golden")
    with StatusLine() as status:
        reports = verify_folder(golden_dir, progress=status)
    print_reports(reports)
    if json_output:
        print(json.dumps(to_json(reports)))
    if not reports or not all(report.ok for report in reports):
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(context: typer.Context) -> None:
    """Start the gRPC server; options as `python -m serving --help` tells them."""
    from serving.__main__ import app as serving_app

    serving_app(args=context.args, prog_name="python -m serving")


def _say_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _check_output(output: Path) -> None:
    """Raise InvalidRequest when a file cannot be written there."""
    folder = output.parent
    if not folder.is_dir():
        raise InvalidRequest(f"cannot write {output}: the folder {folder} does not exist")
    if output.is_dir():
        raise InvalidRequest(f"cannot write {output}: it is a folder; name a file in it")
    if not os.access(output if output.exists() else folder, os.W_OK):
        raise InvalidRequest(f"cannot write {output}: no permission; choose another place with -o")


def _read_clip(voice: Path | None, voice_text: str | None) -> Any:
    """The decoded clip of `--voice`, or None."""
    if (voice is None) != (voice_text is None):
        raise InvalidRequest("--voice and --voice-text go together: the clip, and what is said in it")
    if voice is None or voice_text is None:
        return None
    if not voice_text.strip():
        raise InvalidRequest("--voice-text is blank: write what is said in the clip")
    if not voice.is_file():
        raise InvalidRequest(f"cannot read {voice}: there is no such file")
    from fishjax.audio.read import decode

    return decode(voice.read_bytes())


def main() -> None:
    """Run the command line; a mistake of the user is one sentence and exit code 2."""
    try:
        app()
    except FishjaxError as error:
        sentence = str(error)
    except OSError as error:  # no such file, no permission, no space: the system's own words name it
        sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        sentence = f"this needs the package {error.name}: pip install 'fishjax[{_EXTRAS[error.name]}]'"
    else:
        return
    _say_to_stderr(f"error: {sentence}")
    sys.exit(2)


if __name__ == "__main__":
    main()
