"""Rows of many rollouts: told once as they are, then as they change, however fast that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.driver.conftest import Driver

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import InvalidArgument
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.clients.gate import spent_by
from penstock_driver.domain.ports import CallEnded, CallSpent
from penstock_driver.domain.records import Filter, RequestKey, RolloutEnd, new_records
from penstock_driver.domain.rollout import CallFinished, Phase, PhaseChanged
from penstock_driver.rpc.row_stream import watch_rows
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.summaries import Changes, Summaries

Answer = rollout_service_pb2.WatchRolloutsResponse
ENDED = RolloutEnd(rollout_pb2.Outcome(), {}, last_sequence=1, is_result=True)


def request(**terms: object) -> rollout_service_pb2.WatchRolloutsRequest:
    """The shortest interval that is allowed."""
    made = rollout_service_pb2.WatchRolloutsRequest(**terms)  # type: ignore[arg-type]
    made.interval.FromMilliseconds(100)
    return made


def watched(driver: Driver, matching: Filter | None = None, **terms: object) -> AsyncIterator[Answer]:
    """The stream of rows, with a heartbeat that never comes."""
    rows = Summaries(driver.records._journal)
    return watch_rows(rows, driver.history, matching or Filter(), request(**terms), heartbeat_s=3600)


async def snapshot(stream: AsyncIterator[Answer]) -> dict[str, rollout_pb2.RolloutSummary]:
    """What is there at the beginning."""
    found: dict[str, rollout_pb2.RolloutSummary] = {}
    async for answer in stream:
        found.update({row.rollout_id: row for row in answer.rollouts})
        if answer.snapshot_complete:
            return found
    raise AssertionError("the stream ended before its snapshot was complete")


async def until_ended(stream: AsyncIterator[Answer], rollout_id: str) -> list[rollout_pb2.RolloutSummary]:
    """The rows of one rollout until it has ended."""
    rows: list[rollout_pb2.RolloutSummary] = []
    async for answer in stream:
        rows += [row for row in answer.rollouts if row.rollout_id == rollout_id]
        if rows and rows[-1].phase == rollout_pb2.PHASE_ENDED and rows[-1].HasField("end_time"):
            return rows
    raise AssertionError("the stream ended")


@pytest.mark.requirement("R71")
async def test_summary_follows_a_rollout_to_its_reward(driver: Driver) -> None:
    """A table of rollouts needs one stream; each row has what the rollout's record has."""
    async with aclosing(watched(driver)) as stream:  # type: ignore[type-var]
        assert await snapshot(stream) == {}
        record = await driver.start(driver.spec(labels={"team": "a"}, run_id="run"))
        await driver.outcome(record)
        rows = await until_ended(stream, record.rollout_id)
    last = rows[-1]
    assert (last.task_id, last.agent, last.run_id, dict(last.labels)) == ("t1", "shell", "run", {"team": "a"})
    assert last.reward.value == 1.0
    assert not last.HasField("failure")
    assert [row.phase for row in rows] == sorted(row.phase for row in rows)


@pytest.mark.requirement("R71")
async def test_sums_of_calls_are_kept_with_their_events(driver: Driver) -> None:
    """Calls, tokens and policy versions are counted as they are told, and are on disk with their event."""
    driver.manager.watch_calls()
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    call = trajectory_pb2.Call(rollout_id=record.rollout_id)
    for spent in (CallSpent(100, 20, 4, 5, -6.5, 20), CallSpent(7, 0), CallSpent(50, 9, 3, 3, -0.25, 9)):
        driver.gate.call_ends.put_nowait(CallEnded(record.rollout_id, call, spent))
    async with aclosing(watched(driver)) as stream:  # type: ignore[type-var]
        row = (await snapshot(stream))[record.rollout_id]
        while row.calls.calls < 3:
            row = next(item for item in (await anext(stream)).rollouts)
    driver.gate.hold.set()
    await driver.outcome(record)
    assert (row.calls.calls, row.calls.prompt_tokens, row.calls.completion_tokens) == (3, 157, 29)
    assert (row.calls.oldest_policy_version, row.calls.newest_policy_version) == (3, 5)
    assert (row.calls.logprob_sum, row.calls.logprob_count) == (-6.75, 29)


