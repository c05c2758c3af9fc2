"""The pool of replicas: calls that go to all of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from penstock_inference.replicas.pool import ReplicaPool
from penstock_inference.replicas.supervisor import ReplicaSupervisor


class Supervisor:
    """Replicas that do what they are told when the test lets them."""

    def __init__(self) -> None:
        self.asleep = 0
        self.go_on = asyncio.Event()
        self.done: list[str] = []
        self.changed: Any = None

    def check_some_live(self) -> None:
        return None

    async def call_all(self, call: str, *_: object) -> None:
        await self.go_on.wait()
        self.done.append(call)


@pytest.mark.requirement("R130")
async def test_every_caller_of_sleep_returns_when_the_memory_is_free() -> None:
    """The second returned at once, while the first still waited for running generations."""
    replicas = Supervisor()
    pool = ReplicaPool(cast(ReplicaSupervisor, replicas), MagicMock(), MagicMock())
    both = [asyncio.create_task(pool.sleep(1)) for _ in range(2)]
    waking = asyncio.create_task(pool.wake())
    for _ in range(5):
        await asyncio.sleep(0)
    early = [task for task in both if task.done()]
    replicas.go_on.set()
    await asyncio.gather(*both, waking)
    assert not early
    assert replicas.done == ["sleep", "wake"] and not replicas.asleep
