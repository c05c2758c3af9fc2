"""Exported rows with the rewards of a further grade: an export is written once, when its rollout ends."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.analysis.reward_diff import FIRST
from penstock.client.types.results import Rollout
from penstock.client.types.trajectories import Reward, TurnReward
from penstock.tables.columns import Row, sealed


def with_grade(rows: Iterable[Row], rollouts: Iterable[Rollout], grade: str) -> Iterator[Row]:
    """Yields rows of the tables `turns`, `sequences` or `rollouts` with the rewards and components of a further grade.

    It is what `penstock export --grade` writes, also where the captures are gone. A rollout without that grade, or that
    is not among `rollouts`, gets no reward, and no row has one of a turn or a token then. Digests are those of the new
    rows. Other tables have no rewards: their rows stay as they are.

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
        given = _given(row, rewards.get(row["rollout_id"]))
        if not given:
            yield row
            continue
        changed = row | given
        # Rows of earlier versions have neither count nor digest.
        yield sealed(changed, row["rollout_rows"]) if "row_sha256" in row else changed


def _given(row: Row, reward: Reward | None) -> Row:
    """The row's columns of rewards, as a grade has them; those that its version has."""
    turns = {turn.call_id: turn for turn in (() if reward is None else reward.turns)}
    turn = turns.get(row.get("call_id", ""))
    given: Row = {
        "reward": None if reward is None else reward.value,
        "reward_components": {} if reward is None else dict(reward.components),
        "turn_reward": None if turn is None else turn.value,
        "turn_reward_components": {} if turn is None else dict(turn.components),
        "token_rewards": None if turn is None or turn.token_values is None else list(turn.token_values),
    }
    if "turn_spans" in row:
        of_spans = [(span, turns.get(span["call_id"])) for span in row["turn_spans"]]
        given["turn_rewards"] = [None if turn is None else turn.value for _, turn in of_spans]
        given["token_rewards"] = _of_tokens(len(row["input_ids"]), of_spans)
    return {name: value for name, value in given.items() if name in row}


def _of_tokens(count: int, of_spans: Sequence[tuple[Mapping[str, Any], TurnReward | None]]) -> list[float] | None:
    found, is_given = [0.0] * count, False
    for span, turn in of_spans:
        if turn is not None and turn.token_values is not None:
            start, end = span["start"], span["end"]
            found[start:end] = turn.token_values[: end - start]
            is_given = True
    return found if is_given else None
