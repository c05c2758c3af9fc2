"""SWE-ReX, another runtime of sandboxes for agents that pip installs, measured in an environment of its own.

`make bench-peers` installs it under runs/peers; where it is not, it is left out, and the run says so.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final

from benchmarks import sandbox_service as service
from benchmarks.report import Row
from benchmarks.timing import milliseconds

TITLE: Final = "SWE-ReX"
_PYTHON: Final = Path("runs/peers/bin/python")
_PROGRAM: Final = Path(__file__).with_name("swerex_program.py")


async def rows(kind: str, image: str = "") -> list[Row] | None:
    """Its figures: `local` is its server as a process, `docker` its container with that server in it."""
    if not _PYTHON.exists():
        print(f"{TITLE} is not measured: `make bench-peers` installs it", flush=True)
        return None
    process = await asyncio.create_subprocess_exec(
        _PYTHON.absolute(),
        _PROGRAM,
        kind,
        str(service.FILE_BYTES),
        image,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "SWE_REX_LOG_STREAM_LEVEL": "ERROR"},
    )
    answer, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{TITLE} could not be measured")
    found: dict[str, list[float]] = json.loads(answer.splitlines()[-1])
    return [
        *milliseconds(service.CREATE, found["create"], f"{len(found['create'])} in turn"),
        *milliseconds(service.DELETE, found["delete"]),
        *milliseconds(service.RUN, found["run"], f"{len(found['run'])} in turn"),
        Row(service.RATE, found["burst"][0] / found["burst"][1], "/s", f"{found['burst'][0]:.0f} at once"),
        *([Row(service.MEMORY, found["memory"][0] / 2**20, "MiB", "PSS")] if "memory" in found else []),
        *service.throughput(found["in"], found["out"], "text"),
    ]
