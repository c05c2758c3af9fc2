"""Rollouts: the list, filtered and ordered."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.assistant.answers import Answer
from penstock.assistant.context import Context
from penstock.assistant.errors import ToolError
from penstock.assistant.paging import Key, page
from penstock.assistant.tools.base import MAX_LABELS, Cursor, GroupId, Limit, Name, OfRun, Tool
from penstock.client.types.results import RolloutSummary


class _State(StrEnum):
    ANY = "any"
    RUNNING = "running"
    ENDED = "ended"
    COMPLETED = "completed"
    FAILED = "failed"
    UNGRADED = "ungraded"
    PAUSED = "paused"


class _Order(StrEnum):
    NEWEST = "newest"
    OLDEST = "oldest"
    LOWEST_REWARD = "lowest_reward"
    HIGHEST_REWARD = "highest_reward"
    MOST_CALLS = "most_calls"
    MOST_TOKENS = "most_tokens"
    LONGEST = "longest"


class _Rollouts(OfRun):
    group_id: GroupId = ""
    state: Annotated[
        _State,
        Field(description="`completed` ended without a failure; `ungraded` ended without a reward, which is not zero."),
    ] = _State.ANY
    label: Annotated[Name, Field(description="Only with this label, as NAME=VALUE.")] = ""
    failure: Annotated[Name, Field(description="Only failed for this reason, such as AGENT_TIMEOUT.")] = ""
    order: _Order = _Order.NEWEST
    limit: Limit = 20
    cursor: Cursor = ""


_ORDERS: Final[Mapping[_Order, Callable[[RolloutSummary], float]]] = {
    _Order.NEWEST: lambda item: -_created(item),
    _Order.OLDEST: lambda item: _created(item),
    _Order.LOWEST_REWARD: lambda item: float("inf") if item.reward is None else item.reward.value,
    _Order.HIGHEST_REWARD: lambda item: float("inf") if item.reward is None else -item.reward.value,
    _Order.MOST_CALLS: lambda item: -item.calls,
    _Order.MOST_TOKENS: lambda item: -(item.prompt_tokens + item.completion_tokens),
    _Order.LONGEST: lambda item: -_lasted(item),
}


async def _list(context: Context, given: _Rollouts) -> Answer:
    label, mark, value = given.label.partition("=")
    if given.label and not (label and mark):
        raise ToolError(
            f"label: {given.label!r} is not NAME=VALUE", reason="LABEL_INVALID", advice="write it as NAME=VALUE"
        )
    snapshot = await context.snapshot(
        **given.conditions(), group_id=given.group_id, labels={label: value} if label else None
    )
    chosen = [item for item in snapshot.rollouts if _is(item, given.state) and _failed_for(item, given.failure)]

    def key(item: RolloutSummary) -> Key:
        return _ORDERS[given.order](item), item.rollout_id

    rows = page(chosen, key, _row, given.cursor, given.limit)
    return Answer({**rows.facts("rollouts"), **snapshot.remarks()})


def _row(item: RolloutSummary) -> Mapping[str, Any]:
    return {
        "rollout_id": item.rollout_id,
        "group_id": item.group_id,
        "index": item.index,
        "run_id": item.run_id,
        "task_id": item.task_id,
        "agent": item.agent,
        "labels": dict(list(item.labels.items())[:MAX_LABELS]),
        "phase": item.phase,
        "created": item.create_time,
        "seconds": round(_lasted(item), 1) if item.ended else None,
        "reward": None if item.reward is None else item.reward.value,
        "failure": None if item.failure is None else item.failure.reason,
        "calls": item.calls,
        "prompt_tokens": item.prompt_tokens,
        "sampled_tokens": item.completion_tokens,
        "policy_versions": None if item.min_version is None else [item.min_version, item.max_version],
    }


def _is(item: RolloutSummary, state: _State) -> bool:
    match state:
        case _State.RUNNING:
            return not item.ended
        case _State.ENDED:
            return item.ended
        case _State.COMPLETED:
            return item.ended and item.failure is None
        case _State.FAILED:
            return item.failure is not None
        case _State.UNGRADED:
            return item.ended and item.reward is None
        case _State.PAUSED:
            return item.paused
    return True


def _failed_for(item: RolloutSummary, reason: str) -> bool:
    return not reason or (item.failure is not None and item.failure.reason == reason)


def _created(item: RolloutSummary) -> float:
    return 0.0 if item.create_time is None else item.create_time.timestamp()


def _lasted(item: RolloutSummary) -> float:
    if item.create_time is None or item.end_time is None:
        return 0.0
    return (item.end_time - item.create_time).total_seconds()


ROLLOUTS: Final = (
    Tool(
        "rollouts",
        "Rollouts, filtered and ordered: phase, reward, failure, calls, tokens, policy versions.",
        _Rollouts,
        _list,
    ),
)
