"""Creations in trouble: few ask, for all, and nobody waits longer than he would."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypedDict

import pytest
import uvloop
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.environments.throttle import FIRST_WINDOW, MOST_AT_ONCE, AdaptiveThrottle

ALL = 200


class Patience(TypedDict):
    """How long a caller waits, in seconds."""

    full_s: float
    absent_s: float


PATIENT = Patience(full_s=3600.0, absent_s=3600.0)


class Service:
    """Has `places`; refuses who comes when they are taken. A place that is taken is given back when `leave` is told."""

    def __init__(self, places: int, refusal: Callable[[], PenstockError]) -> None:
        self.places = places
        self.refusal = refusal
        self.asked = self.refused = self.at_once = self.most_at_once = 0

    async def create(self) -> None:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if not self.places:
            self.refused += 1
            raise self.refusal()
        self.places -= 1


def shaper() -> AdaptiveThrottle:
    return AdaptiveThrottle(first_pause_s=1e-4, most_pause_s=1e-3)


@pytest.mark.requirement("R51")
async def test_full_service_is_probed_by_one_caller_until_it_has_room() -> None:
    """Of 200 only the first window hears that it is full; then single probes, and all get their place."""
    service = Service(0, lambda: ResourceExhausted("full", reason="SANDBOX_LIMIT", retry_after_s=1e-4))
    shaped = shaper()
    work = [asyncio.ensure_future(shaped.run(service.create, **PATIENT)) for _ in range(ALL)]
    await eventually(lambda: service.refused >= FIRST_WINDOW + 20, "single ones ask")
    service.most_at_once = 0
    before = service.refused
    await eventually(lambda: service.refused >= before + 5, "some more ask")
    assert service.most_at_once == 1
    service.places = ALL
    refused = service.refused
    await asyncio.gather(*work)
    assert service.refused <= refused + 1, "once there is room, nobody is refused"


@pytest.mark.requirement("R51", "R126")
async def test_a_service_with_room_is_asked_more_and_more_up_to_a_bound() -> None:
    """Thousands of requests at once would keep all others waiting."""
    count = 20 * MOST_AT_ONCE
    service = Service(count, lambda: ResourceExhausted("full", reason="SANDBOX_LIMIT"))
    shaped = shaper()
    await asyncio.gather(*(shaped.run(service.create, **PATIENT) for _ in range(count)))
    assert service.most_at_once == MOST_AT_ONCE and not service.refused


@pytest.mark.requirement("R51", "R126")
async def test_an_end_wakes_one_that_waits_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers are served in the order in which they came. Ten thousand that wake at each end would stop the driver."""
    count, steps, order, ends = 1_000, 0, list[int](), deque[asyncio.Event]()
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
        nonlocal steps
        steps += 1
        return call_soon(*args, **kwargs)

    async def create(number: int) -> None:
        order.append(number)
        ends.append(asyncio.Event())
        await ends[-1].wait()

    shaped = shaper()
    work = [asyncio.ensure_future(shaped.run(partial(create, number), **PATIENT)) for number in range(count)]
    await eventually(lambda: len(order) == FIRST_WINDOW, "the first have their turns")
    monkeypatch.setattr(loop, "call_soon", counted)
    for one in work:
        ends.popleft().set()
        await one
    assert order == list(range(count))
    assert steps < 20 * count


