"""Each write of the driver's journal is refused once, by the errors of a disk in turn, in one scenario (R146).

The scenario has whatever the driver writes: agents registered and deleted; rollouts that complete, that are begun anew,
that are cancelled, deleted, or owe a release; groups; calls that are counted; terminal episodes that are answered,
closed, or cannot be opened at first. Its clients do what their SDKs do about a refusal: they ask again. Then a driver
starts on what one that died has left: rollouts and episodes in every state; each write of that start is refused, too.

The suite refuses a sample by the errors in turn: one write of each statement and a few commits, drawn by a seed.
PENSTOCK_EVERY_REFUSED_WRITE=1 refuses each write by each error, in a few minutes of one core:

    PENSTOCK_EVERY_REFUSED_WRITE=1 python -m pytest tests/faults/driver/test_every_refused_write.py
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from tests.support.disks.failing_disk import Disk, failing
from tests.support.disks.refused_writes import COMMITS, IN_TURN, KINDS, Error, in_turn, sweep
from tests.support.services.inner_driver import CONTEXT, Box, Boxes, InnerDriver, Places, asked, inner_driver
from tests.support.waiting import eventually, eventually_async

from penstock.driver.v1 import agent_pb2, agent_service_pb2, rollout_pb2, terminal_service_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import process_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, Internal, Unavailable
from penstock_driver.domain.ports import CallEnded, CallSpent
from penstock_driver.environments import cleanup
from penstock_driver.rollouts import runner
from penstock_driver.store import event_log

T = TypeVar("T")
SEED: Final = 21
ASKED_AGAIN: Final = ("JOURNAL_FAILED", "TERMINAL_UNRELEASED", "TERMINAL_OPENING", "RELEASE_OWED")
WORK, SLEEP = "work", "sleep"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again soon."""
    for module, name in (
        (event_log, "RETRY_S"),
        (runner, "FIRST_PAUSE_S"),
        (cleanup, "FIRST_PAUSE_S"),
        (cleanup, "MOST_PAUSE_S"),
        (cleanup, "MOST_PAUSE_OWED_S"),
    ):
        monkeypatch.setattr(module, name, 0.001)


async def insisting(work: Callable[[], Awaitable[T]]) -> T:
    """As a client does: what may pass is asked for again."""
    while True:
        try:
            return await asked(work())
        except Unavailable as error:
            assert error.reason in ASKED_AGAIN, error
            await asyncio.sleep(0.001)


def agent(name: str, version: str = "1") -> agent_pb2.AgentSpec:
    return agent_pb2.AgentSpec(
        name=name,
        version=version,
        argv=["/bin/true"],
        instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
        files=[agent_pb2.ConfigFile(path="endpoint", text="{{base_url}}")],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    )


def task(instruction: str = WORK, verify: str = "true") -> rollout_pb2.Task:
    commands = [process_service_pb2.Command(shell=verify)]
    return rollout_pb2.Task(
        task_id="t",
        instruction=instruction,
        setup=[process_service_pb2.Command(shell="true")],
        verifier=rollout_pb2.Verifier(commands=commands, passed_share=rollout_pb2.RewardPassedShare()),
    )


def spec(instruction: str = WORK, **changes: Any) -> rollout_pb2.RolloutSpec:
    return rollout_pb2.RolloutSpec(
        task=task(instruction),
        agent=rollout_pb2.AgentChoice(name="kept"),
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
        **changes,
    )


