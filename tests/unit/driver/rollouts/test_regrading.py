"""Grading ended rollouts again: one grade of one name, whatever is interrupted, bounded, and nothing left over."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.support.waiting import eventually, eventually_async
from tests.unit.driver.conftest import Driver, wire_spec

from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_driver.app import one_place
from penstock_driver.domain.ports import SandboxTerms
from penstock_driver.domain.records import Record, RequestKey, RolloutEnd, new_id, new_records
from penstock_driver.domain.rollout import Changes
from penstock_driver.rollouts import regrading
from penstock_driver.rollouts.preflight import check_backend
from penstock_driver.rollouts.regrading import MOST_GRADES, OUTPUT_BYTES, PATH_BYTES, REGRADE_LABEL, Regrader
from penstock_driver.rpc import rollout_service
from penstock_driver.store.end_states import Bounds, EndStates
from penstock_driver.wire.specs import effective_spec, rollout_spec

pytestmark = pytest.mark.requirement("R140")
NOTHING = Changes(0, 0, 0, 0)
"""A box is no sandbox: what was changed in one cannot be put into another."""


def verifier(*shell: str) -> rollout_pb2.Verifier:
    made = rollout_pb2.Verifier()
    for line in shell:
        made.commands.add(shell=line)
    made.reward_file.SetInParent()
    return made


HALF = verifier("echo 0.5 > $PENSTOCK_REWARD_FILE")


@dataclass
class World:
    """A driver, its end states, and what grades again from them."""

    driver: Driver
    states: EndStates
    spool: Path
    regrader: Regrader

    def make(self, most: int) -> Regrader:
        """One that makes `most` grades at once."""
        opened = self.driver.opened
        return Regrader(
            self.driver.records,
            opened.parts.specs,
            self.driver.registry,
            self.states,
            one_place(self.driver.sandboxes, self.driver.gate, opened.settings),
            self.driver.gate,
            instance_id=opened.parts.instance_id,
            most=most,
        )

    async def ended(
        self,
        rollout_id: str = "r1",
        *,
        setup: str = "",
        group_id: str | None = None,
        network: sandbox_pb2.Allowlist | None = None,
    ) -> Record:
        """An ended rollout with an end state. `network` is its verifier's."""
        wire = wire_spec()
        if network is not None:
            wire.sandbox.verifier_network.CopyFrom(network)
        if setup:
            wire.task.setup.add(shell=setup)
        spec = check_backend(rollout_spec(wire, self.driver.registry, "default"), [self.driver.sandboxes.facts])
        (record,) = new_records(spec, effective_spec(spec), [rollout_id], group_id)
        sealed = await self.driver.opened.parts.specs.sealed(spec, record)
        await self.driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
        self.driver.history.end(rollout_id, None, RolloutEnd(rollout_pb2.Outcome(), {}, 0))
        await self.driver.history.flush()
        await self.states.keep(rollout_id, "default", 1, NOTHING, io.BytesIO())
        return await self.driver.records.get(rollout_id)

    async def grades(self, rollout_id: str = "r1") -> dict[str, float | None]:
        """What is on disk."""
        record = await self.driver.records.get(rollout_id)
        return {one.name: one.reward.value if one.HasField("reward") else None for one in record.grades}

    def verifies(self) -> bool:
        """Whether a verifier runs, or has run in a sandbox that is there."""
        return any("verifier-0" in box.ran for box in self.driver.sandboxes.boxes.values())

    def is_clean(self) -> bool:
        return not self.driver.sandboxes.boxes and not self.regrader.running_count


@dataclass
class Held:
    """A verifier that runs until it is released."""

    path: Path

    def __post_init__(self) -> None:
        os.mkfifo(self.path)
        self.verifier = verifier(f"read word < {self.path}; echo 1 > $PENSTOCK_REWARD_FILE")

    async def release(self) -> None:
        """Returns when it goes on."""
        await asyncio.to_thread(self.path.write_text, "go\n")


@pytest.fixture
async def world(driver: Driver, tmp_path: Path) -> AsyncIterator[World]:
    spool = tmp_path / "spool"
    spool.mkdir()
    states = await EndStates.open(driver.journal, tmp_path / "end-states", Bounds(1 << 30, None, 1e6), spool=spool)
    found = World(driver, states, spool, None)  # type: ignore[arg-type]
    found.regrader = found.make(4)
    yield found
    await found.regrader.aclose()


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path / "held")


