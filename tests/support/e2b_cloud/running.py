"""Runs the stand-in beside a service under test, and does to it what tests ask for."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.support.services.processes import children_of

REAL = "PENSTOCK_TEST_REAL_E2B"
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class StandIn:
    """A stand-in that runs, at ``address``, for whoever has ``api_key``."""

    address: str
    api_key: str
    http: aiohttp.ClientSession
    pid: int

    def environment(self) -> dict[str, str]:
        """What a sandbox service needs to use it."""
        return {
            "PENSTOCK_SANDBOX_E2B_API_KEY": self.api_key,
            "PENSTOCK_SANDBOX_E2B_API_URL": self.address,
            "PENSTOCK_SANDBOX_E2B_SANDBOX_URL": self.address,
        }

    async def sandboxes(self) -> list[dict[str, Any]]:
        """Every sandbox there is, as the control plane shows it."""
        found: list[dict[str, Any]] = (await self._get("sandboxes"))["sandboxes"]
        return found

    async def snapshots(self) -> list[dict[str, Any]]:
        """Every snapshot there is."""
        found: list[dict[str, Any]] = (await self._get("sandboxes"))["snapshots"]
        return found

    async def requests(self, start: str = "") -> list[dict[str, Any]]:
        """The control plane's requests so far, those whose method and path begin with ``start``."""
        told: list[dict[str, Any]] = await self._get("requests")
        return [one for one in told if f"{one['method']} {one['path']}".startswith(start)]

    def children(self) -> set[int]:
        """The processes that it started and that are there yet: each sandbox's first, and what entered one."""
        return set(children_of(self.pid))

    async def fail(self, match: str, times: int = 1, **how: Any) -> None:
        """Have the next ``times`` requests that match fail, as a fault of the stand-in."""
        await self._send("POST", "faults", [{"match": match, "times": times, **how}])

    async def vanish(self, sandbox_id: str) -> None:
        """End the sandbox that a service made as ``sandbox_id``, without a word to anybody."""
        (found,) = [one for one in await self.sandboxes() if one["metadata"].get("penstock_sandbox") == sandbox_id]
        await self._send("POST", f"vanish/{found['sandboxID']}", {})

    async def drop_streams(self) -> int:
        """Cut every open stream to a sandbox; answers how many."""
        dropped: int = (await self._send("POST", "drop", {}))["dropped"]
        return dropped

    async def behave(self, **how: Any) -> None:
        """Be another deployment: ``refuse_network``, ``ignore_network``, ``most`` sandboxes."""
        await self._send("PUT", "behaviour", how)

    async def _get(self, path: str) -> Any:
        async with self.http.get(f"{self.address}/control/{path}") as answer:
            answer.raise_for_status()
            return await answer.json()

    async def _send(self, method: str, path: str, body: Any) -> Any:
        async with self.http.request(method, f"{self.address}/control/{path}", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()


_beside: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    """A stand-in, which services that are started meanwhile use too; everything in it ends with it."""
    key = f"e2b_{secrets.token_hex(20)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.e2b_cloud"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "STAND_IN_API_KEY": key},
        cwd=_ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, f"the stand-in did not start (exit {process.wait()})"
        async with aiohttp.ClientSession() as http:
            running = StandIn(json.loads(line)["address"], key, http, process.pid)
            _beside.set(running)
            try:
                yield running
            finally:
                # A fixture's end may run in another context than its beginning, where a reset would fail.
                _beside.set(None)
    finally:
        process.stdin.close()
        await asyncio.to_thread(process.wait, 30)
        process.stdout.close()


@asynccontextmanager
async def beside() -> AsyncIterator[Mapping[str, str]]:
    """What runs beside a service under the suite: the stand-in, or E2B itself where the environment asks for it."""
    if os.environ.get(REAL) == "1":
        key = os.environ.get("E2B_API_KEY", "")
        assert key, f"{REAL}=1 needs E2B_API_KEY"
        yield {
            "PENSTOCK_SANDBOX_E2B_API_KEY": key,
            "PENSTOCK_SANDBOX_E2B_TEMPLATE": os.environ.get("E2B_TEMPLATE", "base"),
            "PENSTOCK_SANDBOX_E2B_DOMAIN": os.environ.get("E2B_DOMAIN", ""),
        }
    elif (running := _beside.get()) is not None:
        yield running.environment()
    else:
        async with stand_in() as started:
            yield started.environment()
