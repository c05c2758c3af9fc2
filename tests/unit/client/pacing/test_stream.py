"""A stream over groups whose rollouts end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
from tests.support.waiting import eventually
from tests.unit.analysis.trajectory_cases import failed, sample, trajectory
from tests.unit.client.conftest import TOKEN, Fakes

from penstock.client import (
    Bias,
    FailureCause,
    InvalidArgument,
    NotFound,
    Paced,
    Penstock,
    Reward,
    RolloutResult,
    RolloutStream,
    StreamBatch,
    Task,
    Unavailable,
    sync,
)
from penstock.client.pacing.policies import DropStale, InOrder, Policy
from penstock.driver.v1 import rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2


class FakeGroup:
    """A group's handle; a test ends its rollouts."""

    def __init__(self, task: Task, size: int) -> None:
        self.group_id = task.task_id
        self.task, self.size = task, size
        self.cancelled = ""
        self.refusals: list[Exception] = []
        self._ends: asyncio.Queue[RolloutResult | Exception] = asyncio.Queue()
        self._index = 0

    def end(self, *rewards: float | None) -> None:
        """Ends as many rollouts; None = one that its sandbox failed."""
        for reward in rewards:
            result = failed(f"{self.group_id}-{self._index}", FailureCause.INFRASTRUCTURE, group=self.group_id)
            rollout = replace(result.rollout, index=self._index, task_id=self.task.task_id)
            result = replace(result, rollout=rollout)
            if reward is not None:
                outcome = replace(result.outcome, failure=None, reward=Reward(reward))
                result = RolloutResult(rollout, outcome, trajectory("t", [sample("s", [(1, 4, True)])]))
            self._index += 1
            self._ends.put_nowait(result)

    def lose(self, error: Exception) -> None:
        """What remains of it will not end."""
        self._ends.put_nowait(error)

    async def as_ended(self, *, top: bool) -> AsyncGenerator[RolloutResult, None]:
        for _ in range(self.size):
            item = await self._ends.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def cancel(self, reason: str) -> None:
        """Raises the first of `refusals`, if any."""
        if self.refusals:
            raise self.refusals.pop(0)
        self.cancelled = reason


class World:
    """The driver's side."""

    def __init__(self) -> None:
        self.groups: list[FakeGroup] = []
        self.refusal: Exception | None = None
        self._created = asyncio.Event()

    async def wait_created(self, number: int) -> FakeGroup:
        """Returns the group of this number once it is there."""
        while len(self.groups) <= number:
            self._created.clear()
            await self._created.wait()
        return self.groups[number]

    def stream(
        self, pacing: Policy, tasks: Iterable[Task] | None = None, *, size: int = 1, concurrency: int = 100
    ) -> RolloutStream:
        async def create(task: Task) -> FakeGroup:
            if self.refusal is not None:
                raise self.refusal
            self.groups.append(FakeGroup(task, size))
            self._created.set()
            return self.groups[-1]

        return RolloutStream(
            cast(Any, create),
            endless() if tasks is None else tasks,
            size=size,
            pacing=pacing,
            concurrency=concurrency,
            policy_version=0,
            top=False,
        )


@pytest.fixture
def world() -> World:
    return World()


def endless() -> Iterator[Task]:
    return (Task(task_id=f"t{number}", instruction="do it") for number in count())


def some(number: int) -> list[Task]:
    return [task for task, _ in zip(endless(), range(number), strict=False)]


def numbers(batch: StreamBatch) -> list[int]:
    return [group.number for group in batch.groups]


def started(bias: Bias) -> dict[str, float]:
    return {share.name: share.started for share in bias.distributions[1].classes}


