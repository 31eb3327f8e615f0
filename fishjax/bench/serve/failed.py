"""What ends a measurement."""

from __future__ import annotations

from fishjax.errors import FishjaxError


class MeasurementFailed(FishjaxError):
    """A server did not come up, or a process of callers ended badly or did not end."""
