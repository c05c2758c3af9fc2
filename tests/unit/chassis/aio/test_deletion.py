"""A deletion is retried until it succeeds, whoever asked for it, and once more when the service ends (R50)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_chassis.aio.deletion import Deletions
from penstock_chassis.aio.retry import Delays
from penstock_chassis.errors import Unavailable
from penstock_chassis.testing import in_virtual_time

DELAYS = Delays(1.0, 8.0)


class Full(Unavailable):
    """A provider that has no time for it."""

    def __init__(self) -> None:
        super().__init__("full", reason="FULL", retry_after_s=30.0)


class Target:
    """Something whose deletion fails a number of times."""

    def __init__(
        self, failures: int = 0, *, error: Callable[[], BaseException] = OSError, takes_s: float = 0.0
    ) -> None:
        self.failures = failures
        self.error = error
        self.takes_s = takes_s
        self.tried_at: list[float] = []
        self.gone = False

    async def delete(self) -> None:
        self.tried_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        if len(self.tried_at) <= self.failures:
            raise self.error()
        self.gone = True


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("error", [OSError, Full, asyncio.CancelledError, TypeError])
def test_a_failed_deletion_is_retried_whatever_its_error(error: type[BaseException]) -> None:
    target = Target(4, error=error)

    async def run() -> None:
        deletion = Deletions(DELAYS).start("it", target.delete)
        assert not await deletion.attempted()
        await deletion.finished()

    in_virtual_time(run())
    assert (target.gone, target.tried_at) == (True, [0.0, 1.0, 3.0, 7.0, 15.0])


@pytest.mark.requirement("R50")
def test_a_caller_learns_when_a_pending_deletion_is_tried_again() -> None:
    async def run() -> float | None:
        deletion = Deletions(DELAYS).start("it", Target(9).delete)
        await deletion.attempted()
        await asyncio.sleep(0.25)
        with pytest.raises(Unavailable) as pending:
            await deletion.outcome()
        assert pending.value.reason == "DELETE_PENDING"
        return pending.value.retry_after_s

    assert in_virtual_time(run()) == 0.75


@pytest.mark.requirement("R49")
def test_a_deletion_survives_its_cancelled_caller() -> None:
    target = Target(2, takes_s=1.0)

    async def run() -> None:
        deletions = Deletions(DELAYS)
        caller = asyncio.create_task(deletions.delete("it", target.delete))
        await asyncio.sleep(0.5)
        caller.cancel()
        await asyncio.sleep(60.0)
        assert caller.cancelled()
        assert deletions.pending == ()

    in_virtual_time(run())
    assert target.gone


@pytest.mark.requirement("R22")
def test_deletions_of_one_thing_are_one() -> None:
    target = Target(1, takes_s=1.0)

    async def run() -> list[bool]:
        deletions = Deletions(DELAYS)
        return await asyncio.gather(*(deletions.delete("it", target.delete) for _ in range(5)))

    assert in_virtual_time(run()) == [False] * 5
    assert len(target.tried_at) == 1


@pytest.mark.requirement("R50")
def test_absent_resource_counts_as_deleted() -> None:
    target = Target(1, error=FileNotFoundError)
    assert in_virtual_time(Deletions(DELAYS, gone=(FileNotFoundError,)).delete("it", target.delete))


def test_attempts_at_the_same_time_are_limited() -> None:
    running, most = 0, 0

    async def attempt() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1

    async def run() -> float:
        deletions = Deletions(DELAYS, at_once=2)
        await asyncio.gather(*(deletions.delete(str(number), attempt) for number in range(6)))
        return asyncio.get_running_loop().time()

    assert (in_virtual_time(run()), most) == (3.0, 2)


def test_more_failures_than_are_kept_are_logged_and_left() -> None:
    async def run() -> tuple[str, ...]:
        deletions = Deletions(DELAYS, keep=2)
        for number in range(4):
            await deletions.delete(str(number), Target(99).delete)
        pending = deletions.pending
        await deletions.aclose()
        return pending

    with structlog.testing.capture_logs() as logs:
        assert in_virtual_time(run()) == ("0", "1")
    assert [line["what"] for line in logs if "too many" in line["event"]] == ["2", "3"]


@pytest.mark.requirement("R50")
def test_the_services_end_tries_once_more_and_logs_what_is_left() -> None:
    lucky, unlucky = Target(1), Target(99)

    async def run() -> float:
        deletions = Deletions(DELAYS)
        await deletions.delete("lucky", lucky.delete)
        await deletions.delete("unlucky", unlucky.delete)
        await deletions.aclose()
        return asyncio.get_running_loop().time()

    with structlog.testing.capture_logs() as logs:
        assert in_virtual_time(run()) == 0.0
    assert (lucky.gone, len(unlucky.tried_at)) == (True, 2)
    assert logs[-1]["what"] == ["unlucky"]


def test_the_services_end_waits_for_an_attempt_only_so_long() -> None:
    target = Target(takes_s=1000.0)

    async def run() -> float:
        deletions = Deletions(DELAYS)
        deletion = deletions.start("it", target.delete)
        await asyncio.sleep(0)
        await deletions.aclose(10.0)
        assert deletion.done
        assert not await deletion.attempted()
        return asyncio.get_running_loop().time()

    assert in_virtual_time(run()) == 10.0
    assert not target.gone


def test_a_deletion_that_begins_as_the_service_ends_releases_its_waiters() -> None:
    async def run() -> bool:
        deletions = Deletions(DELAYS)
        deletion = deletions.start("it", Target(takes_s=1000.0).delete)
        await deletions.aclose(0.0)
        return await deletion.attempted()

    assert not in_virtual_time(run())


@pytest.mark.requirement("R50")
@settings(max_examples=50)
@given(
    targets=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=5),
    cancelled_at=st.integers(0, 30).map(lambda seconds: seconds + 0.5),
    at_once=st.none() | st.integers(1, 3),
)
def test_everything_is_gone_in_the_end_however_often_it_fails(
    targets: list[tuple[int, int, int]], cancelled_at: float, at_once: int | None
) -> None:
    """Failures, durations and starts at will, and callers who all leave at some point."""
    made = [Target(failures, takes_s=takes_s) for failures, takes_s, _ in targets]

    async def run() -> None:
        deletions = Deletions(DELAYS, at_once=at_once)

        async def ask(number: int) -> None:
            await asyncio.sleep(targets[number][2])
            await deletions.delete(str(number), made[number].delete)

        callers = [asyncio.create_task(ask(number)) for number in range(len(made))]
        await asyncio.sleep(cancelled_at)
        begun = [number for number, (_, _, starts_at) in enumerate(targets) if starts_at < cancelled_at]
        for caller in callers:
            caller.cancel()
        await asyncio.sleep(1000.0)
        assert deletions.pending == ()
        for number in begun:
            assert made[number].gone and len(made[number].tried_at) == targets[number][0] + 1

    with structlog.testing.capture_logs():
        in_virtual_time(run())