@pytest.mark.requirement("R51")
async def test_a_caller_cancelled_with_its_turn_passes_it_on() -> None:
    """The cancellation comes between the grant and the first step of the caller."""
    shaped, end, asked = shaper(), asyncio.Event(), 0

    async def refuse_once() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("no", reason="TRANSPORT_UNAVAILABLE")
        await end.wait()
        asyncio.get_running_loop().call_soon(cancelled.cancel)

    first = asyncio.ensure_future(shaped.run(refuse_once, **PATIENT))
    await eventually(lambda: asked == 2, "it has the only turn")
    cancelled = asyncio.ensure_future(shaped.run(refuse_once, **PATIENT))
    await asyncio.sleep(0)
    end.set()
    await asyncio.wait([first, cancelled])
    assert cancelled.cancelled() and asked == 2
    both = asyncio.Barrier(2)
    await asyncio.gather(*(shaped.run(both.wait, **PATIENT) for _ in range(2)))


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_callers_that_wait_for_a_turn_end_at_their_limits(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """One probes a service that does not answer; the others have the last error at their own limits."""

    async def main() -> None:
        shaped, asked = shaper(), 0

        async def refuse_then_hang() -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise Unavailable("gone", reason="TRANSPORT_UNAVAILABLE")
            await asyncio.get_running_loop().create_future()

        probe = asyncio.ensure_future(shaped.run(refuse_then_hang, **PATIENT))
        await eventually(lambda: asked == 2, "it asks again")
        limits = (0.0, 0.03, 0.01, 0.02)
        others = [shaped.run(refuse_then_hang, full_s=3600.0, absent_s=limit) for limit in limits]
        results = await asyncio.gather(*others, return_exceptions=True)
        assert [str(result) for result in results] == ["gone"] * len(limits) and asked == 2
        probe.cancel()

    run(main())


@pytest.mark.requirement("R51")
async def test_the_pause_is_never_shorter_than_the_service_says() -> None:
    """RetryInfo is honoured, with jitter on top, and grows no further for those of one burst."""
    shaped, times = shaper(), list[float]()
    loop = asyncio.get_running_loop()

    async def refuse_once() -> None:
        times.append(loop.time())
        if len(times) == 1:
            raise ResourceExhausted("full", reason="SANDBOX_LIMIT", retry_after_s=0.05)

    await shaped.run(refuse_once, **PATIENT)
    assert times[1] - times[0] >= 0.05


@pytest.mark.requirement("R51")
async def test_caller_that_cannot_wait_gets_the_last_error_unasked() -> None:
    """The second learns of the first one's failure, and the service is not asked again."""
    service = Service(0, lambda: Unavailable("gone", reason="TRANSPORT_UNAVAILABLE", retry_after_s=3600.0))
    shaped = shaper()
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await shaped.run(service.create, full_s=1.0, absent_s=1.0)
    assert service.asked == 1


@pytest.mark.requirement("R56")
@pytest.mark.parametrize(
    "error",
    [
        FailedPrecondition("no", reason="CAPABILITY_MISSING"),
        ResourceExhausted("used up", reason="BUDGET_EXHAUSTED"),
        Unavailable("no such package", reason="INSTALL_FAILED", metadata={"permanent": "true"}),
    ],
)
async def test_permanent_error_is_returned_at_once_and_blocks_nobody(error: PenstockError) -> None:
    """The next one asks at once."""
    shaped, asked = shaper(), 0

    async def refuse() -> None:
        nonlocal asked
        asked += 1
        raise error

    for _ in range(2):
        with pytest.raises(type(error)):
            await shaped.run(refuse, **PATIENT)
    assert asked == 2


@pytest.mark.requirement("R51")
async def test_cancelled_probe_blocks_nobody() -> None:
    """His turn goes to the next."""
    shaped = shaper()
    entered = asyncio.Event()

    async def refuse() -> None:
        raise Unavailable("no", reason="TRANSPORT_UNAVAILABLE")

    async def hang() -> None:
        entered.set()
        await asyncio.get_running_loop().create_future()

    async def well() -> str:
        return "made"

    with pytest.raises(Unavailable):
        await shaped.run(refuse, full_s=0.0, absent_s=0.0)
    probe = asyncio.ensure_future(shaped.run(hang, **PATIENT))
    await entered.wait()
    other: Awaitable[str] = asyncio.ensure_future(shaped.run(well, **PATIENT))
    probe.cancel()
    assert await other == "made"


@pytest.mark.requirement("R51", "R117")
async def test_a_lost_sandbox_service_holds_up_no_request_to_another_one() -> None:
    """One throttle has the forks at all of them: what is lost is not asked again, and the others are not paused."""
    shaped = AdaptiveThrottle(first_pause_s=3600.0, most_pause_s=3600.0)

    async def lost() -> None:
        raise Unavailable("n1 does not answer", reason="NODE_LOST", retry_after_s=1.0)

    with pytest.raises(Unavailable):
        await shaped.run(lost, **PATIENT)
    there = Service(1, lambda: ResourceExhausted("full", reason="SANDBOX_LIMIT"))
    await shaped.run(there.create, **PATIENT)
    assert there.asked == 1
