"""What must not come of a soak: promises that were lost, memory that grew. Calls and figures in, sentences out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from .call import OK, Call
from .mischief import EXPECTED
from .rows import REFUSED


def judge_calls(calls: Sequence[Call]) -> list[str]:
    """A sentence for each kind of call that ended as it must not, with how often."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.problem:
            found[f"{call.does}: {call.problem}"] += 1
        if call.status == REFUSED and not call.promised:
            if call.retry_ms is None and call.does != "leaves before sound":
                found[f"{call.does}: refused with no hint when to try again"] += 1
        elif call.status not in EXPECTED[call.does]:
            found[f"{call.does}: {'promised, and then ' if call.promised else ''}{call.status}: {call.detail}"] += 1
    return [f"{what} ({count} calls)" for what, count in found.items()]


def judge_fault(calls: Sequence[Call], broken_s: float) -> list[str]:
    """The same of calls around a fault: in a step INTERNAL, else UNAVAILABLE, and somebody was in it."""
    after = [call for call in calls if call.ended_s > broken_s and call.status != OK]
    found = judge_calls([call for call in calls if call.ended_s <= broken_s or call.status == OK])
    if not any(call.status == "INTERNAL" and call.promised for call in after):
        found.append("the device broke, and no call that it spoke was told so")
    wrong = Counter(call.status for call in after if call.status not in ("INTERNAL", "UNAVAILABLE"))
    return found + [f"after the fault {count} calls ended with {status}" for status, count in wrong.items()]


def judge_memory(rss_mb: Sequence[tuple[float, float]], limits: dict[str, float]) -> list[str]:
    """A sentence if the process has grown by more than the limit since it had settled."""
    settled = [mb for when_s, mb in rss_mb if when_s >= limits["settle_seconds"]]
    if len(settled) < 2:
        return ["memory was not looked at often enough: soak longer"]
    tenth = max(1, len(settled) // 10)
    before, after = statistics.median(settled[:tenth]), statistics.median(settled[-tenth:])
    if after - before <= limits["rss_growth_mb"]:
        return []
    return [f"resident memory grew from {before:.0f} to {after:.0f} MB"]
