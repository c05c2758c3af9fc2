"""OpenRLHF (0.11.2): what an agent executor returns, and the tensors of an `Experience` as numpy arrays.

Forms: openrlhf/utils/agent.py (`MultiTurnAgentExecutor.execute`), openrlhf/trainer/ppo_utils/samples_generator.py
(`_process_response_into_experience`) and experience.py (`Experience`), of openrlhf 0.11.2 on PyPI.
"""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.selection import Row, Selection, trained_runs


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
    selection: Selection, *, label: str = "", decode: Callable[[list[int]], str] | None = None
) -> list[Experience]:
    """Returns an experience per sequence; the arguments are those of `agent_responses`."""
    found = []
    for row in selection.rows:
        ids, mask = row.sample.input_ids, row.sample.loss_mask
        actions = np.flatnonzero(mask)
        found.append(
            Experience(
                sequences=ids.astype(np.int64)[None],
                attention_mask=np.ones((1, len(ids)), np.int64),
                action_mask=mask[1:].astype(np.int64)[None],
                rollout_log_probs=row.logprobs[1:].astype(np.float32)[None],
                rewards=np.array([row.reward], np.float32),
                scores=np.array([row.reward], np.float32),
                response_length=np.array([actions[-1] - actions[0] + 1], np.int64),
                truncated=np.array([row.sample.truncated]),
                total_length=np.array([len(ids)], np.float32),
                prompts=[decode(row.prompt_ids.tolist()) if decode else ""],
                labels=[label],
                info={
                    "reward": np.array([row.reward], np.float32),
                    "score": np.array([row.reward], np.float32),
                    **{name: np.array([value], np.float32) for name, value in _logs(row).items()},
                },
            )
        )
    return found


def _logs(row: Row) -> dict[str, float]:
    versions = row.policy_versions
    return {
        "turns": float(len(row.sample.turns)),
        "weight": row.sample.weight,
        "policy_version": float(min(versions, default=0)),
    }
