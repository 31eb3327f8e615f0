"""The command line: `python -m fishjax say | serve | convert | verify`.

Human text goes to stderr. With `--json` the last line of stdout is one JSON document. Exit codes: 0 ok,
1 failed (a check was out), 2 usage (what was asked cannot be done; one sentence says why).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fishjax.errors import FishjaxError, InvalidRequest

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Speech on JAX.")

ModelOption = Annotated[Path | None, typer.Option("--model", help="Model folder [default: minnow, which ships]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line of stdout")]
PrecisionOption = Annotated[
    str | None,
    typer.Option(help="bf16, or per module: slow=fp8,fast=bf16,head=bf16,kv=fp8,codec=bf16 [default: fp32 on a CPU]"),
]


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say")],
    output: Annotated[Path, typer.Option("-o", "--output", help="WAV file to write")] = Path("out.wav"),
    voice: Annotated[Path | None, typer.Option(help="A clip of the voice to follow (any sound file)")] = None,
    voice_text: Annotated[str | None, typer.Option(help="What is said in the clip")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same speech", min=0, max=2**32 - 1)] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 < t < 2 [default: the model's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="0 < p <= 1 [default: the model's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="1 is greedy [default: the model's]")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Stop after so many frames of 46 ms")] = None,
    max_len: Annotated[int, typer.Option(help="Positions of the slot: prompt and frames")] = 1024,
    model: ModelOption = None,
    precision: PrecisionOption = None,
    json_output: JsonOption = False,
) -> None:
    """Speak TEXT into a WAV file."""
    from fishjax.audio.encode import write_wav
    from fishjax.audio.read import read_reference
    from fishjax.engine.sampling_params import SamplingParams
    from fishjax.speech import load

    if not text.strip():
        raise InvalidRequest("there is no text to say: TEXT is empty")
    if (voice is None) != (voice_text is None):
        raise InvalidRequest("--voice and --voice-text go together: the clip, and what is said in it")
    if not output.parent.is_dir():
        raise InvalidRequest(f"cannot write {output}: the folder {output.parent} does not exist")
    clip = _read_file(voice) if voice else None

    started = time.perf_counter()
    speech = load(model, num_slots=1, max_len=max_len, precision=precision, progress=_say_to_stderr)
    profile = speech.profile
    sampling = SamplingParams(
        profile.temperature if temperature is None else temperature,
        profile.top_p if top_p is None else top_p,
        profile.top_k if top_k is None else top_k,
        seed,
        max_frames,
    )
    references = []
    if clip is not None and voice_text is not None:
        references = [speech.reference(read_reference(clip, speech.engine.sample_rate_hz), voice_text)]
    utterance = speech.utterance(text, references, sampling)
    ready = time.perf_counter()
    frames, first_sound = [], None
    for frame in speech.speak(utterance):
        first_sound = first_sound or time.perf_counter()
        frames.append(frame)
    done = time.perf_counter()
    if not frames or first_sound is None:
        _say_to_stderr("the model ended before its first sound: nothing was written")
        raise typer.Exit(1)
    write_wav(output, frames, speech.engine.sample_rate_hz)
    seconds = len(frames) * speech.engine.samples_per_frame / speech.engine.sample_rate_hz
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
    precision: PrecisionOption = None,
    json_output: JsonOption = False,
) -> None:
    """Convert a public model folder once: renamed, quantised by the policy, restored fast ever after."""
    from fishjax.weights.convert import convert as run
    from fishjax.weights.precision import Precision

    policy = Precision.parse(precision) if precision else Precision.default()
    report = run(source, out, policy, progress=_say_to_stderr)
    _say_to_stderr(
        f"{out}: {report.num_tensors} tensors, {report.num_parameters:,} parameters, "
        f"{report.bytes_in / 1e9:.2f} GB in, {report.bytes_out / 1e9:.2f} GB out, {report.seconds:.1f} s, "
        f"at most {report.peak_rss_bytes / 1e9:.2f} GB of memory"
    )
    if json_output:
        print(json.dumps({"output": str(out), "precision": str(policy), **dataclasses.asdict(report)}))


@app.command()
def verify(
    golden_dir: Annotated[Path, typer.Argument(help="Folder of recorded numbers, laid out like tests/golden")],
    json_output: JsonOption = False,
) -> None:
    """Replay every recorded case; exit 1 when one is out of tolerance or was not compared."""
    from fishjax.verify.run import print_reports, to_json, verify_folder

    reports = verify_folder(golden_dir)
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


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def main() -> None:
    """Run the command line; errors that fishjax raises on purpose become one sentence and exit code 2."""
    try:
        app()
    except FishjaxError as error:
        _say_to_stderr(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
