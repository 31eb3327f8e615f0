"""One stage of training, start to finish: unpack what was carried, make the corpus in the background, train.

    python3 -m tools.minnow.stage codec   [--carry DIR] [--work DIR] [-- options of train_codec]
    python3 -m tools.minnow.stage dual_ar [--carry DIR] [--work DIR] [-- options of train_dual_ar]

The carried folder holds `sentences.txt`, flite's packages (`*.deb`, optional), and for the second stage the trained
`codec/`. A corpus that is already made, or being made, in the work folder is used as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def unpack_flite(carry: Path, work: Path) -> Path | None:
    """flite's folder, checked by one word; None (said aloud) where there are no packages or it does not run."""
    root, packages = work / "flite", sorted(carry.glob("*.deb"))
    if not packages:
        print("no flite packages: four voices fewer", flush=True)
        return None
    for package in packages:
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    environment = dict(os.environ, LD_LIBRARY_PATH=str(root / "usr/lib/x86_64-linux-gnu"))
    command = [str(root / "usr/bin/flite"), "-voice", "rms", "-t", "one", "-o", str(work / "one.wav")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode or (work / "one.wav").stat().st_size < 2000:
        print(f"flite does not run here, four voices fewer: {result.stderr.strip()}", flush=True)
        return None
    return root


def start_corpus(carry: Path, work: Path, processes: int, scale: float) -> Path:
    """Starts the data maker in a session of its own unless one was started before; returns the corpus folder."""
    corpus = work / "corpus"
    if corpus.exists():
        print(f"corpus: using {corpus}, {len(list(corpus.glob('[0-9]*.npz')))} shards", flush=True)
        return corpus
    corpus.mkdir(parents=True)
    command = [sys.executable, "-m", "tools.minnow.make_corpus", "--sentences", str(carry / "sentences.txt")]
    command += ["--out", str(corpus), "--processes", str(processes), "--scale", str(scale)]
    flite = unpack_flite(carry, work)
    if flite is not None:
        command += ["--flite-root", str(flite)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with (work / "corpus.log").open("w") as log:
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    return corpus


def wait_for_shards(corpus: Path, work: Path, count: int, patience_s: float) -> None:
    """Until the held-out shard and `count` others exist, or the corpus is done; the log's end if nothing comes."""
    began = time.monotonic()
    while not ((corpus / "00000.npz").exists() and len(list(corpus.glob("[0-9]*.npz"))) > count):
        if (corpus / "done").exists():
            return
        if time.monotonic() - began > patience_s:
            log = (work / "corpus.log").read_text()[-2000:]
            raise SystemExit(f"no corpus after {patience_s:.0f} s; its log ends:\n{log}")
        time.sleep(0.5)


def training_environment() -> dict[str, str]:
    """XLA without Triton matmuls: their tuning took over a minute of compiling. Left out where XLA lacks the flag."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_triton_gemm=false"
    environment = dict(os.environ, XLA_FLAGS=flags.strip())
    # An unknown flag ends the process, so it is tried on a process that may end; on the CPU, to leave the GPU alone.
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    known = subprocess.run(probe, env={**environment, "JAX_PLATFORMS": "cpu"}, capture_output=True, check=False)
    if known.returncode:
        print("XLA does not know --xla_gpu_enable_triton_gemm: compiling with its defaults", flush=True)
        return dict(os.environ)
    return environment


def main() -> None:
    """Command line; see the module's text."""
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["codec", "dual_ar"])
    parser.add_argument("--carry", type=Path, default=Path(".carry"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/minnow"))
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args(own)
    arguments.work.mkdir(parents=True, exist_ok=True)
    corpus = start_corpus(arguments.carry, arguments.work, arguments.processes, arguments.scale)
    wait_for_shards(corpus, arguments.work, count=4 if arguments.scale < 0.1 else 16, patience_s=120)
    command = [sys.executable, "-m", f"tools.minnow.train_{arguments.stage}", "--corpus", str(corpus), *rest]
    if arguments.stage == "dual_ar":
        if "--codec" not in rest:
            command += ["--codec", str(arguments.carry / "codec")]
        if "--codes" not in rest:
            command += ["--codes", str(arguments.work / "codes")]
    code = subprocess.run(command, env=training_environment(), check=False).returncode
    log = arguments.work / "corpus.log"
    print("corpus:", log.read_text().strip().splitlines()[-1:] if log.exists() else "made before", flush=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
