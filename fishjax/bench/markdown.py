"""Tables as Markdown writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """A row of names, and cells below them; columns in `words` stand left, the others, of figures, right."""
    rule = "|" + "".join("---|" if column in words else "---:|" for column in range(len(head)))
    return "\n".join([_row(head), rule, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
