"""`penstock pause` and `penstock resume`, on a group that a trainer answers."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from tests.integration.client.conftest import TASK
from tests.integration.client.test_watch import connection
from tests.support.terminal.commands import invoke

from penstock.client import Penstock

__all__ = ["connection"]  # a fixture


@pytest.mark.requirement("R131")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_paused_group_goes_on_rollout_by_rollout(ps: Penstock, connection: dict[str, str]) -> None:
    """Each call is answered by the engine's script, so the rewards are those of rollouts that nobody paused."""

    async def command(*arguments: str) -> str:
        code, printed, err = await asyncio.to_thread(invoke, *arguments, environment=connection)
        assert code == 0, err
        return printed

    label = secrets.token_hex(8)
    async with ps.intercept(labels={"test": label}) as session:
        group = await ps.groups.create(TASK, "shell", 2, labels={"test": label})
        calls = session.calls()
        waiting = {call.rollout_id: call for call in [await anext(calls), await anext(calls)]}
        printed = await command("pause", group.group_id, "--for", "600", "--reason", "the weights move")
        assert "2 of its rollouts are paused" in printed
        first, second = group.rollout_ids
        assert "goes on" in await command("resume", first)
        await waiting[first].delegate()
        call = await anext(calls)
        assert (call.rollout_id, call.index) == (first, 1)
        held = (await ps.rollouts.get(second)).pause
        assert held is not None and held.reason == "the weights move"
        assert "goes on" in await command("resume", group.group_id)
        assert (await ps.rollouts.get(second)).pause is None

        async def answer_the_rest() -> None:
            for one in (call, waiting[second]):
                await one.delegate()
            async for one in calls:
                await one.delegate()

        answering = asyncio.create_task(answer_the_rest())
        results = await group.results()
        session.finish()
        await answering
    assert [one.reward and one.reward.value for one in results] == [0.75, 0.75]