@pytest.mark.requirement("R136")
async def test_a_slow_group_is_gone_round_until_its_last_version_and_then_awaited(world: World) -> None:
    """Quick ones are trained meanwhile; none is older than the bound, and none is lost."""
    async with world.stream(Paced(batch=1, max_staleness=1, leave_out=0.0), some(3)) as stream:
        slow, quick = [await world.wait_created(number) for number in range(2)]
        async with aclosing(stream.batches()) as batches:
            quick.end(1.0)
            first = await anext(batches)
            assert (numbers(first), first.groups[0].staleness) == ([1], 0)
            assert len(world.groups) == 2, "no place in time is free while this version has its batch"
            waiting = asyncio.ensure_future(anext(batches))
            third = await world.wait_created(2)
            third.end(0.0)
            slow.end(0.5)
            second = await waiting
            assert (numbers(second), second.groups[0].staleness, second.policy_version) == ([0], 1, 1)
            assert numbers(await anext(batches)) == [2]
            with pytest.raises(StopAsyncIteration):
                await anext(batches)
    assert not any(group.cancelled for group in world.groups)
    assert stream.bias().distance == 0.0 and stream.bias().running == 0


async def test_a_rollout_that_is_left_out_ends_late_and_counts_in_the_baselines_of_others_like_it(
    world: World,
) -> None:
    """What is not waited for goes on; its reward is what those left out later are reckoned with."""
    async with (
        world.stream(Paced(batch=1, max_staleness=0, leave_out=0.5), size=2) as stream,
        aclosing(stream.batches()) as batches,
    ):
        first = await world.wait_created(0)
        first.end(1.0)
        batch = await anext(batches)
        (group,) = batch.groups
        assert (group.left_out, group.baseline, [one.rollout_id for one in group.results]) == (1, 1.0, ["t0-0"])
        waiting = asyncio.ensure_future(anext(batches))
        second = await world.wait_created(1)
        first.end(0.0)
        second.end(1.0)
        batch = await waiting
        (group,) = batch.groups
        assert (group.number, group.left_out, group.baseline) == (1, 1, 0.5)
        assert [(late.rollout_id, late.trajectory) for late in batch.late] == [("t0-1", None)]
    assert second.cancelled and not first.cancelled
    assert (stream.bias().started, stream.bias().trained) == (4, 2)


async def test_no_more_rollouts_run_than_concurrency_and_no_more_wait_than_credits(world: World) -> None:
    """Memory is bounded although the tasks are endless and the trainer is slow."""
    async with world.stream(Paced(batch=2, max_staleness=2), size=2, concurrency=5) as stream:
        for number in range(6):
            group = await world.wait_created(number)
            running = [one for one in world.groups if one is not group and one._index < 2]
            assert len(running) <= 1
            group.end(1.0, 1.0)
        async with aclosing(stream.batches()) as batches:
            batch = await anext(batches)
            assert numbers(batch) == [0, 1] and len(batch.results) == 4
            assert len(world.groups) == 6, "(2 + 1) * 2 groups, whatever the concurrency"


async def test_an_announced_version_is_the_one_that_staleness_counts_from(world: World) -> None:
    """A trainer of several batches for a version has less staleness than batches."""
    async with world.stream(InOrder(batch=1, most=4)) as stream:
        for number in range(4):
            (await world.wait_created(number)).end(1.0)
        async with aclosing(stream.batches()) as batches:
            stream.announce(7)
            first, second = await anext(batches), await anext(batches)
            assert [first.policy_version, second.policy_version, stream.policy_version] == [7, 7, 7]
            assert [first.groups[0].staleness, second.groups[0].staleness] == [7, 7]
            (await world.wait_created(4)).end(1.0)
            assert [(await anext(batches)).groups[0].policy_version for _ in range(3)] == [0, 0, 7]


async def test_a_trainer_that_takes_several_batches_for_a_version_is_not_left_waiting(world: World) -> None:
    """Even if no group may be older than the weights."""
    async with world.stream(Paced(batch=1, max_staleness=0), some(3)) as stream, aclosing(stream.batches()) as batches:
        for number in range(3):
            waiting = asyncio.ensure_future(anext(batches))
            (await world.wait_created(number)).end(1.0)
            batch = await waiting
            assert (numbers(batch), batch.policy_version) == ([number], 5 if number else 0)
            stream.announce(5)


