"""A replica's process: what a start that fails leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest
from tests.support.services import replicas
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition
from penstock_inference.engines.base import EngineOptions
from penstock_inference.replicas import replica_process, wire
from penstock_inference.replicas.replica_process import ReplicaProcess


@pytest.mark.requirement("R87")
async def test_a_start_that_is_cancelled_while_it_cleans_up_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another replica fails at the same time: the killed process was left to end by itself."""
    killed = asyncio.Event()
    started: list[Process] = []

    def held(process: Process) -> None:
        """The process has the signal, and does not end yet."""
        started.append(process)
        killed.set()

    def unsent(*_: object) -> None:
        """The process waits for the order."""

    async def failed(_: asyncio.StreamReader) -> wire.Failed:
        """The first message. Its process is stopped before its socket is closed, and so cannot end by itself."""
        await eventually(lambda: "r0" in replicas.processes(), "the process has its arguments")
        replicas.stop("r0")
        return wire.Failed.of(0, FailedPrecondition("no model", reason="MODEL_UNREADABLE"))

    monkeypatch.setattr(replica_process, "_kill", held)
    monkeypatch.setattr(wire, "send", unsent)
    monkeypatch.setattr(wire, "receive", failed)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    order: Any = wire.Open("numpy", EngineOptions(tmp_path, "none", work_dir=tmp_path), "error", "json")
    start = asyncio.create_task(ReplicaProcess.start("r0", order, {}, 60.0))
    await killed.wait()
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not start.done()
    os.kill(started[0].pid, signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError):
        await start
    assert replicas.processes() == {}
