"""The first process of a sandbox made from an image is a program of ours, which needs nothing of the image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.images.registry import MACHINE

from penstock_sandbox.backends.local.images import first_process


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_program_is_a_small_static_executable(architecture: str) -> None:
    program = first_process.program(architecture)
    assert program is not None and program.startswith(b"\x7fELF") and len(program) < 512
    assert first_process.program("s390x") is None


def test_it_writes_a_line_and_ends_with_its_input(tmp_path: Path) -> None:
    program = first_process.program(MACHINE)
    assert program is not None
    path = tmp_path / "first"
    path.write_bytes(program)
    path.chmod(0o755)
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.read(1) == b"\n"
        assert running.poll() is None
        running.stdin.write(b"x" * 1000)
        running.stdin.close()
        assert running.stdout.read() == b""
    assert running.returncode == 0
