"""What a session requests of the flow of its calls when a stream begins anew."""

import asyncio
from collections.abc import Callable

import pytest

from penstock.client.intercept.pauses import PAUSE_S, Pauses
from penstock.interception.v1 import intercept_service_pb2 as pb


@pytest.fixture
def sent() -> list[pb.InterceptRequest]:
    """The frames for the gate."""
    return []


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the loop's clock so many seconds forward. It stands still otherwise."""
    loop = asyncio.get_running_loop()
    clock = [loop.time()]
    monkeypatch.setattr(loop, "time", lambda: clock[0])

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    return pass_time


async def _held(pauses: Pauses, max_duration: float | None) -> None:
    answer = pauses.pause("weights", max_duration)
    pauses.paused(0)
    await answer


@pytest.mark.requirement("R26")
@pytest.mark.parametrize("asked", [90.0, None])
async def test_a_pause_is_requested_again_for_what_is_left_of_it(
    sent: list[pb.InterceptRequest], pass_time: Callable[[float], None], asked: float | None
) -> None:
    """Else a gate that breaks at the end of a pause would hold the calls as long again."""
    pauses = Pauses(sent.append)
    await _held(pauses, asked)
    pass_time(60.0)
    sent.clear()
    pauses.began_stream()
    (frame,) = sent
    assert frame.pause.reason == "weights" and pauses.is_unconfirmed
    assert frame.pause.max_duration.ToSeconds() == (PAUSE_S if asked is None else asked) - 60


@pytest.mark.requirement("R26")
async def test_a_pause_of_which_nothing_is_left_is_not_requested_again(
    sent: list[pb.InterceptRequest], pass_time: Callable[[float], None]
) -> None:
    """Also where the gate could not say that it has ended."""
    pauses = Pauses(sent.append)
    await _held(pauses, 90.0)
    pass_time(60.0)
    pauses.began_stream()
    assert pauses.is_unconfirmed
    pass_time(30.0)
    sent.clear()
    pauses.began_stream()
    assert not sent and not pauses.is_unconfirmed


@pytest.mark.requirement("R26")
async def test_a_pause_in_force_that_is_lengthened_while_the_gate_is_away_puts_back_what_the_gate_leases(
    sent: list[pb.InterceptRequest], pass_time: Callable[[float], None]
) -> None:
    """The gate has forgotten the pause, and leases calls before it reads that it is to last longer."""
    pauses = Pauses(sent.append)
    await _held(pauses, 120.0)
    pass_time(102.0)
    longer = pauses.pause("push", 120.0)
    (frame,) = pauses.unanswered()
    sent.clear()
    pauses.began_stream()
    unconfirmed = [pauses.is_unconfirmed]
    assert not sent, "the open request is sent already"
    assert frame.pause.max_duration.ToSeconds() == 120
    pauses.paused(3)
    assert await longer == 3
    unconfirmed.append(pauses.is_unconfirmed)
    resumed = pauses.resume()
    pauses.began_stream()
    assert [*unconfirmed, pauses.is_unconfirmed] == [True, False, False]
    pauses.resumed()
    await resumed


@pytest.mark.requirement("R26", "R118")
@pytest.mark.parametrize(("away", "left_ms"), [(20.0, 40_000), (300.0, 1)])
async def test_a_pause_that_began_without_a_gate_lasts_there_for_what_is_left_of_it(
    sent: list[pb.InterceptRequest], pass_time: Callable[[float], None], away: float, left_ms: int
) -> None:
    """A gate that comes back after the pause would hold calls once more, for nobody; it still has to answer."""
    pauses = Pauses(sent.append)
    answer = pauses.pause("weights", 60.0)
    pauses.began_without_it()
    pass_time(away)
    (frame,) = pauses.unanswered()
    assert (frame.pause.reason, frame.pause.max_duration.ToMilliseconds()) == ("weights", left_ms)
    pauses.began_stream()
    pauses.paused(0)
    assert await answer == 0 and not pauses.is_unconfirmed


@pytest.mark.requirement("R26")
@pytest.mark.parametrize("before", [False, True])
async def test_a_pause_that_waits_for_the_gate_lasts_whole(
    sent: list[pb.InterceptRequest], pass_time: Callable[[float], None], *, before: bool
) -> None:
    """It begins when the gate answers: whoever is told so may rely on it."""
    pauses = Pauses(sent.append)
    if before:
        pauses.pause("weights", 60.0)
        pauses.began_without_it()
    answer = pauses.pause("weights", 60.0)
    pass_time(300.0)
    (frame,) = pauses.unanswered()
    assert frame.pause.max_duration.ToSeconds() == 60
    pauses.paused(0)
    assert await answer == 0
