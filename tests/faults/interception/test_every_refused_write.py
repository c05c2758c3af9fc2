"""Each write of the gate's journal is refused once, by each error of a disk, under one fixed scenario (R34, R146).

The scenario has whatever the gate writes: rollouts with a run's budgets, tokens, calls that are answered one by one and
together, given back, paused and cancelled, host tools, closing and deleting. Agent, trainer and driver do what their
SDKs do about a refusal: they ask again.

The suite refuses a sample of what the scenario writes: one write of each statement and a few commits, drawn by a seed.
PENSTOCK_EVERY_REFUSED_WRITE=1 refuses each write in its turn, in one or two minutes of one core:

    PENSTOCK_EVERY_REFUSED_WRITE=1 python -m pytest tests/faults/interception/test_every_refused_write.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import pytest
from tests.support.failing_disk import FULL, IOERR, Disk, failing
from tests.support.inner_gate import InnerGate, completion, inner_gate

from penstock_chassis.errors import NotFound, Unavailable
from penstock_interception.budgets import RunBudgets
from penstock_interception.calls import Call, CallState, Rollout, RolloutState
from penstock_interception.capture import Grade, capture
from penstock_interception.ports import durable
from penstock_interception.rpc import results
from penstock_interception.sessions import Selector
from penstock_interception.tokens import TokenTerms
from penstock_interception.tools.model import CallKey, HostTool, ToolResult

T = TypeVar("T")
HANGS_S = 60.0
TOOL = HostTool("work", "", "{}")
EVERY: Final = os.environ.get("PENSTOCK_EVERY_REFUSED_WRITE") == "1"
SEED: Final = 16
COMMITS: Final = 6
"""So many commits are in the sample."""


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

    def __init__(self, gate: InnerGate) -> None:
        self.gate = gate
        self.trainer = gate.join()
        self.accepted: dict[str, str] = {}
        self.refused: set[str] = set()
        self.revoked = ""

    async def play(self) -> None:
        """From the opening to the last rollout, which stays open."""
        gate = self.gate
        await insisting(lambda: durable(gate.turns.gate.tools.offer(self.trainer, Selector(), (TOOL,))))
        rollout = await insisting(lambda: gate.open(run_id="run", run_budgets=RunBudgets(max_calls=100)))
        self.revoked = gate.turns.gate.credentials.token(rollout)
        await insisting(lambda: gate.turns.gate.credentials.issue(rollout, "t1", TokenTerms(), 0.0))
        await self.converse(rollout, ["a"])
        await self.converse(rollout, ["a", "bb"], ["bb", "a"])
        await self.hold(rollout)
        await self.use_tool(rollout)
        await insisting(lambda: gate.turns.close("r1", "DONE"))
        for _ in range(2):
            await insisting(lambda: gate.open(request_id="open-r2", rollout_id="r2", run_id="run"))
            await self.converse(gate.turns.gate.rollout("r2"), ["ccc"])
            await insisting(lambda: gate.turns.gate.delete("r2"))
        await insisting(lambda: gate.open(request_id="open-r3", rollout_id="r3", run_id="run"))
        await self.converse(gate.turns.gate.rollout("r3"), ["a"])

    async def converse(self, rollout: Rollout, *conversations: list[str]) -> None:
        """Calls at once, answered at once; an agent that gets no answer asks again."""
        asked = [await self.gate.ask(rollout, *_whole(said)) for said in conversations]
        await asyncio.gather(*(self.answer(call) for call in asked))
        for said, call in zip(conversations, asked, strict=True):
            if call.state is not CallState.DELIVERED:
                assert (call.state, call.end_reason) == (CallState.FAILED, "JOURNAL_FAILED")
                await self.converse(rollout, said)
            else:
                self.gate.turns.gate.told(call)

    async def answer(self, call: Call) -> None:
        """A trainer's answer, and what it is told."""
        text = f"a{call.index}"
        verdict = await self.gate.turns.gate.answers.accept(call.id, call.lease_id, completion(text))
        told = await results.told([verdict])
        if told.accepted_call_ids:
            self.accepted[call.id] = text
        else:
            self.refused.add(call.id)
        await call.ended

    async def hold(self, rollout: Rollout) -> None:
        """A pause, with a call that is given back and one that its agent leaves."""
        gate = self.gate.turns.gate
        left, kept = [await self.gate.ask(rollout, text) for text in ("bb", "ccc")]
        gate.answers.release(kept.id, kept.lease_id)
        gate.dispatcher.pause(self.trainer, 100.0)
        await self.gate.passes(10.0)
        gate.dispatcher.resume(self.trainer)
        gate.cancel(left, "AGENT_GONE")
        await self.answer(kept)

    async def use_tool(self, rollout: Rollout) -> None:
        """A call of a host tool with its result, or the word that it was lost."""
        desk = self.gate.turns.gate.tools
        tool = desk.tool(rollout.id, "work")
        assert tool is not None
        call = desk.begin(rollout.id, tool, b"{}", CallKey("s", "1", bytes(32)))
        verdict = desk.settle(self.trainer, call.id, ToolResult(b"[]", False))
        told = await results.told([verdict])
        await call.ended
        if told.accepted_call_ids:
            assert call.state is CallState.DELIVERED
            desk.told(call)
        else:
            assert (call.state, call.end_reason) == (CallState.FAILED, "JOURNAL_FAILED")

    async def check(self, gate: InnerGate) -> None:
        """What holds of a gate that has seen all this, before a restart and after it."""
        known = set()
        for name in ("r1", "r3"):
            rollout = gate.turns.gate.rollout(name)
            assert not rollout.damaged
            assert (rollout.state is RolloutState.CLOSED) is (name == "r1")
            conversation = await gate.turns.conversation(rollout)
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
        assert len(gone) == 2 and not any(gate.turns.gate.knows(call_id) for call_id in gone)  # of r2
        with pytest.raises(NotFound):
            gate.turns.gate.rollout("r2")
        assert gate.turns.gate.credentials.check("r1", self.revoked) in ("revoked", "closed")


