"""Services as processes, with a stand-in for the service: how often it is started, and who ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.waiting import eventually

from penstock.client.transport.endpoints import ServiceName
from penstock.local.processes import START_TIMEOUT_S, ServiceProcesses
from penstock.local.supervision import ServiceRestart

_SERVICE: Final = """
import json, os, signal
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{os.getpid()}\\n")
print(json.dumps({"event": "ready", "address": "127.0.0.1:1", "endpoints": {}}), flush=True)
signal.pause()
"""


class _One(ServiceProcesses):
    """One service."""

    @property
    def services(self) -> Sequence[ServiceName]:
        return ("sandbox",)

    def settings_of(self, service: ServiceName) -> dict[str, Any]:
        return {}


@pytest.mark.requirement("R97")
@pytest.mark.usefixtures("genuine_starts")
async def test_a_restart_that_takes_too_long_is_followed_by_one_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow process is ended before the next start, and its end is no death of its own."""
    package, starts = tmp_path / "programs" / "penstock_sandbox", tmp_path / "starts"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_SERVICE)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.setattr("penstock.local.supervision.FIRST_PAUSE_S", 0.0)
    seen: list[tuple[int, bool]] = []

    def on_restart(restart: ServiceRestart) -> None:
        """The first restart has no time; later ones have enough."""
        seen.append((restart.number, restart.ready))
        stack._start_timeout = 0.0 if restart.number == 1 else START_TIMEOUT_S

    stack = _One(state_dir=tmp_path / "state", on_restart=on_restart)
    async with stack:
        os.kill(int(starts.read_text()), signal.SIGKILL)
        await eventually(lambda: bool(seen) and seen[-1][1], "the service is back")
        await stack._restarting.wait()
        assert seen == [(1, False), (2, False), (2, True)]
        (process,) = stack._processes
        assert int(starts.read_text().split()[-1]) == process.process.pid
