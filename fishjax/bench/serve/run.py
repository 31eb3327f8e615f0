"""The suite from end to end: servers, loads, rows, the document."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishjax.bench.header import busy_note, make_header, see_gpu
from fishjax.client import Client
from fishjax.config import Fused

from . import loads
from .drive import Seen, drive, num_processes
from .plan import Requests
from .rows import calls_per_s, make_row
from .server import ServerProcess, look_at_device
from .tables import row_name
from .verdict import Thresholds
from .voice import CLIP_TEXT, VOICE_ID, first_requests

METHOD = (
    "A server process on the loopback and processes of grpc.aio callers on the same machine, each text once. "
    "closed: callers who call again when their speech has arrived; poisson, bursty: calls at drawn times, bursty ones "
    "in the first half of every 4 s. ttfa_ms: at the caller, from the call to the first byte of sound. underrun_ms: "
    "silence in a stream for a listener who plays as sound arrives; continuity: share of streams without any. The "
    "first fifth of a load is not measured; calls that begin after it are heard out, frames count until its end. "
    "slot_utilisation: mean of busy slots, looked at every 50 ms. rejected_ms: from the call to RESOURCE_EXHAUSTED. "
    "first: the first request after the start; next: five like it."
)
_REQUESTS_PER_LOAD = 30_000


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured. `slots`: one server each; a concurrency goes to the smallest that has so many slots.

    `address`: a server that runs already, instead. `gpu_price`: an hour of what the server runs on.
    """

    slots: tuple[int, ...]
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    bursty: bool
    seconds: float
    voices: str
    seed: int
    max_frames: int | None
    gpu_price: float | None
    batch_lane: bool
    check: bool
    address: str | None
    model: Path | None
    precision: str | None
    max_len: int | None
    fused: Fused | None


def device_seen(address: str | None) -> dict[str, Any]:
    """This machine's device and versions; of a server elsewhere nothing is known."""
    if address is None:
        return look_at_device()
    return {"platform": "unknown", "device": "server-elsewhere", "versions": {}, "precision": "as served"}


def server_options(suite: Suite, num_slots: int, *more: str) -> list[str]:
    """Arguments of `python -m serving`."""
    named = {"--model": suite.model, "--precision": suite.precision, "--max-len": suite.max_len, "--slots": num_slots}
    flags = ["--fused", suite.fused] if suite.fused else []
    return [*(str(part) for name, value in named.items() if value is not None for part in (name, value)), *flags, *more]


