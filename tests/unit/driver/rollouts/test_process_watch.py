"""A process is watched to its end however slowly its output is read; only silence says that its sandbox is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.unit.driver.conftest import Driver

from penstock_chassis.errors import DeadlineExceeded, PenstockError
from penstock_driver.domain.ports import Exit, ExitReason, Output, Sandboxes
from penstock_driver.domain.rollout import Cause, RolloutFailed
from penstock_driver.rollouts import agent_process
from penstock_driver.rollouts.process_watch import watched

OVER = -1.0
"""A limit that is over before anything was read."""


@dataclass
class Scripted:
    """Sandboxes with one process: what it said, and how it ends: by itself, once it is killed, or never."""

    said: list[bytes]
    end: Exit | None = None
    dies: bool = False
    refuses: PenstockError | None = None
    kills: int = 0
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, _sandbox: str, _process: str) -> AsyncGenerator[Output | Exit, None]:
        """See ports.Sandboxes."""
        for data in self.said:
            yield Output(data)
        if self.end is None:
            await self.killed.wait()
        yield self.end or Exit(ExitReason.KILLED, signal=9)

    async def kill(self, _sandbox: str, _process: str, *, everything: bool = False) -> None:
        """See ports.Sandboxes."""
        self.kills += 1
        if self.refuses is not None:
            raise self.refuses
        if self.dies:
            self.killed.set()


async def heard(sandboxes: Scripted, limit_s: float = OVER) -> list[Output | Exit]:
    """All that is told of the process, by who waits for nothing."""
    watching = watched(sandboxes, "s", "p", limit_s, what="the agent", margin_s=0.0)  # type: ignore[arg-type]
    async with aclosing(watching) as items:
        return [item async for item in items]


@pytest.mark.requirement("R43", "R96")
async def test_unread_output_after_the_limit_is_a_sign_of_life() -> None:
    """A flood that a busy driver reads long after its agent was ended is that agent's own."""
    ended = Exit(ExitReason.TIMED_OUT, signal=9)
    flood = Scripted([b"x"] * 1000, ended)
    assert await heard(flood) == [Output(b"x")] * 1000 + [ended]
    assert flood.kills == 1


@pytest.mark.requirement("R43", "R96")
async def test_process_left_by_a_busy_service_is_killed_as_over_its_limit() -> None:
    """Not as killed by somebody, nor as lost."""
    *said, end = await heard(Scripted([b"x"], dies=True))
    assert said == [Output(b"x")]
    assert isinstance(end, Exit)
    assert end.reason is ExitReason.TIMED_OUT


@pytest.mark.requirement("R59")
async def test_a_process_that_ended_before_the_kill_keeps_its_own_end() -> None:
    """One that succeeded while nobody had time to read has succeeded."""
    ended = Exit(ExitReason.EXITED, code=0)
    assert (await heard(Scripted([], ended)))[-1] == ended


@pytest.mark.requirement("R60")
async def test_before_its_limit_nothing_is_killed() -> None:
    ended = Exit(ExitReason.EXITED, code=0)
    process = Scripted([b"x"], ended)
    assert await heard(process, 600.0) == [Output(b"x"), ended]
    assert process.kills == 0


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("refuses", [None, DeadlineExceeded("no answer", reason="DEADLINE_EXCEEDED")])
async def test_a_sandbox_that_says_nothing_and_ends_nothing_is_lost(refuses: PenstockError | None) -> None:
    """That is the infrastructure's failure, with what the kill was answered."""
    with pytest.raises(RolloutFailed) as failed:
        await heard(Scripted([b"x"], refuses=refuses))
    failure = failed.value.failure
    assert (failure.cause, failure.reason, failure.retriable) == (Cause.INFRASTRUCTURE, "SANDBOX_UNRESPONSIVE", True)
    assert ("no answer" in failure.message) is (refuses is not None)


@pytest.mark.requirement("R43", "R96")
async def test_an_agent_that_nobody_ended_at_its_limit_has_timed_out(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rollout's whole course around it; this was once retried as SANDBOX_UNRESPONSIVE."""

    def at_once(sandboxes: Sandboxes, sandbox_id: str, process_id: str, _: float, *, what: str, held_s: Any) -> Any:
        return watched(sandboxes, sandbox_id, process_id, -60.0, what=what, margin_s=60.0)

    monkeypatch.setattr(agent_process, "watched", at_once)
    spec = driver.spec()
    agent = spec.agent.spec.model_copy(update={"argv": ["sleep", "1000000"]})
    spec = replace(spec, agent=replace(spec.agent, spec=agent), task=replace(spec.task, verifier=None))
    failure = (await driver.run(spec)).failure
    assert (failure.reason, failure.retriable) == ("AGENT_TIMED_OUT", False)
