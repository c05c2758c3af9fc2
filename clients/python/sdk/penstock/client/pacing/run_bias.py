"""How far what a trainer trained of a run is from what was started, of rollouts that services have."""

from collections.abc import AsyncIterable, Collection, Iterable

from penstock.client.pacing.meter import Bias, BiasMeter, Facts, is_trainable
from penstock.client.types.results import Outcome, Rollout, RolloutResult
from penstock.client.types.trajectories import Trajectory


async def bias_of(
    rollouts: Iterable[Rollout],
    trajectories: AsyncIterable[tuple[Trajectory, Outcome]],
    trained: Collection[str] | None = None,
) -> Bias:
    """Compares the rollouts of a run with those of them that were trained.

    Args:
        rollouts: all that were started, from `ps.rollouts.list`.
        trajectories: of those that ended, from `ps.rollouts.export`; lengths are theirs.
        trained: ids; None = all that a policy can learn from: with a reward, and no failure but its own.
    """
    meter, left = BiasMeter(), {rollout.rollout_id: rollout for rollout in rollouts}
    for rollout in left.values():
        meter.start(rollout.task_id)

    def count(result: RolloutResult) -> None:
        facts = Facts.of(result)
        meter.end(facts)
        if is_trainable(result) if trained is None else result.rollout_id in trained:
            meter.train(facts)

    async for trajectory, outcome in trajectories:
        if (ended := left.pop(trajectory.rollout_id, None)) is not None:
            count(RolloutResult(ended, outcome, trajectory))
    for rollout in left.values():
        if rollout.outcome is not None:
            count(RolloutResult(rollout, rollout.outcome))
    return meter.report()
