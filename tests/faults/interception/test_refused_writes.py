"""What the gate's disk refuses did not happen: nobody is told it, nothing builds on it, and the gate goes on (R34)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.disks.failing_disk import IOERR, Disk, failing
from tests.support.services.inner_gate import completion, inner_gate

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.errors import Unavailable
from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.results import Accepted, Rejection
from penstock_interception.rollouts.trajectory import Grade, capture
from penstock_interception.rpc import results
from penstock_interception.testing import OpenGate


async def told(gate: OpenGate, verdict: Accepted | Rejection) -> pb.ResultsAcknowledged:
    """What a trainer hears."""
    return await results.acknowledge([verdict])


@pytest.fixture
async def disk() -> AsyncIterator[Disk]:
    """A disk that can be filled."""
    with failing(Disk()) as made:
        yield made


@pytest.mark.requirement("R34", "R82", "R146")
async def test_answer_refused_by_the_disk_is_dropped_and_the_next_skips_it(disk: Disk, tmp_path: Path) -> None:
    """B1. The call fails, the trainer hears so, and its next answers are kept and trained on."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        first = await gate.ask(rollout, "a")
        await gate.store.settled()
        interceptor = gate.interceptor
        disk.fill()
        verdict = await interceptor.deliver(first.id, first.lease_id, completion("refused"))
        rejected = (await told(gate, verdict)).rejected
        assert [item.call_id for item in rejected] == [first.id] and "JOURNAL_FAILED" in rejected[0].message
        assert first.state is CallState.FAILED and first.end_reason == "JOURNAL_FAILED"
        assert first.completion is None and first.chain_index is None and not first.chain_sha256
        again = await interceptor.deliver(first.id, first.lease_id, completion("refused"))
        assert isinstance(again, Rejection)
        disk.free()
        second = await gate.ask(rollout, "a")
        verdict = await interceptor.deliver(second.id, second.lease_id, completion("kept"))
        assert list((await told(gate, verdict)).accepted_call_ids) == [second.id]
        graph = (await gate.interceptor.conversations.of(rollout)).graph
        assert list(graph.calls) == [second.id] and second.chain_index == 0
        head = graph.chain_head
    async with inner_gate(tmp_path) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        assert rollout.state is RolloutState.OPEN and not rollout.damaged
        conversation = await gate.interceptor.conversations.of(rollout)
        assert list(conversation.graph.calls) == [second.id] and conversation.graph.chain_head == head
        await gate.interceptor.rollouts.close("r1", "DONE")
        got = capture(rollout, await gate.interceptor.conversations.of(rollout))
        assert got.grade is Grade.EXACT and [len(sample.turns) for sample in got.samples] == [1]


@pytest.mark.requirement("R82", "R146")
async def test_concurrent_answers_of_a_rollout_continue_from_the_disk(
    tmp_path: Path,
) -> None:
    """B1. The first of two is refused alone; the second one's record does not name it."""
    with failing(Disk(IOERR, at=1, undoes=False)) as disk:
        disk.armed = False
        async with inner_gate(tmp_path) as gate:
            rollout = await gate.open()
            gate.join()
            calls = [await gate.ask(rollout, text) for text in ("a", "bb")]
            await gate.store.settled()
            interceptor = gate.interceptor
            tasks = [
                asyncio.ensure_future(interceptor.deliver(call.id, call.lease_id, completion(f"to {call.index}")))
                for call in calls
            ]
            disk.armed = True
            first = await tasks[0]
            assert isinstance(first, Accepted)
            shown = (await gate.interceptor.conversations.of(rollout)).graph.calls
            assert calls[0].id not in shown  # nor in a capture meanwhile
            assert (await told(gate, await tasks[1])).accepted_call_ids
            assert disk.reached
            await asyncio.gather(*(call.ended for call in calls))
            assert [call.state for call in calls] == [CallState.FAILED, CallState.DELIVERED]
    async with inner_gate(tmp_path) as gate:
        graph = (await gate.interceptor.conversations.of(gate.interceptor.registry.rollout("r1"))).graph
        assert list(graph.calls) == [calls[1].id]


@pytest.mark.requirement("R34", "R146")
async def test_damaged_journal_returns_what_precedes_the_damage_and_its_rollout_is_deletable(
    tmp_path: Path,
) -> None:
    """B1. What an earlier version broke is closed, readable, graded UNUSABLE, and its id is free again."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        said = ["a"]
        for text in ("bb", "ccc", "bb"):
            call = await gate.ask(rollout, *said)
            await told(gate, await gate.interceptor.deliver(call.id, call.lease_id, completion(text)))
            said += [text, "a"]
        waiting = await gate.ask(rollout, "ccc")
        ids = [call.id for call in rollout.calls]
    with sqlite3.connect(tmp_path / "interception.sqlite3") as connection:
        connection.execute("DELETE FROM graphs WHERE answer_order = 2")
    connection.close()
    async with inner_gate(tmp_path) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        assert rollout.state is RolloutState.CLOSED and rollout.close_reason == "JOURNAL_DAMAGED"
        conversation = await gate.interceptor.conversations.of(rollout)
        assert list(conversation.graph.calls) == ids[:1]
        got = capture(rollout, conversation)
        assert got.grade is Grade.UNUSABLE and "JOURNAL_DAMAGED" in [finding.reason for finding in got.findings]
        assert gate.interceptor.registry.call(waiting.id).state is CallState.CANCELLED
        await gate.interceptor.rollouts.delete("r1")
        assert (await gate.open()).state is RolloutState.OPEN
    async with inner_gate(tmp_path) as gate:
        assert gate.interceptor.registry.rollout("r1").calls == []


@pytest.mark.requirement("R34", "R146")
async def test_call_refused_by_the_disk_fails_without_a_gap(disk: Disk, tmp_path: Path) -> None:
    """B2. Its agent may ask again; no answer to it is acknowledged; later calls have their own index."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        disk.fill()
        lost = await gate.ask(rollout, "a")
        verdict = await gate.interceptor.deliver(lost.id, lost.lease_id, completion("to nobody"))
        assert (await told(gate, verdict)).rejected
        assert lost.state is CallState.FAILED and lost.end_reason == "JOURNAL_FAILED"
        disk.free()
        kept = [await gate.ask(rollout, "a"), await gate.ask(rollout, "bb")]
        assert [call.index for call in kept] == [1, 2]
    async with inner_gate(tmp_path) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        assert [call.index for call in rollout.calls] == [1, 2]
        gate.join()
        last = await gate.ask(rollout, "ccc")
        assert last.index == 3
        verdict = await gate.interceptor.deliver(last.id, last.lease_id, completion("a"))
        assert (await told(gate, verdict)).accepted_call_ids
        got = capture(rollout, await gate.interceptor.conversations.of(rollout), after_index=1)
        assert [call.index for call in got.calls] == [2, 3]
    async with inner_gate(tmp_path) as gate:
        assert [call.index for call in gate.interceptor.registry.rollout("r1").calls] == [1, 2, 3]


