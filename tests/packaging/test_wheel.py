"""What a wheel holds: three packages, the voice, nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (wheel,) = out.glob("fishjax-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_top_level_is_the_three_packages(names):
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"fishjax", "pallas_kernels", "serving"}


def test_the_voice_and_the_licence_travel(names):
    for wanted in (
        "fishjax/minnow/config.json",
        "fishjax/minnow/model.safetensors",
        "fishjax/minnow/tokenizer.json",
        "fishjax/minnow/codec/model.safetensors",
    ):
        assert wanted in names
    assert any(name.endswith("licenses/NOTICE") for name in names)