async def test_one_name_is_graded_once_however_often_it_is_asked_for(world: World) -> None:
    """By all at once, and later; the prepared state is made once for all names, and no sandbox is left."""
    record = await world.ended()
    grades = await asyncio.gather(*(world.regrader.regrade(record, HALF, "v2") for _ in range(8)))
    assert all(grade == grades[0] for grade in grades) and grades[0].reward.value == 0.5
    assert grades[0].grading.place == rollout_pb2.GRADING_PLACE_FRESH_FORK
    assert await world.regrader.regrade(await world.driver.records.get("r1"), HALF, "v2") == grades[0]
    await world.regrader.regrade(record, verifier("echo 1 > $PENSTOCK_REWARD_FILE"), "v3")
    assert await world.grades() == {"v2": 0.5, "v3": 1.0}
    calls = world.driver.sandboxes.calls
    assert (calls.count("prepare_snapshot"), calls.count("fork")) == (1, 2) and world.is_clean()


@pytest.mark.requirement("R134")
async def test_a_verifier_with_a_judge_does_not_grade_again(world: World) -> None:
    """The gate has closed the rollout, and its judge with it."""
    asking = verifier("true")
    asking.judge.SetInParent()
    with pytest.raises(InvalidArgument) as refused:
        await world.regrader.regrade(await world.ended(), asking, "v2")
    assert [one.field for one in refused.value.violations] == ["verifier.judge"]


async def test_a_grade_is_made_although_its_caller_went_away(world: World, held: Held) -> None:
    record = await world.ended()
    asking = asyncio.ensure_future(world.regrader.regrade(record, held.verifier, "v2"))
    await eventually(world.verifies, "the verifier runs")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.regrader.running_count == 1
    await held.release()
    await eventually(world.is_clean, "the grade is made")
    assert await world.grades() == {"v2": 1.0}


