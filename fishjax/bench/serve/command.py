"""The command `serve`: options to a suite, figures to files, verdicts to an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fishjax.config import Fused
from fishjax.errors import InvalidRequest

from .. import frozen
from ..options import FreezeOption, JsonOption, OutOption


def serve(
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loops of so many callers: 1,16,64", show_default="1,4 on a CPU, 1,16,64 on a GPU"),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Open loops of so many calls a second: 2,8.5; Poisson")] = None,
    bursty: Annotated[bool, typer.Option("--bursty", help="Open loops in bursts: 2 s of calls, 2 s of none")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of each load", show_default="8 on a CPU, 30 on a GPU", min=1)
    ] = None,
    voices: Annotated[
        str, typer.Option(help="cached: a stored voice; cold: a reference clip of its own in each request")
    ] = "cached",
    slots: Annotated[
        str | None, typer.Option(help="A server of so many slots each: 1,64", show_default="4 on a CPU, 1,64 on a GPU")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model folder", show_default="minnow, which ships")] = None,
    precision: Annotated[str | None, typer.Option(help="As of python -m serving")] = None,
    max_len: Annotated[int | None, typer.Option(help="As of python -m serving")] = None,
    fused: Annotated[Fused | None, typer.Option(help="As of python -m serving", show_default="as the server")] = None,
    max_frames: Annotated[
        int | None, typer.Option(help="Frames of a request, for a model that does not stop by itself", min=1)
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port of a server that runs; else one is started")] = None,
    gpu_price: Annotated[float | None, typer.Option(help="Price of an hour of the GPU, any currency", min=0)] = None,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals")] = 0,
    batch_lane: Annotated[
        bool, typer.Option("--batch-lane", help="A bursty trace without and with BATCH requests that fill the slots")
    ] = False,
    soak: Annotated[
        float | None, typer.Option(help="Seconds of bad callers, killed ones and a broken device; nothing else", min=20)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also four times the callers, twice the capacity, the batch lane; judge all")
    ] = False,
    out: OutOption = None,
    freeze: FreezeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Load a real server with listeners: time to first sound, frames a second, underruns, cost."""
    from fishjax.status_line import StatusLine

    from .run import Measuring, Suite, device_seen
    from .server import ended_by_sigterm
    from .tables import serve_tables
    from .verdict import Thresholds, slower, unsound, verdicts

    if voices not in ("cached", "cold"):
        raise InvalidRequest(f"--voices is cached or cold, not {voices!r}")
    if address and (check or freeze or soak):
        raise InvalidRequest("--check, --freeze and --soak take a server of their own: leave --address out")
    rates = _numbers("--rate", rate, float)
    sizes, callers = _numbers("--slots", slots, int), _numbers("--concurrency", concurrency, int)
    thresholds, seen = Thresholds.read(), device_seen(address)
    kind = "gpu" if seen["platform"] == "gpu" else "cpu"
    suite = Suite(
        slots=tuple(sizes or thresholds.slots[kind]),
        concurrency=tuple(callers or ([] if rates and not check else thresholds.concurrency[kind])),
        rates=tuple(rates),
        bursty=bursty,
        seconds=seconds or thresholds.seconds[kind],
        voices=voices,
        seed=seed,
        max_frames=max_frames,
        gpu_price=gpu_price,
        batch_lane=batch_lane or check,
        check=check,
        address=address,
        model=model,
        precision=precision,
        max_len=max_len,
        fused=fused,
    )
    if freeze and soak is not None and soak < thresholds.soak["frozen_seconds"]:
        raise InvalidRequest(f"--freeze takes a soak of {thresholds.soak['frozen_seconds']:g} s or more")
    if freeze and soak is None and (missing := set(thresholds.concurrency[kind]) - set(suite.concurrency)):
        raise InvalidRequest(f"--freeze takes closed loops of {sorted(missing)} callers too: leave --concurrency out")
    if soak is not None:
        _soak(suite, soak, thresholds, seen, out, freeze, json_output)
        return
    with ended_by_sigterm(), _exit_1_if_it_fails(), StatusLine() as status:
        document = Measuring(suite, seen, thresholds, status).run()
    frozen.say(serve_tables(document))
    _write(document, out, json_output)
    found = unsound(document["rows"])
    if check:
        for sentence, holds in verdicts(document["rows"], thresholds, kind):
            frozen.say(f"{'holds' if holds else 'BROKEN'}: {sentence}")
            found += [] if holds else [sentence]
        kept = frozen.path_of("serve", seen["device"])
        before = json.loads(kept.read_text())["rows"] if kept.exists() else []
        found += slower(document["rows"], before, thresholds, kind)
    for problem in found:
        frozen.say(problem)
    if found:
        raise typer.Exit(1)
    if freeze:
        frozen.freeze(document)


def _soak(
    suite: Any,
    seconds: float,
    thresholds: Any,
    seen: dict[str, Any],
    out: Path | None,
    freeze: bool,
    as_json: bool,
) -> None:
    from fishjax.status_line import StatusLine

    from .run import server_options
    from .server import ended_by_sigterm
    from .soak import soak, to_document
    from .tables import soak_table

    num_slots = max(suite.slots)
    with ended_by_sigterm(), _exit_1_if_it_fails(), StatusLine() as status:
        found = asyncio.run(soak(server_options(suite, num_slots), num_slots, seconds, thresholds.soak, status))
    document = to_document(found, seen, seconds, num_slots)
    frozen.say(soak_table(document))
    _write(document, out, as_json)
    if found.problems:
        raise typer.Exit(1)
    if freeze:
        frozen.freeze(document)


@contextlib.contextmanager
def _exit_1_if_it_fails() -> Iterator[None]:
    import grpc

    from .failed import MeasurementFailed

    try:
        yield
    except grpc.RpcError as error:
        frozen.say(f"failed: the server answered {error.code().name}: {error.details()}")  # type: ignore[attr-defined]
        raise typer.Exit(1) from None
    except (MeasurementFailed, TimeoutError) as error:
        frozen.say(f"failed: {error}")
        raise typer.Exit(1) from None


def _write(document: dict[str, Any], out: Path | None, as_json: bool) -> None:
    if out:
        out.write_text(frozen.to_json(document))
    if as_json:
        print(json.dumps(document))


def _numbers(option: str, text: str | None, kind: type) -> list[Any]:
    if text is None:
        return []
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{option} takes numbers with commas between them, not {text!r}") from None
    if not all(number > 0 for number in numbers):
        raise InvalidRequest(f"{option} takes numbers above 0, not {text!r}")
    return numbers
