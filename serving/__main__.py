"""`python -m serving`: load a model, serve it until SIGTERM or Ctrl-C, then drain.

Exit codes: 0 stopped when told to, 1 the engine failed (the process ends so that it can be started anew), 2 usage.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fishjax.config import Fused
from fishjax.errors import FishjaxError

from . import logs
from .config import ServerConfig
from .contract import Speech
from .options_file import read_options
from .server import build, check

logger = logging.getLogger(__name__)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_DEFAULT = ServerConfig()


@app.command(context_settings={"auto_envvar_prefix": "FISHJAX"})
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of these options: max-queue = 8; environment and command line go before it",
            show_default="none",
            is_eager=True,  # before the options whose defaults it sets
            callback=read_options,
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model folder", show_default="minnow, which ships")] = None,
    slots: Annotated[int, typer.Option(help="Requests spoken at once; 1 is the low-latency server", min=1)] = 4,
    max_len: Annotated[int, typer.Option(help="Positions of a slot: prompt columns and frames", min=16)] = 1024,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: the network")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="0: a free one", min=0, max=65535)] = _DEFAULT.port,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16, or per module: slow=fp8,fast=bf16,head=bf16,kv=fp8,codec=bf16",
            show_default="as converted, else fp32 on a CPU, bf16 on a GPU",
        ),
    ] = None,
    fused: Annotated[
        Fused | None,
        typer.Option(
            help="Transformers that step through kernels of many operations each",
            show_default="where they come first on this chip and know the model",
        ),
    ] = None,
    voice_memory: Annotated[
        int, typer.Option(help="MiB of device memory for voices that were read: they are copied, not read again", min=0)
    ] = 512,
    max_queue: Annotated[
        int, typer.Option(help="REALTIME requests that may wait for a slot, and as many STANDARD ones", min=0)
    ] = _DEFAULT.max_queue,
    max_batch_queue: Annotated[
        int, typer.Option(help="BATCH requests that may wait for a slot", min=0)
    ] = _DEFAULT.max_batch_queue,
    drain: Annotated[float, typer.Option(help="Seconds for running requests at the end", min=0)] = _DEFAULT.drain_s,
    slow_reader: Annotated[
        float, typer.Option(help="Seconds a caller may fall behind its speech before it is cut off", min=0.1)
    ] = _DEFAULT.slow_reader_s,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="JSON file of hashed keys: python -m serving.keys", show_default="none needed"),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate with its chain", show_default="no encryption")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM certificates; callers must show one that these have signed")
    ] = None,
    voices: Annotated[
        Path | None, typer.Option(help="Folder of stored voices", show_default="none; voices go with the process")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of Prometheus metrics on 127.0.0.1; 0: a free one", show_default="none", min=0, max=65535
        ),
    ] = None,
    compile_cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of compiled programs for the next start",
            show_default="JAX_COMPILATION_CACHE_DIR, else fishjax/compiled in the user's cache folder",
        ),
    ] = None,
    log_level: Annotated[logs.Level, typer.Option(help="Least level to log", case_sensitive=False)] = logs.Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON document a line")] = False,
) -> None:
    """Serve speech over gRPC (fishjax.rpc.v1.Tts, health, reflection)."""
    logs.configure(log_level, as_json=log_json)
    settings = ServerConfig(
        host=host,
        port=port,
        metrics_port=metrics_port,
        api_keys=api_keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        voices=voices,
        max_queue=max_queue,
        max_batch_queue=max_batch_queue,
        drain_s=drain,
        slow_reader_s=slow_reader,
    )
    check(settings)  # mistakes that need no model to be seen are told before one is loaded
    from fishjax.engine.compile_cache import default_folder, keep_compiled
    from fishjax.engine.engine import sound_group_for
    from fishjax.engine.xla_flags import set_xla_flags
    from fishjax.speech import load

    set_xla_flags()
    keep_compiled(compile_cache or default_folder())
    speech = load(
        model,
        num_slots=slots,
        max_len=max_len,
        precision=precision,
        voice_bytes=voice_memory * 2**20,
        sound_group=sound_group_for(slots),
        fused=fused,
        progress=logger.info,
        warm=False,
    )
    logger.info("device memory for %d slots of %d positions: %s", slots, max_len, speech.engine.memory)
    raise typer.Exit(asyncio.run(run(speech, settings)))


async def run(speech: Speech, config: ServerConfig) -> int:
    """Serve until a signal or a failure; returns the exit code. A second signal ends without draining."""
    server = build(speech, config)
    told_to_stop, in_a_hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (in_a_hurry if told_to_stop.is_set() else told_to_stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await server.start()
    failed = asyncio.create_task(server.failed())
    await _first(failed, asyncio.create_task(told_to_stop.wait()))
    if failed.done():
        logger.critical("ending in %g s, because the engine failed", config.failure_linger_s)
        await _first(asyncio.create_task(told_to_stop.wait()), timeout_s=config.failure_linger_s)
        await server.stop(drain_s=0)
        return 1
    logger.info("stopping; running requests have %g s", config.drain_s)
    stopping = asyncio.create_task(server.stop())
    hurry = asyncio.create_task(in_a_hurry.wait())
    await _first(stopping, hurry, cancel=False)
    if not stopping.done():
        await server.stop(drain_s=0)
    hurry.cancel()
    await stopping
    failed.cancel()
    return 0


async def _first(*tasks: asyncio.Task, timeout_s: float | None = None, cancel: bool = True) -> None:
    """Wait for the first of some tasks, or for a time; with `cancel`, give up those that are not done."""
    _, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if cancel:
        for task in pending:
            task.cancel()


def main() -> None:
    """Run the command line; errors that fishjax raises on purpose become one sentence and exit code 2."""
    try:
        app()
    except FishjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