async def test_a_stream_that_ends_as_it_begins_leaves_no_task(world: World) -> None:
    """Not even one that has not run yet."""
    async with world.stream(InOrder(batch=1, most=3)) as stream:
        pass
    assert stream.bias().running == 0 and stream.bias().started == 3


async def test_a_group_that_the_policy_drops_is_cancelled_and_makes_room(world: World) -> None:
    """A slot is free when its agents are gone."""
    async with world.stream(DropStale(batch=1, most=4, max_staleness=0), concurrency=2) as stream:
        slow, quick = [await world.wait_created(number) for number in range(2)]
        async with aclosing(stream.batches()) as batches:
            quick.end(1.0)
            assert numbers(await anext(batches)) == [1]
            waiting = asyncio.ensure_future(anext(batches))
            await world.wait_created(3)
            assert slow.cancelled
            world.groups[3].end(1.0)
            assert numbers(await waiting) == [3]
    assert stream.bias().distance > 0


async def test_an_error_of_a_creation_ends_the_stream_and_its_block_cancels_what_runs(world: World) -> None:
    """After it nothing more is started."""
    with pytest.raises(InvalidArgument, match="no such image"):
        async with world.stream(InOrder(batch=1, most=2)) as stream:
            first = await world.wait_created(0)
            first.end(1.0)
            world.refusal = InvalidArgument("no such image", reason="FIELD_INVALID")
            async with aclosing(stream.batches()) as batches:
                async for _ in batches:
                    pass
    assert [bool(group.cancelled) for group in world.groups] == [False, True]


async def test_an_error_of_the_tasks_comes_out_of_the_batches(world: World) -> None:
    """As itself."""

    def broken() -> Iterator[Task]:
        yield from some(1)
        raise RuntimeError("the file of tasks ended early")

    with pytest.raises(RuntimeError, match="ended early"):
        async with world.stream(InOrder(batch=1, most=2), broken()) as stream, aclosing(stream.batches()) as batches:
            await anext(batches)


async def test_a_group_that_its_driver_lost_comes_with_what_ended_and_the_error(world: World) -> None:
    """The stream goes on; the lost rollouts are started and not trained."""
    async with world.stream(InOrder(batch=1, most=1), some(2), size=2) as stream:
        lost = await world.wait_created(0)
        lost.end(0.25)
        lost.lose(NotFound("the driver came back without it", reason="HOME_LOST"))
        async with aclosing(stream.batches()) as batches:
            (group,) = (await anext(batches)).groups
            assert group.error is not None and group.error.reason == "HOME_LOST"
            assert (len(group.results), group.baseline, group.left_out) == (1, 0.25, 0)
            waiting = asyncio.ensure_future(anext(batches))
            (await world.wait_created(1)).end(1.0, None)
            (group,) = (await waiting).groups
            assert (len(group.results), group.baseline) == (2, 1.0), "a broken sandbox is no reward of zero"
    assert (stream.bias().started, stream.bias().trained, stream.bias().running) == (4, 2, 0)
    assert started(stream.bias()) == {"4-7": 0.5, "unknown": 0.5}


@pytest.mark.requirement("R32")
@pytest.mark.parametrize("refusals", [0, 1])
async def test_a_group_that_cannot_be_followed_is_cancelled(world: World, refusals: int) -> None:
    """Its rollouts would run on, and nobody would count them. Where its driver cannot be reached, the stream's end
    tries again.
    """
    away = Unavailable("the driver is away", reason="STREAM_ENDED")
    async with world.stream(InOrder(batch=1, most=1), some(2), size=2) as stream:
        group = await world.wait_created(0)
        group.refusals = [away] * refusals
        group.end(0.25)
        group.lose(away)
        async with aclosing(stream.batches()) as batches:
            (lost,) = (await anext(batches)).groups
            assert lost.error is away and len(lost.results) == 1
        assert bool(group.cancelled) == (not refusals)
    assert group.cancelled and not group.refusals


