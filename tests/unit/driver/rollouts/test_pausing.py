"""Pauses of one rollout against a model: whatever fails and however often it is asked, the last word holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.support.waiting import eventually
from tests.unit.driver.conftest import Driver

from penstock_chassis.aio.retry import Delays
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from penstock_chassis.health import Draining
from penstock_chassis.server import Server, Service
from penstock_driver.domain.pauses import Pause, PauseEnd, PauseLimits
from penstock_driver.domain.records import GroupPlan, Record
from penstock_driver.domain.rollout import Phase, RunProgress
from penstock_driver.rollouts.groups import GroupPolicy, GroupWatch
from penstock_driver.rollouts.pausing import Pausing


class Book:
    """Stands for a recorder: what is on disk."""

    def __init__(self, pause: Pause | None = None, phase: Phase = Phase.QUEUED) -> None:
        self.record = type("R", (), {"rollout_id": "r"})()
        self.progress = RunProgress(phase=phase)
        self.pause = pause
        self.paused_s = 0.0
        self.pauses = 0
        self.ends: list[PauseEnd] = []

    def begin_pause(self, pause: Pause) -> None:
        self.pauses += 1
        self.pause = pause

    def set_pause(self, pause: Pause) -> None:
        self.pause = pause

    def end_pause(self, why: PauseEnd) -> None:
        assert self.pause is not None
        self.pause = None
        self.ends.append(why)

    async def secure(self) -> None:
        await asyncio.sleep(0)


class Services:
    """What is held. Each call may fail, before or after it took effect."""

    lease_s = 3600.0

    def __init__(self, book: Book) -> None:
        self.book = book
        self.is_held = False
        self.failures: list[tuple[bool, Exception]] = []
        self.is_gone = False

    async def _call(self, held: bool) -> None:
        if self.is_gone:
            raise NotFound("gone", reason="SANDBOX_UNKNOWN")
        await asyncio.sleep(0)
        happens, error = self.failures.pop(0) if self.failures else (True, None)
        if happens:
            self.is_held = held
        await asyncio.sleep(0)
        if error is not None:
            raise error

    async def hold(self) -> bool:
        assert self.book.pause is not None, "a pause is on disk before anything is held"
        await self._call(True)
        return True

    async def keep(self) -> None:
        assert self.is_held

    async def release(self) -> None:
        assert self.book.pause is not None, "it is over on disk only after everything goes on"
        await self._call(False)


LOST = Unavailable("the answer was lost", reason="TRANSPORT_UNAVAILABLE")


class PausingMachine(RuleBasedStateMachine):
    """Requests, failures, the start and the end of agents, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.wanted = False
        self.running: asyncio.Task[None] | None = None
        self.started = False
        self.over = asyncio.Event()

    def run(self, turns: int) -> None:
        async def pass_turns() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pass_turns())

    @initialize()
    def begin(self) -> None:
        async def made() -> None:
            self.book = Book()
            self.services = Services(self.book)
            self.pausing = Pausing(self.book, PauseLimits(1e6, 1000), lambda _: None)  # type: ignore[arg-type]

        self.loop.run_until_complete(made())

    async def _asked(self, pause: bool) -> None:
        if pause:
            self.pausing.begin("", None)
        else:
            self.pausing.end()

    @rule(pause=st.booleans(), turns=st.integers(0, 8))
    def ask(self, pause: bool, turns: int) -> None:
        self.wanted = pause
        self.loop.run_until_complete(self._asked(pause))
        self.run(turns)

    @rule(happens=st.booleans())
    def next_call_fails(self, happens: bool) -> None:
        self.services.failures.append((happens, LOST))

    async def _agent(self) -> None:
        async def start() -> None:
            assert not self.services.is_held and self.book.pause is None, "an agent starts in no pause"
            self.started = True
            await asyncio.sleep(0)
            assert not self.services.is_held

        async with self.pausing.holding(self.services):
            await self.pausing.start(start)
            await self.over.wait()
        assert not self.services.is_held, "nothing holds what is graded"

    @precondition(lambda self: self.running is None)
    @rule(turns=st.integers(0, 8))
    def agent_begins(self, turns: int) -> None:
        async def begun() -> None:
            self.over.clear()
            self.started = False
            self.services.is_gone = self.services.is_held = False
            self.running = asyncio.create_task(self._agent())

        self.loop.run_until_complete(begun())
        self.run(turns)

    @precondition(lambda self: self.running is not None and self.started)
    @rule()
    def agent_ends(self) -> None:
        assert self.running is not None
        self.services.failures.clear()
        self.over.set()
        self.loop.run_until_complete(self.running)
        self.running = None

    @precondition(lambda self: self.running is not None)
    @rule(gone=st.booleans())
    def attempt_is_cancelled(self, gone: bool) -> None:
        assert self.running is not None
        self.services.is_gone = gone
        self.running.cancel()
        self.loop.run_until_complete(asyncio.wait([self.running]))
        assert self.running.cancelled()
        self.running = None
        self.services.is_held = False  # its sandbox is deleted

    @rule()
    def settle(self) -> None:
        """Once nothing fails any more, the services do what was asked last, and so says the journal."""
        self.services.failures.clear()
        assert self.loop.run_until_complete(self.pausing.settled(30.0))
        assert (self.book.pause is not None) == self.wanted
        if self.running is not None and not self.services.is_gone:
            assert self.services.is_held == self.wanted

    def teardown(self) -> None:
        if self.running is not None:
            self.running.cancel()
            self.loop.run_until_complete(asyncio.wait([self.running]))
        if hasattr(self, "pausing"):
            self.pausing.close()
        self.run(5)
        self.loop.close()


