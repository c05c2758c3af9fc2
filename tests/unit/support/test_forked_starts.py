"""A start by `tests.support.services.forking` gives what an ordinary start gives: the other tests rely on it."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.support.services import dying, forking

DRIVER = [sys.executable, "-m", "penstock_driver"]


def environment(state: Path) -> dict[str, str]:
    """Of a driver whose neighbours are absent."""
    given = {"OPERATOR_TOKEN": "x" * 40, "STATE_DIR": str(state), "PORT": "0"}
    given |= {"SANDBOX_ADDRESS": "127.0.0.1:1", "INTERCEPTION_ADDRESS": "127.0.0.1:1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return kept | {f"PENSTOCK_DRIVER_{key}": value for key, value in given.items()}


def parent_and_group(pid: int) -> list[int]:
    """Of a process, with its session."""
    return [int(item) for item in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:4]]


async def started(starts: AbstractContextManager[None], state: Path, **options: Any) -> tuple[dict[str, Any], bool]:
    """What can be seen of a service that was started so, until it is killed, and whether it is a fork: where the kernel
    shows an environment it is that of the warm process."""
    state.mkdir()
    with starts, (state / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *DRIVER, env=environment(state), stdout=subprocess.PIPE, stderr=log, cwd=state, **options
        )
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    seen = {
        "its own pid": ready["pid"] == process.pid,
        "argv": Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0"),
        "directory": Path(f"/proc/{process.pid}/cwd").readlink() == state,
        "parent": parent_and_group(process.pid)[0] == os.getpid(),
        "group": parent_and_group(process.pid)[1] == process.pid,
        "session": parent_and_group(process.pid)[2] == process.pid,
        "input": Path(f"/proc/{process.pid}/fd/0").readlink().name,
        "log": Path(f"/proc/{process.pid}/fd/2").readlink() == state / "log",
    }
    forked = b"OPENBLAS_NUM_THREADS=1" in Path(f"/proc/{process.pid}/environ").read_bytes()
    process.kill()
    return {**seen, "end": await process.wait()}, forked


@pytest.mark.parametrize("options", [{}, {"process_group": 0}, {"start_new_session": True}], ids=str)
async def test_a_forked_service_looks_like_an_ordinary_one(options: Mapping[str, Any], tmp_path: Path) -> None:
    given = {"stdin": subprocess.DEVNULL, **options}
    forked, is_fork = await started(nullcontext(), tmp_path / "forked", **given)
    ordinary, is_fork_too = await started(forking.genuine(), tmp_path / "ordinary", **given)
    assert forked == ordinary and is_fork and not is_fork_too
    assert forked["its own pid"] and forked["parent"] and forked["end"] == -signal.SIGKILL


def test_a_forked_commands_output_and_exit_are_an_ordinary_ones() -> None:
    for argv in (["--version"], ["rollout", "--no-such-option"], ["agents", "--endpoint", "nowhere"]):
        command = [sys.executable, "-m", "penstock.cli.main", *argv]
        forked = subprocess.run(command, capture_output=True, check=False)
        with forking.genuine():
            ordinary = subprocess.run(command, capture_output=True, check=False)
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            ordinary.returncode,
            ordinary.stdout,
            ordinary.stderr,
        )


def test_a_refused_start_is_refused_in_a_fork_too(tmp_path: Path) -> None:
    given = {**environment(tmp_path), "PENSTOCK_DRIVER_PORT": "many"}
    refused = subprocess.run(DRIVER, env=given, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith("penstock-driver: Invalid settings: ")


def test_a_fork_is_customized_by_what_its_path_has_for_that(tmp_path: Path) -> None:
    """A `sitecustomize` on PYTHONPATH runs in it as in any interpreter."""
    (tmp_path / "sitecustomize.py").write_text("print('customized')\n", encoding="utf-8")
    given = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "penstock.cli.main", "--version"]
    forked = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    with forking.genuine():
        ordinary = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert forked.stdout == ordinary.stdout
    assert forked.stdout.startswith("customized\n")


@pytest.mark.parametrize("service", ["driver", "interception"])
def test_a_service_that_dies_at_its_writes_imports_nothing_in_its_fork(service: str) -> None:
    """It dies hundreds of times, and most of a start is imports."""
    spec = importlib.util.find_spec(f"penstock_{service}.__main__")
    assert spec is not None and spec.origin is not None
    lines = ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    named = {line.module for line in lines if isinstance(line, ast.ImportFrom)} - {"penstock_chassis"}
    assert len(named) >= 3
    assert named <= set(dying.imported(service))
