"""Exported rows with the rewards of a further grade: an export is written once, when its rollout ends."""

from collections.abc import Iterable, Iterator

from penstock.analysis.reward_diff import FIRST
from penstock.client.types.results import Rollout
from penstock.tables.columns import Row, sealed


def with_grade(rows: Iterable[Row], rollouts: Iterable[Rollout], grade: str) -> Iterator[Row]:
    """Yields rows of the tables `sequences` or `rollouts` with the reward and the components of a further grade.

    It is what `penstock export --grade` writes, also where the captures are gone. A rollout without that grade, or that
    is not among `rollouts`, gets no reward. Digests are those of the new rows. Other tables have no rewards: their rows
    stay as they are.

    Args:
        rows: of exports, as `read_exports` or `read_rows` yields them.
        rollouts: as `ps.rollouts.list` yields them, with all their grades.
        grade: the name of the grade; `first` leaves all rows as they are.
    """
    if grade == FIRST:
        yield from rows
        return
    rewards = {
        rollout.rollout_id: found.reward for rollout in rollouts for found in rollout.grades if found.name == grade
    }
    for row in rows:
        if "reward" not in row:
            yield row
            continue
        reward = rewards.get(row["rollout_id"])
        changed = {
            **row,
            "reward": None if reward is None else reward.value,
            "reward_components": {} if reward is None else dict(reward.components),
        }
        # Rows of earlier versions have neither count nor digest.
        yield sealed(changed, row["rollout_rows"]) if "row_sha256" in row else changed
