"""ART (openpipe-art 0.5.23): the fields of its `TrajectoryGroup`s, with a choice for each run of trained tokens.

Forms: art/trajectories/__init__.py (`Trajectory`, `TrajectoryGroup`, `PydanticException`) and
art/preprocessing/tokenize.py (`assemble_vllm_training_sequences`, which takes the ids of a choice as they are), of
openpipe-art 0.5.23 on PyPI. 0.5.18 reads no `prompt_token_ids`: it renders and tokenises the conversation again.
"""

from collections.abc import Callable
from typing import Any, TypedDict

from penstock.adapters.trainers.selection import Place, Row, Selection, trained_runs


class TokenLogprob(TypedDict):
    """An entry of a choice's `logprobs["content"]`; the token is written as vLLM does, `token_id:N`."""

    token: str
    bytes: None
    logprob: float
    top_logprobs: list[Any]


class Choice(TypedDict):
    """A `Choice` of openai's chat completions, with vLLM's ids beside it; `Choice(**it)` makes it.

    Make it: ART takes a dict for a message of the prompt, and trains nothing of it.
    """

    index: int
    finish_reason: str
    message: dict[str, Any]
    logprobs: dict[str, list[TokenLogprob]]
    prompt_token_ids: list[int]
    token_ids: list[int]


class Trajectory(TypedDict):
    """The fields of a `Trajectory`; `plugins.art.made` makes it, with its choices."""

    messages_and_choices: list[Choice]
    reward: float
    initial_policy_version: int | None
    final_policy_version: int | None
    metrics: dict[str, float | int | bool]
    metadata: dict[str, str]


class Failure(TypedDict):
    """The fields of a `PydanticException`."""

    type: str
    message: str
    traceback: str


class TrajectoryGroup(TypedDict):
    """The arguments of `art.TrajectoryGroup`; `plugins.art.made_group` makes it."""

    trajectories: list[Trajectory]
    exceptions: list[Failure]
    metadata: dict[str, str]


def trajectory_groups(
    selection: Selection, *, decode: Callable[[list[int]], str] | None = None
) -> list[TrajectoryGroup]:
    """Returns a group for each of the selection's, with a trajectory per rollout.

    A dropped rollout is one of its group's `exceptions`, as one that failed in ART's own gathering: it is in no mean.

    Args:
        selection: of any number of groups, with any number of sequences of a rollout.
        decode: the tokenizer's, for the texts of choices; None = empty ones.
    """
    groups: dict[str, TrajectoryGroup] = {}
    for place in selection.places:
        group = groups.setdefault(
            place.group, TrajectoryGroup(trajectories=[], exceptions=[], metadata={"penstock_group": place.group})
        )
        if place.rows:
            group["trajectories"].append(trajectory(place, decode=decode))
        else:
            group["exceptions"].append(Failure(type="penstock.Dropped", message=str(place.dropped), traceback=""))
    return list(groups.values())


def trajectory(place: Place, *, decode: Callable[[list[int]], str] | None = None) -> Trajectory:
    """Returns the trajectory of a rollout with at least one row.

    The choices of all its rows are in one list: ART begins a new sequence where a choice's prompt does not continue the
    one before, and divides the loss of a trajectory by its trained tokens, so that a rollout counts once.
    """
    versions = [version for row in place.rows for version in row.policy_versions]
    first = place.rows[0]
    return Trajectory(
        messages_and_choices=[choice for row in place.rows for choice in _choices(row, decode)],
        reward=first.reward,
        initial_policy_version=min(versions, default=None),
        final_policy_version=max(versions, default=None),
        metrics={
            "turns": sum(len(row.sample.turns) for row in place.rows),
            "sequences": len(place.rows),
            "truncated": any(row.sample.truncated for row in place.rows),
        },
        metadata={"penstock_rollout_id": place.rollout_id, "task_id": first.trajectory.task_id},
    )


def _choices(row: Row, decode: Callable[[list[int]], str] | None) -> list[Choice]:
    ids, found = row.sample.input_ids.tolist(), []
    for start, end in trained_runs(row.sample.loss_mask):
        tokens = ids[start:end]
        logprobs = row.logprobs[start:end].tolist()
        found.append(
            Choice(
                index=0,
                finish_reason="stop",
                message={"role": "assistant", "content": decode(tokens) if decode else ""},
                logprobs={
                    "content": [
                        TokenLogprob(token=f"token_id:{token}", bytes=None, logprob=logprob, top_logprobs=[])
                        for token, logprob in zip(tokens, logprobs, strict=True)
                    ]
                },
                prompt_token_ids=ids[:start],
                token_ids=tokens,
            )
        )
    return found