@pytest.mark.requirement("R71")
async def test_unmatched_or_deleted_rollout_is_reported_gone(driver: Driver) -> None:
    """A table that follows the stream has no rows that nobody else has."""
    driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    async with (
        aclosing(watched(driver, Filter(ended=False))) as running,  # type: ignore[type-var]
        aclosing(watched(driver)) as everything,  # type: ignore[type-var]
    ):
        assert set(await snapshot(running)) == {record.rollout_id}
        await snapshot(everything)
        driver.gate.hold.set()
        await driver.outcome(record)
        async for answer in running:
            if answer.gone_rollout_ids:
                assert list(answer.gone_rollout_ids) == [record.rollout_id]
                break
        await until_ended(everything, record.rollout_id)
        await driver.records.delete(record.rollout_id)
        driver.history.deleted([record.rollout_id], "default")
        async for answer in everything:
            if answer.gone_rollout_ids:
                assert list(answer.gone_rollout_ids) == [record.rollout_id]
                break


@pytest.mark.requirement("R71")
async def test_thousand_rollouts_come_in_pages_and_a_burst_once(driver: Driver) -> None:
    """Many rollouts cost messages of bounded size; what changes often is told as it is last."""
    spec = driver.spec()
    large = rollout_pb2.RolloutSpec(task=rollout_pb2.Task(instruction="s" * 10_000))
    records = new_records(spec, large, [f"r{index}" for index in range(1000)])
    await driver.records.create(RequestKey("q", "d"), records)
    async with aclosing(watched(driver)) as stream:  # type: ignore[type-var]
        sizes: list[int] = []
        found: set[str] = set()
        async for answer in stream:
            assert answer.ByteSize() < 64 << 10
            sizes.append(len(answer.rollouts))
            found.update(row.rollout_id for row in answer.rollouts)
            if answer.snapshot_complete:
                break
        assert len(found) == 1000
        assert max(sizes) <= 256
        for sequence, phase in enumerate(Phase, start=1):
            driver.history.set_phase("r7", phase, 1, 0)
            driver.history.append("r7", None, sequence, PhaseChanged(phase), is_summary=True)
        await driver.history.flush()
        answer = await anext(stream)
    assert [(row.rollout_id, row.phase) for row in answer.rollouts] == [("r7", rollout_pb2.PHASE_ENDED)]


@pytest.mark.requirement("R71")
async def test_only_the_newest_ended_rollouts_are_listed(driver: Driver) -> None:
    """A driver with a long past is watched at the price of its present."""
    spec = driver.spec()
    await driver.records.create(
        RequestKey("q", "d"), new_records(spec, spec.request, [f"r{index}" for index in range(20)])
    )
    for index in range(18):
        driver.history.end(f"r{index}", None, ENDED)
    await driver.history.flush()
    async with aclosing(watched(driver, ended_limit=3)) as stream:  # type: ignore[type-var]
        assert set(await snapshot(stream)) == {"r19", "r18", "r17", "r16", "r15"}
    async with aclosing(watched(driver, Filter(ended=True), ended_limit=0)) as stream:  # type: ignore[type-var]
        assert await snapshot(stream) == {}


