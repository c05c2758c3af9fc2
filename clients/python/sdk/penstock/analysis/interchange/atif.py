"""Rollouts in the Agent Trajectory Interchange Format, ATIF v1.8, which Harbor and others read: a JSON file each.

Source: Harbor's RFC 0001 (github.com/harbor-framework/harbor, rfcs/0001-trajectory-format.md). The document is the
agent's own conversation. Other conversations of the rollout (sub-agents, shortened or edited histories) are embedded.
Steps are texts with counts, sampled ids and logprobs; prompts' ids are in the tables `turns` and `sequences` only.
"""

import asyncio
from collections.abc import AsyncIterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from penstock.analysis.interchange.chat_rows import BodiesMissing, BranchConversation, conversations
from penstock.analysis.prices import Prices, used
from penstock.chat.v1 import chat_pb2
from penstock.client.errors import InvalidArgument
from penstock.client.transport.atomic_files import replacing
from penstock.client.types.results import Outcome
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire.results import trajectory_to
from penstock.tables import rows
from penstock.tables.columns import Row
from penstock.trajectory.v1 import trajectory_pb2 as pb

VERSION: Final = "ATIF-v1.8"
_SOURCES: Final = {"system": "system", "assistant": "agent"}
"""Of steps, by the roles of messages; others are the user's."""


def document(trajectory: Trajectory, prices: Prices | None = None) -> Row | None:
    """Returns a rollout's document; None if no call of it has an answer: a document has a step.

    Args:
        trajectory: with its calls.
        prices: in USD, for the costs of steps; a step whose model has no price has none.

    Raises:
        InvalidArgument: `BODIES_MISSING`, the trajectory was read without request bodies (`bodies=True`).
    """
    message = trajectory_to(trajectory)
    try:
        found = list(conversations(message))
    except BodiesMissing as error:
        text = f"ATIF needs request bodies, and {error}: read trajectories with bodies=True"
        raise InvalidArgument(text, reason="BODIES_MISSING") from None
    if not found:
        return None
    root = next((one for one in found if one.branch.branch_class == pb.CALL_CLASS_MAIN), found[0])
    costs = {} if prices is None else _costs(trajectory, prices)
    made = _document(message, root, costs, shared=0)
    made["session_id"] = message.rollout_id
    made["extra"] |= _of_rollout(message)
    others = [_document(message, one, costs, shared=one.shared) for one in found if one is not root]
    return made | ({"subagent_trajectories": others} if others else {})


async def write(
    trajectories: AsyncIterable[Trajectory | tuple[Trajectory, Outcome]],
    directory: Path,
    prices: Prices | None = None,
) -> int:
    """Writes each rollout to `ROLLOUT_ID.json` in a directory, which is created; a file appears once complete.

    Returns:
        The number of files. A rollout without an answer has none.

    Raises:
        InvalidArgument: `BODIES_MISSING`.
    """
    written = 0
    async for item in trajectories:
        trajectory = item if isinstance(item, Trajectory) else item[0]
        made = document(trajectory, prices)
        if made is not None:
            await asyncio.to_thread(_store, made, directory / f"{trajectory.rollout_id}.json")
            written += 1
    return written


