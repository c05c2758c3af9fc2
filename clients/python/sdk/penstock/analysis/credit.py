"""Credit by counterfactuals: which turns of a rollout its reward is owed to, measured by branches.

`of` chooses calls of an ended rollout or group, branches each of them n times, and compares what the branches earn
before and after each turn. `credit_values` defines values and advantages, `credit_plan` the choice of calls.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, overload

from penstock.analysis.credit_plan import By, Point, partings, plan, surprise
from penstock.analysis.credit_values import RolloutCredit, TurnCredit, Value, counted_reward, credited, turns_of
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, first_of
from penstock.client.rollouts.handles import GroupHandle
from penstock.client.types.results import RolloutResult
from penstock.client.types.trajectories import Trajectory

__all__ = [
    "By",
    "Point",
    "RolloutCredit",
    "TurnCredit",
    "Value",
    "counted_reward",
    "credited",
    "of",
    "partings",
    "plan",
    "surprise",
    "turns_of",
]

CONCURRENT_CALLS: Final = 8
"""Calls whose branches run at a time, unless the caller says otherwise."""
_MAX_SEED: Final = (1 << 63) - 1
_CANCEL_S: Final = 30.0
"""Seconds to wait for a cancellation; after that the branches' own limits end them."""


@overload
async def of(
    ps: Penstock,
    ended: RolloutResult,
    *,
    budget: int,
    n: int = ...,
    by: By = ...,
    seed: int = ...,
    concurrent_calls: int = ...,
) -> RolloutCredit: ...


@overload
async def of(
    ps: Penstock,
    ended: Iterable[RolloutResult],
    *,
    budget: int,
    n: int = ...,
    by: By = ...,
    seed: int = ...,
    concurrent_calls: int = ...,
) -> dict[str, RolloutCredit]: ...


async def of(
    ps: Penstock,
    ended: RolloutResult | Iterable[RolloutResult],
    *,
    budget: int,
    n: int = 8,
    by: By = "parting",
    seed: int = 0,
    concurrent_calls: int = CONCURRENT_CALLS,
) -> RolloutCredit | dict[str, RolloutCredit]:
    """Branches calls of an ended rollout, or of the rollouts of a group, and returns the advantages of their turns.

    Branches have the parent's run and labels. In gate mode somebody must answer their calls meanwhile, as a session of
    that run does. Their samples can be trained as those of any group: `Value.group_id` names it.

    The value before a rollout's first turn is the mean reward of its siblings, if it has any; they cost no branch.

    Args:
        ps: the connection.
        ended: one result, or all results of a group, as `group.results()` returns them.
        budget: branches in all, at least n. With n for each turn of each rollout all calls are branched.
        n: branches of each call, 1 to 256.
        by: what ranks turns when the budget is smaller: siblings that part there, then the surprise of the answer;
            or the surprise alone.
        seed: of the choice among equal turns, and of the seeds of branches whose parent was sampled with one.
        concurrent_calls: calls whose branches run at a time, at least 1.

    Returns:
        The credit of the rollout; for several results by rollout id, without those that have no reward that counts.

    Raises:
        InvalidArgument: `BRANCH_PLAN`.
        FailedPrecondition: `REWARD_ABSENT`: the rollout has no reward that counts; and as `ps.rollouts.branch`.
    """
    alone = isinstance(ended, RolloutResult)
    results = [ended] if isinstance(ended, RolloutResult) else list(ended)
    rewards = {one.rollout_id: reward for one in results if (reward := counted_reward(one)) is not None}
    if alone and not rewards:
        raise FailedPrecondition(
            f"rollout {results[0].rollout_id} has no reward that counts: it was not graded, or failed by no fault of "
            "the policy",
            reason="REWARD_ABSENT",
        )
    graded = [one for one in results if one.rollout_id in rewards]
    trajectories = [await _with_calls(ps, one) for one in graded]
    values = _of_siblings(graded, trajectories, rewards)
    points = await asyncio.to_thread(plan, trajectories, budget=budget, n=n, by=by, seed=seed, known=values)
    seeded = {trajectory.rollout_id for trajectory in trajectories if _has_seed(trajectory)}
    draw = random.Random(seed)  # noqa: S311 - seeds of samples
    seeds = {point.call_id: draw.randrange(_MAX_SEED - n) for point in points if point.rollout_id in seeded}
    values |= await _branched(ps, points, n, max(1, concurrent_calls), seeds)
    credit = {
        one.rollout_id: credited(one.rollout_id, turns_of(one), values, rewards[one.rollout_id]) for one in trajectories
    }
    return credit[results[0].rollout_id] if alone else credit


async def _with_calls(ps: Penstock, result: RolloutResult) -> Trajectory:
    if result.trajectory is not None and result.trajectory.calls:
        return result.trajectory
    return await ps.rollouts.trajectory(result.rollout_id)


def _has_seed(trajectory: Trajectory) -> bool:
    """Whether a call was sampled with the seed of its request, so that a branch would repeat its answer."""
    for call in turns_of(trajectory):
        used = None if call.completion is None else call.completion.sampling_used
        if used is not None and used.seed is not None and used.seed == call.sampling_requested.seed:
            return True
    return False


def _of_siblings(
    results: Sequence[RolloutResult], trajectories: Sequence[Trajectory], rewards: Mapping[str, float]
) -> dict[str, Value]:
    """Returns the values before first turns: the mean reward of the other rollouts of the group."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for one in results:
        if one.rollout.group_id is not None:
            groups[one.rollout.group_id].append(one.rollout_id)
    found = {}
    for one, trajectory in zip(results, trajectories, strict=True):
        others = [other for other in groups.get(one.rollout.group_id or "", ()) if other != one.rollout_id]
        turns = turns_of(trajectory)
        if others and turns:
            found[turns[0].call_id] = Value(tuple(rewards[other] for other in others))
    return found


async def _branched(
    ps: Penstock, points: Sequence[Point], n: int, concurrent: int, seeds: Mapping[str, int]
) -> dict[str, Value]:
    """Returns the values of calls by id; those of which no branch counts have none. `seeds` are those of branches."""
    free = asyncio.Semaphore(concurrent)
    values: dict[str, Value] = {}

    async def branch(point: Point) -> None:
        async with free:
            group = await _created(ps, point, n, seeds.get(point.call_id))
            try:
                results = await group.results()
            except BaseException:
                await _abandon(group)
                raise
        rewards = [counted_reward(one) for one in results]
        counted = tuple(reward for reward in rewards if reward is not None)
        if counted:
            values[point.call_id] = Value(counted, len(rewards) - len(counted), group.group_id)

    try:
        async with asyncio.TaskGroup() as tasks:
            for point in points:
                tasks.create_task(branch(point))
    # Not by `except*`, which before Python 3.11.4 raises a group whatever its block raises.
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    return values


async def _created(ps: Penstock, point: Point, n: int, seed: int | None) -> GroupHandle:
    """Starts the branches of a call; if this is cancelled meanwhile, cancels them."""
    creating = asyncio.ensure_future(ps.rollouts.branch(point.rollout_id, point.call_id, n, seed=seed))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with suppress(Exception, asyncio.CancelledError):
            await _abandon(await asyncio.wait_for(creating, _CANCEL_S))
        raise


async def _abandon(group: GroupHandle) -> None:
    """Cancels a group whose results nobody awaits any more; errors are suppressed, as another one is on its way."""
    work = asyncio.ensure_future(group.cancel("its results are not awaited any more"))
    with suppress(Exception, asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(work), _CANCEL_S)
    work.cancel()
