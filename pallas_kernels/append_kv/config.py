"""What the kernel can run: one function. It has no choices."""

from __future__ import annotations

HALF = 32
"""Rows for a slot's keys, and as many for its values: together one register tile."""
WIDTHS = (64, 128)


def can_run(G: int, d: int) -> str | None:
    """None when the kernel can write rows of G kv heads, d wide, else the reason."""
    if d not in WIDTHS:
        return f"head width {d} is not {' or '.join(map(str, WIDTHS))}"
    return None if G <= HALF else f"{G} kv heads are more than {HALF}"
