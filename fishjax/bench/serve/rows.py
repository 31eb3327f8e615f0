"""From calls to a row of figures: percentiles with counts, and rates inside the measured time. Knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .call import OK, Call
from .drive import Seen

REFUSED = "RESOURCE_EXHAUSTED"


def make_row(
    seen: Seen, about: dict[str, Any], *, num_slots: int, gpu_price: float | None, lane: str = "real"
) -> dict[str, Any]:
    """Figures of a load; calls that begin in its measured time are heard out, frames count until its end.

    `about` says which load. Latencies and refusals are those of `lane`; rates and utilisation those of all.
    `cost_per_hour_of_audio` is in the currency of `gpu_price`, which is per hour of what the server runs on.
    """
    from_s, to_s = seen.from_s, seen.to_s
    seconds = to_s - from_s
    calls = [call for call in seen.calls if call.lane == lane and from_s <= call.called_s < to_s]
    heard = [call for call in calls if call.status == OK and call.arrivals]
    refused = [call for call in calls if call.status == REFUSED]
    frames, audio_s = _made(seen.calls, from_s, to_s)
    busy = [busy for when_s, busy, _ in seen.looks if from_s <= when_s < to_s]
    ttfa_ms = [1000 * call.ttfa_s for call in heard]
    underrun_ms = [1000 * call.underrun_s for call in heard]
    audio_rate = audio_s / seconds
    return about | {
        "slots": num_slots,
        "seconds": round(seconds, 3),
        "calls": len(calls),
        "heard": len(heard),
        "ttfa_ms_p50": percentile(ttfa_ms, 50),
        "ttfa_ms_p95": percentile(ttfa_ms, 95),
        "ttfa_ms_p99": percentile(ttfa_ms, 99),
        "frames_per_s": round(frames / seconds, 2),
        "audio_s_per_s": round(audio_rate, 3),
        "underrun_ms_p95": percentile(underrun_ms, 95),
        "continuity": _share([value == 0 for value in underrun_ms]),
        "rejected": len(refused),
        "rejected_ms_p95": percentile([1000 * (call.ended_s - call.called_s) for call in refused], 95),
        "rejected_with_hint": _share([call.retry_ms is not None for call in refused]),
        "failed": sum(call.status not in (OK, REFUSED) for call in calls),
        "broken": sum(call.status == OK and bool(call.problem) for call in calls),
        "slot_utilisation": round(float(np.mean(busy)) / num_slots, 4) if busy else None,
        "cost_per_hour_of_audio": None if gpu_price is None or not audio_rate else round(gpu_price / audio_rate, 5),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` percent do not exceed; None of nothing."""
    return round(float(np.percentile(values, share, method="inverted_cdf")), 3) if len(values) else None


def calls_per_s(seen: Seen) -> float:
    """Calls that ended well in the measured time, a second."""
    ended = sum(call.status == OK and seen.from_s <= call.ended_s < seen.to_s for call in seen.calls)
    return ended / (seen.to_s - seen.from_s)


def _made(calls: Sequence[Call], from_s: float, to_s: float) -> tuple[int, float]:
    """Frames and seconds of sound that came in a time."""
    frames = [sum(n for when_s, n in call.arrivals if from_s <= when_s < to_s) for call in calls]
    seconds = [n * call.frame_s for n, call in zip(frames, calls, strict=True) if n]
    return sum(frames), sum(seconds)


def _share(values: Sequence[bool]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None