def _store(made: Row, path: Path) -> None:
    with replacing(path) as stream:
        stream.write(orjson.dumps(made, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _costs(trajectory: Trajectory, prices: Prices) -> dict[str, float]:
    """Returns the costs of the calls that were sampled and have a price, by their ids."""
    if prices.currency != "USD":
        raise InvalidArgument(f"ATIF has costs in USD, not {prices.currency}", reason="PRICES_INVALID")
    found = {call.call_id: prices.cost(tokens) for call in trajectory.calls if (tokens := used([call]))}
    return {call_id: cost.amount for call_id, cost in found.items() if not cost.unpriced}


def _document(trajectory: pb.Trajectory, one: BranchConversation, costs: Mapping[str, float], *, shared: int) -> Row:
    steps = list(_steps(one, costs, shared))
    totals: dict[str, float] = {}
    for step in steps:
        for name, value in step.get("metrics", {}).items():
            if name.endswith(("_tokens", "_usd")):
                totals[f"total_{name}"] = totals.get(f"total_{name}", 0) + value
    extra: Row = {
        "branch_id": one.branch.branch_id,
        "role": rows.word(pb.CallClass, one.branch.branch_class),
        "call_id": one.leaf.call_id,
    }
    if one.left_out:
        extra["left_out"] = one.left_out
    agent: Row = {
        "name": trajectory.agent or "unknown",
        "version": trajectory.agent_spec_sha256 or "unknown",
        "model_name": one.leaf.completion.model or one.leaf.model_requested,
    }
    if one.tools:
        agent["tool_definitions"] = one.tools
    return {
        "schema_version": VERSION,
        "trajectory_id": f"{trajectory.rollout_id}-{one.leaf.call_id}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {**totals, "total_steps": len(steps)},
        "extra": extra,
    }


def _of_rollout(trajectory: pb.Trajectory) -> Row:
    common = rows.common(trajectory)
    kept = ("run_id", "group_id", "group_index", "attempt", "task_id", "labels", "error", "error_cause")
    found = {name: common[name] for name in kept if common[name] is not None}
    found |= {"grade": rows.word(pb.Grade, trajectory.grade), **rows.reward(trajectory)}
    return found


def _steps(one: BranchConversation, costs: Mapping[str, float], shared: int) -> Iterator[Row]:
    calls = one.calls
    step: Row | None = None
    number = 0
    for place, message in enumerate(one.messages):
        if message["role"] == "tool":
            if step is None:
                number += 1
                step = {"step_id": number, "source": "system", "message": ""}
            step.setdefault("observation", {"results": []})["results"].append(_observed(step, message))
            continue
        if step is not None:
            yield step
        number += 1
        step = {"step_id": number, "source": _SOURCES.get(message["role"], "user"), "message": message["content"]}
        if message["role"] == "assistant":
            step |= _acted(message)
        if place in calls:
            step |= _of_call(calls[place], costs)
        if place < shared:
            step["is_copied_context"] = True
    if step is not None:
        yield step


def _acted(message: Row) -> Row:
    made: Row = {}
    if "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        made["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return made


def _tool_call(call: Row) -> Row:
    function = call["function"]
    made: Row = {"tool_call_id": call["id"], "function_name": function["name"], "arguments": function["arguments"]}
    if not isinstance(function["arguments"], dict):
        made |= {"arguments": {}, "extra": {"arguments_text": function["arguments"]}}
    return made


def _observed(step: Row, message: Row) -> Row:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    if message["tool_call_id"] in known:
        return {"source_call_id": message["tool_call_id"], "content": message["content"]}
    # The agent shortened its history: the format does not take a result of a call that its step lacks.
    return {"content": message["content"], "extra": {"tool_call_id": message["tool_call_id"]}}


def _of_call(call: pb.Call, costs: Mapping[str, float]) -> Row:
    done = call.completion
    span = done.span
    metrics: Row = {"prompt_tokens": call.prompt_count or done.usage.prompt_tokens}
    metrics["completion_tokens"] = span.count or done.usage.completion_tokens
    if done.usage.HasField("cached_tokens"):
        metrics["cached_tokens"] = done.usage.cached_tokens
    if call.call_id in costs:
        metrics["cost_usd"] = costs[call.call_id]
    if span.token_ids:
        metrics["completion_token_ids"] = np.frombuffer(span.token_ids, "<i4").tolist()
    if span.logprobs:
        metrics["logprobs"] = np.frombuffer(span.logprobs, "<f4").tolist()
    extra: Row = {"call_id": call.call_id, "finish_reason": rows.word(chat_pb2.FinishReason, done.finish_reason)}
    if span.versions:
        extra["policy_versions"] = sorted({version.policy_version for version in span.versions})
    if call.injected:
        extra["injected"] = True
    made: Row = {"llm_call_count": 1, "metrics": metrics, "extra": extra}
    if done.model:
        made["model_name"] = done.model
    if call.HasField("end_time"):
        made["timestamp"] = call.end_time.ToJsonString()
    return made
