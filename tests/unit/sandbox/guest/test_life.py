"""The first process of a sandbox, as what serves the sandbox watches it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from penstock_sandbox.guest.system import Life


@pytest.mark.requirement("R91")
async def test_a_first_process_that_becomes_another_program_is_noticed() -> None:
    """It outlives every tree of processes, so it must still be what it was when work is graded."""
    shell = subprocess.Popen(["sh", "-c", "read line; exec cat"], stdin=subprocess.PIPE)
    try:
        assert shell.stdin is not None
        name = Path(f"/proc/{shell.pid}/comm")
        await eventually(lambda: name.read_text() == "sh\n", "the shell")
        life = Life(shell.pid)
        assert life.intact()
        shell.stdin.write(b"go on\n")
        shell.stdin.flush()
        await eventually(lambda: name.read_text() == "cat\n", "the other program")
        assert not life.intact()
    finally:
        shell.kill()
        shell.wait()
