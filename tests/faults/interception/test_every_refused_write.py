"""Each write of the gate's journal is refused once, by the errors of a disk in turn, in one scenario (R146).

The scenario has whatever the gate writes: rollouts with a run's budgets, tokens, calls that are answered one by one and
together, given back, paused and cancelled, host tools, closing and deleting. Agent, trainer and driver do what their
SDKs do about a refusal: they ask again.

The suite refuses a sample of what the scenario writes: one write of each statement and a few commits, drawn by a seed.
PENSTOCK_EVERY_REFUSED_WRITE=1 refuses each write in its turn, in one or two minutes of one core:

    PENSTOCK_EVERY_REFUSED_WRITE=1 python -m pytest tests/faults/interception/test_every_refused_write.py
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import pytest
from tests.support.disks.failing_disk import Disk, failing
from tests.support.disks.refused_writes import COMMITS, EVERY, IN_TURN, KINDS, Error, in_turn, sweep
from tests.support.services.inner_gate import completion, inner_gate

from penstock_chassis.errors import NotFound, Unavailable
from penstock_interception.domain.agent_keys import KeyTerms
from penstock_interception.domain.budgets import RunBudgets
from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.host_tools import CallKey, HostTool, ToolResult
from penstock_interception.domain.state import Call, Rollout, Selector
from penstock_interception.rollouts.trajectory import Grade, capture
from penstock_interception.rpc import results
from penstock_interception.store.commits import durable
from penstock_interception.testing import OpenGate

T = TypeVar("T")
TOOL = HostTool("work", "", "{}")
SEED: Final = 16


async def insisting(work: Callable[[], Awaitable[T]]) -> T:
    """As a client does: what the disk refused is asked for again."""
    for _ in range(3):
        try:
            return await work()
        except Unavailable as error:
            assert error.reason == "JOURNAL_FAILED"
    return await work()


class Scenario:
    """What happens, and what was acknowledged of it."""

    def __init__(self, gate: OpenGate) -> None:
        self.gate = gate
        self.trainer = gate.join()
        self.accepted: dict[str, str] = {}
        self.refused: set[str] = set()
        self.revoked = ""

    async def play(self) -> None:
        """From the opening to the last rollout, which stays open."""
        gate = self.gate
        await insisting(lambda: durable(gate.interceptor.tools.offer(self.trainer, Selector(), (TOOL,))))
        rollout = await insisting(lambda: gate.open(run_id="run", run_budgets=RunBudgets(max_calls=100)))
        self.revoked = gate.interceptor.agent_keys.first_text(rollout)
        await insisting(lambda: gate.interceptor.agent_keys.issue(rollout, "t1", KeyTerms(), 0.0))
        await self.converse(rollout, ["a"])
        await self.converse(rollout, ["a", "bb"], ["bb", "a"])
        await self.hold(rollout)
        await self.use_tool(rollout)
        await insisting(lambda: gate.interceptor.rollouts.close("r1", "DONE"))
        for _ in range(2):
            await insisting(lambda: gate.open(request_id="open-r2", rollout_id="r2", run_id="run"))
            await self.converse(gate.interceptor.registry.rollout("r2"), ["ccc"])
            await insisting(lambda: gate.interceptor.rollouts.delete("r2"))
        await insisting(lambda: gate.open(request_id="open-r3", rollout_id="r3", run_id="run"))
        await self.converse(gate.interceptor.registry.rollout("r3"), ["a"])

    async def converse(self, rollout: Rollout, *conversations: list[str]) -> None:
        """Calls at once, answered at once; an agent that gets no answer asks again."""
        asked = [await self.gate.ask(rollout, *_whole(said)) for said in conversations]
        await asyncio.gather(*(self.answer(call) for call in asked))
        for said, call in zip(conversations, asked, strict=True):
            if call.state is not CallState.DELIVERED:
                assert (call.state, call.end_reason) == (CallState.FAILED, "JOURNAL_FAILED")
                await self.converse(rollout, said)
            else:
                self.gate.interceptor.answer_sent(call)

    async def answer(self, call: Call) -> None:
        """A trainer's answer, and what it is told."""
        text = f"a{call.index}"
        verdict = await self.gate.interceptor.deliver(call.id, call.lease_id, completion(text))
        told = await results.acknowledge([verdict])
        if told.accepted_call_ids:
            self.accepted[call.id] = text
        else:
            self.refused.add(call.id)
        await call.ended

    async def hold(self, rollout: Rollout) -> None:
        """A pause, with a call that is given back and one that its agent leaves."""
        interceptor = self.gate.interceptor
        left, kept = [await self.gate.ask(rollout, text) for text in ("bb", "ccc")]
        await interceptor.release(kept.id, kept.lease_id)
        interceptor.sessions.pause(self.trainer, 100.0)
        await self.gate.passes(10.0)
        interceptor.resume(self.trainer)
        interceptor.gate.cancel(left, "AGENT_GONE")
        await self.answer(kept)

    async def use_tool(self, rollout: Rollout) -> None:
        """A call of a host tool with its result, or the word that it was lost."""
        broker = self.gate.interceptor.tools
        tool = broker.tool(rollout.id, "work")
        assert tool is not None
        call = broker.begin(rollout.id, tool, b"{}", CallKey("s", "1", bytes(32)))
        verdict = broker.settle(self.trainer, call.id, ToolResult(b"[]", False))
        told = await results.acknowledge([verdict])
        await call.ended
        if told.accepted_call_ids:
            assert call.state is CallState.DELIVERED
            broker.answer_sent(call)
        else:
            assert (call.state, call.end_reason) == (CallState.FAILED, "JOURNAL_FAILED")

    async def check(self, gate: OpenGate) -> None:
        """What holds of a gate that has seen all this, before a restart and after it."""
        known = set()
        for name in ("r1", "r3"):
            rollout = gate.interceptor.registry.rollout(name)
            assert not rollout.damaged
            assert (rollout.state is RolloutState.CLOSED) is (name == "r1")
            conversation = await gate.interceptor.conversations.of(rollout)
            delivered = {call.id for call in rollout.calls if call.state is CallState.DELIVERED}
            assert set(conversation.graph.calls) == delivered
            known |= delivered
            for call in rollout.calls:
                if call.id in delivered:
                    assert call.message is not None and call.message.text == self.accepted[call.id]
            if name == "r1":
                assert capture(rollout, conversation).grade is Grade.EXACT
                assert rollout.totals.open == 0
        assert not known & self.refused
        gone = {call_id for call_id in self.accepted if call_id not in known}
        assert len(gone) == 2 and not any(gate.interceptor.registry.find_call(call_id) for call_id in gone)  # of r2
        with pytest.raises(NotFound):
            gate.interceptor.registry.rollout("r2")
        assert gate.interceptor.agent_keys.check("r1", self.revoked) in ("revoked", "closed")