async def test_grades_whose_callers_went_away_count_as_running(
    world: World, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who asks and goes away cannot have more work done than one who waits."""
    monkeypatch.setattr(regrading, "MOST_WAITING", 1)
    world.regrader = regrader = world.make(1)
    record = await world.ended()
    for count, name in enumerate(("v2", "v3"), 1):
        asking = asyncio.ensure_future(regrader.regrade(record, held.verifier, name))
        await eventually(partial(_runs, regrader, count), f"{name} is begun")
        asking.cancel()
        await asyncio.wait([asking])
    with pytest.raises(ResourceExhausted, match="try again later") as refused:
        await regrader.regrade(record, HALF, "v4")
    assert refused.value.reason == "REGRADE_LIMIT" and refused.value.retry_after_s
    await regrader.aclose()
    await eventually(world.is_clean, "all have stopped")


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("run", NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")),
        ("run", FailedPrecondition("it ended", reason="SANDBOX_LOST")),
        ("run", Unavailable("away", reason="UNAVAILABLE")),
        ("put_layer", FailedPrecondition("it ended", reason="SANDBOX_LOST")),
    ],
    ids=["unknown", "lost", "away", "lost before"],
)
async def test_what_fails_of_the_sandbox_is_no_grade(world: World, method: str, error: PenstockError) -> None:
    """The same call grades afterwards."""
    record, given = await world.ended(), rollout_pb2.Verifier()
    given.CopyFrom(HALF)
    given.files.add(path="check.txt", content=b"x")
    await world.regrader.regrade(record, HALF, "v1")  # which prepares its state
    world.driver.sandboxes.fail[method] = [error]
    with pytest.raises(Unavailable, match="nothing was graded") as interrupted:
        await world.regrader.regrade(record, given, "v2")
    assert interrupted.value.reason == "REGRADE_INTERRUPTED"
    assert await world.grades() == {"v1": 0.5} and world.is_clean()
    assert (await world.regrader.regrade(record, given, "v2")).reward.value == 0.5


async def test_work_that_ends_its_own_sandbox_is_graded_without_a_reward(world: World) -> None:
    """Otherwise it could never be graded."""
    record = await world.ended()
    await world.regrader.regrade(record, HALF, "v1")
    world.driver.sandboxes.from_within = True
    world.driver.sandboxes.fail["run"] = [FailedPrecondition("it ended", reason="SANDBOX_LOST")]
    grade = await world.regrader.regrade(record, HALF, "v2")
    assert grade.failure.cause == rollout_pb2.FAILURE_CAUSE_AGENT and not grade.HasField("reward")
    assert await world.grades() == {"v1": 0.5, "v2": None} and world.is_clean()


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("group_id", "named", "recording"),
    [(None, "", "rollout/r1/grading"), ("g1", "", "group/g1/grading"), ("g1", "frozen", "frozen")],
)
async def test_a_verifier_reaches_what_the_rollouts_own_reached(
    world: World, group_id: str | None, named: str, recording: str
) -> None:
    """It gets the same responses: another reward would otherwise say nothing of the work."""
    network = sandbox_pb2.Allowlist(hosts=["a.test"], ports=[8080], recording=named)
    record = await world.ended(group_id=group_id, network=network)
    await world.regrader.regrade(record, HALF, "v2")
    network.recording = recording
    assert world.driver.sandboxes.allowlists == [network]


async def test_a_prepared_state_that_is_gone_is_made_again(world: World) -> None:
    record = await world.ended()
    await world.regrader.regrade(record, HALF, "v2")
    world.driver.sandboxes.snapshots.clear()
    assert (await world.regrader.regrade(record, HALF, "v3")).reward.value == 0.5
    assert world.driver.sandboxes.calls.count("prepare_snapshot") == 2


async def test_a_prepared_state_that_cannot_be_made_again_is_named(world: World) -> None:
    record = await world.ended(setup="exit 3")
    with pytest.raises(FailedPrecondition, match="prepared state") as refused:
        await world.regrader.regrade(record, HALF, "v2")
    assert refused.value.reason == "REGRADE_FAILED" and await world.grades() == {}


async def test_a_rollout_that_is_deleted_meanwhile_gets_no_grade(world: World, held: Held) -> None:
    record = await world.ended()
    asking = asyncio.ensure_future(world.regrader.regrade(record, held.verifier, "v2"))
    await eventually(world.verifies, "the verifier runs")
    await world.driver.records.delete("r1")
    await held.release()
    with pytest.raises(NotFound) as unknown:
        await asking
    assert unknown.value.reason == "ROLLOUT_UNKNOWN" and world.is_clean()


async def test_a_rollout_has_a_bounded_number_of_grades(world: World) -> None:
    """Those that it has are returned all the same."""
    await world.ended()
    for number in range(MOST_GRADES):
        await world.regrader.regrade(await world.driver.records.get("r1"), HALF, f"v{number}")
    record = await world.driver.records.get("r1")
    with pytest.raises(ResourceExhausted, match=str(MOST_GRADES)) as refused:
        await world.regrader.regrade(record, HALF, "more")
    assert refused.value.reason == "GRADE_LIMIT"
    assert (await world.regrader.regrade(record, HALF, "v0")).reward.value == 0.5


async def test_what_work_prints_and_names_is_bounded_in_its_grade(world: World) -> None:
    """Lists leave it out: a page has many rollouts, each with many grades."""
    await world.ended()
    names = tuple(f"/workspace/{number}/" + "n" * 4000 for number in range(32))
    await world.states.keep("r1", "default", 1, Changes(0, 0, 0, 32, names), io.BytesIO(bytes(10240)))
    record = await world.driver.records.get("r1")
    lines = [f"head -c 5000 /dev/zero | tr '\\0' {number % 10}" for number in range(63)]
    grade = await world.regrader.regrade(record, verifier(*lines, "echo 1 > $PENSTOCK_REWARD_FILE"), "v2")
    outputs = [command.stdout_tail for command in grade.grading.commands]
    assert len(outputs) == 64 and outputs[5].startswith(b"555") and 0 < sum(map(len, outputs)) <= OUTPUT_BYTES
    listed = grade.grading.changes.left_out_paths
    assert 0 < sum(map(len, listed)) <= PATH_BYTES and grade.grading.changes.left_out == 32
    asked = rollout_service_pb2.ListRolloutsRequest()
    (row,) = (await world.driver.opened.parts.rollout_servicer.ListRollouts(asked, None)).rollouts
    assert row.grades[0].reward.value == 1.0 and row.grades[0].grading.changes.left_out == 32
    assert not row.grades[0].grading.commands and not row.grades[0].grading.changes.left_out_paths


@pytest.mark.requirement("R135")
async def test_a_page_of_long_rewards_is_shorter_and_the_next_one_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier may reward each token, and a page must fit into a message."""
    reward = trajectory_pb2.Reward(value=1, turns=[trajectory_pb2.TurnReward(call_id="c", token_values=bytes(4000))])
    for number in range(3):
        await world.ended(f"r{number}")
        await world.driver.records.set_grades(f"r{number}", [rollout_pb2.Grade(name="v2", reward=reward)])
    monkeypatch.setattr(rollout_service, "PAGE_BYTES", 6000)
    servicer, token, pages = world.driver.opened.parts.rollout_servicer, "", list[list[str]]()
    while token or not pages:
        asked = rollout_service_pb2.ListRolloutsRequest(page_token=token, page_size=3)
        answer = await servicer.ListRollouts(asked, None)
        token = answer.next_page_token
        pages.append([row.rollout_id for row in answer.rollouts])
        assert all(len(row.grades[0].reward.turns[0].token_values) == 4000 for row in answer.rollouts)
    assert pages == [["r2"], ["r1"], ["r0"]]


async def test_a_driver_that_stops_leaves_no_sandbox_and_no_grade(world: World, held: Held) -> None:
    record = await world.ended()
    asking = asyncio.ensure_future(world.regrader.regrade(record, held.verifier, "v2"))
    await eventually(world.verifies, "the verifier runs")
    await world.regrader.aclose()
    with pytest.raises(Unavailable) as interrupted:
        await asking
    assert interrupted.value.reason == "REGRADE_INTERRUPTED"
    assert await world.grades() == {} and world.is_clean()


async def test_sandboxes_of_a_killed_driver_go_before_it_grades_again(world: World) -> None:
    record, sandboxes = await world.ended(), world.driver.sandboxes
    label = {REGRADE_LABEL: world.driver.opened.parts.instance_id}
    left = await sandboxes.create(SandboxTerms(), 60.0, label)
    other = await sandboxes.create(SandboxTerms(), 60.0, {REGRADE_LABEL: "another"})
    world.regrader.recover(sandboxes)
    await world.regrader.regrade(record, HALF, "v2")
    assert list(sandboxes.boxes) == [other.sandbox_id] and sandboxes.calls.index("delete") < sandboxes.calls.index(
        "fork"
    )
    assert left.sandbox_id not in sandboxes.boxes
    await sandboxes.delete(other.sandbox_id)


async def test_a_full_disk_is_no_grade_and_loses_no_end_state(world: World) -> None:
    record = await world.ended()
    await world.states.keep("r1", "default", 1, NOTHING, io.BytesIO(bytes(1 << 20)))
    world.spool.rmdir()
    with pytest.raises(Unavailable, match="disk") as interrupted:
        await world.regrader.regrade(record, HALF, "v2")
    assert interrupted.value.reason == "REGRADE_INTERRUPTED"
    world.spool.mkdir()
    assert (await world.regrader.regrade(record, HALF, "v2")).reward.value == 0.5


async def test_a_grade_that_came_first_under_a_name_stays(world: World, held: Held) -> None:
    """Two verifiers at once under one name: the second is refused when it is done, and nothing is overwritten."""
    record = await world.ended()
    asking = asyncio.ensure_future(world.regrader.regrade(record, held.verifier, "v2"))
    await eventually(world.verifies, "the verifier runs")
    await world.regrader.regrade(record, HALF, "v2")
    await held.release()
    with pytest.raises(PenstockError, match="choose another name") as refused:
        await asking
    assert refused.value.reason == "GRADE_EXISTS"
    await eventually_async(lambda: _is(world, {"v2": 0.5}), "the first stays")


def _runs(regrader: Regrader, count: int) -> bool:
    return regrader.running_count == count


async def _is(world: World, grades: dict[str, float | None]) -> bool:
    return await world.grades() == grades
