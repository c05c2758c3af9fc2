"""The hf backend's parts by themselves: what a job's end counts as, how long its lease may be, and what is fetched."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_chassis.errors import Unavailable
from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client.pipe import SandboxGone
from penstock_sandbox.backends.hf.client import JobEnd, Jobs
from penstock_sandbox.backends.hf.legacy_sdk import LegacyRemote
from penstock_sandbox.backends.hf.sandbox import HfSandbox
from penstock_sandbox.backends.hf.threads import Threads
from penstock_sandbox.backends.remote_machine.bootstrap import PreparedMachine


class _Machine:
    """The SDK's object for a job with one file; each of two that share a ``barrier`` waits for the other's read."""

    job_id = "job"

    def __init__(self, content: bytes, barrier: threading.Barrier) -> None:
        self._content = content
        self._barrier = barrier

    def exec(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 0, "piece.0 piece.1", "")

    def read_file(self, name: str, *, text: bool) -> bytes:
        self._barrier.wait()
        return self._content


class _Ended:
    """A job that failed, without a word why, ``left_s`` before its time limit."""

    job_id = "job"

    def __init__(self, left_s: float) -> None:
        self.ends_at = even_time() + left_s

    async def attach(self, command: list[str]) -> None:
        """Its first pipe."""

    async def ended(self) -> JobEnd:
        return JobEnd("ERROR")


@pytest.mark.requirement("R93")
@pytest.mark.parametrize(("left_s", "reason"), [(3600.0, "JOB_FAILED"), (-1.0, "JOB_ENDED")])
async def test_a_job_that_ends_at_its_time_limit_is_not_the_agents_failure(left_s: float, reason: str) -> None:
    """Even where Hugging Face does not say that it was the limit."""
    place = PreparedMachine("python3", 1000, 1000, as_root=False)
    sandbox = HfSandbox("sb-1", cast("Any", _Ended(left_s)), "an-image", place, (), lambda _: None, cast("Any", None))
    await sandbox._open_pipe()
    with pytest.raises(SandboxGone) as gone:
        await sandbox._open_pipe()
    assert await sandbox._what_ended_it(gone.value.reason) == reason


@pytest.mark.requirement("R49", "R57")
async def test_layers_that_are_fetched_at_once_are_not_mixed(tmp_path: Path) -> None:
    """Their ids differ only behind a dot."""
    threads, barrier = Threads(2), threading.Barrier(2)
    jobs = Jobs(cast("Any", None), "me", "", threads)
    contents = {"ss.home.aa": b"a" * 1000, "ss.home.bb": b"b" * 1000}
    remotes = {
        name: LegacyRemote(cast("Any", _Machine(content, barrier)), jobs, threads, 0.0, tmp_path)
        for name, content in contents.items()
    }
    await asyncio.gather(*(remote.fetch("captured", tmp_path / name) for name, remote in remotes.items()))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        name: content * 2 for name, content in contents.items()
    }
    threads.close()


@pytest.mark.requirement("R49")
async def test_a_layer_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    threads, broken = Threads(1), threading.Barrier(1)
    broken.abort()
    remote = LegacyRemote(
        cast("Any", _Machine(b"", broken)), Jobs(cast("Any", None), "me", "", threads), threads, 0.0, tmp_path
    )
    with pytest.raises(Unavailable):
        await remote.fetch("captured", tmp_path / "ss.home.aa")
    assert not list(tmp_path.iterdir())
    threads.close()