@pytest.mark.requirement("R34", "R146")
async def test_answer_to_an_unjournalled_call_is_refused(tmp_path: Path) -> None:
    """B2. An update of no row is no success."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        call = await gate.ask(rollout, "a")
        await gate.store._journal.execute("DELETE FROM calls WHERE call_id = ?", (call.id,))
        verdict = await gate.interceptor.deliver(call.id, call.lease_id, completion("a"))
        assert (await told(gate, verdict)).rejected
        assert call.state is CallState.FAILED and not (await gate.interceptor.conversations.of(rollout)).graph.calls


@pytest.mark.requirement("R34", "R146")
async def test_a_repeated_opening_hears_of_the_first_ones_refusal(disk: Disk, tmp_path: Path) -> None:
    """B6. Nobody is told that a rollout is open which the disk refused; it is open once asked for again."""
    async with inner_gate(tmp_path) as gate:
        disk.fill()
        both = await asyncio.gather(gate.open(), gate.open(), return_exceptions=True)
        assert [(type(error), getattr(error, "reason", "")) for error in both] == [(Unavailable, "JOURNAL_FAILED")] * 2
        assert gate.interceptor.registry.find("r1") is None
        disk.free()
        assert (await gate.open()).state is RolloutState.OPEN
        assert not (await gate.ask(gate.interceptor.registry.rollout("r1"), "a")).state.terminal


@pytest.mark.requirement("R34", "R146")
async def test_a_rollout_is_there_until_its_deletion_is_on_disk(disk: Disk, tmp_path: Path) -> None:
    """B7. A refused deletion is told, is done when it is asked for again, and lasts."""
    async with inner_gate(tmp_path) as gate:
        await gate.interceptor.rollouts.close((await gate.open()).id, "DONE")
        disk.fill()
        for _ in range(2):
            with pytest.raises(Unavailable, match="could not record"):
                await gate.interceptor.rollouts.delete("r1")
            assert gate.interceptor.registry.find("r1") is not None
        disk.free()
        await gate.interceptor.rollouts.delete("r1")
        assert gate.interceptor.registry.find("r1") is None
    async with inner_gate(tmp_path) as gate:
        assert gate.interceptor.registry.find("r1") is None


@pytest.mark.requirement("R34", "R146")
async def test_an_old_rollout_that_the_disk_kept_is_deleted_later(disk: Disk, tmp_path: Path) -> None:
    """What is due and refused is tried again, and holds up nothing else."""
    async with inner_gate(tmp_path) as gate:
        await gate.interceptor.rollouts.close((await gate.open()).id, "DONE")
        disk.fill()
        await gate.passes(gate.interceptor.limits.retention_s + 1)
        assert gate.interceptor.registry.find("r1") is not None
        disk.free()
        await gate.passes(61.0)
        assert gate.interceptor.registry.find("r1") is None


@pytest.mark.requirement("R5", "R34", "R146")
async def test_a_revocation_that_the_disk_refused_is_not_acknowledged_by_its_repeat(disk: Disk, tmp_path: Path) -> None:
    """A token that was told to be void stays void after a restart."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        credentials = gate.interceptor.agent_keys
        token = credentials.first_text(rollout)
        disk.fill()
        for _ in range(2):
            with pytest.raises(Unavailable, match="could not record"):
                await credentials.revoke(rollout, (), 0.0)
        disk.free()
        await credentials.revoke(rollout, (), 0.0)
    async with inner_gate(tmp_path) as gate:
        assert gate.interceptor.agent_keys.check("r1", token) == "revoked"


@pytest.mark.requirement("R34", "R146")
async def test_closing_a_rollout_ends_calls_whose_end_was_never_written(disk: Disk, tmp_path: Path) -> None:
    """A closed rollout has no open call after a restart, so that nobody waits for one."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        await gate.ask(rollout, "a")
        await gate.store.settled()
        disk.fill()
        for call in rollout.calls:
            gate.interceptor.gate.cancel(call, "AGENT_GONE")
        await gate.store.settled()
        disk.free()
        await gate.interceptor.rollouts.close("r1", "DONE")
    async with inner_gate(tmp_path) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        await gate.interceptor.conversations.of(rollout)
        assert [call.state for call in rollout.calls] == [CallState.CANCELLED]
        async with asyncio.timeout(60.0):
            await gate.interceptor.rollouts.delete("r1")