@pytest.mark.requirement("R136")
async def test_groups_start_again_where_the_policy_dropped_all_of_them(world: World) -> None:
    """None of them runs any more, so that no end of one would start others."""
    async with (
        world.stream(DropStale(batch=2, most=4, max_staleness=1)) as stream,
        aclosing(stream.batches()) as batches,
    ):
        for number in range(4):
            (await world.wait_created(number)).end(1.0)
        await eventually(lambda: stream.bias().running == 0, "all groups have ended")
        stream.announce(100)
        waiting = asyncio.ensure_future(anext(batches))
        for number in (4, 5):
            (await world.wait_created(number)).end(1.0)
        assert numbers(await waiting) == [4, 5]


async def test_leaving_the_loop_early_leaves_nothing_running(world: World) -> None:
    """A trainer that stops cancels what it does not want any more."""
    async with world.stream(InOrder(batch=1, most=3)) as stream:
        (await world.wait_created(0)).end(1.0)
        await world.wait_created(2)
        async with aclosing(stream.batches()) as batches:
            async for _ in batches:
                break
    assert [bool(group.cancelled) for group in world.groups[:3]] == [False, True, True]


def test_a_concurrency_below_one_group_is_refused(world: World) -> None:
    """It could start nothing."""
    with pytest.raises(ValueError, match="concurrency"):
        world.stream(Paced(batch=1, max_staleness=1), size=8, concurrency=4)


def queue_a_group(fakes: Fakes) -> None:
    """A group of one rollout, r0 of g, with a reward of 0.5."""
    ended = rollout_pb2.Outcome(reward=trajectory_pb2.Reward(value=0.5, range_min=0, range_max=1))
    rollout = rollout_pb2.Rollout(rollout_id="r0", group_id="g", phase=rollout_pb2.PHASE_ENDED, outcome=ended)
    group = rollout_pb2.Group(group_id="g", size=1, rollout_ids=["r0"], ended=True)
    event = rollout_pb2.RolloutEvent(sequence=1, rollout_id="r0", ended=ended)
    trajectory = trajectory_pb2.Trajectory(rollout_id="r0", task_id="t0")
    fakes.queue("CreateGroup", pb.CreateGroupResponse(group=rollout_pb2.Group(group_id="g", size=1)))
    fakes.queue("WatchGroup", [pb.WatchGroupResponse(event=event), pb.WatchGroupResponse(group=group)])
    fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=rollout))
    fakes.queue("GetTrajectory", [pb.GetTrajectoryResponse(trajectory=trajectory)])


async def test_a_stream_creates_groups_with_the_options_that_it_was_given(fakes: Fakes, ps: Penstock) -> None:
    """Over the wire: the same requests as `ps.groups.create`."""
    queue_a_group(fakes)
    pacing = Paced(batch=4, max_staleness=1)
    async with (
        ps.stream(some(1), "shell", 1, pacing=pacing, concurrency=1, run_id="run-7", seed=3) as stream,
        aclosing(stream.batches()) as batches,
    ):
        (found,) = [batch async for batch in batches]
    assert [(one.group_id, one.baseline) for one in found.groups] == [("g", 0.5)], "the last batch may be smaller"
    spec = fakes.requests["CreateGroup"][0].spec
    assert (spec.run_id, spec.seed, spec.task.task_id, spec.agent.name) == ("run-7", 3, "t0", "shell")


async def test_a_trainer_without_await_has_the_same_stream(fakes: Fakes, address: str) -> None:
    """In a thread of its own, whose batches are the same values."""
    queue_a_group(fakes)

    def trained() -> list[StreamBatch]:
        target = dict.fromkeys(("sandbox", "driver", "interception", "inference"), address)
        with sync.connect(target, TOKEN) as ps:
            pacing = Paced(batch=4, max_staleness=1)
            with ps.stream(some(1), "shell", 1, pacing=pacing, concurrency=1) as stream:
                found = []
                for batch in stream.batches():
                    found.append(batch)
                    stream.announce(batch.policy_version + 1)
                assert (stream.policy_version, stream.bias().trained) == (1, 1)
            return found

    (batch,) = await asyncio.to_thread(trained)
    assert [result.rollout_id for result in batch.results] == ["r0"]
