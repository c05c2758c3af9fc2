"""Stubs for Ruby, as the guide of languages without a client generates them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.support.absent import absent

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "docs" / "guides" / "any-language.md"


def stubs(folder: Path, protos: Path = ROOT / "protos") -> Path:
    """Runs the guide's command in a folder; returns where the stubs are. Without the programs the test is left out."""
    for program in ("protoc", "grpc_ruby_plugin", "ruby"):
        if shutil.which(program) is None:
            packages = "protobuf-compiler protobuf-compiler-grpc libprotobuf-dev ruby-grpc"
            absent(f"THE TRAINER IN RUBY IS NOT TESTED HERE: no {program}: apt-get install {packages}")
    (block,) = re.findall(r"^```sh\n(apt-get .*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    commands = block.partition("\n")[2]
    (folder / "protos").symlink_to(protos)
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "stubs"
