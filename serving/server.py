"""A server's life: bind, warm up (health NOT_SERVING), serve (SERVING), drain, stop.

server = build(speech); await server.start(); await server.ready(); ...; await server.stop()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fishjax.errors import Draining, InvalidRequest, NotReady
from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc

from .address import bare, check_free, join
from .call import GOODBYE_S, Calls
from .config import ServerConfig
from .contract import Speech
from .desk import LoopState
from .guard import Guard
from .health import Health
from .incoming import Incoming
from .keys import read_keys
from .loop import SynthesisLoop
from .mailbox import Mailbox, deliver
from .metrics import Metrics, check_port
from .references import ReferenceReader
from .scheduler import Scheduler
from .servicer import TtsServicer
from .tls import server_credentials
from .voices import VoiceStore, open_folder

logger = logging.getLogger(__name__)
SERVICE_NAME = tts_pb2.DESCRIPTOR.services_by_name["Tts"].full_name
HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_KEYLESS = {  # methods that need no key, and how many may be in each at once
    f"/{HEALTH_NAME}/Check": 64,
    f"/{HEALTH_NAME}/Watch": 32,
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": 16,
}
_OTHER_CALLS = 64 + sum(_KEYLESS.values())  # and info and calls about to be refused, beside those that have a place
_LARGEST_ANSWER_BYTES = 4 * 1024 * 1024


class Server:
    """One engine behind one port. All methods belong to one asyncio loop."""

    def __init__(self, speech: Speech, config: ServerConfig, clock: Callable[[], float]):
        self.config = config
        self.address = ""  # "host:port" once started
        self.metrics_address = ""  # of HTTP, once started, if metrics are served
        self.metrics = Metrics()
        self._speech = speech
        self._clock = clock
        self._health = Health([SERVICE_NAME, HEALTH_NAME])
        self._executor = ThreadPoolExecutor(config.decode_threads, thread_name_prefix="prepare")
        self._settled = asyncio.Event()  # the warm-up is over, for better or worse
        self._failed = asyncio.Event()
        self._grpc: grpc.aio.Server | None = None
        self._calls: Calls | None = None
        self._incoming: Incoming | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._loop: SynthesisLoop[Mailbox] | None = None
        self._stopped = False
        self._references: ReferenceReader | None = None

    async def start(self) -> None:
        """Listen, and begin to warm up.

        Raises InvalidRequest when the slots are too short to speak, and as `check` does, WeightsError for a file in the
        folder of voices that is no voice of this model.
        """
        engine, config = self._speech.engine, self.config
        check(config)
        if engine.max_len < (least := self._speech.least_max_len):
            raise InvalidRequest(
                f"--max-len must be at least {least} for this model, not {engine.max_len}: no text fits a shorter slot"
            )
        frame_s = engine.samples_per_frame / engine.sample_rate_hz
        aio = asyncio.get_running_loop()
        self._loop = SynthesisLoop(
            engine,
            Scheduler(
                engine.num_slots,
                config.max_queue,
                frame_s=frame_s,
                max_batch_queue=config.max_batch_queue,
                max_chunks_per_step=config.max_chunks_per_step,
            ),
            deliver=lambda mail: _post(aio, deliver, mail),
            on_state=lambda state: _post(aio, self._on_state, state),
            max_unread_frames=max(1, round(config.max_unread_s / frame_s)),
            metrics=self.metrics,
            clock=self._clock,
        )
        self.metrics.watch(self._loop.desk.load, engine.voices)
        keys = read_keys(config)
        calls = self._calls = Calls(keys, self.metrics, self._clock)
        incoming = self._incoming = Incoming(config.max_incoming_bytes, config.max_message_bytes)
        self._grpc = grpc.aio.server(
            interceptors=[Guard(calls, incoming, config.max_silence_s, _KEYLESS)],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", _LARGEST_ANSWER_BYTES),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not half of the callers
                ("grpc.keepalive_time_ms", 30_000),  # a peer that vanished without a word gives up its slot
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ],
            maximum_concurrent_rpcs=engine.num_slots + 2 * config.max_queue + config.max_batch_queue + _OTHER_CALLS,
        )
        voices = VoiceStore(
            config.voices,
            self._executor,
            model_name=engine.model_name,
            num_codebooks=engine.num_codebooks,
            max_voices=config.max_voices,
        )
        self._references = ReferenceReader(
            engine,
            self._loop.desk,
            self._executor,
            num_at_once=config.decode_threads,
            max_bytes=config.max_cached_bytes,
        )
        servicer = TtsServicer(
            self._speech,
            self._loop.desk,
            self._executor,
            self._references,
            voices,
            keys,
            calls,
            incoming,
            self.metrics,
            config,
            self._clock,
        )
        tts_pb2_grpc.add_TtsServicer_to_server(servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME), self._grpc)
        address, credentials = join(config.host, config.port), server_credentials(config)
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(address)
            else:
                port = self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            check_free(config.host, config.port)  # somebody may have come first
            reason = "gRPC does not take the certificate and its key" if credentials else "gRPC cannot bind it"
            raise InvalidRequest(f"cannot listen on {address}: {reason}") from error
        if credentials is None and not _is_loopback(config.host):
            logger.warning("anybody on the network can read what is said here: there is no encryption")
        self.address = join(config.host, port)
        if config.metrics_port is not None:
            metrics_port, self._stop_metrics = self.metrics.serve(config.metrics_port)
            self.metrics_address = f"127.0.0.1:{metrics_port}"
            logger.info("metrics on http://%s/metrics", self.metrics_address)
        await self._grpc.start()
        logger.info("listening on %s; warming up", self.address)
        self._loop.start()

    async def ready(self) -> None:
        """Wait for the end of the warm-up. Raises NotReady if it failed, Draining if the server was stopped."""
        await self._settled.wait()
        if self._failed.is_set():
            raise NotReady("the engine failed while warming up")
        if self._loop is None or self._loop.desk.state is not LoopState.SERVING:
            raise Draining("the server was stopped while warming up")

    async def failed(self) -> None:
        """Wait until the engine fails; the server answers NOT_SERVING from then on."""
        await self._failed.wait()

    async def stop(self, drain_s: float | None = None) -> None:
        """Take no more requests, give those that are here `drain_s` seconds (None: the configured time), end.

        Until then the port answers: new calls, and those that are left at the end, get Draining.

        A second call while the first one waits cuts its time short.
        """
        if self._loop is not None:
            self._loop.desk.drain()
        self._health.close()
        if self._calls is not None:
            await self._calls.close(self.config.drain_s if drain_s is None else drain_s)
        if self._grpc is not None:
            await self._grpc.stop(GOODBYE_S)  # for who was told just now
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)
        self._settled.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None
        if not self._stopped:
            self._stopped = True
            logger.info("stopped")

    def _on_state(self, state: LoopState) -> None:
        # Health first: whoever was told that the server is ready, or has failed, finds it so.
        self._health.set(serving=state is LoopState.SERVING)
        if state is LoopState.FAILED:
            self._failed.set()
        if state is LoopState.SERVING:
            logger.info("ready: %d slots", self._speech.engine.num_slots)
        self._settled.set()


def _is_loopback(host: str) -> bool:
    return bare(host) in ("localhost", "::1") or host.startswith("127.")


def _post(aio: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    aio.call_soon_threadsafe(function, argument)


def check(config: ServerConfig) -> None:
    """Look at all that a server needs but its model: keys, certificates, folder of voices, ports.

    Raises InvalidRequest for what is not in order.
    """
    server_credentials(config)
    read_keys(config)
    if config.voices is not None:
        open_folder(config.voices)
    check_free(config.host, config.port)
    if config.metrics_port is not None:
        check_port(config.metrics_port)


def build(speech: Speech, config: ServerConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> Server:
    """A server for a model that `fishjax.load` returned, or for anything of that shape (`serving/contract.py`)."""
    return Server(speech, config or ServerConfig(), clock)