def _whole(said: list[str]) -> list[str]:
    """A conversation that ends with its user."""
    return said if len(said) % 2 else [*said, "a"]


async def play(directory: Path, disk: Disk) -> None:
    """All of it on this disk, and a restart."""
    with failing(disk):
        disk.armed = False
        async with inner_gate(directory) as gate:
            disk.armed = True
            scenario = Scenario(gate)
            await scenario.play()
            await scenario.check(gate)
            heads = await _heads(gate)
    async with inner_gate(directory) as gate:
        await scenario.check(gate)
        assert await _heads(gate) == heads
        scenario.gate, scenario.trainer = gate, gate.join()
        await scenario.converse(gate.interceptor.registry.rollout("r3"), ["bb"])
        await gate.interceptor.rollouts.close("r3", "DONE")
        for name in ("r1", "r3"):
            await gate.interceptor.rollouts.delete(name)


async def _heads(gate: OpenGate) -> dict[str, bytes]:
    rollouts = [gate.interceptor.registry.rollout(name) for name in ("r1", "r3")]
    return {rollout.id: (await gate.interceptor.conversations.of(rollout)).graph.chain_head for rollout in rollouts}


@pytest.mark.requirement("R34", "R82", "R146")
@KINDS
@IN_TURN
async def test_refused_write_loses_nothing_acknowledged_and_keeps_nothing_refused(
    tmp_path: Path, errors: tuple[Error, ...], commits: bool
) -> None:
    """Every answer that was acknowledged is there, none that was refused, and every chain is whole."""
    swept = await sweep(play, tmp_path, in_turn(errors, commits=commits), draw=random.Random(f"{SEED} {errors}"))
    assert set(swept.refused) == set(swept.written)
    assert len(swept.refused) > 10 or (not EVERY and len(swept.refused) >= COMMITS)
    if not commits:
        swept.has("INSERT INTO rollouts", "INSERT INTO calls", "INSERT INTO graphs", "DELETE FROM rollouts")
