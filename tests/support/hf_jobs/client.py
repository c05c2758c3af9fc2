"""Starts the stand-in as a process, and asks it for faults."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.support.hf_jobs.jobs import NAMESPACE, TOKEN

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class HfJobs:
    """A running stand-in."""

    endpoint: str
    proxy: str
    ca: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What leads the unmodified SDKs here."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HTTPS_PROXY": self.proxy,
            "SSL_CERT_FILE": self.ca,
            "NO_PROXY": "127.0.0.1",
        }

    async def fault(self, what: str, **asked: Any) -> None:
        """Ask for a fault; see `jobs`."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.endpoint}/stand-in/{what}", json=asked, raise_for_status=True),
        ):
            pass

    async def jobs(self) -> list[dict[str, Any]]:
        """What it says of all jobs that there ever were."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.endpoint}/stand-in/jobs", raise_for_status=True) as answer,
        ):
            told: list[dict[str, Any]] = await answer.json()
            return told

    async def running(self) -> list[dict[str, Any]]:
        """The jobs that run or will."""
        return [job for job in await self.jobs() if job["stage"] in ("RUNNING", "SCHEDULING")]


__all__ = ["NAMESPACE", "TOKEN", "HfJobs", "hf_jobs"]


@asynccontextmanager
async def hf_jobs() -> AsyncIterator[HfJobs]:
    """Start the stand-in; it and all of its jobs end with this."""
    with tempfile.TemporaryDirectory(prefix="penstock-hf-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hf_jobs.jobs", folder],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            line = await asyncio.to_thread(process.stdout.readline)
            assert line, f"the stand-in did not start (exit {process.wait()})"
            yield HfJobs(**json.loads(line))
        finally:
            process.stdin.close()
            await asyncio.to_thread(process.wait, 30)
            process.stdout.close()
