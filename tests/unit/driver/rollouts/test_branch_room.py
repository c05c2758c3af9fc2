"""What branches may take: their recordings are bounded for each team, and generations of them do not grow."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.driver.conftest import Driver, accepted

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import InvalidArgument, ResourceExhausted
from penstock_driver.domain.records import RequestKey, new_id, new_records
from penstock_driver.domain.validation import MAX_GROUP, MAX_SEED, Violations
from penstock_driver.rollouts.branch_room import BranchRoom
from penstock_driver.rollouts.branching import Parents, branch_order
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.wire.specs import effective_spec, rollout_spec

LONG = "x" * 50_000


def answered(count: int) -> list[trajectory_pb2.Call]:
    """Calls with long answers, as a gate has them of a rollout."""
    answer = completion_pb2.Completion(message=chat_pb2.Message(parts=[chat_pb2.Part(text=chat_pb2.Text(text=LONG))]))
    return [trajectory_pb2.Call(call_id=f"c{number}", index=number, completion=answer) for number in range(count)]


async def ended_parent(driver: Driver) -> None:
    """A rollout `parent` that has ended, and of which the gate has four calls."""
    request = rollout_service_pb2.CreateRolloutRequest(request_id="q", rollout_id="parent")
    request.spec.mode = interception_pb2.MODE_INTERCEPTION_GATE
    request.spec.source.tokenizer.name = "tiny"
    request.spec.agent.name = "shell"
    request.spec.task.instruction = "copy"
    await driver.opened.parts.rollout_servicer.CreateRollout(request, None)
    await driver.manager.wait("parent", 60)
    driver.gate.captured["parent"] = answered(4)


async def branched(driver: Driver, parent: str, group: str, count: int = 1) -> list[str]:
    """Ids of branches of its last call, which are created as a client creates them."""
    request = rollout_service_pb2.BranchRolloutRequest(
        request_id=secrets.token_hex(8), rollout_id=parent, call_index=3, count=count, group_id=group
    )
    answer = await driver.opened.parts.rollout_servicer.BranchRollout(request, None)
    return list(answer.group.rollout_ids)


@pytest.mark.requirement("R129")
async def test_copies_of_a_long_rollout_are_bounded_for_each_team(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request costs its team one copy, until its branches have ended; a refused one leaves nothing."""
    folder = driver.opened.settings.state_dir / "recordings"
    await ended_parent(driver)
    driver.gate.hold = asyncio.Event()  # branches stay at their first call

    first = await branched(driver, "parent", "g0", 8)
    found = RecordingFile(folder, first[0]).identity()
    assert found is not None and found[1] > 3 * len(LONG)
    size = found[1]
    room = driver.opened.parts.rollout_servicer._service.creation._parents._room
    monkeypatch.setattr(room, "_most", 3 * size + size // 2)
    await branched(driver, "parent", "g1")
    last = await branched(driver, "parent", "g2")
    for count in (1, 8):
        with pytest.raises(ResourceExhausted) as refused:
            await branched(driver, "parent", "g3", count)
        assert refused.value.reason == "RECORDINGS_FULL" and "max_recording_bytes" in str(refused.value)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 10 and not [name for name in names if not name.endswith(".recording")]
    other = await room.open("another team")
    room.grow(other, 3 * size)  # has its own
    room.drop(other)

    # The next process counts what there is: ten files, of three copies.
    again = BranchRoom(3 * size, driver.records, folder, driver.manager.is_running)
    with pytest.raises(ResourceExhausted):
        again.grow(await again.open("default"), 1)

    await driver.manager.cancel(last[0], "no longer wanted")
    (new,) = await branched(driver, "parent", "g3")
    assert RecordingFile(folder, new).is_there
    for one in ("g0", "g1", "g3"):
        await driver.manager.cancel_group(await driver.records.group(one), "enough")
    assert not list(folder.iterdir())
    await room.open("default")
    assert room._used["default"] == 0 and not room._kept


@pytest.mark.requirement("R129")
async def test_more_branches_than_a_team_may_have_are_refused(driver: Driver) -> None:
    """Before anything is read or written for them."""
    await ended_parent(driver)
    with pytest.raises(ResourceExhausted) as refused:
        await branched(driver, "parent", "g0", MAX_GROUP)
    assert refused.value.reason == "ROLLOUT_LIMIT"
    folder = driver.opened.settings.state_dir / "recordings"
    assert not folder.exists() or not list(folder.iterdir())
    with pytest.raises(InvalidArgument):
        await branched(driver, "parent", "g0", MAX_GROUP + 1)


@pytest.mark.requirement("R129")
async def test_an_equal_request_at_once_is_counted_once(driver: Driver) -> None:
    room = BranchRoom(100, driver.records, Path("nowhere"), lambda _: True)
    one, other = await room.open("team"), await room.open("team")
    room.grow(one, 40)
    room.grow(other, 40)
    room.keep("g", ["g-0"], one)
    room.keep("g", ["g-0"], other)
    room.grow(await room.open("team"), 60)
    assert room._used["team"] == 100


@pytest.mark.requirement("R129")
async def test_a_thousandth_generation_is_asked_for_as_the_first_was(driver: Driver, tmp_path: Path) -> None:
    """Its spec is as large, and its seeds stay seeds, whatever seeds and indexes the generations before had."""
    parents = Parents(
        driver.records,
        driver.opened.parts.specs,
        driver.gate,
        tmp_path,
        BranchRoom(1, driver.records, tmp_path, lambda _: False),
    )
    spec, record = accepted(driver)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    sizes, request = set[int](), rollout_pb2.RolloutSpec()
    for generation in range(1000):
        ask = rollout_service_pb2.BranchRolloutRequest(rollout_id=record.rollout_id, call_index=1, count=MAX_GROUP)
        if generation % 2 == 0:
            ask.seed = MAX_SEED - MAX_GROUP + 1
        order = branch_order(ask)
        order.check(Violations())
        request = await parents.request(record, order)
        sizes.add(request.ByteSize())
        spec = check_backend(rollout_spec(request, driver.registry, "default"), [driver.sandboxes.facts])
        point = trajectory_pb2.BranchPoint(parent_rollout_id=record.rollout_id, call_id="c1", call_index=1)
        if order.seed is not None:
            point.seed = order.seed
        (record,) = new_records(spec, effective_spec(spec), [f"b{generation}"], branched_from=point)
        record = replace(record, index=MAX_GROUP - 1)
        sealed = await driver.opened.parts.specs.sealed(spec, record)
        await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    assert len(sizes) <= 2, "with a seed of the parent's own, and without"
    assert request.sampling_override.seed == MAX_SEED
    assert request.replay == rollout_pb2.REPLAY_EXACT
