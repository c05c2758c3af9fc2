"""A request that is repeated is done once; one that failed, expired or was forgotten is done again."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock_chassis.aio.idempotency import IdempotencyTable, cancel_once
from penstock_chassis.errors import Aborted, AlreadyExists, PenstockError, Unavailable

_TTL_S = 100.0
_KEEP = 3


class RequestsMachine(RuleBasedStateMachine):
    """Callers come, cancel and repeat; work ends and fails at will."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.table: IdempotencyTable[int] = IdempotencyTable(lambda: self.now, ttl_s=_TTL_S, keep=_KEEP)
        self.working: dict[str, asyncio.Future[int]] = {}
        self.callers: list[tuple[str, asyncio.Task[int]]] = []
        self.runs: Counter[str] = Counter()
        self.results: dict[str, int] = {}

    def turns(self) -> None:
        async def pass_turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.runner.run(pass_turns())

    async def _work(self, request: str) -> int:
        assert request not in self.working, "one piece of work for each id"
        self.runs[request] += 1
        gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.working[request] = gate
        try:
            return await gate
        finally:
            await asyncio.sleep(0)  # a clean-up that takes its time
            del self.working[request]

    @rule(request=st.sampled_from("abcd"))
    def call(self, request: str) -> None:
        async def start() -> asyncio.Task[int]:
            return asyncio.create_task(self.table.join(request, request, lambda: self._work(request)))

        self.callers.append((request, self.runner.run(start())))
        self.turns()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [caller for _, caller in self.callers if not caller.done()]
        if waiting:
            data.draw(st.sampled_from(waiting)).cancel()
            self.turns()

    @rule(data=st.data(), fails=st.booleans())
    def work_ends(self, data: st.DataObject, fails: bool) -> None:
        if not self.working:
            return
        request = data.draw(st.sampled_from(sorted(self.working)))
        if fails:
            self.working[request].set_exception(Unavailable("no", reason="NO"))
        else:
            self.results[request] = self.runs[request]
            self.working[request].set_result(self.runs[request])
        self.turns()

    @rule(seconds=st.sampled_from([1.0, 60.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(request=st.sampled_from("abcd"))
    def other_content_is_refused(self, request: str) -> None:
        if request in self.working:
            with pytest.raises(AlreadyExists):
                self.runner.run(self.table.join(request, "other", lambda: self._work(request)))

    @invariant()
    def work_lives_as_long_as_a_caller_waits(self) -> None:
        assert set(self.working) == {request for request, caller in self.callers if not caller.done()}

    @invariant()
    def callers_get_the_result_of_a_run_of_their_request(self) -> None:
        for request, caller in self.callers:
            if caller.done() and not caller.cancelled() and caller.exception() is None:
                assert 1 <= caller.result() <= self.runs[request]

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        assert len(self.table._known) <= _KEEP + 1 + len(self.working)

    def teardown(self) -> None:
        async def end() -> None:
            await self.table.drain()
            await asyncio.gather(*(caller for _, caller in self.callers), return_exceptions=True)

        self.runner.run(end())
        self.runner.close()
        assert not self.working


@pytest.mark.requirement("R25")
def test_every_request_is_done_once_whatever_its_callers_do() -> None:
    run_state_machine_as_test(
        RequestsMachine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )


async def _five() -> int:
    return 5


@pytest.mark.requirement("R25")
async def test_a_repeated_request_gets_the_first_result_and_other_content_is_refused() -> None:
    table: IdempotencyTable[int] = IdempotencyTable(lambda: 0.0)
    assert await table.join("a", "content", _five) == 5

    async def never() -> int:
        raise AssertionError("done twice")

    assert await table.join("a", "content", never) == 5
    with pytest.raises(AlreadyExists) as refused:
        await table.join("a", "other", never)
    assert refused.value.reason == "REQUEST_ID_REUSED"


async def test_a_result_is_forgotten_on_request_and_with_its_age() -> None:
    now = 0.0
    table: IdempotencyTable[int] = IdempotencyTable(lambda: now, ttl_s=10.0)
    runs = 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        return runs

    assert await table.join("a", "", work) == 1
    table.forget("a", 2)
    table.forget("b", 1)
    assert await table.join("a", "", work) == 1
    table.forget("a", 1)
    assert await table.join("a", "", work) == 2
    now = 11.0
    assert await table.join("a", "", work) == 3


async def test_requests_without_an_id_are_apart_and_not_kept() -> None:
    table: IdempotencyTable[int] = IdempotencyTable(lambda: 0.0)
    assert sum(await asyncio.gather(table.join("", "", _five), table.join("", "", _five))) == 10
    assert not table._known


async def test_work_that_another_party_cancels_fails_its_callers() -> None:
    def deleted() -> PenstockError:
        return Aborted("deleted", reason="DELETED_MEANWHILE")

    table: IdempotencyTable[None] = IdempotencyTable(lambda: 0.0, cancelled=deleted)
    tasks: list[asyncio.Task[None]] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await asyncio.Event().wait()

    caller = asyncio.create_task(table.join("a", "", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cancel_once(tasks[0])
    with pytest.raises(Aborted) as aborted:
        await caller
    assert aborted.value.reason == "DELETED_MEANWHILE"


async def test_draining_cancels_what_is_in_progress_and_refuses_new_requests() -> None:
    table: IdempotencyTable[None] = IdempotencyTable(lambda: 0.0)
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    caller = asyncio.create_task(table.join("a", "", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await table.drain()
    assert steps == ["cleaned up"]
    for call in (caller, table.join("b", "", work)):
        with pytest.raises(Unavailable) as refused:
            await call
        assert refused.value.reason == "DRAINING"
