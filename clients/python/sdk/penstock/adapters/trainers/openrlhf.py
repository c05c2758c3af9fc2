"""OpenRLHF (0.11.2): what an agent executor returns, and the tensors of an `Experience` as numpy arrays.

Forms: openrlhf/utils/agent.py (`MultiTurnAgentExecutor.execute`), openrlhf/trainer/ppo_utils/samples_generator.py
(`_process_response_into_experience`) and experience.py (`Experience`), groups as experience_maker.py
(`compute_advantages_and_returns`) cuts them, of openrlhf 0.11.2 on PyPI.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.selection import Place, Row, Selection, only_row, trained_runs
from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import Logprobs


class AgentResponse(TypedDict):
    """The return value of an agent executor's `execute` for one rollout."""

    prompt: str
    label: str
    images: None
    mm_train_inputs: None
    reward: float
    scores: float
    observation_tokens: list[int]
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float]
    truncated: bool
    extra_logs: dict[str, float]


class Experience(TypedDict):
    """The fields of an `Experience` of one sequence, with a first axis of 1; tokens are shifted by one, as in OpenRLHF:
    entry i of an array of T - 1 entries is about token i + 1."""

    sequences: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    action_mask: NDArray[np.int64]
    rollout_log_probs: NDArray[np.float32]
    rewards: NDArray[np.float32]
    scores: NDArray[np.float32]
    response_length: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    total_length: NDArray[np.float32]
    prompts: list[str]
    labels: list[str]
    info: dict[str, NDArray[Any]]


def agent_responses(
    selection: Selection, *, label: str = "", decode: Callable[[list[int]], str] | None = None
) -> list[AgentResponse]:
    """Returns a response per sequence. `action_ranges` are the runs of trained tokens, so that masked turns are
    context.

    OpenRLHF accepts one response per `execute`: use `select(results, one_sequence=True)` there, and raise if the
    rollout was dropped; it has no masked responses.

    Args:
        selection: of any number of groups.
        label: passed through.
        decode: the tokenizer's, for the text of the prompt; None = empty.
    """
    return [
        AgentResponse(
            prompt=decode(row.prompt_ids.tolist()) if decode else "",
            label=label,
            images=None,
            mm_train_inputs=None,
            reward=row.reward,
            scores=row.reward,
            observation_tokens=row.sample.input_ids.tolist(),
            action_ranges=list(trained_runs(row.sample.loss_mask)),
            rollout_log_probs=row.logprobs.tolist(),
            truncated=row.sample.truncated,
            extra_logs=_logs(row),
        )
        for row in selection.rows
    ]


def experiences(
    selection: Selection,
    *,
    label: str = "",
    decode: Callable[[list[int]], str] | None = None,
    filler_token_id: int | None = None,
) -> list[Experience]:
    """Returns an experience per rollout, group after group.

    OpenRLHF knows no groups: it cuts the rewards, in the order of the rows, into pieces of `n_samples_per_prompt`,
    which must be the size of each group. So a dropped rollout keeps its place, by a row that trains nothing
    (`action_mask` 0), with the mean reward of its group's kept rollouts, which moves no baseline.

    Args:
        selection: of `select(results, one_sequence=True)`, of any number of groups.
        label: passed through.
        decode: the tokenizer's, for the text of the prompt; None = empty.
        filler_token_id: for dropped rollouts; the tokenizer's padding. It needs OpenRLHF's
            `train.dynamic_batch_enable`: otherwise the loss of a micro batch is divided by its own trained tokens, and
            of such a row alone is NaN. And a fixed coefficient of the KL (no `algo.kl.target`): such a row's KL is NaN,
            which the adaptive one becomes. None = a dropped rollout is an error.

    Raises:
        InvalidArgument: `SEVERAL_SEQUENCES`, a rollout has more than one; `ROLLOUT_DROPPED`, one was dropped, and there
            is no `filler_token_id`.
    """
    groups: dict[str, list[Place]] = {}
    for place in selection.places:
        groups.setdefault(place.group, []).append(place)
    oldest = min((_logs(row)["policy_version"] for row in selection.rows), default=0.0)
    found = []
    for place in chain.from_iterable(groups.values()):
        row = only_row(place, "OpenRLHF")
        if row is not None:
            found.append(
                _experience(
                    row.sample.input_ids,
                    row.sample.loss_mask,
                    row.logprobs,
                    row.reward,
                    _logs(row),
                    label,
                    prompt=decode(row.prompt_ids.tolist()) if decode else "",
                    truncated=row.sample.truncated,
                )
            )
        elif filler_token_id is None:
            raise InvalidArgument(
                f"{place.dropped}. OpenRLHF needs a row for each rollout of a group: leave the group out, or give "
                "filler_token_id, with OpenRLHF's train.dynamic_batch_enable",
                reason="ROLLOUT_DROPPED",
            )
        else:
            # The shortest sequence that has a token to mask. It makes the batch look no older.
            ids, mask, logprobs = np.full(2, filler_token_id), np.zeros(2, np.bool_), np.zeros(2, np.float32)
            logs = {"turns": 0.0, "weight": 0.0, "policy_version": oldest}
            found.append(_experience(ids, mask, logprobs, selection.group_reward(place.group), logs, label))
    return found


def _experience(
    ids: NDArray[np.integer[Any]],
    mask: NDArray[np.bool_],
    logprobs: Logprobs,
    reward: float,
    logs: dict[str, float],
    label: str,
    *,
    prompt: str = "",
    truncated: bool = False,
) -> Experience:
    actions = np.flatnonzero(mask)
    return Experience(
        sequences=ids.astype(np.int64)[None],
        attention_mask=np.ones((1, len(ids)), np.int64),
        action_mask=mask[1:].astype(np.int64)[None],
        rollout_log_probs=logprobs[1:].astype(np.float32)[None],
        rewards=np.array([reward], np.float32),
        scores=np.array([reward], np.float32),
        response_length=np.array([actions[-1] - actions[0] + 1 if len(actions) else 0], np.int64),
        truncated=np.array([truncated]),
        total_length=np.array([len(ids)], np.float32),
        prompts=[prompt],
        labels=[label],
        info={
            "reward": np.array([reward], np.float32),
            "score": np.array([reward], np.float32),
            **{name: np.array([value], np.float32) for name, value in logs.items()},
        },
    )


def _logs(row: Row) -> dict[str, float]:
    versions = row.policy_versions
    return {
        "turns": float(len(row.sample.turns)),
        "weight": row.sample.weight,
        "policy_version": float(min(versions, default=0)),
    }
