"""Replicas of the numpy engine: opened, found among the processes, killed where it hurts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.support.services.processes import argv_of, children_of

from penstock_chassis.errors import Internal
from penstock_inference.engines.base import EngineOptions, EngineStats, UpdateFormat
from penstock_inference.replicas.devices import open_replicas
from penstock_inference.replicas.pool import ReplicaPool
from penstock_inference.replicas.replica_process import ReplicaProcess
from penstock_inference.testing import random_config, random_tensors, write_model

CONFIG = random_config("qwen3", max_position_embeddings=4096, eos_token_id=None)


def processes() -> dict[str, int]:
    """Process ids of this process's replicas by name."""
    found = {}
    for pid in children_of(os.getpid()):
        told = argv_of(pid)
        if told[1:3] == [b"-m", b"penstock_inference.replicas.child"]:
            found[told[-1].decode()] = pid
    return found


def kill(name: str) -> None:
    """As the kernel does it to who takes too much memory."""
    os.kill(processes()[name], signal.SIGKILL)


def stop(name: str) -> None:
    """It hangs, and is not dead."""
    os.kill(processes()[name], signal.SIGSTOP)


def go_on(name: str) -> None:
    """After `stop`."""
    os.kill(processes()[name], signal.SIGCONT)


@asynccontextmanager
async def pool(directory: Path, count: int = 2, silence_s: float = 300.0, **options: Any) -> AsyncIterator[ReplicaPool]:
    """Replicas of a random model that never stops by itself."""
    model = write_model(directory / "model", CONFIG, random_tensors(CONFIG))
    (directory / "work").mkdir()
    chosen = EngineOptions(model, "tiny", work_dir=directory / "work", **options)
    opened = await open_replicas("numpy", chosen, count, [], "error", "json", silence_s)
    try:
        yield opened
    finally:
        await opened.aclose()


async def push(opened: ReplicaPool, directory: Path, version: int, seed: int) -> None:
    """A whole policy, as a file."""
    path = directory / f"push-{version}-{seed}.safetensors"
    save_file(random_tensors(CONFIG, seed), path)
    await opened.begin_update(version, "", UpdateFormat.FULL)
    await opened.push_file(path)
    await opened.commit_update()


async def all_live(opened: ReplicaPool) -> EngineStats:
    """Until every replica gets requests; the figures then."""
    while True:
        stats = opened.stats()
        if all(replica.live for replica in stats.replicas):
            return stats
        await changed(opened)


async def changed(opened: ReplicaPool) -> None:
    """Until a replica came or went."""
    supervisor, event = opened._supervisor, asyncio.Event()
    before = supervisor.changed

    def tell() -> None:
        event.set()
        before()

    supervisor.changed = tell
    try:
        await event.wait()
    finally:
        supervisor.changed = before


async def versions(opened: ReplicaPool) -> dict[str, int]:
    """What each live replica answers with, asked itself."""
    ids = np.arange(10, dtype=np.int32)
    return {life.name: (await life.ask("score", ids, 1.0, "")).policy_version for life in opened._supervisor.lives()}


class Trap:
    """Kills a replica's process when the service asks it something: before it hears of it, or once it answered."""

    def __init__(self, monkeypatch: Any) -> None:
        self._traps: dict[tuple[str, str, str], int] = {}
        self._refusals: set[tuple[str, str]] = set()
        ask = ReplicaProcess.ask

        async def trapped(life: ReplicaProcess, method: str, *arguments: Any) -> Any:
            if (life.name, method) in self._refusals:
                self._refusals.remove((life.name, method))
                raise Internal(f"{method} failed", reason="GENERATION_FAILED")
            if self._sprung("before", life.name, method):
                # Stopped, it cannot act on what it is told before it dies.
                os.kill(life.pid, signal.SIGSTOP)
                os.kill(life.pid, signal.SIGKILL)
                return await ask(life, method, *arguments)
            answer = await ask(life, method, *arguments)
            if self._sprung("after", life.name, method):
                os.kill(life.pid, signal.SIGKILL)
                await life.died()
            return answer

        monkeypatch.setattr(ReplicaProcess, "ask", trapped)

    def set(self, when: str, name: str, method: str, times: int = 1) -> None:
        """`when` is before or after."""
        self._traps[when, name, method] = times

    def refuse(self, name: str, method: str) -> None:
        """The next time, it fails at that and lives on."""
        self._refusals.add((name, method))

    def _sprung(self, when: str, name: str, method: str) -> bool:
        left = self._traps.get((when, name, method), 0)
        if left:
            self._traps[when, name, method] = left - 1
        return bool(left)
