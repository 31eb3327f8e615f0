"""Everything that can be set about a server, checked once. The slots and their length belong to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fishjax.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits of a server. Raises InvalidRequest for a value out of range."""

    host: str = "127.0.0.1"  # this machine only; 0.0.0.0 opens the server to the network
    port: int = 50051  # 0: a free one
    metrics_port: int | None = None  # of HTTP on the loopback; 0: a free one; None: no metrics are served
    tls_cert: Path | None = None  # PEM, with the chain; None: no encryption
    tls_key: Path | None = None  # PEM
    tls_client_ca: Path | None = None  # PEM; with it callers must show a certificate that it has signed
    api_keys: Path | None = None  # see `keys.py`; None: anybody who reaches the port may call
    voices: Path | None = None  # folder of stored voices; None: they are gone when the server ends
    max_queue: int = 64  # REALTIME requests that may wait for a slot, and as many STANDARD ones
    max_batch_queue: int = 256  # BATCH requests that may wait; those that gave their slot up come on top
    max_chunks_per_step: int = 4  # of prompts, read between two frames while every listener has sound for longer
    slow_reader_s: float = 10.0  # seconds that a reader may fall behind sound that waits for it
    max_unread_s: float = 60.0  # seconds of sound that may wait for a reader before its slot pauses
    max_silence_s: float = 60.0  # seconds that a request, or the next piece of a live text, may take to come
    drain_s: float = 30.0  # seconds that running requests have to end when the server stops
    failure_linger_s: float = 5.0  # seconds that a process whose engine failed still answers NOT_SERVING
    max_text_bytes: int = 65_536  # UTF-8
    max_references: int = 8
    max_voices: int = 1000  # that may be stored
    max_cached_bytes: int = 64 * 1024 * 1024  # of codes of reference clips, kept by content
    max_message_bytes: int = 32 * 1024 * 1024  # of a request; what the server sends is far smaller
    max_incoming_bytes: int = 512 * 1024 * 1024  # of requests on their way and of clips that are not read yet
    decode_threads: int = 2  # for reference clips and tokenising

    def __post_init__(self):
        for name in ("port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65_535:
                raise InvalidRequest(f"{name} must lie in 0..65535, not {getattr(self, name)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("tls_cert and tls_key belong together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidRequest("tls_client_ca needs tls_cert and tls_key")
        for name, low in (
            ("max_queue", 0),
            ("max_batch_queue", 0),
            ("max_chunks_per_step", 1),
            ("max_text_bytes", 1),
            ("max_references", 0),
            ("max_voices", 0),
            ("max_cached_bytes", 0),
            ("max_message_bytes", 1024),
            ("decode_threads", 1),
        ):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.max_incoming_bytes < self.max_message_bytes:
            raise InvalidRequest(
                f"max_incoming_bytes must be at least max_message_bytes, {self.max_message_bytes}, "
                f"not {self.max_incoming_bytes}"
            )
        for name in ("slow_reader_s", "max_unread_s", "max_silence_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0 seconds, not {getattr(self, name)}")
        for name in ("drain_s", "failure_linger_s"):
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} must be at least 0 seconds, not {getattr(self, name)}")
