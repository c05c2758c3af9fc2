"""verl (0.9.1): the padded batch that its agent loops make, as numpy arrays, and the output of a single loop.

Forms: verl/experimental/agent_loop/agent_loop.py (`AgentLoopOutput`, `_run_agent_loop`, `_postprocess`) and
verl/protocol.py (`DataProto`), of verl 0.9.1 on PyPI.

    batch = verl.data_proto(select(results, max_prompt_tokens=P, max_response_tokens=R), ...)
    tensors = {name: torch.from_numpy(array) for name, array in batch["batch"].items()}
    DataProto.from_dict(tensors, non_tensors=batch["non_tensor_batch"], meta_info=batch["meta_info"])
"""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.experts import as_type, experts_of
from penstock.adapters.trainers.selection import Row, Selection
from penstock.client.errors import InvalidArgument


class DataProto(TypedDict):
    """The parts of a `verl.DataProto`."""

    batch: dict[str, NDArray[Any]]
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any]


class AgentLoopOutput(TypedDict):
    """The fields of `verl.experimental.agent_loop.agent_loop.AgentLoopOutput`; `AgentLoopOutput(**it)` makes it."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    metrics: dict[str, float]
    extra_fields: dict[str, Any]
    routed_experts: NotRequired[NDArray[np.int16]]


def data_proto(
    selection: Selection,
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    advantages: bool = True,
) -> DataProto:
    """Returns a batch with a row per sequence: prompts padded on the left, responses on the right.

    The batch has prompts, responses, input_ids, attention_mask, position_ids and response_mask as int64,
    rollout_log_probs and rm_scores (the rollout's reward at the last token of the response) as float32. The rest has
    uid (the group), rollout_id, sample_id, weight, truncated, the policy versions as min_global_steps and
    max_global_steps, and `__num_turns__`. If the sequences have routed experts (read with `tensors=True`), so has the
    batch: int16, (rows, prompt and response, layers, experts per token), 0 for padding and for the last token.

    Args:
        selection: of any number of groups.
        pad_token_id: the tokenizer's.
        prompt_length, response_length: of the padded arrays; None = of the longest. Let `select` drop longer ones.
        advantages: whether to add `advantages` and `returns`. verl's own estimators treat each row as a rollout,
            so that one with branches counts several times in its group's mean; these count it once.

    Raises:
        InvalidArgument: `SEQUENCE_TOO_LONG`; `EMPTY`, there is no row; as `experts_of`.
    """
    rows = selection.rows
    if not rows:
        raise InvalidArgument("No rollout can be trained on", reason="EMPTY")
    prompt_length = _length(prompt_length, [row.sample.prompt_count for row in rows], "prompt")
    response_length = _length(response_length, [len(row.response_ids) for row in rows], "response")
    prompts = _padded([row.prompt_ids for row in rows], prompt_length, pad_token_id, np.int64, left=True)
    responses = _padded([row.response_ids for row in rows], response_length, pad_token_id, np.int64)
    attention = np.concatenate(
        (
            _padded([np.ones(row.sample.prompt_count) for row in rows], prompt_length, 0, np.int64, left=True),
            _padded([np.ones(len(row.response_ids)) for row in rows], response_length, 0, np.int64),
        ),
        axis=1,
    )
    mask = _padded([row.response_mask for row in rows], response_length, 0, np.int64)
    scores = np.zeros(mask.shape, np.float32)
    for index, row in enumerate(rows):
        scores[index, len(row.response_ids) - 1] = row.reward
    batch = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": np.concatenate((prompts, responses), axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "rollout_log_probs": _padded([row.response_logprobs for row in rows], response_length, 0, np.float32),
        "rm_scores": scores,
    }
    experts = experts_of(rows)
    if experts is not None:
        shape = experts[0].shape[1:]
        whole = batch["routed_experts"] = np.zeros((len(rows), prompt_length + response_length, *shape), np.int16)
        for line, row, own in zip(whole, rows, experts, strict=True):
            start = prompt_length - row.sample.prompt_count
            line[start : start + len(own)] = as_type(own, np.int16)
    if advantages:
        found = selection.advantages()
        per_row = np.array([found[row.trajectory.rollout_id] for row in rows], np.float32)
        batch["advantages"] = per_row[:, None] * mask.astype(np.float32)
        batch["returns"] = batch["advantages"].copy()
    groups = [place.group for place in selection.places for _ in place.rows]
    columns: dict[str, list[Any]] = {
        "uid": groups,
        "rollout_id": [row.trajectory.rollout_id for row in rows],
        "sample_id": [row.sample.sample_id for row in rows],
        "weight": [row.sample.weight for row in rows],
        "truncated": [row.sample.truncated for row in rows],
        "min_global_steps": [min(row.policy_versions, default=None) for row in rows],
        "max_global_steps": [max(row.policy_versions, default=None) for row in rows],
    }
    others = {name: _objects(values) for name, values in columns.items()}
    others["__num_turns__"] = np.array([_turns(row) for row in rows], np.int32)
    return DataProto(batch=batch, non_tensor_batch=others, meta_info={"metrics": [{} for _ in rows]})


def agent_loop_outputs(selection: Selection) -> list[AgentLoopOutput]:
    """Returns an output per sequence, for a custom agent loop: `extra_fields` identifies the rows.

    `routed_experts`, if the sequences have them, are of all tokens but the last, for which verl has zeros.

    Raises:
        InvalidArgument: as `experts_of`.
    """
    experts = experts_of(selection.rows)
    outputs = [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids.tolist(),
            response_ids=row.response_ids.tolist(),
            response_mask=row.response_mask.astype(int).tolist(),
            response_logprobs=row.response_logprobs.tolist(),
            reward_score=row.reward,
            num_turns=_turns(row),
            metrics={},
            extra_fields={
                "uid": place.group,
                "rollout_id": place.rollout_id,
                "sample_id": row.sample.sample_id,
                "weight": row.sample.weight,
                "truncated": row.sample.truncated,
                "min_global_steps": min(row.policy_versions, default=None),
                "max_global_steps": max(row.policy_versions, default=None),
                "reward_extra_info": {},
            },
        )
        for place in selection.places
        for row in place.rows
    ]
    for output, own in zip(outputs, experts or (), strict=False):
        output["routed_experts"] = as_type(own, np.int16)
    return outputs


def _turns(row: Row) -> int:
    """Counts turns as verl does: the prompt, and each reply of the model."""
    return 1 + len(row.sample.turns)


def _length(asked: int | None, counts: list[int], what: str) -> int:
    longest = max(counts)
    if asked is not None and longest > asked:
        raise InvalidArgument(
            f"A {what} has {longest} tokens, more than {what}_length={asked}: select(..., max_{what}_tokens={asked})"
            " drops such sequences and reports them",
            reason="SEQUENCE_TOO_LONG",
        )
    return longest if asked is None else asked


def _padded(
    arrays: list[NDArray[Any]], length: int, filler: int, dtype: type[np.generic], *, left: bool = False
) -> NDArray[Any]:
    padded = np.full((len(arrays), length), filler, dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[length - len(array) if left else 0 : length if left else len(array)] = array
    return padded


def _objects(values: list[Any]) -> NDArray[Any]:
    column = np.empty(len(values), object)
    column[:] = values
    return column
