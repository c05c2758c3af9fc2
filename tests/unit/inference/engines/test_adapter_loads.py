"""Loads of adapters by several at once: by replicas, and against the limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.waiting import GUARD_S

from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.membership.routing import Router
from penstock_inference.engines.adapters import AdapterTable
from penstock_inference.engines.base import PauseMode
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.replicas.supervisor import Policy, ReplicaSupervisor


class Life:
    """A replica's process, whose load of the adapter `slow` takes as long as the test wants."""

    alive = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()

    async def ask(self, method: str, *arguments: Any) -> AdapterInfo | None:
        """Note it, and answer it."""
        if method != "load_adapter":
            return None
        source = arguments[0]
        self.asked.append(source.name)
        if source.name == "slow":
            self.loading.set()
            await self.go_on.wait()
        return AdapterInfo(source.name, source.policy_version, 1)


def source(name: str, directory: Path = Path()) -> AdapterSource:
    """Its first version."""
    return AdapterSource(name, 1, directory)


@pytest.mark.requirement("R43", "R87")
async def test_replicas_load_one_adapter_while_another_takes_long() -> None:
    """A replica that joins meanwhile gets it too."""
    supervisor = ReplicaSupervisor([{}, {}], cast(Any, None), cast(Policy, None), Router(), 1.0)
    first, second = Life("r0"), Life("r1")
    supervisor.replicas[0].life = cast(Any, first)
    slow = asyncio.create_task(supervisor.load_adapter(source("slow"), PauseMode.WAIT))
    await first.loading.wait()
    async with asyncio.timeout(GUARD_S):
        await supervisor.load_adapter(source("other"), PauseMode.WAIT)
        await supervisor.unload_adapter("other")
        async with supervisor.lock:
            supervisor.replicas[1].life = cast(Any, second)
    assert not slow.done() and supervisor.adapter_infos() == ()
    first.go_on.set()
    await second.loading.wait()
    second.go_on.set()
    assert supervisor.adapter_infos() == () and second.asked == ["slow"]
    loaded = await slow
    assert supervisor.adapter_infos() == (loaded,)
    assert first.asked == ["slow", "other"]


@pytest.mark.requirement("R43")
def test_adapters_that_are_being_loaded_count_for_the_limit(tmp_path: Path) -> None:
    """Until their loads are given up. A newer version of one counts once."""
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    table = AdapterTable(1, 8)
    adapter = table.prepare(source("a", tmp_path))
    with pytest.raises(ResourceExhausted) as caught:
        table.prepare(source("b", tmp_path))
    assert caught.value.reason == "ADAPTER_LIMIT"
    table.give_up(adapter)
    table.put(table.prepare(source("b", tmp_path)))
    table.prepare(AdapterSource("b", 2, tmp_path))
    with pytest.raises(ResourceExhausted):
        table.prepare(source("a", tmp_path))


@pytest.mark.requirement("R43", "R107")
def test_no_team_takes_the_adapters_of_another(tmp_path: Path) -> None:
    """With a limit for each namespace."""
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    table = AdapterTable(3, 8, limit_each=2)
    for name in ("a", "b"):
        table.put(table.prepare(source(name, tmp_path)))
    with pytest.raises(ResourceExhausted, match=r"2 adapters of the namespace default .*max_adapters_per_namespace"):
        table.prepare(source("c", tmp_path))
    table.put(table.prepare(AdapterSource("a", 2, tmp_path)))  # a newer version is no further adapter
    table.put(table.prepare(source("team-a/a", tmp_path)))
    with pytest.raises(ResourceExhausted, match=r"3 adapters are loaded.*max_adapters\)"):
        table.prepare(source("team-a/b", tmp_path))
    table.remove("b")
    table.put(table.prepare(source("c", tmp_path)))
