"""From nothing to a WAV file through the real service: start the server, call it, write what comes, say how fast.

    python examples/demo.py --text "please open the old gate" --output hello.wav

The server is its own process on a free loopback port and is stopped at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np

import fishjax
from fishjax.audio.encode import write_wav
from fishjax.client import Client
from fishjax.config import SpeechProfile
from fishjax.status_line import StatusLine


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(client: Client, server: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Show that time passes while the server compiles; end with a sentence when it dies or takes too long."""
    started = time.monotonic()
    with StatusLine() as status:
        status("the server reads and compiles the model")
        while True:
            if server.poll() is not None:
                sys.exit(f"the server ended with exit code {server.returncode}; its own words are above")
            if time.monotonic() - started > timeout_s:
                sys.exit(f"the server was not ready after {timeout_s:.0f} s")
            try:
                client.wait_ready(timeout_s=0.5)
            except TimeoutError:
                continue
            break
    print(f"server ready after {time.monotonic() - started:.1f} s", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="please open the old gate")
    parser.add_argument("--output", type=Path, default=Path("hello.wav"))
    arguments = parser.parse_args()
    if not arguments.text.strip():
        parser.error("there is no text to say: --text is blank")
    try:
        arguments.text.encode("utf-8")
    except UnicodeEncodeError:
        parser.error("--text cannot be said: its bytes are not UTF-8")
    if not arguments.output.parent.is_dir():
        parser.error(f"cannot write {arguments.output}: the folder {arguments.output.parent} does not exist")
    profile = SpeechProfile.from_file(Path(fishjax.__file__).parent / "minnow" / "generation_config.json")
    if untaught := profile.untaught(arguments.text):
        print(f"minnow was not taught: {', '.join(untaught)}. It knows {' '.join(profile.vocabulary)}", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):  # else the server would stay
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        speak(arguments.text, arguments.output)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def server_process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with us. Ctrl-C is for us alone, and we tell it."""
    server = subprocess.Popen(command, start_new_session=True)
    try:
        yield server
    finally:
        server.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=30)
        finally:
            server.kill()  # nothing, once it has ended
            server.wait()


def speak(text: str, output: Path) -> None:
    """Start the server, let it say the text, write what comes."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "serving",
        "--slots",
        "1",
        "--port",
        address.split(":")[1],
        "--log-level",
        "warning",
    ]
    try:
        with server_process(command) as server, Client(address) as client:
            wait_until_ready(client, server, timeout_s=300)
            called = time.perf_counter()
            speech = client.synthesize(text, top_k=1)  # greedy: what is understood best
            pieces, first_sound_s = [], 0.0
            for chunk in speech:
                first_sound_s = first_sound_s or time.perf_counter() - called
                pieces.append(chunk.samples)
            total_s = time.perf_counter() - called
            rate_hz, summary = speech.header.sample_rate_hz, speech.summary
    except grpc.RpcError as error:
        sys.exit(f"the server refused: {error.details()}")  # type: ignore[attr-defined]
    if not pieces or summary is None:
        sys.exit("the model ended before its first sound")
    samples = np.concatenate(pieces)
    write_wav(output, [samples.astype(np.float32) / 32768], rate_hz)
    seconds = len(samples) / rate_hz
    print(f'said "{text}" into {output}')
    print(
        f"sound {seconds:.2f} s   first sound after {1000 * first_sound_s:.0f} ms   "
        f"real-time factor {total_s / seconds:.2f}   ({summary.num_frames} frames)"
    )


if __name__ == "__main__":
    main()