@pytest.mark.requirement("R131")
def test_services_do_what_was_asked_last_in_any_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is on disk before anything is held, and over on disk after everything goes on."""
    monkeypatch.setattr("penstock_driver.rollouts.pausing._DELAYS", Delays(0.0001, 0.0001))
    run_state_machine_as_test(PausingMachine, settings=settings(max_examples=60, stateful_step_count=20, deadline=None))


@pytest.mark.requirement("R131")
async def test_a_pause_that_an_earlier_process_held_is_let_go(tmp_path: Path) -> None:
    """Also one that ended before its agent was found again, or whose agent is not found any more."""
    past = Pause("", 1.0, 2.0, True)
    for is_gone in (False, True):
        book = Book(past, Phase.RUNNING)
        services = Services(book)
        services.is_held, services.is_gone = True, is_gone
        pausing = Pausing(book, PauseLimits(1e6), lambda _: None)  # type: ignore[arg-type]
        pausing.end(PauseEnd.EXPIRED)
        assert book.pause is not None, "something may be held still"
        async with pausing.holding(services):
            assert await pausing.settled(30.0)
        assert pausing.pause is None and (is_gone or not services.is_held)
        pausing.close()
    lost = Pausing(Book(past, Phase.RUNNING), PauseLimits(1e6), lambda _: None)  # type: ignore[arg-type]
    lost.end()
    lost.attempt_over()
    assert await lost.settled(30.0) and lost.pause is None
    lost.close()


@pytest.mark.requirement("R131")
async def test_pauses_are_limited_in_number_and_time() -> None:
    """A repeat makes none of them longer than the rest."""
    book = Book()
    pausing = Pausing(book, PauseLimits(100.0, 2), lambda _: None)  # type: ignore[arg-type]
    pausing.begin("one", None)
    assert book.pause is not None and book.pause.end_time - book.pause.start_time <= 100.0
    pausing.begin("again", 1e9)
    assert book.pauses == 1 and book.pause.end_time - book.pause.start_time <= 101.0
    pausing.end()
    pausing.begin("two", None)
    pausing.end()
    with pytest.raises(ResourceExhausted) as refused:
        pausing.begin("three", None)
    assert refused.value.reason == "PAUSE_LIMIT"
    pausing.close()


async def paused(driver: Driver, *records: Record) -> None:
    await driver.manager.pause_all([record.rollout_id for record in records], "", None, 30.0)


@pytest.mark.requirement("R131")
async def test_one_that_waits_is_passed_over_and_keeps_its_place(driver: Driver) -> None:
    """The next takes the slot; resumed, it is before those that came after it."""
    hold = driver.gate.hold = asyncio.Event()
    first = await driver.start_group(driver.spec(), GroupPlan(8))
    waiting = await driver.start_recorded(3)
    await paused(driver, waiting[0])
    live = driver.manager._live
    await driver.manager.cancel(first.rollout_ids[0], "")
    assert not live[waiting[0].rollout_id].is_started and live[waiting[1].rollout_id].is_started
    await driver.manager.resume(waiting[0].rollout_id, 30.0)
    assert not live[waiting[0].rollout_id].is_started, "no slot is free"
    await driver.manager.cancel(first.rollout_ids[1], "")
    assert live[waiting[0].rollout_id].is_started and not live[waiting[2].rollout_id].is_started
    await paused(driver, waiting[2])
    await driver.manager.cancel(waiting[2].rollout_id, "")
    hold.set()
    for record in waiting[:2]:
        assert (await driver.outcome(record)).reward.value == 1.0


@pytest.mark.requirement("R131")
async def test_a_paused_rollout_keeps_its_slot(driver: Driver) -> None:
    """Its sandbox is there: another one in its place would be one too many."""
    hold = driver.gate.hold = asyncio.Event()
    first = await driver.start_group(driver.spec(), GroupPlan(8))
    (waiting,) = await driver.start_recorded(1)
    await eventually(lambda: len(driver.gate.requests) == 8, "all have called")
    await driver.manager.pause_all(first.rollout_ids, "", None, 30.0)
    assert len(driver.sandboxes.frozen) == 8 and len(driver.gate.held) == 8
    assert not driver.manager._live[waiting.rollout_id].is_started
    assert driver.manager.paused_count(first.rollout_ids) == 8
    await driver.manager.resume_all(first.rollout_ids, 30.0)
    assert not driver.sandboxes.frozen and not driver.gate.held
    hold.set()
    assert (await driver.outcome(waiting)).reward.value == 1.0


@pytest.mark.requirement("R131")
async def test_a_rollout_that_is_graded_ends_in_its_pause(driver: Driver) -> None:
    """And one whose backend cannot freeze says so, and is held at its next call."""
    driver.sandboxes.freezes = False
    hold = driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    found = await driver.manager.pause(record.rollout_id, "why", None, 30.0)
    assert found.pause is not None and not found.pause.sandbox_frozen
    assert record.rollout_id in driver.gate.held
    hold.set()  # its gate is no real one: it answers
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0
    ended = await driver.records.get(record.rollout_id)
    assert ended.pause is None
    with pytest.raises(FailedPrecondition):
        await driver.manager.pause(record.rollout_id, "", None, 30.0)


@pytest.mark.requirement("R131")
async def test_a_pause_is_pending_while_the_gate_is_away(driver: Driver) -> None:
    """It is in force as soon as the gate answers."""
    hold = driver.gate.hold = asyncio.Event()
    record = await driver.start(driver.spec())
    await driver.gate.called.wait()
    driver.gate.fail["hold_calls"] = [LOST]
    with pytest.raises(Unavailable) as pending:
        await driver.manager.pause(record.rollout_id, "", None, 0.0)
    assert pending.value.reason == "PAUSE_PENDING"
    await driver.manager.pause(record.rollout_id, "", None, 30.0)
    assert driver.sandboxes.frozen and driver.gate.held
    await driver.manager.resume(record.rollout_id, 30.0)
    hold.set()
    assert (await driver.outcome(record)).reward.value == 1.0


@pytest.mark.requirement("R127", "R131")
async def test_a_pause_is_not_in_force_before_the_agent_of_an_earlier_process_is_held() -> None:
    """That agent runs, although no attempt of this process watches it yet; or its attempt is over."""
    for is_watched in (True, False):
        book = Book(phase=Phase.RUNNING)
        pausing, services = Pausing(book, PauseLimits(60.0), lambda _: None), Services(book)  # type: ignore[arg-type]
        pausing.begin("why", None)
        assert not await pausing.settled(0.0)
        if is_watched:
            async with pausing.holding(services):
                assert await pausing.settled(30.0)
                assert services.is_held
        else:
            pausing.attempt_over()
            assert await pausing.settled(0.0)
        pausing.close()


@pytest.mark.requirement("R127", "R131")
@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREPARING, Phase.RUNNING])
async def test_a_stop_for_the_next_process_ends_no_pause(driver: Driver, phase: Phase) -> None:
    """In whatever phase: the next process finds the pause, and takes the rollout up after it."""
    parts, reached = driver.opened.parts, asyncio.Event()
    if phase is Phase.RUNNING:
        driver.gate.hold, reached = asyncio.Event(), driver.gate.called
    else:
        driver.sandboxes.holds["prepare_toolbox"] = reached
    others = await driver.start_group(driver.spec(), GroupPlan(8)) if phase is Phase.QUEUED else None
    (record,) = await driver.start_recorded(1)
    await reached.wait()
    await paused(driver, record)
    assert driver.manager.current(record).phase is phase
    if others is not None:
        await driver.manager.cancel_group(others, "")
    service = Service(registrations=(), draining=Draining(parts.take, parts.running), leave=parts.leave)
    async with Server(service, Authenticator({Role.OPERATOR: "an-operator"}), drain_s=60.0, stop_s=0.0) as server:
        server.is_replaced = True
    with pytest.raises(Unavailable) as stopping, driver.manager.room("default", 1):
        pytest.fail("a driver that stops takes no new rollouts")
    assert stopping.value.reason == "DRAINING"
    driver.sandboxes.holds.clear()
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    assert driver.manager.paused_count([record.rollout_id]) == 1
    assert not any(event.HasField("resumed") for event in await driver.events(record.rollout_id))
    if driver.gate.hold is not None:
        driver.gate.hold.set()
    await driver.manager.resume(record.rollout_id, 30.0)
    assert (await driver.outcome(record)).reward.value == 1.0


@pytest.mark.requirement("R131")
async def test_no_straggler_is_cancelled_while_its_group_is_paused() -> None:
    """The grace goes on after the pause."""
    is_paused, cancelled = True, asyncio.Event()

    async def cancel(_ids: object, _failure: object) -> None:
        cancelled.set()

    watch = GroupWatch(GroupPolicy(2, 1, 0.0), lambda: ["r"], cancel, is_paused=lambda: is_paused, results=1)
    running = asyncio.ensure_future(watch.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not cancelled.is_set()
    is_paused = False
    watch.paused_or_resumed()
    await running
    assert cancelled.is_set()
