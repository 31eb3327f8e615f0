"""Options that several suites have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BudgetOption = Annotated[float, typer.Option("--budget", help="Start no new case after so many seconds")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="JSON file to write; kernels and step: beside a .jsonl journal and a .log")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the journal of --out: same commit, device and versions")
]
FreezeOption = Annotated[
    bool,
    typer.Option("--freeze", help="Write fishjax/bench/baselines/<device>/<suite>.json if all is well"),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Measure nothing: check --out (and --freeze it), else the frozen files")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout")]