@pytest.mark.requirement("R71")
async def test_a_watch_of_a_day_holds_no_more_than_what_runs(driver: Driver) -> None:
    """Rollouts that ended while somebody watched cost nothing, and are told as gone all the same."""
    ids = [f"r{index}" for index in range(600)]
    await driver.records.create(RequestKey("q", "d"), new_records(driver.spec(), rollout_pb2.RolloutSpec(), ids))
    async with aclosing(watched(driver)) as stream:  # type: ignore[type-var]
        assert set(await snapshot(stream)) == set(ids)
        for rollout_id in ids[:-1]:
            driver.history.end(rollout_id, None, ENDED)
        await driver.history.flush()
        ended: set[str] = set()
        while len(ended) < 599:
            answer = await anext(stream)
            ended.update(row.rollout_id for row in answer.rollouts)
        held = stream.ag_frame.f_locals.values()  # type: ignore[attr-defined]
        assert max(len(item) for item in held if isinstance(item, set | dict | list)) <= 256
        await driver.records.delete("r0")
        driver.history.deleted(["r0"], "default")
        assert list((await anext(stream)).gone_rollout_ids) == ["r0"]


@pytest.mark.requirement("R71", "R107")
async def test_deleted_rollouts_of_others_are_not_told(driver: Driver) -> None:
    """Not even if they were written since the watcher looked. Its own are told, sent before or not."""
    spec = driver.spec()

    async def ended(rollout_id: str, namespace: str) -> None:
        records = new_records(replace(spec, namespace=namespace), spec.request, [rollout_id])
        await driver.records.create(RequestKey(rollout_id, "d", namespace), records)
        driver.history.end(rollout_id, None, ENDED)
        await driver.history.flush()

    await ended("sent", "ours")
    async with (
        aclosing(watched(driver, Filter(namespace="ours"))) as ours,  # type: ignore[type-var]
        aclosing(watched(driver)) as everything,  # type: ignore[type-var]
    ):
        assert set(await snapshot(ours)) == set(await snapshot(everything)) == {"sent"}
        for rollout_id, namespace in (("theirs", "theirs"), ("short", "ours")):
            await ended(rollout_id, namespace)
            await driver.manager.delete(rollout_id)
        await driver.manager.delete("sent")
        driver.history.changed(["theirs", "sent"])  # such as an export that was under way
        await ended("last", "ours")
        for stream, gone in ((ours, ["sent", "short"]), (everything, ["sent", "short", "theirs"])):
            answer = await anext(stream)
            assert [row.rollout_id for row in answer.rollouts] == ["last"]
            assert list(answer.gone_rollout_ids) == gone


@pytest.mark.requirement("R71", "R107")
async def test_a_deletion_is_told_although_its_row_was_missed_before(driver: Driver) -> None:
    """The stream may look between the deletion of a row and the word of it."""
    ids = ["first", "second"]
    await driver.records.create(RequestKey("q", "d"), new_records(driver.spec(), rollout_pb2.RolloutSpec(), ids))
    driver.history.end("first", None, ENDED)
    await driver.history.flush()
    async with aclosing(watched(driver)) as stream:  # type: ignore[type-var]
        await snapshot(stream)
        await driver.records.delete("first")
        driver.history.changed(ids)
        answer = await anext(stream)
        assert [row.rollout_id for row in answer.rollouts] == ["second"] and not answer.gone_rollout_ids
        driver.history.deleted(["first"], "default")
        assert list((await anext(stream)).gone_rollout_ids) == ["first"]


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(("terms", "field"), [({"ended_limit": -1}, "ended_limit"), ({}, "interval")])
async def test_terms_that_cannot_be_are_refused_by_field(driver: Driver, terms: dict[str, int], field: str) -> None:
    """Bad input names its field."""
    asked = request(**terms)
    if field == "interval":
        asked.interval.FromMilliseconds(1)
    with pytest.raises(InvalidArgument) as caught:
        await anext(watch_rows(Summaries(driver.records._journal), driver.history, Filter(), asked, heartbeat_s=1))
    assert [item.field for item in caught.value.violations] == [field]


