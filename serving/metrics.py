"""What the server counts, for Prometheus. Each server has a registry of its own and passes this object down.

Names are `fishjax_<what>_<unit>`. Nothing here knows a caller, a text or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .address import check_free
from .contract import Voices

_WAIT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP_BUCKETS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.0464, 0.1, 0.25, 1)
_LOOPBACK = "127.0.0.1"
_FACTOR_BUCKETS = (0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 8, 12, 20)


def check_port(port: int) -> None:
    """Raises InvalidRequest when metrics cannot have the port."""
    check_free(_LOOPBACK, port, " for metrics")


class _VoiceCounts(Collector):
    """What the engine itself counts of snapshots of voices."""

    def __init__(self, voices: Voices):
        self._voices = voices

    def collect(self) -> Iterator[Metric]:
        """One value each."""
        voices = self._voices
        yield CounterMetricFamily("fishjax_voice_hits", "Prompts whose voice was copied, not read", voices.hits)
        yield CounterMetricFamily("fishjax_voice_misses", "Prompts whose voice had to be read", voices.misses)
        yield GaugeMetricFamily("fishjax_voice_bytes", "Device memory of the voices kept", voices.num_bytes)


class Metrics:
    """Counters and histograms; they may be used from any thread. `priority` is the name of a class."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "fishjax_requests",
            "Calls that ended, by the reason that speech ended for, 'ok', or the status",
            ["rpc", "outcome"],
            registry=registry,
        )
        self.first_sound = Histogram(
            "fishjax_time_to_first_sound_seconds",
            "From a call's arrival until its first sound was handed to the network",
            ["rpc", "priority"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self.queue_wait = Histogram(
            "fishjax_queue_wait_seconds",
            "From a call's arrival until it had a slot; reading its clips included, and live the first sentence",
            ["rpc", "priority"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self.real_time_factor = Histogram(
            "fishjax_real_time_factor_ratio",
            "Seconds of sound made in a second, from getting a slot to the end",
            ["priority"],
            buckets=_FACTOR_BUCKETS,
            registry=registry,
        )
        self.underruns = Counter(
            "fishjax_underruns",
            "Times that a listener who plays sound as it arrives ran dry",
            ["priority"],
            registry=registry,
        )
        self.preemptions = Counter(
            "fishjax_preemptions", "Times that a BATCH request gave its slot up", registry=registry
        )
        self.step = Histogram(
            "fishjax_step_seconds",
            "From one step's frames to the next one's, prompts read between them included",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.sound = Counter("fishjax_sound_seconds", "Sound made", registry=registry)
        self._busy = Gauge("fishjax_busy_slots", "Slots with a request", registry=registry)
        self._waiting = Gauge("fishjax_waiting_requests", "Requests without a slot", registry=registry)

    def watch(self, load: Callable[[], tuple[int, int]], voices: Voices) -> None:
        """Read busy slots and waiting requests from `load`, and `voices`, whenever somebody asks."""
        self._busy.set_function(lambda: load()[0])
        self._waiting.set_function(lambda: load()[1])
        self.registry.register(_VoiceCounts(voices))

    def serve(self, port: int) -> tuple[int, Callable[[], None]]:
        """Answer `GET /metrics` on this machine's loopback; returns the port (0: a free one) and how to stop.

        Raises InvalidRequest when the port cannot be had.
        """
        check_port(port)
        httpd, thread = start_http_server(port, _LOOPBACK, self.registry)

        def stop() -> None:
            httpd.shutdown()
            httpd.server_close()
            thread.join()

        return httpd.server_port, stop