class Measuring:
    """One run of a suite; rows gather in `rows`, starts of servers in `starts`, which rows count from 1 as `server`."""

    def __init__(self, suite: Suite, seen: dict[str, Any], thresholds: Thresholds, say: Callable[[str], None]):
        self.rows: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self._note = busy_note()
        self._suite, self._seen, self._thresholds, self._say = suite, seen, thresholds, say
        self._firsts = itertools.count(0, _REQUESTS_PER_LOAD)
        policy = suite.precision or ("as converted" if suite.model else seen["precision"])
        self._about = {"server": 0, "policy": policy, "voices": suite.voices}

    def run(self) -> dict[str, Any]:
        """Measure everything; the document."""
        suite = self._suite
        if suite.address is not None:
            with Client(suite.address) as client:
                num_slots = client.server_info().num_slots
            self._measure_server(suite.address, num_slots, suite.concurrency, last=True)
        else:
            sizes = sorted(set(suite.slots))
            for num_slots in sizes:
                mine = [c for c in suite.concurrency if _home(c, sizes) == num_slots]
                with self._server(num_slots) as server:
                    self._measure_server(server.address, num_slots, mine, last=num_slots == sizes[-1])
            if suite.check:
                self._measure_overload(sizes[-1])
        return self._document()

    @contextlib.contextmanager
    def _server(self, num_slots: int, *more: str) -> Iterator[ServerProcess]:
        self._say(f"starting a server of {num_slots} slots")
        with ServerProcess(server_options(self._suite, num_slots, *more)) as server:
            self.starts.append({"slots": num_slots, "start_s": round(server.start_s, 2)})
            self._about["server"] = len(self.starts)
            yield server

    def _measure_server(self, address: str, num_slots: int, concurrency: Any, *, last: bool) -> None:
        suite = self._suite
        with self._requests(address, num_slots) as requests:
            for callers in sorted(concurrency):
                self._put(address, num_slots, loads.closed(requests, callers, suite.seconds, next(self._firsts)))
            if not last:
                return
            for rate in suite.rates:
                load = loads.opened(requests, rate, suite.seconds, next(self._firsts), num_slots, bursty=suite.bursty)
                self._put(address, num_slots, load)
            if suite.batch_lane:
                self._measure_lane(address, num_slots, requests)
            if suite.check:
                crowd, crowd_s = loads.CALLERS_PER_SLOT * num_slots, self._thresholds.crowd_seconds
                for loop, callers, seconds in (("crowd", crowd, crowd_s), ("after crowd", 1, suite.seconds)):
                    self._put(address, num_slots, loads.closed(requests, callers, seconds, next(self._firsts), loop))

    def _measure_lane(self, address: str, num_slots: int, requests: Requests) -> None:
        suite = self._suite
        full = loads.closed(requests, num_slots, suite.seconds, next(self._firsts), "full")
        whole = self._put(address, num_slots, full)
        real = dataclasses.replace(requests, priority="REALTIME")
        rate = loads.LANE_SHARE * calls_per_s(whole)
        alone = loads.opened(
            real, rate, suite.seconds, next(self._firsts), num_slots, bursty=True, loop="lane, real alone"
        )
        self._put(address, num_slots, alone)
        fill = dataclasses.replace(requests, priority="BATCH")
        self._put(address, num_slots, loads.lane(alone, fill, num_slots, next(self._firsts)))

    def _measure_overload(self, num_slots: int) -> None:
        """Twice what a server can do, at one whose queue has no places: admitted streams are as quick as ever."""
        with (
            self._server(num_slots, "--max-queue", "0") as server,
            self._requests(server.address, num_slots) as requests,
        ):
            whole = loads.closed(requests, num_slots, self._suite.seconds, next(self._firsts), "no queue")
            rate = loads.OVERLOAD * calls_per_s(self._put(server.address, num_slots, whole))
            first = next(self._firsts)
            over = loads.opened(
                requests, rate, self._suite.seconds, first, 4 * num_slots, bursty=False, loop="overload"
            )
            self._put(server.address, num_slots, over)

    @contextlib.contextmanager
    def _requests(self, address: str, num_slots: int) -> Iterator[Requests]:
        suite = self._suite
        with tempfile.TemporaryDirectory(prefix="fishjax-bench-") as folder:
            clip = Path(folder) / "clip.wav"
            calls = first_requests(address, clip)
            if suite.address is None:
                for loop, some in (("first", calls[:1]), ("next", calls[1:])):
                    about = self._about | {"loop": loop, "concurrency": 1, "rate": None, "voices": "none"}
                    seen = Seen(some, [], some[0].called_s, some[-1].ended_s)
                    self.rows.append(make_row(seen, about, num_slots=num_slots, gpu_price=None))
            cold = suite.voices == "cold"
            yield Requests(
                suite.seed,
                voice_id="" if cold else VOICE_ID,
                clip=str(clip) if cold else "",
                transcript=CLIP_TEXT,
                max_frames=suite.max_frames,
            )

    def _put(self, address: str, num_slots: int, load: loads.NamedLoad) -> Seen:
        about = self._about | load.about
        self._say(f"{row_name(about)}: {load.load.seconds:g} s at {num_slots} slots")
        seen = asyncio.run(drive(address, load.load, load.width))
        self.rows.append(make_row(seen, about, num_slots=num_slots, gpu_price=self._suite.gpu_price))
        return seen

    def _document(self) -> dict[str, Any]:
        suite, seen = self._suite, self._seen
        gpu = see_gpu() if seen["platform"] == "gpu" else None
        header = make_header("serve", seen["device"], seen["versions"], gpu, [self._note], METHOD)
        load = {
            "model": suite.model.resolve().name if suite.model else ("as served" if suite.address else "minnow"),
            "max_len": suite.max_len,
            "fused": suite.fused,
            "prompts": "unique",
            "seed": suite.seed,
            "max_frames": suite.max_frames,
            "gpu_price": suite.gpu_price,
            "caller_processes_at_most": num_processes(max([*suite.concurrency, *suite.slots, 1])),
        }
        return {"header": header, "load": load, "starts": self.starts, "rows": self.rows}


def _home(callers: int, sizes: list[int]) -> int:
    return next((size for size in sizes if size >= callers), sizes[-1])
