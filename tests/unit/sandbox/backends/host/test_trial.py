"""A trial's shell reads its own rights, whatever changes in the same file meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock_sandbox.backends.host.trial import RIGHTS

_SIGNALS = """
import ctypes, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
send = ctypes.CDLL(None).sigqueue
print(flush=True)
while True:
    for _ in range(12):
        send(os.getpid(), 40, ctypes.c_void_p(0))
    for _ in range(12):
        signal.sigwait({40})
"""


@pytest.fixture
def signals() -> Iterator[None]:
    """A process of the same user, whose waiting signals are counted in everyone's status: one digit, then two."""
    with subprocess.Popen([sys.executable, "-c", _SIGNALS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        process.kill()


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_rights_are_read_while_their_file_changes(shell: str, signals: None) -> None:
    """With one reading each, bash misses several lines of a hundred."""
    shown = subprocess.run(
        [shell, "-c", RIGHTS + "status NoNewPrivs\n" * 400], capture_output=True, text=True, check=True
    )
    values = shown.stdout.splitlines()[-400:]
    assert len(values) == 400 and set(values) <= {"0", "1"}


@pytest.mark.requirement("R55")
def test_a_line_that_is_not_there_is_no_right_that_is_absent() -> None:
    shown = subprocess.run(["sh", "-c", RIGHTS + "status NoSuchLine"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "unknown"
