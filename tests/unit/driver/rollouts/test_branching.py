"""What a branch needs of its parent: its spec, bounded and with its own seed, and its answers up to a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver, accepted, wire_spec

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock_chassis.journal import Journal
from penstock_driver.agents.launch import AgentChoice
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.records import Record, RequestKey, RolloutEnd, new_id, new_records
from penstock_driver.domain.rollout import RolloutSpec
from penstock_driver.domain.validation import MAX_SEED, Violations, check_seeds
from penstock_driver.placement.services import LOADINGS
from penstock_driver.rollouts.branch_room import BranchRoom
from penstock_driver.rollouts.branching import Parents, branch_order
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import MIGRATION_KEPT_SPECS
from penstock_driver.wire.specs import effective_spec, rollout_spec


def order(**fields: Any) -> rollout_service_pb2.BranchRolloutRequest:
    """A request that can be met, with these fields changed."""
    request = rollout_service_pb2.BranchRolloutRequest(rollout_id="r1", call_index=1, count=2)
    for name, value in fields.items():
        getattr(request, name).CopyFrom(value) if name == "answer" else setattr(request, name, value)
    return request


def message(*parts: chat_pb2.Part, role: chat_pb2.Role.ValueType = chat_pb2.ROLE_ASSISTANT) -> chat_pb2.Message:
    return chat_pb2.Message(role=role, parts=parts)


TEXT = chat_pb2.Part(text=chat_pb2.Text(text="x"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"count": 0}, "count"),
        ({"count": 257}, "count"),
        ({"call_index": -1}, "call_index"),
        ({"replay": rollout_pb2.REPLAY_OFF}, "replay"),
        ({"seed": -1}, "seed"),
        ({"seed": MAX_SEED}, "seed"),
        ({"answer": message()}, "answer.parts"),
        ({"answer": message(TEXT, role=chat_pb2.ROLE_USER)}, "answer.role"),
        ({"answer": message(chat_pb2.Part(tool_result=chat_pb2.ToolResult()))}, "answer.parts[0]"),
        ({"answer": message(chat_pb2.Part(tool_call=chat_pb2.ToolCall()))}, "answer.parts[0].tool_call.name"),
        ({"answer": message(chat_pb2.Part(text=chat_pb2.Text(text="x" * (1 << 20))))}, "answer"),
    ],
)
def test_a_wrong_field_of_the_request_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        branch_order(order(**fields)).check(Violations())
    assert [violation.field for violation in caught.value.violations] == [named]


def test_a_given_answer_is_a_message_that_nobody_sampled() -> None:
    call = chat_pb2.Part(tool_call=chat_pb2.ToolCall(name="bash", arguments_json="{}"))
    answer = branch_order(order(answer=message(TEXT, call, role=chat_pb2.ROLE_UNSPECIFIED))).completion()
    assert answer is not None and not answer.HasField("span")
    assert answer.finish_reason == chat_pb2.FINISH_REASON_TOOL_CALLS
    assert answer.message.role == chat_pb2.ROLE_ASSISTANT and answer.message.parts[1].tool_call.id


async def captured(count: int) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Calls with answers, the last one open."""
    for number in range(count):
        call = trajectory_pb2.Call(call_id=f"c{number}", index=number, prompt_count=7, branch_point=number == 0)
        if number < count - 1:
            call.completion.engine = "e"
        yield trajectory_pb2.Trajectory(calls=[call])


@pytest.mark.requirement("R129")
@pytest.mark.parametrize("answer", [None, completion_pb2.Completion(engine="given")])
async def test_the_file_has_the_calls_before_and_the_marked_one(
    tmp_path: Path, answer: completion_pb2.Completion | None
) -> None:
    """Two rollouts have it without a copy; a point of the parent's own is no point of the branch."""
    file = RecordingFile(tmp_path / "recordings", "shared")
    call = await file.write_branch(captured(5), ("r1", 3), lambda one: one.index == 2, answer, exact=True)
    assert call.call_id == "c2" and call.completion.engine == "e"
    file.share(["b-0", "b-1"])
    file.remove()
    for branch in ("b-0", "b-1"):
        (part,) = RecordingFile(tmp_path / "recordings", branch).parts()
        assert (part.rollout_id, part.recorded_rollout_id, part.recorded_attempt) == (branch, "r1", 3)
        assert [(one.call_id, one.branch_point, one.completion.engine) for one in part.calls] == [
            *(("c0", False, "e"), ("c1", False, "e"), ("c2", True, "" if answer is None else "given"))
        ]
        assert part.calls[2].HasField("completion") is part.calls[2].injected is (answer is not None)
    assert len({path.stat().st_ino for path in (tmp_path / "recordings").iterdir()}) == 1


