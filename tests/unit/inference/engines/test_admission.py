"""The queue before vLLM: order, limits, versions, pauses, cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import PenstockError, Unavailable
from penstock_inference.engines.admission import Admission
from penstock_inference.engines.base import GenerateRequest, Sampling


def request(name: str = "r", least: int | None = None, exact: int | None = None, adapter: str = "") -> GenerateRequest:
    return GenerateRequest(
        name,
        np.array([1], np.int32),
        Sampling(max_tokens=1),
        min_policy_version=least,
        exact_policy_version=exact,
        adapter=adapter,
    )


def enter(admission: Admission, alone: bool = False, **fields: object) -> asyncio.Task[bool]:
    return asyncio.create_task(admission.enter(request(**fields), alone=alone))  # type: ignore[arg-type]


async def settled() -> None:
    """All tasks have got as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.requirement("R26")
async def test_running_requests_are_bounded_and_the_rest_come_in_order() -> None:
    """First come, first served; one that is too many is refused with a delay."""
    admission = Admission(2, 2, lambda _: 0)
    tasks = [enter(admission, name=str(n)) for n in range(4)]
    await settled()
    assert [task.done() for task in tasks] == [True, True, False, False] and admission.waiting == 2
    with pytest.raises(PenstockError) as caught:
        await admission.enter(request("five"))
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after_s
    admission.leave()
    await settled()
    assert [task.done() for task in tasks] == [True, True, True, False]


@pytest.mark.requirement("R26")
async def test_requests_are_held_while_any_hold_lasts() -> None:
    """Two reasons to wait are both waited for."""
    admission = Admission(2, 2, lambda _: 0)
    admission.hold()
    admission.hold()
    task = enter(admission)
    admission.release()
    await settled()
    assert not task.done()
    admission.release()
    assert await task


@pytest.mark.requirement("R26", "R87")
async def test_a_hold_of_one_adapter_holds_no_other_request() -> None:
    """Its requests keep their places, and are looked at with the version that is in force when it ends."""
    version = 1
    admission = Admission(2, 4, lambda _: version)
    with admission.holding("style"):
        old = enter(admission, exact=1, adapter="style")
        new = enter(admission, exact=2, adapter="style")
        assert await admission.enter(request("base"))
        assert await admission.enter(request("another", adapter="tone"))
        admission.leave()
        await settled()
        assert not old.done() and not new.done() and admission.waiting == 2
        version = 2
    with pytest.raises(PenstockError) as caught:
        await old
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert await new


@pytest.mark.requirement("R87")
async def test_future_version_is_awaited_and_a_past_one_refused() -> None:
    """And who waits for a version keeps nobody else."""
    version = 3
    admission = Admission(1, 5, lambda _: version)
    early = enter(admission, least=4)
    await settled()
    assert await admission.enter(request("other"))
    admission.leave()
    with pytest.raises(PenstockError) as caught:
        await admission.enter(request(exact=4))
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert not early.done()
    version = 4
    admission.look()
    assert await early


@pytest.mark.requirement("R26", "R132")
async def test_requests_that_must_be_alone_take_their_turn_with_the_others() -> None:
    """Those that came before end first, and those behind wait: neither starves."""
    admission = Admission(4, 8, lambda _: 0)
    tasks = [enter(admission, alone=n % 2 == 1) for n in range(5)]
    for n in range(5):
        await settled()
        assert [task.done() for task in tasks] == [m <= n for m in range(5)]
        assert admission.running == 1
        admission.leave()
    together = [enter(admission) for _ in range(3)]
    await asyncio.gather(*together)
    assert admission.running == 3


@pytest.mark.requirement("R23", "R132")
@pytest.mark.parametrize("ended", ["cancelled", "aborted"])
async def test_a_request_that_gives_up_being_alone_holds_nobody_back(ended: str) -> None:
    admission = Admission(4, 8, lambda _: 0)
    assert await admission.enter(request())
    alone = enter(admission, alone=True, name="alone")
    behind = enter(admission)
    await settled()
    assert not behind.done()
    if ended == "cancelled":
        alone.cancel()
    else:
        admission.abort(lambda r: r.request_id == "alone")
    assert await behind
    assert admission.running == 2 and admission.waiting == 0