class Scenario:
    """What happens, and what was acknowledged of it."""

    def __init__(self, driver: InnerDriver) -> None:
        self.driver = driver
        self.outcomes: dict[str, rollout_pb2.Outcome] = {}
        self.observed: dict[tuple[str, str], terminal_service_pb2.StepResponse] = {}
        self.terminals: dict[str, str] = {}

    async def play(self) -> None:
        """All of it; one terminal episode stays open."""
        await self.register()
        await self.roll()
        await self.group()
        await self.episodes()

    async def register(self) -> None:
        agents = self.driver.agents
        for each in (agent("gone"), agent("kept"), agent("kept", "2")):
            registering = agent_service_pb2.RegisterAgentRequest(spec=each)
            await insisting(lambda request=registering: agents.RegisterAgent(request, None))  # type: ignore[misc]
        gone = agent_service_pb2.DeleteAgentRequest(name="gone")
        await insisting(lambda: agents.DeleteAgent(gone, None))

    async def roll(self) -> None:
        """A plain one with a call, one that is begun anew, one that owes a release, and one that is cancelled."""
        boxes, ended = self.driver.boxes, self.driver.places.ended
        boxes.holds.add("write_files")
        await self.create("plain")
        call = trajectory_pb2.Call(rollout_id="plain")
        await boxes.started.wait()
        ended.put_nowait(CallEnded("plain", call, CallSpent(3, 2)))
        await eventually(ended.empty, "the call is told")
        boxes.release()
        await self.wait("plain")
        boxes.fail["write_files"] = [Unavailable("injected", reason="INJECTED")]
        await self.create("anew", max_attempts=2)
        await self.wait("anew")
        boxes.fail["delete"] = [Internal("injected", reason="INJECTED")]
        await self.create("owed")
        await self.wait("owed")
        boxes.started.clear()
        await self.create("cancelled", SLEEP)
        await boxes.started.wait()
        cancel = pb.CancelRolloutRequest(rollout_id="cancelled", reason="enough")
        await insisting(lambda: self.driver.rollouts.CancelRollout(cancel, None))
        await self.wait("cancelled")
        for rollout_id in ("plain", "owed"):
            await self.delete(rollout_id)

    async def create(self, rollout_id: str, instruction: str = WORK, **changes: Any) -> None:
        request = pb.CreateRolloutRequest(
            request_id=f"create-{rollout_id}", rollout_id=rollout_id, spec=spec(instruction, **changes)
        )
        for _ in range(2):
            told = await insisting(lambda: self.driver.rollouts.CreateRollout(request, None))
            assert told.rollout.rollout_id == rollout_id

    async def wait(self, rollout_id: str) -> None:
        """Its end is acknowledged: it is the same from then on."""
        request = pb.WaitRolloutRequest(rollout_id=rollout_id)
        told = await insisting(lambda: self.driver.rollouts.WaitRollout(request, CONTEXT))
        assert told.rollout.HasField("outcome")
        self.outcomes[rollout_id] = told.rollout.outcome

    async def delete(self, rollout_id: str) -> None:
        request = pb.DeleteRolloutRequest(rollout_id=rollout_id)
        await insisting(lambda: self.driver.rollouts.DeleteRollout(request, None))
        self.outcomes.pop(rollout_id, None)

    async def group(self) -> None:
        """Two groups, of which one is deleted."""
        for name in ("g", "h"):
            making = pb.CreateGroupRequest(request_id=f"create-{name}", group_id=name, spec=spec(), size=2)
            await insisting(lambda request=making: self.driver.rollouts.CreateGroup(request, None))  # type: ignore[misc]
            waiting = pb.WaitGroupRequest(group_id=name)
            told = await insisting(lambda request=waiting: self.driver.rollouts.WaitGroup(request, CONTEXT))  # type: ignore[misc]
            assert told.group.complete
            for rollout_id in told.group.rollout_ids:
                await self.wait(rollout_id)
        delete = pb.DeleteGroupRequest(group_id="h")
        await insisting(lambda: self.driver.rollouts.DeleteGroup(delete, None))
        for index in range(2):
            del self.outcomes[f"h-{index}"]

    async def episodes(self) -> None:
        """One that is answered, one that is closed, one that cannot be opened at first, and one that stays open."""
        await self.open("answered")
        await self.step("answered", "one", command="echo a")
        await self.step("answered", "two", command="echo b")
        await self.step("answered", "end", answer="done")
        if given := self.observed.get(("answered", "end")):
            assert given.reward.value == 1.0
        await self.open("closed")
        await self.step("closed", "one", command="echo a")
        await self.close("closed")
        self.driver.boxes.fail["write_files"] = [FailedPrecondition("injected", reason="INJECTED")]
        try:
            await self.open("failed")
        except FailedPrecondition as error:
            assert error.reason == "INJECTED"
            await self.open("failed")
        await self.close("failed")
        await self.open("open")
        await self.step("open", "one", command="echo a")

    async def open(self, name: str) -> None:
        """An episode; who asks again gets the same."""
        request = terminal_service_pb2.OpenTerminalRequest(request_id=f"open-{name}", task=task())
        first, again = [await insisting(lambda: self.driver.terminals.OpenTerminal(request, None)) for _ in range(2)]
        assert first.terminal.terminal_id == again.terminal.terminal_id
        self.terminals[name] = first.terminal.terminal_id

    async def close(self, name: str) -> None:
        request = terminal_service_pb2.CloseTerminalRequest(terminal_id=self.terminals[name])
        await insisting(lambda: self.driver.terminals.CloseTerminal(request, None))

    async def step(self, name: str, step_id: str, *, command: str = "", answer: str = "") -> None:
        """A step; what it gives is acknowledged. An episode of which a step was refused is over and says why."""
        request = terminal_service_pb2.StepRequest(terminal_id=self.terminals[name], step_id=step_id)
        if answer:
            request.final_answer = answer
        else:
            request.command.shell = command

        async def once() -> terminal_service_pb2.StepResponse:
            async def requests() -> AsyncIterator[terminal_service_pb2.StepRequest]:
                yield request

            (given,) = [item async for item in self.driver.terminals.Step(requests(), None)]
            return given

        try:
            self.observed[name, step_id] = await insisting(once)
        except FailedPrecondition as error:
            assert error.reason == "EPISODE_ENDED"
            told = await self.terminal(name)
            assert (told.ended, told.failure.reason) == (True, "JOURNAL_FAILED"), told
            assert (told.failure.cause, told.failure.retriable) == (rollout_pb2.FAILURE_CAUSE_INFRASTRUCTURE, True)
            assert told.failure.caused_by == rollout_pb2.PARTY_DRIVER
        else:
            assert await insisting(once) == self.observed[name, step_id]

    async def terminal(self, name: str) -> terminal_service_pb2.Terminal:
        request = terminal_service_pb2.GetTerminalRequest(terminal_id=self.terminals[name])
        return (await insisting(lambda: self.driver.terminals.GetTerminal(request, None))).terminal

    def check_outcomes(self) -> None:
        """A disk that refuses for a moment changes no rollout's end."""
        for rollout_id, outcome in self.outcomes.items():
            if rollout_id == "cancelled":
                assert outcome.failure.reason == "CANCELLED"
            else:
                assert outcome.reward.value == 1.0 and not outcome.HasField("failure"), (rollout_id, outcome)

    async def view(self) -> dict[str, Any]:
        """All that clients are told; of what has ended it is the same before a restart and after it."""
        driver = self.driver
        agents = (await asked(driver.agents.ListAgents(agent_service_pb2.ListAgentsRequest(), None))).agents
        told = (await insisting(lambda: driver.rollouts.ListRollouts(pb.ListRolloutsRequest(), None))).rollouts
        groups = (await insisting(lambda: driver.rollouts.ListGroups(pb.ListGroupsRequest(), None))).groups
        seen: dict[str, Any] = {f"agent {item.spec.name}": item for item in agents if not item.built_in}
        assert sorted(seen) == ["agent kept"] and seen["agent kept"].spec.version == "2"
        assert {item.rollout_id for item in told} == set(self.outcomes)
        for item in told:
            assert item.outcome == self.outcomes[item.rollout_id]
            request = pb.WatchRolloutRequest(rollout_id=item.rollout_id)
            events = await insisting(lambda request=request: self.events(request))  # type: ignore[misc]
            assert [event.sequence for event in events] == list(range(1, item.last_sequence + 1))
            assert [event.HasField("ended") for event in events].count(True) == 1 and events[-1].HasField("ended")
            seen[item.rollout_id] = (item, events)
        assert [item.group_id for item in groups] == ["g"]
        seen["group g"] = groups[0]
        for name in self.terminals:
            terminal = await self.terminal(name)
            seen[f"terminal {name}"] = terminal if terminal.ended else terminal.terminal_id
        for name, step_id in self.observed:
            await self.step(name, step_id, **_STEPS[name, step_id])
        return seen

    async def events(self, request: pb.WatchRolloutRequest) -> list[rollout_pb2.RolloutEvent]:
        return [each.event async for each in self.driver.rollouts.WatchRollout(request, None)]

    async def clear(self) -> None:
        """Everything is over, and nothing is left of it anywhere."""
        for name in self.terminals:
            await self.close(name)
            assert (await self.terminal(name)).ended
        for rollout_id in list(self.outcomes):
            await self.delete(rollout_id)
        driver = self.driver
        managers = (driver.manager, driver.episodes)
        await eventually(lambda: not any(item.pending_cleanups for item in managers), "what was owed is released")
        assert not await insisting(driver.records.pending_cleanups)
        assert not driver.boxes.boxes
        assert not driver.places.open_ones and not driver.places.captured


