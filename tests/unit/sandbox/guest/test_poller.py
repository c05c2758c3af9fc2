"""The buffer of a command's output in an hf-sandbox job: nothing is lost or doubled, whoever asks how often."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_sandbox.guest import poller

_PROGRAM = Path(poller.__file__)


@pytest.fixture
def socket() -> Iterator[str]:
    """Where a buffer serves; a Unix socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="penstock-keep-") as folder:
        yield f"{folder}/socket"
        _end_buffer(f"{folder}/socket")


def keep(socket: str, script: str) -> None:
    argv = [sys.executable, "-I", str(_PROGRAM), "keep", "--socket", socket, "--", "/bin/sh", "-c", script]
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def take(socket: str, offset: int, wait_s: float = 20.0) -> tuple[str, bytes]:
    argv = [
        sys.executable,
        "-I",
        str(_PROGRAM),
        "take",
        "--socket",
        socket,
        "--offset",
        str(offset),
        "--wait",
        str(wait_s),
    ]
    state, _, data = subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.partition(b"\n")
    return state.decode(), data


@pytest.mark.requirement("R48")
def test_the_poller_can_be_read_by_an_old_python() -> None:
    """An image's Python may be 3.8."""
    ast.parse(_PROGRAM.read_text(), feature_version=(3, 8))


@pytest.mark.requirement("R39")
def test_output_comes_whole_in_order_and_ends_with_the_commands_code(socket: str) -> None:
    keep(socket, "for n in 1 2 3 4 5; do seq 20000; sleep 0.05; done; exit 7")
    taken, state = b"", poller.MORE
    while state == poller.MORE:
        state, data = take(socket, len(taken))
        taken += data
    assert state == f"{poller.END} 7"
    assert taken == b"".join(b"%d\n" % n for n in range(1, 20001)) * 5


@pytest.mark.requirement("R26")
def test_lost_answer_is_given_again_and_taken_output_is_forgotten(socket: str) -> None:
    keep(socket, "echo first; sleep 1000")
    first = take(socket, 0)
    assert first == take(socket, 0) == (poller.MORE, b"first\n")
    assert take(socket, 6, 0.0) == (poller.MORE, b"")
    assert take(socket, 0)[0] == poller.LOST
    assert take(socket, 7)[0] == poller.LOST


@pytest.mark.requirement("R23")
def test_a_command_waits_when_more_is_kept_than_may_be(socket: str) -> None:
    keep(socket, "head -c 5000000 /dev/zero | tr '\\0' x; sleep 1000")
    taken = 0
    while taken < 5_000_000:
        _, data = take(socket, taken)
        assert 0 < len(data) < poller.KEPT + 65536
        taken += len(data)


def _end_buffer(socket: str) -> None:
    """A buffer outlives its callers on purpose; its socket's name finds it."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and socket.encode() in (folder / "cmdline").read_bytes():
                os.killpg(int(folder.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
