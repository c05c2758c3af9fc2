"""Creations in trouble: few ask, for all, and nobody waits longer than he would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.environments.throttle import FIRST_WINDOW, AdaptiveThrottle

ALL = 200
PATIENT = {"full_s": 3600.0, "absent_s": 3600.0}


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
