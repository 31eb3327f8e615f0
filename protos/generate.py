"""Generate fishjax/rpc/v1 from tts.proto: `python protos/generate.py`. Run it after every change of the proto.

Needs grpcio-tools 1.76: newer stubs refuse older runtimes. A test runs it and expects no change.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(out_dir: Path) -> None:
    """Write `fishjax/rpc/v1/tts_pb2.py`, `.pyi` and `tts_pb2_grpc.py` under `out_dir`."""
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out_dir}",
        f"--pyi_out={out_dir}",
        f"--grpc_python_out={out_dir}",
        *sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto")),
    ]
    if (code := protoc.main(arguments)) != 0:
        raise SystemExit(f"protoc failed with exit code {code}: see its message above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
