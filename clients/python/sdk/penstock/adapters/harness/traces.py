"""The model calls of a `penstock.adapters.harness.session`, in the formats of harness workers.

Pure functions of a trajectory. Token ids, logprobs and masks are the captured ones: nothing is tokenised again, and
missing data is refused, never filled in (R82, R84).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.client.types.chat import Completion
from penstock.client.types.trajectories import Call, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingTurn:
    """One model call for a trainer.

    Attributes:
        node_id: the call's id.
        prompt_token_ids: the whole prompt.
        completion_token_ids: all sampled tokens.
        per_token_logps: finite and <= 0, one for each sampled token.
        loss_mask: over prompt and completion, 1 = train this token. All 0 = context only.
        request: the agent's body, as it sent it.
        response: the answer as a chat completion.
        metadata: index, branch, class, dialect, policy version, grade of the whole.
    """

    node_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = field(default_factory=dict, repr=False)
    response: dict[str, Any] = field(default_factory=dict, repr=False)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """The calls of a rollout, branch after branch: a prompt extends the previous call wherever it really did."""

    turns: list[TrainingTurn]
    schema_version: int = 1

    def to_trace_entries(self) -> list[dict[str, Any]]:
        """Returns the same as plain mappings."""
        return [
            {
                "prompt_token_ids": turn.prompt_token_ids,
                "completion_token_ids": turn.completion_token_ids,
                "per_token_logps": turn.per_token_logps,
                "loss_mask": turn.loss_mask,
                "request": turn.request,
                "response": turn.response,
                "metadata": {**turn.metadata, "node_id": turn.node_id},
            }
            for turn in self.turns
        ]


def training_trace(trajectory: Trajectory) -> TrainingTrace:
    """Returns the answered calls with the masks of the trajectory's samples: a shared token is trained once.

    An answer of a model that is not trained is context; one without tokens or logprobs is left out.

    Raises:
        ValueError: a call that may be trained has no tokens or no logprobs, so there is nothing exact to train on.
    """
    masks = _masks(trajectory)
    turns = []
    for call in _by_branch(trajectory):
        if call.completion is None or call.injected:
            continue
        ids, logprobs = call.completion.token_ids, call.completion.logprobs
        if ids is None or logprobs is None:
            if call.trained is False:
                continue
            raise ValueError(
                f"call {call.index} was captured without {'tokens' if ids is None else 'logprobs'}"
                f" (answered by {call.answerer}): training needs an engine that returns both"
            )
        mask = masks.get(call.call_id, np.zeros(len(ids), np.bool_))
        if len(mask) != len(ids):
            raise ValueError(f"call {call.index} has {len(ids)} tokens and a mask of {len(mask)}")
        prompt = trajectory.prompt_of(call.call_id)
        turns.append(
            TrainingTurn(
                node_id=call.call_id,
                prompt_token_ids=prompt.tolist(),
                completion_token_ids=ids.tolist(),
                per_token_logps=logprobs.tolist(),
                loss_mask=[0] * len(prompt) + mask.astype(int).tolist(),
                request=_request(call),
                response=_response(call.completion),
                metadata=_metadata(trajectory, call),
            )
        )
    return TrainingTrace(turns)


def proxy_trace(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Returns all calls in order of arrival, unanswered ones with an `error`. Fields without tokens are empty."""
    masks = _masks(trajectory)
    entries = []
    for call in sorted(trajectory.calls, key=lambda item: item.index):
        completion = call.completion
        ids = None if completion is None else completion.token_ids
        logprobs = None if completion is None else completion.logprobs
        prompt = trajectory.prompt_of(call.call_id).tolist()
        trained = masks.get(call.call_id, np.zeros(0 if ids is None else len(ids), np.bool_))
        began, ended = call.receive_time, call.end_time
        entry: dict[str, Any] = {
            "turn": call.index,
            "request": _request(call),
            "response": {"choices": []} if completion is None else _response(completion),
            "prompt_token_ids": prompt,
            "completion_token_ids": [] if ids is None else ids.tolist(),
            "completion_tokens": [] if ids is None else [f"token_id:{number}" for number in ids.tolist()],
            "per_token_logps": [] if logprobs is None else logprobs.tolist(),
            "loss_mask": [0] * len(prompt) + trained.astype(int).tolist(),
            "finish_reason": None if completion is None else completion.finish_reason.value,
            "latency_s": 0.0 if began is None or ended is None else (ended - began).total_seconds(),
            "timestamp": 0.0 if began is None else began.timestamp(),
            "metadata": _metadata(trajectory, call),
        }
        if call.state != "delivered":
            entry["error"] = {"type": call.state, "message": call.end_reason}
        entries.append(entry)
    return entries


def _by_branch(trajectory: Trajectory) -> Iterator[Call]:
    """Yields each call once: the branches in their order, then calls that are on none."""
    calls = {call.call_id: call for call in trajectory.calls}
    for branch in trajectory.branches:
        for call_id in branch.call_ids:
            if (call := calls.pop(call_id, None)) is not None:
                yield call
    yield from sorted(calls.values(), key=lambda item: item.index)


def _masks(trajectory: Trajectory) -> dict[str, NDArray[np.bool_]]:
    """Returns, for each call, which of its sampled tokens are trained by some sample."""
    masks: dict[str, NDArray[np.bool_]] = {}
    for sample in trajectory.samples:
        for turn in sample.turns:
            mask = sample.loss_mask[turn.start : turn.end]
            if not mask.any():
                continue  # it may be only the beginning of what was sampled, whatever the reason that it names
            known = masks.get(turn.call_id)
            masks[turn.call_id] = mask if known is None else known | mask
    return masks


def _request(call: Call) -> dict[str, Any]:
    """Returns the agent's body; empty if the trajectory was read without bodies or the body is no object."""
    try:
        body = orjson.loads(call.request_body or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _response(completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if completion.message is not None:
        message["content"] = completion.message.text or None
        if completion.message.tool_calls:
            message["tool_calls"] = [
                {
                    "id": item.id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments_json},
                }
                for item in completion.message.tool_calls
            ]
    return {"choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason.value}]}


def _metadata(trajectory: Trajectory, call: Call) -> dict[str, Any]:
    return {
        "rollout_id": trajectory.rollout_id,
        "index": call.index,
        "branch_id": call.branch_id,
        "call_class": call.call_class,
        "dialect": call.dialect,
        "policy_version": None if call.completion is None else call.completion.policy_version,
        "grade": trajectory.grade,
    }
