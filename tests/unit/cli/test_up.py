"""How `penstock up` stops its services, which are stand-ins here: whatever comes meanwhile cuts no stop short."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

_PROGRAM: Final = '''
import asyncio, fcntl, os, pty, signal, sys, termios
from pathlib import Path

folder, first, later, *command = sys.argv[1:]
if first == "closed":
    os.setsid()
    terminal, ours = pty.openpty()
    for number in (0, 1, 2):
        os.dup2(ours, number)
    os.close(ours)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

from penstock.cli.commands.up import _up
from penstock.cli.terminal.console import run
from penstock.client.transport.endpoints import Endpoints


class Services:
    """They stop in several steps, before each of which a signal comes."""

    connection_file = Path(folder, "connection.json")
    log_dir = Path(folder)
    trainer_token = ingress_address = ""
    services = ("driver",)
    endpoints = Endpoints(driver="127.0.0.1:1", token="t")

    async def wait(self):
        if first == "closed":
            os.close(terminal)
        elif first != "0":
            os.kill(os.getpid(), int(first))
        await asyncio.get_running_loop().create_future()

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        for _ in range(3):
            for number in later.split(","):
                os.kill(os.getpid(), int(number))
            for _ in range(5):
                await asyncio.sleep(0)
        Path(folder, "stopped").write_text(repr(error))


run(_up(Services(), None, True, None, command, may_free=False))
'''


def _ended(folder: Path, first: str, later: list[signal.Signals], *command: str) -> int:
    """Runs services until the signal `first` or the end of a command, and further signals while they stop."""
    numbers = ",".join(str(int(number)) for number in later)
    program = [sys.executable, "-c", _PROGRAM, str(folder), first, numbers, *command]
    return subprocess.run(program, capture_output=True, check=False, timeout=240).returncode


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_that_come_while_services_stop_do_not_cut_it_short(tmp_path: Path, first: signal.Signals) -> None:
    """A terminal that is closed sends SIGHUP by its shell and by the kernel."""
    code = _ended(tmp_path, str(int(first)), [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
    assert (tmp_path / "stopped").read_text() == "CancelledError()"
    assert code == 0


def test_an_interrupt_after_the_commands_end_leaves_the_stop_and_the_exit_code(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit(7)")
    code = _ended(tmp_path, "0", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], *command)
    assert (tmp_path / "stopped").read_text() == "None"
    assert code == 7


def test_services_stop_when_the_terminal_is_closed(tmp_path: Path) -> None:
    """It takes no word of the stop any more."""
    assert _ended(tmp_path, "closed", [signal.SIGHUP]) == 0
    assert (tmp_path / "stopped").read_text() == "CancelledError()"


def test_a_closed_terminal_ends_a_command_with_its_own_exit_code(tmp_path: Path) -> None:
    hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); signal.pause()"
    assert _ended(tmp_path, "0", [signal.SIGHUP], sys.executable, "-c", hang_up) == 128 + signal.SIGHUP
    assert (tmp_path / "stopped").exists()