_STEPS: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("answered", "one"): {"command": "echo a"},
    ("answered", "two"): {"command": "echo b"},
    ("answered", "end"): {"answer": "done"},
    ("closed", "one"): {"command": "echo a"},
    ("open", "one"): {"command": "echo a"},
}
"""Observed ones are asked for again."""


async def play(directory: Path, disk: Disk) -> None:
    """All of it on this disk, and a restart."""
    boxes, places = Boxes(), Places()
    with failing(disk):
        async with AsyncExitStack() as stack:
            driver = await insisting(lambda: stack.enter_async_context(inner_driver(directory, boxes, places)))
            scenario = Scenario(driver)
            await scenario.play()
            scenario.check_outcomes()
            before = await scenario.view()
    async with inner_driver(directory, boxes, places) as driver:
        scenario.driver = driver
        after = await scenario.view()
        changed = {key for key in before if before[key] != after[key]}
        assert changed <= {"terminal open"}, changed
        await scenario.clear()


class Remains:
    """What a driver that died has left: its journal, and what it held elsewhere."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._boxes: dict[str, Box] = {}
        self._open: set[str] = set()
        self.terminals: dict[str, str] = {}

    async def leave(self) -> None:
        """Rollouts that run, one that owes its release, and episodes: open, at a command, opening, answered."""
        boxes, places = Boxes(), Places()
        async with inner_driver(self._directory / "first", boxes, places) as driver:
            scenario = Scenario(driver)
            await scenario.register()
            await scenario.create("first")
            await scenario.wait("first")
            await scenario.delete("first")
            boxes.fail["delete"] = boxes.fail["delete_labelled"] = [Internal("injected", reason="INJECTED")] * 1_000_000
            await scenario.create("owed")
            await scenario.wait("owed")
            for rollout_id in ("runs", "runs-too"):
                await scenario.create(rollout_id, SLEEP)
                await boxes.started.wait()
                boxes.started.clear()
            for name in ("open", "busy", "answered"):
                await scenario.open(name)
                await scenario.step(name, "one", command="echo a")
            tasks = [asyncio.ensure_future(scenario.step("busy", "two", command=SLEEP))]
            await boxes.started.wait()
            boxes.started.clear()
            boxes.holds |= {"run", "write_files"}
            tasks.append(asyncio.ensure_future(scenario.step("answered", "end", answer="done")))
            await boxes.started.wait()
            boxes.started.clear()
            tasks.append(asyncio.ensure_future(scenario.open("opening")))
            await boxes.started.wait()
            await driver.journal.query("SELECT 1")
            shutil.copytree(self._directory / "first", self._directory / "left")
            self._boxes = {name: Box(box.labels) for name, box in boxes.boxes.items()}
            self._open = set(places.open_ones)
            self.terminals = {name: scenario.terminals[name] for name in ("open", "busy", "answered")}
            boxes.fail.clear()
            boxes.release()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def start_on(self, directory: Path, disk: Disk) -> None:
        """Starts drivers on this disk until one is there, as whoever runs them does."""
        shutil.copytree(self._directory / "left", directory)
        boxes, places = Boxes(self._boxes), Places()
        places.open_ones |= self._open
        places.captured |= self._open
        with failing(disk):
            async with AsyncExitStack() as stack:
                entered = lambda: stack.enter_async_context(inner_driver(directory, boxes, places))  # noqa: E731
                await self.check(await insisting(entered))

    async def check(self, driver: InnerDriver) -> None:
        """All has ended as it must, or goes on."""
        scenario = Scenario(driver)
        scenario.terminals = dict(self.terminals)
        for rollout_id in ("owed", "runs", "runs-too"):
            await scenario.wait(rollout_id)
        for rollout_id in ("runs", "runs-too"):
            assert scenario.outcomes[rollout_id].failure.reason == "SANDBOX_LOST"
        await scenario.open("opening")
        await scenario.step("open", "two", command="echo b")
        await scenario.step("open", "end", answer="done")
        scenario.observed.clear()
        await scenario.close("busy")
        told = await scenario.terminal("busy")
        assert told.failure.reason in ("CLOSED", "JOURNAL_FAILED"), told
        await eventually_async(lambda: _ended(scenario, "answered"), "the answered one has ended")
        assert (await scenario.terminal("answered")).failure.reason == "GRADING_INTERRUPTED"
        await scenario.clear()


async def _ended(scenario: Scenario, name: str) -> bool:
    return (await scenario.terminal(name)).ended


@pytest.mark.requirement("R49", "R50", "R70", "R78", "R146")
@KINDS
@IN_TURN
async def test_refused_write_changes_no_rollouts_end_and_loses_no_reported_event(
    tmp_path: Path, errors: tuple[Error, ...], commits: bool
) -> None:
    """Who is refused hears why; what was told is there after a restart; nothing is left."""
    swept = await sweep(play, tmp_path, in_turn(errors, commits=commits), draw=random.Random(f"{SEED} {errors}"))
    assert len(swept.refused) >= COMMITS
    if not commits:
        swept.has("INSERT INTO rollouts", "INSERT INTO events", "INSERT INTO terminals", "UPDATE terminals")


@pytest.mark.requirement("R50", "R70", "R146")
@KINDS
@IN_TURN
async def test_refused_write_at_start_ends_or_resumes_the_last_drivers_rollouts(
    tmp_path: Path, errors: tuple[Error, ...], commits: bool
) -> None:
    """A driver starts on such a disk or says why it does not; the next one does."""
    remains = Remains(tmp_path)
    await remains.leave()
    draw = random.Random(f"{SEED} {errors}")
    swept = await sweep(remains.start_on, tmp_path, in_turn(errors, commits=commits), draw=draw)
    assert len(swept.refused) > 2
    if not commits:
        swept.has("UPDATE rollouts SET phase = ?, end_time", "DELETE FROM owed", "UPDATE terminals SET outcome")