@pytest.mark.requirement("R129")
async def test_a_branch_gets_what_hosts_answered_before_its_point(tmp_path: Path) -> None:
    """What they answered later is another's: after the point the branch asks hosts itself."""

    async def calls() -> AsyncIterator[trajectory_pb2.Trajectory]:
        async for part in captured(4):
            part.calls[0].receive_time.FromSeconds(100 + 10 * part.calls[0].index)
            yield part

    async def results() -> AsyncIterator[trajectory_pb2.HostToolCall]:
        for ended in (105, 120, 125):
            call = trajectory_pb2.HostToolCall(tool_call_id=f"t{ended}", result_json="{}")
            call.end_time.FromSeconds(ended)
            yield call

    file = RecordingFile(tmp_path, "b")
    await file.write_branch(calls(), ("r1", 1), lambda one: one.index == 2, None, exact=True, results=results)
    (part,) = file.parts()
    assert [one.call_id for one in part.calls] == ["c0", "c1", "c2"]
    assert [one.tool_call_id for one in part.host_tool_calls] == ["t105", "t120"]


@pytest.mark.parametrize(("index", "kind", "reason"), [(9, NotFound, "CALL_UNKNOWN"), (4, FailedPrecondition, "")])
async def test_calls_that_cannot_be_branched_are_refused(
    tmp_path: Path, index: int, kind: type[Exception], reason: str
) -> None:
    file = RecordingFile(tmp_path, "shared")
    with pytest.raises(kind) as caught:
        await file.write_branch(captured(5), ("r1", 1), lambda one: one.index == index, None, exact=True)
    assert getattr(caught.value, "reason", "") == (reason or "CALL_UNANSWERED")


async def end_each(driver: Driver, log: EventLog, spec: RolloutSpec, count: int) -> list[Record]:
    """Rollouts of this spec that have ended one after another. After each end the journal has as much as it says."""
    records = new_records(spec, effective_spec(spec), [new_id("r") for _ in range(count)])
    for record in records:
        sealed = await driver.opened.parts.specs.sealed(spec, record)
        await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    for record in records:
        log.end(record.rollout_id, None, RolloutEnd(rollout_pb2.Outcome(), {}, 0))
        await log.flush()
        assert sum((await counted(driver)).values()) <= log._kept_spec_bytes
    return records


async def counted(driver: Driver) -> dict[str, int]:
    """Bytes of kept specs by namespace: as the journal counts them, which is what there is."""
    there = "SELECT namespace, SUM(LENGTH(sealed)) FROM sealed_specs WHERE ended IS NOT NULL GROUP BY namespace"
    found = {str(row[0]): int(row[1]) for row in await driver.journal.query(there)}
    assert {str(row[0]): int(row[1]) for row in await driver.journal.query("SELECT * FROM kept_specs")} == found
    return found


async def numbers(driver: Driver) -> dict[str, int]:
    """How many specs of ended rollouts each namespace has."""
    there = "SELECT namespace, COUNT(*) FROM sealed_specs WHERE ended IS NOT NULL GROUP BY namespace"
    return {str(row[0]): int(row[1]) for row in await driver.journal.query(there)}


async def kept(driver: Driver, records: Iterable[Record]) -> list[bool]:
    """Which of these rollouts have their specs."""
    return [await driver.records.sealed_spec(record) is not None for record in records]


@pytest.mark.requirement("R129")
@pytest.mark.parametrize(("room", "left"), [(0, 0), (0.5, 0), (2.5, 2), (100, 5)])
async def test_specs_of_ended_rollouts_are_kept_within_their_bound(driver: Driver, room: float, left: int) -> None:
    """The newest ones, after every single end; of a rollout that runs always."""
    spec, runs = accepted(driver)
    sealed = await driver.opened.parts.specs.sealed(spec, runs)
    await driver.records.create(RequestKey(new_id("q"), "d"), [runs], sealed=sealed)
    log = EventLog(driver.journal, kept_spec_bytes=int(room * len(sealed)))
    records = await end_each(driver, log, spec, 5)
    assert await kept(driver, [runs, *records]) == [True, *[number >= 5 - left for number in range(5)]]
    await log.aclose()


