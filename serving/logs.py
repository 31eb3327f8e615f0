"""The only place that configures logging: one line a record, as text or as JSON, with the request it belongs to.

The end of each call is a record of figures; as JSON they are fields of the line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

_FIGURES = "figures"
_request_id: ContextVar[str] = ContextVar("request_id", default="-")


class Level(StrEnum):
    """The least level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@contextmanager
def request(request_id: str) -> Iterator[None]:
    """Records made inside, in this task, carry the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def configure(level: Level = Level.INFO, *, as_json: bool = False) -> None:
    """Send the records of the whole process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(
        _JsonFormatter()
        if as_json
        else logging.Formatter("%(asctime)s %(levelname)-8s %(name)s [%(request_id)s] %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.value)
    for chatty in ("jax", "absl"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def figures(logger: logging.Logger, values: Mapping[str, str | float]) -> None:
    """Log what a call came to: names and values, rounded to tenths."""
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in values.items()}
    words = ", ".join(f"{name} {value}" for name, value in rounded.items())
    logger.info("call ended: %s", words, extra={_FIGURES: rounded})


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = _request_id.get()
    return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
            **getattr(record, _FIGURES, {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
