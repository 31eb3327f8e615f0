"""One line on stderr that says what is being done now, and for how many seconds: nobody waits in silence.

On a terminal the line is written over itself. Into a file or a pipe go whole lines, at most one every two seconds, and
one every ten seconds while a step lasts.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_REDRAW_S = 0.5
_BETWEEN_LINES_S = 2.0
_STILL_AT_IT_S = 10.0


class StatusLine:
    """`with StatusLine() as say: say("reading minnow"); ...`. Call it from any thread; at the end the line is gone."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._changed = threading.Condition()
        self._what = ""
        self._since_s = 0.0
        self._shown, self._shown_s = "", -_BETWEEN_LINES_S
        self._ended = False
        self._thread = threading.Thread(target=self._tick, name="status-line", daemon=True)

    def __call__(self, what: str) -> None:
        """From now on `what` is being done."""
        with self._changed:
            self._what, self._since_s = what, time.monotonic()
            self._show()

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if self._on_terminal:
            self._write("\r\x1b[K")

    def _tick(self) -> None:
        with self._changed:
            while not self._ended:
                self._changed.wait(_REDRAW_S)
                if self._what and not self._ended:
                    self._show()

    def _show(self) -> None:
        now_s = time.monotonic()
        seconds = int(now_s - self._since_s)
        line = f"{self._what} ({seconds} s)" if seconds else self._what
        if self._on_terminal:
            self._write(f"\r\x1b[K{line}")
        elif now_s - self._shown_s >= (_STILL_AT_IT_S if self._shown == self._what else _BETWEEN_LINES_S):
            self._write(f"{line}\n")
            self._shown, self._shown_s = self._what, now_s

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