@pytest.mark.requirement("R129")
async def test_a_team_with_many_specs_forgets_its_own_first(driver: Driver) -> None:
    """Teams with less than an equal part of the bytes keep all; what they leave free is the others'."""
    spec, first = accepted(driver)
    size = len(await driver.opened.parts.specs.sealed(spec, first))
    log = EventLog(driver.journal, kept_spec_bytes=9 * size + size // 2)
    greedy, modest, late = (replace(spec, namespace=name) for name in ("greedy", "modest", "late"))
    small = await end_each(driver, log, modest, 2)
    await end_each(driver, log, greedy, 20)
    assert await numbers(driver) == {"modest": 2, "greedy": 7}
    await end_each(driver, log, late, 20)
    assert await kept(driver, small) == [True, True]
    assert await numbers(driver) == {"modest": 2, "greedy": 3, "late": 4}
    await driver.records.delete(small[0].rollout_id)
    assert (await numbers(driver))["modest"] == 1 and (await counted(driver))["modest"] < 2 * size
    await log.aclose()
    await EventLog(driver.journal, kept_spec_bytes=3 * size + size // 2).aclose()
    assert await numbers(driver) == {"modest": 1, "greedy": 1, "late": 1}
    await EventLog(driver.journal).aclose()
    assert await counted(driver) == {}


async def test_a_journal_of_before_counts_what_it_keeps(tmp_path: Path) -> None:
    """Of each namespace, also of groups."""
    path, spec = tmp_path / "old.db", b"s" * 100
    earlier = MIGRATIONS[: MIGRATIONS.index(MIGRATION_KEPT_SPECS)]
    columns = "(rollout_id, group_id, idx, task_id, agent, agent_sha256, labels, spec, create_time, phase, phase_times"
    async with await Journal.open(path, earlier) as journal:
        for rollout_id, group_id, namespace in (("r1", None, "a"), ("r2", "g1", "b"), ("r3", None, "a")):
            sql = f"INSERT INTO rollouts {columns}, namespace) VALUES (?, ?, 0, '', '', '', '', '', 0, 0, '{{}}', ?)"
            await journal.execute(sql, (rollout_id, group_id, namespace))
        await journal.execute(
            "INSERT INTO groups (group_id, spec, size, spares, quorum, create_time, rollout_ids, namespace)"
            " VALUES ('g1', '', 1, 0, 1, 0, '[]', 'b')"
        )
        for spec_id, ended in (("r1", 1.0), ("g1", 2.0), ("r3", None)):
            await journal.execute("INSERT INTO sealed_specs VALUES (?, ?, ?)", (spec_id, spec, ended))
    async with await Journal.open(path, MIGRATIONS) as journal:
        rows = await journal.query("SELECT namespace, bytes FROM kept_specs ORDER BY namespace")
        assert [tuple(row) for row in rows] == [("a", 100), ("b", 100)]
        await EventLog(journal, kept_spec_bytes=100).aclose()
        rows = await journal.query("SELECT spec_id FROM sealed_specs ORDER BY spec_id")
        assert [row[0] for row in rows] == ["r3"], "the share of two is less than the spec of each"


@pytest.mark.requirement("R129")
async def test_rollouts_replay_the_file_of_the_request_that_recorded_them(tmp_path: Path, driver: Driver) -> None:
    """Not that of another request for the same ids, which was refused: it may be another team's."""
    folder = tmp_path / "recordings"
    own, other = RecordingFile(folder, "own"), RecordingFile(folder, "other")
    for file, engine in ((own, "own"), (other, "other")):
        answer = completion_pb2.Completion(engine=engine)
        await file.write_branch(captured(5), ("r1", 1), lambda one: one.index == 2, answer, exact=True)
    room = BranchRoom(1, driver.records, folder, lambda _: False)
    parents = Parents(driver.records, driver.opened.parts.specs, driver.gate, folder, room)
    other.share(["b-0"])
    own.share(["b-1"])
    parents.assign(["b-0", "b-1", "b-2"], own)
    for branch in ("b-0", "b-1", "b-2"):
        assert own.is_shared_with(branch) and not other.is_shared_with(branch)
        (part,) = RecordingFile(folder, branch).parts()
        assert part.calls[2].completion.engine == "own"
    parents.assign(["b-0", "b-1"], None)
    assert not RecordingFile(folder, "b-0").is_there and not own.is_shared_with("b-0")


@pytest.mark.requirement("R129")
async def test_a_new_rollout_replays_no_file_that_a_refused_request_left(driver: Driver) -> None:
    """A refused branch of the same id came while it was being recorded."""
    folder = driver.opened.settings.state_dir / "recordings"
    file = RecordingFile(folder, "taken")
    await file.write_branch(captured(5), ("r1", 1), lambda one: one.index == 2, None, exact=True)
    request = rollout_service_pb2.CreateRolloutRequest(request_id="q", rollout_id="taken", spec=wire_spec())
    request.spec.max_attempts = 2
    await driver.opened.parts.rollout_servicer.CreateRollout(request, None)
    await driver.manager.wait("taken", 60)
    assert not driver.gate.recorded


@pytest.mark.requirement("R129")
async def test_few_branches_have_a_part_of_their_recording_in_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group begins at once, and each has megabytes to load: the others wait for their turn."""
    inside, most, go_on = set[str](), 0, asyncio.Event()

    async def load(part: rollout_gate_service_pb2.LoadRecordingRequest) -> int:
        nonlocal most
        inside.add(part.rollout_id)
        most = max(most, len(inside))
        await go_on.wait()
        inside.remove(part.rollout_id)
        return len(part.calls)

    monkeypatch.setattr(driver.gate, "load_recording", load)
    folder = driver.opened.settings.state_dir / "recordings"
    file, point = RecordingFile(folder, "shared"), trajectory_pb2.BranchPoint(parent_rollout_id="r1", call_id="c1")
    await file.write_branch(captured(5), ("r1", 1), lambda one: one.index == 1, None, exact=True)
    spec, ids = driver.spec(), [new_id("r") for _ in range(8)]
    file.share(ids)
    records = new_records(spec, spec.request, ids, branched_from=point)
    await driver.records.create(RequestKey(new_id("q"), "d"), records)
    driver.manager.start(spec, records)
    await eventually(lambda: len(driver.gate.opened) == len(ids), "all are opened at the gate")
    await eventually(lambda: len(inside) == LOADINGS, "as many load as may")
    go_on.set()
    for record in records:
        await driver.outcome(record)
    assert most == LOADINGS


@pytest.mark.parametrize(("seed", "fits"), [(MAX_SEED, False), (MAX_SEED - 1, True), (-1, True)])
async def test_each_rollout_of_a_group_has_a_seed(driver: Driver, seed: int, fits: bool) -> None:
    """Also the last one, so that branches of it have it too."""
    spec = driver.spec(choice=AgentChoice(seed=seed))
    if fits:
        check_seeds(spec, 2)
        return
    with pytest.raises(InvalidArgument) as caught:
        check_seeds(spec, 2)
    assert [one.field for one in caught.value.violations] == ["spec.seed"]


@pytest.mark.requirement("R141")
async def test_a_branch_is_answered_from_its_parents_recording(tmp_path: Path, driver: Driver) -> None:
    """Up to the branch point its programs ask what its parent's asked."""
    spec, _ = accepted(driver)
    spec.request.sandbox.agent_network.hosts.append("a.test")
    (record,) = new_records(spec, effective_spec(spec), ["g1-0"], "g1")
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    room = BranchRoom(1, driver.records, tmp_path, lambda _: False)
    parents = Parents(driver.records, driver.opened.parts.specs, driver.gate, tmp_path, room)
    request = await parents.request(record, branch_order(order(rollout_id="g1-0")))
    assert request.sandbox.agent_network.recording == "group/g1"
    spec = rollout_spec(request, driver.registry, "default")  # a client may not name it so
    assert spec.agent_network is not None and spec.agent_network.recording == "group/g1"


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("name", ["group/g1/grading", "rollout/r1"])
async def test_no_task_names_the_recording_of_another_group(driver: Driver, name: str, group: bool) -> None:
    """Its agent would choose what that group's verifier is answered."""
    spec = wire_spec()
    for network in (spec.sandbox.agent_network, spec.sandbox.verifier_network):
        network.hosts.append("a.test")
        network.recording = name
    servicer = driver.opened.parts.rollout_servicer
    with pytest.raises(InvalidArgument) as caught:
        if group:
            await servicer.CreateGroup(rollout_service_pb2.CreateGroupRequest(request_id="q", spec=spec, size=1), None)
        else:
            await servicer.CreateRollout(rollout_service_pb2.CreateRolloutRequest(request_id="q", spec=spec), None)
    assert [one.field for one in caught.value.violations] == [
        "spec.sandbox.agent_network.recording",
        "spec.sandbox.verifier_network.recording",
    ]
