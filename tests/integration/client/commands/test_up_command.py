"""`penstock up -- COMMAND`: the program finds the services, and they end with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = (
    "import asyncio, os, sys\n"
    "from penstock.client import connect\n"
    "async def main():\n"
    "    async with connect() as ps:\n"
    "        print('drivers', len(await ps.operations.members('driver')) >= 0)\n"
    "asyncio.run(main())\n"
    "print('connection', os.environ['PENSTOCK_CONNECTION'])\n"
    "sys.exit(7)\n"
)


def test_services_end_with_the_command_and_return_its_exit_code(tmp_path: Path) -> None:
    state = tmp_path / "state"
    up = [sys.executable, "-m", "penstock.cli.main", "up", "--state-dir", str(state), "--free-ports", "--no-dashboard"]
    upstream = ["--upstream", "none=http://127.0.0.1:9/v1"]
    done = subprocess.run(
        [*up, *upstream, "--", sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 7, f"{done.stdout}\n{done.stderr}"
    assert "drivers True" in done.stdout
    assert f"connection {state / 'connection.json'}" in done.stdout
    assert not (state / "connection.json").exists()
    assert "penstock up --model-dir DIR" in done.stderr and "--upstream URL --model M" in done.stderr


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    up = [sys.executable, "-m", "penstock.cli.main", "up", "--state-dir", str(tmp_path / "state"), "--free-ports"]
    upstream = ["--no-dashboard", "--upstream", "none=http://127.0.0.1:9/v1"]
    done = subprocess.run(
        [*up, *upstream, "--", str(tmp_path / "absent")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert "absent cannot be run: No such file or directory" in done.stderr
