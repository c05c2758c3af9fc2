"""The Docker backend on the session's engine, for tests that use it without the service around it."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.docker import dockerd

from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.domain.backend import MountedToolbox, SandboxHandle
from penstock_sandbox.domain.model import SandboxSpec
from penstock_sandbox.processes.output import Collected

REACHES = ("direct", "sidecar")
BY_THE_ENGINE = (
    "direct",
    pytest.param("sidecar", marks=pytest.mark.on_demand("what Docker's engine does by itself, beside a sidecar too")),
)
"""For tests of what the service asks the engine for, however it reaches what runs in a container."""


@asynccontextmanager
async def backend(folder: Path, reach: str = "direct", **options: Any) -> AsyncIterator[DockerBackend]:
    """An opened backend on the session's engine."""
    engine = await asyncio.to_thread(dockerd.engine)
    chosen = DockerOptions(
        state_dir=folder / "docker",
        image=dockerd.BASE,
        sidecar_image=dockerd.BASE,
        host=engine.host,
        reach=reach,
        tmp_bytes=64 << 20,
    )
    opened = DockerBackend(replace(chosen, **options))
    with dockerd.nothing_left():
        await opened.open()
        try:
            yield opened
        finally:
            await opened.aclose()


async def create(opened: DockerBackend, **spec: Any) -> SandboxHandle:
    """A sandbox."""
    toolboxes: Sequence[MountedToolbox] = spec.pop("toolboxes", ())
    return await opened.create(f"sb-{secrets.token_hex(16)}", SandboxSpec(**spec), toolboxes, lambda _: None)


async def run(handle: SandboxHandle, *argv: str, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """A command's exit code and what it wrote."""
    sink = Collected()
    process = await handle.start(
        argv, {**handle.default_env, **(env or {})}, handle.workdir, sink, stdin=False, pty=None
    )
    ended = await sink.ended
    await sink.closed_output.wait()
    await process.aclose()
    return ended.code if ended is not None else None, sink.text.decode()


async def diff(handle: SandboxHandle) -> tuple[dict[str, bytes | None], list[str]]:
    """What a sandbox changed: content by path (None for what is no file), and what it deleted."""
    pieces = [piece async for piece in handle.diff()]
    return await asyncio.to_thread(_read, pieces)


def _read(pieces: list[bytes | list[str]]) -> tuple[dict[str, bytes | None], list[str]]:
    *chunks, deleted = pieces
    assert isinstance(deleted, list)
    found: dict[str, bytes | None] = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            found[member.name] = content.read() if content is not None else None
    return found, deleted