@pytest.mark.requirement("R132")
async def test_who_still_reads_an_ended_request_keeps_its_place_and_delays_nobody() -> None:
    """A slow reader would stop a score, and all behind it, for as long as it likes."""
    admission = Admission(2, 8, lambda _: 0)
    assert await admission.enter(request())
    admission.rest()
    assert await admission.enter(request(), alone=True)
    behind = enter(admission)
    admission.leave(rested=True)
    await settled()
    assert not behind.done()
    admission.leave()
    assert await behind
    assert admission.running == 1


@pytest.mark.requirement("R24")
async def test_waiting_requests_are_aborted_or_failed_by_type() -> None:
    """Nobody is left waiting."""
    admission = Admission(1, 5, lambda _: 0)
    admission.hold()
    aborted, failed = enter(admission, name="a"), enter(admission, name="b")
    await settled()
    assert admission.abort(lambda r: r.request_id == "a") == 1
    admission.fail(lambda: Unavailable("gone", reason="ENGINE_DIED"))
    assert await aborted is False
    with pytest.raises(Unavailable):
        await failed
    assert admission.waiting == 0


@pytest.mark.requirement("R32")
async def test_idleness_is_signalled_when_the_last_leaves_or_waiting_ends() -> None:
    admission = Admission(2, 0, lambda _: 0)
    await admission.idle()
    assert await admission.enter(request())
    waits = [asyncio.create_task(admission.idle()) for _ in range(2)]
    await settled()
    assert not any(wait.done() for wait in waits)
    admission.leave()
    await asyncio.gather(*waits)


@pytest.mark.requirement("R22")
@given(st.lists(st.sampled_from(["enter", "alone", "leave", "cancel", "hold", "release", "abort"]), max_size=40))
def test_no_interleaving_loses_or_invents_a_place(steps: list[str]) -> None:
    """Never more than the limit, and in the end all places are free."""

    async def play() -> None:
        admission = Admission(2, 50, lambda _: 0)
        tasks: list[asyncio.Task[bool]] = []
        inside, holds = 0, 0
        for n, step in enumerate(steps):
            match step:
                case "enter":
                    tasks.append(enter(admission, name=str(n)))
                case "alone":
                    tasks.append(enter(admission, alone=True, name=str(n)))
                case "cancel" if tasks:
                    tasks[n % len(tasks)].cancel()
                case "hold":
                    admission.hold()
                    holds += 1
                case "release" if holds:
                    admission.release()
                    holds -= 1
                case "abort":
                    admission.abort(lambda r, n=n: int(r.request_id) % 2 == n % 2)  # type: ignore[misc]
                case "leave" if inside:
                    admission.leave()
                    inside -= 1
            if n % 3:
                await settled()
                inside = _gather(tasks, inside)
            assert 0 <= admission.running <= 2
        for _ in range(holds):
            admission.release()
        while True:
            await settled()
            inside = _gather(tasks, inside)
            assert admission.running == inside
            if not inside:
                break
            admission.leave()
            inside -= 1
        assert admission.running == admission.waiting == 0 and not tasks

    asyncio.run(play())


def _gather(tasks: list[asyncio.Task[bool]], inside: int) -> int:
    """Count those that were let in and drop what is over."""
    over: Callable[[asyncio.Task[bool]], bool] = lambda task: task.done()  # noqa: E731
    for task in [task for task in tasks if over(task)]:
        tasks.remove(task)
        inside += not task.cancelled() and task.exception() is None and task.result()
    return inside


@pytest.mark.requirement("R23")
async def test_caller_leaving_while_refused_has_left() -> None:
    """A cancelled wait ends as one, whatever was about to be said."""
    admission = Admission(1, 5, lambda _: 3)
    admission.hold()
    task = enter(admission, exact=4)
    await settled()
    admission.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.waiting == 0 and admission.running == 0
