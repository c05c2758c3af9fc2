"""NeMo-Gym (0.7.0): the response of an agent's `/run` for a rollout, with token ids and logprobs as NeMo-RL reads them.

Forms: nemo_gym/openai_utils.py (`NeMoGymResponse`, `TokenIDLogProbMixin`) and base_resources_server.py
(`BaseVerifyResponse`) of nemo-gym 0.7.0 on PyPI; nemo_rl/environments/nemo_gym.py
(`_postprocess_nemo_gym_to_nemo_rl_result`) of https://github.com/NVIDIA-NeMo/RL at 7ea279a.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from penstock.adapters.trainers.selection import Row, trained_runs

Item = dict[str, Any]
"""An item of a response's output: a message, a reasoning or a function call."""


class VerifyResponse(TypedDict):
    """The fields of a `BaseVerifyResponse`, and the rollout's own beside them."""

    responses_create_params: dict[str, Any]
    response: dict[str, Any]
    reward: float
    penstock_rollout_id: str
    turns: int
    truncated: bool


def verify_response(
    row: Row,
    *,
    params: Mapping[str, Any] | None = None,
    items: Mapping[str, Sequence[Item]] | None = None,
    model: str = "",
) -> VerifyResponse:
    """Returns the answer to `/run` for the sequence of a rollout.

    There is none for a rollout that nothing can be learned from. NeMo-RL counts the reward of a sample with
    `mask_sample` in its group's baseline, and refuses one without tokens: let `/run` fail.

    Args:
        row: of a selection.
        params: the request's `responses_create_params`.
        items: of each turn, by call id, for people and for NeMo-RL's penalties, without token ids.
        model: the policy's name.
    """
    return VerifyResponse(
        responses_create_params={"input": [], **(params or {})},
        response={
            "id": f"resp_{row.trajectory.rollout_id}",
            "created_at": 0.0,
            "model": model,
            "object": "response",
            "output": output_items(row, items),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        reward=row.reward,
        penstock_rollout_id=row.trajectory.rollout_id,
        turns=len(row.sample.turns),
        truncated=row.sample.truncated,
    )


def output_items(row: Row, items: Mapping[str, Sequence[Item]] | None = None) -> list[Item]:
    """Returns the output items of a sequence, turn by turn.

    The last item of each turn has the turn's `generation_token_ids` and `generation_log_probs`, and in
    `prompt_token_ids` all that is before: the items continue each other, as NeMo-RL demands. A turn that is not trained
    has no ids; it is in the prompt of the next one.
    """
    ids, mask, found = row.sample.input_ids.tolist(), row.sample.loss_mask, []
    for turn in row.sample.turns:
        given = [dict(item) for item in (items or {}).get(turn.call_id, ())] or [_message(turn.call_id)]
        runs = [(turn.start + start, turn.start + end) for start, end in trained_runs(mask[turn.start : turn.end])]
        # Tokens of a turn that are trained apart: each run has an item of its own.
        given += [_message(turn.call_id) for _ in runs[1:]]
        for item, (start, end) in zip(given[len(given) - len(runs) :], runs, strict=True):
            item["prompt_token_ids"] = ids[:start]
            item["generation_token_ids"] = ids[start:end]
            item["generation_log_probs"] = row.logprobs[start:end].tolist()
        found += given
    return found


def _message(call_id: str) -> Item:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "", "annotations": []}],
    }
