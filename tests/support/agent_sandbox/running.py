"""Runs the stand-in beside a service under test, and does to it what tests ask for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class StandIn:
    """A stand-in that runs."""

    kubeconfig: str
    keys: str
    control: str
    http: aiohttp.ClientSession

    def environment(self) -> dict[str, str]:
        """What a sandbox service needs to use it."""
        return {
            "PENSTOCK_SANDBOX_KUBERNETES_CONFIG": self.kubeconfig,
            "PENSTOCK_SANDBOX_KUBERNETES_KEYS": self.keys,
            "PENSTOCK_SANDBOX_KUBERNETES_NAMESPACE": "sandboxes",
            "PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL": "penstock",
        }

    async def claims(self) -> list[dict[str, Any]]:
        """Every claim there is."""
        found: list[dict[str, Any]] = await self._send("GET", "claims")
        return found

    async def claim_of(self, sandbox_id: str) -> dict[str, Any]:
        """The claim of a sandbox."""
        (found,) = [
            one for one in await self.claims() if one["metadata"]["annotations"]["penstock-sandbox"] == sandbox_id
        ]
        return found

    async def requests(self, start: str = "") -> list[dict[str, Any]]:
        """The requests so far that begin with ``start``, such as "POST sandboxclaims"."""
        told: list[dict[str, Any]] = await self._send("GET", "requests")
        return [one for one in told if one["what"].startswith(start)]

    async def fail(self, match: str, times: int = 1, **how: Any) -> None:
        """Have the next ``times`` requests that match fail."""
        await self._send("POST", "faults", [{"match": match, "times": times, **how}])

    async def behave(self, **how: Any) -> None:
        """Set the controller's faults."""
        await self._send("PUT", "behaviour", how)

    async def edit(self, plural: str, name: str, spec: Any) -> None:
        """Merges ``spec`` into an object's, as an operator does."""
        await self._send("PATCH", f"{plural}/{name}", {"spec": spec})

    async def do(self, what: str, name: str = "") -> dict[str, Any]:
        """Ask for compact, cut, rotate, or fail, replace, delete of a claim."""
        told: dict[str, Any] = await self._send("POST", f"{what}/{name}" if name else what, {})
        return told

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        async with self.http.request(
            method,
            f"{self.control}/control/{path}",
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"},
        ) as answer:
            answer.raise_for_status()
            return await answer.json()


_beside: ContextVar[StandIn | None] = ContextVar("agent_sandbox", default=None)


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    """A stand-in, which services that are started meanwhile use too; everything in it ends with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.agent_sandbox"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, f"the stand-in did not start (exit {process.wait()})"
        async with aiohttp.ClientSession() as http:
            running = StandIn(**json.loads(line), http=http)
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
    """What runs beside a service under the suite."""
    if (running := _beside.get()) is not None:
        yield running.environment()
    else:
        async with stand_in() as started:
            yield started.environment()