@pytest.mark.requirement("R71")
def test_call_totals_come_from_tokens_or_else_from_usage() -> None:
    """A source of text says how many tokens it used; where there are tokens, they are counted."""
    tokens = completion_pb2.Completion(
        span=completion_pb2.TokenSpan(
            count=9,
            versions=[
                completion_pb2.PolicyVersionSpan(policy_version=4, start=0, end=3),
                completion_pb2.PolicyVersionSpan(policy_version=5, start=3, end=9),
            ],
        )
    )
    assert spent_by(trajectory_pb2.Call(prompt_count=100, completion=tokens)) == CallSpent(100, 9, 4, 5)
    usage = completion_pb2.Completion(usage=chat_pb2.Usage(prompt_tokens=70, completion_tokens=8))
    assert spent_by(trajectory_pb2.Call(completion=usage)) == CallSpent(70, 8)
    assert spent_by(trajectory_pb2.Call()) == CallSpent()


@pytest.mark.requirement("R71")
def test_logprobs_count_of_tokens_that_were_sampled_for_the_call() -> None:
    """Without logprobs, replayed, of a script, or summed to no number: nothing is known of how sure the policy was."""
    processed, scripted = completion_pb2.LOGPROBS_MODE_PROCESSED, completion_pb2.LOGPROBS_MODE_SCRIPTED
    span = completion_pb2.TokenSpan(count=9, logprob_sum=-4.5, logprobs_mode=processed)
    call = trajectory_pb2.Call(prompt_count=1, completion=completion_pb2.Completion(span=span))
    assert spent_by(call) == CallSpent(1, 9, logprob_sum=-4.5, logprob_count=9)
    call.completion.span.logprob_sum = 0.0  # every token was the only one possible
    assert spent_by(call).logprob_count == 9
    call.completion.span.logprob_sum = float("nan")
    assert spent_by(call) == CallSpent(1, 9)
    call.completion.span.ClearField("logprob_sum")
    assert spent_by(call) == CallSpent(1, 9)
    call.completion.span.logprob_sum, call.completion.span.logprobs_mode = -4.5, scripted
    assert spent_by(call) == CallSpent(1, 9)
    call.completion.span.logprobs_mode = processed
    call.replayed_from.call_id = "c"
    assert spent_by(call) == CallSpent()


@pytest.mark.requirement("R71")
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["add", "delete"]), st.integers(0, 9)),
            st.tuples(st.just("take"), st.integers(1, 4)),
        )
    )
)
def test_changes_are_neither_lost_nor_repeated(steps: list[tuple[str, int]]) -> None:
    """Each rollout that changed since somebody looked is told once, in the order of the first change. One that was
    deleted is told as such, also if a write is told after that.
    """
    changes, waiting = Changes(), dict[str, bool]()
    for step, number in steps:
        if step == "take":
            taken = list(waiting.items())[:number]
            assert list(changes.take(number).items()) == taken
            for rollout_id, _ in taken:
                del waiting[rollout_id]
        else:
            changes.add([str(number)], deleted=step == "delete")
            waiting[str(number)] = waiting.get(str(number), False) or step == "delete"
    assert list(changes.take(100).items()) == list(waiting.items())


@pytest.mark.requirement("R50")
async def test_sums_start_at_nothing_where_a_journal_is_older(tmp_path: Path) -> None:
    """A driver of before goes on with its rollouts; what was not counted then is nothing."""
    old = await Journal.open(tmp_path / "driver.db", MIGRATIONS[:-1])
    await old.execute(
        "INSERT INTO rollouts (rollout_id, idx, task_id, agent, agent_sha256, labels, spec, create_time, phase,"
        " phase_times) VALUES ('r', 0, 't', 'shell', '', '{}', x'', 1.0, 1, '{}')"
    )
    await old.aclose()
    journal = await Journal.open(tmp_path / "driver.db", MIGRATIONS)
    history = EventLog(journal)
    history.append("r", None, 1, CallFinished(trajectory_pb2.Call(), CallSpent(1, 2, 3, 3)), is_summary=False)
    await history.aclose()
    row = (await Summaries(journal).of(["r"]))[0]
    await journal.aclose()
    assert (row.calls, row.prompt_tokens, row.completion_tokens, row.newest_version) == (1, 1, 2, 3)