def _whole(said: list[str]) -> list[str]:
    """A conversation that ends with its user."""
    return said if len(said) % 2 else [*said, "a"]


async def refuse(directory: Path, disk: Disk) -> list[str]:
    """Plays the scenario on this disk. Returns what does not hold."""
    heads: dict[str, bytes] = {}
    try:
        async with asyncio.timeout(HANGS_S):
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
                await scenario.converse(gate.turns.gate.rollout("r3"), ["bb"])
                await gate.turns.close("r3", "DONE")
                for name in ("r1", "r3"):
                    await gate.turns.gate.delete(name)
    except TimeoutError:
        return ["it hangs"]
    except (AssertionError, ExceptionGroup) as error:
        return [f"{error!r}"]
    return []


async def _heads(gate: InnerGate) -> dict[str, bytes]:
    rollouts = [gate.turns.gate.rollout(name) for name in ("r1", "r3")]
    return {rollout.id: (await gate.turns.conversation(rollout)).graph.chain_head for rollout in rollouts}


async def writes(directory: Path, *, commits: bool) -> list[str]:
    """What the scenario writes on a disk that refuses nothing, in its order."""
    disk = Disk(commits=commits)
    assert await refuse(directory, disk) == []
    return disk.seen


def drawn(written: list[str], code: int, undoes: bool) -> list[int]:
    """The sample, as positions that begin at one: a write of each statement, or `COMMITS` where all are commits.

    Writers may share a commit or not, so that one run has fewer commits than another: the last ones are not drawn.
    """
    draw = random.Random(f"{SEED} {code} {undoes}")
    places: dict[str, list[int]] = {}
    for place, statement in enumerate(written, 1):
        places.setdefault(statement, []).append(place)
    if len(places) == 1:
        return sorted(draw.sample(range(1, len(written) * 3 // 4), COMMITS))
    return sorted(draw.choice(of_one) for of_one in places.values())


@pytest.mark.parametrize("commits", [False, True], ids=["statements", "commits"])
@pytest.mark.parametrize(
    ("code", "undoes"), [(FULL, True), (IOERR, True), (IOERR, False)], ids=["full", "io error", "io error of one"]
)
async def test_whatever_write_is_refused_nothing_acknowledged_is_lost_and_nothing_refused_is_kept(
    tmp_path: Path, code: int, undoes: bool, commits: bool
) -> None:
    """R34, R82, R146: every answer that was acknowledged is there, none that was refused, and every chain is whole."""
    written = await writes(tmp_path / "0", commits=commits)
    chosen: Iterable[int] = count(1) if EVERY else drawn(written, code, undoes)
    failed: dict[str, list[str]] = {}
    refused: list[str] = []
    for at in chosen:
        disk = Disk(code, at=at, commits=commits, undoes=undoes)
        found = await refuse(tmp_path / str(at), disk)
        if found:
            failed[f"{at}: {disk.refused[:1]}"] = found
        if not disk.reached:
            break  # the scenario has no further write
        refused.append(disk.refused[0])
    assert not failed
    assert set(refused) == set(written)
    assert len(refused) > 10 or (not EVERY and len(refused) >= COMMITS)
    if not commits:
        for kind in ("INSERT INTO rollouts", "INSERT INTO calls", "INSERT INTO graphs", "DELETE FROM rollouts"):
            assert any(statement.startswith(kind) for statement in refused), (kind, refused)
