"""The server's options from a TOML file, named as on the command line without the dashes in front: `max-queue = 8`.

The command line goes before the environment (FISHJAX_MAX_QUEUE), and that before the file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import typer

from fishjax.errors import InvalidRequest


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """Let the file's values be the defaults of the command line. Raises InvalidRequest, naming what is wrong in it."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"the file of --config cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"the file of --config is not TOML: {error}") from error
    names = {option.opts[0].removeprefix("--"): option.name for option in context.command.params}
    for name, value in given.items():
        if name not in names or name in ("config", "help"):
            raise InvalidRequest(f"the file of --config sets {name!r}, which is no option of the server: see --help")
        if isinstance(value, list | dict):
            raise InvalidRequest(f"the file of --config gives {name} more than one value")
    context.default_map = {names[name]: value for name, value in given.items()}
    return path
