"""The rest of the Python client's subject: terminals, agents, weights, host tools, calls without a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tests.conformance.clients.python_sandboxes import COMMANDS as SANDBOXES

from penstock.client import (
    HostTool,
    HostToolCall,
    LeasedCall,
    Penstock,
    PenstockError,
    Score,
    Selector,
    ToolFailed,
    ToScore,
)

if TYPE_CHECKING:
    from tests.conformance.clients.python_subject import Subject

Json = dict[str, Any]


def _ps(subject: Subject, given: Json) -> Penstock:
    return subject.client(given)


# Terminals and agents.


async def terminal_open(subject: Subject, given: Json) -> Json:
    opened = await _ps(subject, given).terminals.open(subject.task(given["spec"]))
    subject.kept("terminals")[opened.terminal_id] = opened
    return {"terminal_id": opened.terminal_id}


async def terminal_run(subject: Subject, given: Json) -> Json:
    seen = await subject.kept("terminals")[given["terminal_id"]].run(given["shell"])
    return {"stdout": seen.result.stdout.decode(), "code": seen.result.exit.code, "ended": seen.ended}


async def terminal_answer(subject: Subject, given: Json) -> Json:
    seen = await subject.kept("terminals")[given["terminal_id"]].answer(given["text"])
    return {"ended": seen.ended, "reward": None if seen.reward is None else seen.reward.value}


async def terminal_get(subject: Subject, given: Json) -> Json:
    found = await _ps(subject, given).terminals.attach(given["terminal_id"])
    subject.kept("terminals")[found.terminal_id] = found
    seen = found.info
    return {"step_count": seen.step_count, "ended": seen.ended}


async def terminal_close(subject: Subject, given: Json) -> None:
    await subject.kept("terminals")[given["terminal_id"]].close()


async def agent_list(subject: Subject, given: Json) -> Json:
    return {"names": [item.name async for item in _ps(subject, given).agents.list()]}


async def agent_get(subject: Subject, given: Json) -> Json:
    found = await _ps(subject, given).agents.get(given["name"])
    return {"name": found.name, "built_in": found.built_in}


async def agent_register(subject: Subject, given: Json) -> Json:
    """Under another name, the spec of an agent that there is."""
    ps = _ps(subject, given)
    spec = (await ps.agents.get(given["like"])).spec
    spec.name = given["name"]
    made = await ps.agents.register(spec)
    return {"name": made.name, "built_in": made.built_in}


async def agent_delete(subject: Subject, given: Json) -> None:
    await _ps(subject, given).agents.delete(given["name"])


async def agent_check(subject: Subject, given: Json) -> Json:
    findings = _ps(subject, given).agents.check(given["name"], spec_only=given["spec_only"])
    return {"findings": [{"step": item.step, "outcome": item.outcome} async for item in findings]}


# Weights.


def _tensors(given: Json) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(item["shape"], item["fill"], np.float32) for name, item in given["tensors"].items()}


async def policy_version(subject: Subject, given: Json) -> Json:
    return {"policy_version": (await _ps(subject, given).inference.info()).policy_version}


async def update_weights(subject: Subject, given: Json) -> Json:
    """Of the version after `after`."""
    update = await _ps(subject, given).inference.update_weights(
        given["after"] + 1, _tensors(given), partial=given.get("partial", False)
    )
    return {"policy_version": update.policy_version, "away": list(update.away)}


async def update_weights_from(subject: Subject, given: Json) -> Json:
    update = await _ps(subject, given).inference.update_weights_from(given["after"] + 1, given["path"])
    return {"policy_version": update.policy_version}


async def init_transfer(subject: Subject, given: Json) -> None:
    await _ps(subject, given).inference.init_transfer(given["backend"], given["options"])


async def transfer(subject: Subject, given: Json) -> Json:
    """Start, tensors, and commit or abandon."""
    started = await _ps(subject, given).inference.start_transfer(given["after"] + 1)
    await started.tensors(given["descriptor"])
    finished = await (started.commit() if given["commit"] else started.give_up())
    return {"policy_version": finished.policy_version}


async def load_adapter(subject: Subject, given: Json) -> Json:
    loaded = await _ps(subject, given).inference.load_adapter(
        given["name"], given["version"], _tensors(given), given["config"]
    )
    return {"name": loaded.name, "policy_version": loaded.policy_version, "rank": loaded.rank}


async def load_adapter_from(subject: Subject, given: Json) -> Json:
    loaded = await _ps(subject, given).inference.load_adapter_from(given["name"], given["version"], given["path"])
    return {"name": loaded.name, "policy_version": loaded.policy_version, "rank": loaded.rank}


async def adapter_list(subject: Subject, given: Json) -> Json:
    return {"names": [item.name for item in await _ps(subject, given).inference.adapters()]}


async def unload_adapter(subject: Subject, given: Json) -> None:
    await _ps(subject, given).inference.unload_adapter(given["name"])


async def pause_engine(subject: Subject, given: Json) -> Json:
    return {"in_flight": await _ps(subject, given).inference.pause(given["mode"])}


async def resume_engine(subject: Subject, given: Json) -> None:
    await _ps(subject, given).inference.resume()


# Scores.


def _observed_score(score: Score) -> Json:
    top = score.top_token_ids
    return {
        "logprobs": score.logprobs.tobytes().hex(),
        "top_count": None if top is None else top.shape[1],
        "top_token_ids": None if top is None else top.ravel().tolist(),
    }


def _to_score(given: Json) -> list[ToScore]:
    return [ToScore(**item) for item in given["sequences"]]


async def score(subject: Subject, given: Json) -> Json:
    """The first sequence alone."""
    one = _to_score(given)[0]
    options: Json = {"temperature": one.temperature, "exact_version": one.exact_version}
    engine = _ps(subject, given).inference
    return _observed_score(await engine.score_top(one.token_ids, one.start, one.top_logprobs, **options))


async def score_batch(subject: Subject, given: Json) -> Json:
    return {"scores": [*map(_observed_score, await _ps(subject, given).inference.score_batch(_to_score(given)))]}


async def score_each(subject: Subject, given: Json) -> Json:
    found: dict[int, Json] = {}
    async for index, one in _ps(subject, given).inference.score_each(_to_score(given)):
        found[index] = {"failure": one.reason} if isinstance(one, PenstockError) else _observed_score(one)
    return {"scores": [found[index] for index in sorted(found)]}


# Host tools.


class _Tool:
    """What a tool does when it is called is in its description."""

    def __init__(self, does: str) -> None:
        self.does = does
        self.runs = 0
        self.called = asyncio.Event()
        self.let = asyncio.Event()

    async def run(self, call: HostToolCall[Any]) -> object:
        self.runs += 1
        self.called.set()
        match self.does:
            case "text":
                return f"the word is {call.arguments['word']}"
            case "fails":
                raise ToolFailed("There is no such word.")
            case "breaks":
                raise RuntimeError("a secret of the host")
            case "waits":
                await self.let.wait()
        return {"word": call.arguments.get("word"), "runs": self.runs}


async def offer_tools(subject: Subject, given: Json) -> None:
    made = {item["name"]: _Tool(item["does"]) for item in given["tools"]}
    subject.kept("tools").update(made)
    offered = [
        HostTool(name=item["name"], function=made[item["name"]].run, parameters=item.get("parameters"))
        for item in given["tools"]
    ]
    await subject.kept("sessions")[given["session"]].offer_tools(offered)


async def tool_called(subject: Subject, given: Json) -> Json:
    tool = subject.kept("tools")[given["name"]]
    await tool.called.wait()
    return {"runs": tool.runs}


async def let_tool(subject: Subject, given: Json) -> None:
    subject.kept("tools")[given["name"]].let.set()


# Calls without a session, watches, exports, what a service says of itself.


async def lease_calls(subject: Subject, given: Json) -> Json:
    calls = await _ps(subject, given).gate.lease_calls(
        Selector(run_id=given["run_id"], policy_ids=given.get("policy_ids", ())),
        max_calls=given.get("max_calls", 1),
        wait=given.get("wait_s", 20),
    )
    subject.kept("calls").update({call.call_id: call for call in calls})
    return {"calls": [subject.observed_call(call) for call in calls]}


async def extend_leases(subject: Subject, given: Json) -> Json:
    calls: list[LeasedCall] = [subject.kept("calls")[call_id] for call_id in given["call_ids"]]
    return {"lost": [call.call_id for call in calls if not await call.extend()]}


async def watch_rollouts(subject: Subject, given: Json) -> Json:
    """Until all that there are were given, or until a driver is away."""
    found: list[str] = []
    away: tuple[str, ...] = ()
    async for changes in _ps(subject, given).rollouts.watch(run_id=given["run_id"]):
        found += [item.rollout_id for item in changes.rollouts]
        away = changes.away
        if changes.away if given.get("until_away") else changes.complete:
            break
    return {"rollout_ids": sorted(found), "away": list(away)}


async def export(subject: Subject, given: Json) -> Json:
    exported = [item async for item in _ps(subject, given).rollouts.export(run_id=given["run_id"])]
    told = [
        {
            "rollout_id": trajectory.rollout_id,
            "samples": len(trajectory.samples),
            "reward": None if outcome.reward is None else outcome.reward.value,
        }
        for trajectory, outcome in exported
    ]
    return {"rollouts": sorted(told, key=lambda item: str(item["rollout_id"]))}


async def log_metrics(subject: Subject, given: Json) -> None:
    """Of a run by its id, or else of the session's run."""
    if "run_id" in given:
        await _ps(subject, given).runs.log(given["run_id"], given["values"], step=given["step"])
    else:
        await subject.kept("sessions")[given["session"]].log(given["values"], step=given["step"])


async def metrics(subject: Subject, given: Json) -> Json:
    found = await _ps(subject, given).runs.metrics(
        given["run_id"], names=given.get("names", ()), max_points=given.get("max_points", 0)
    )
    pairs = {one.name: list(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for one in found}
    return {"metrics": pairs}


async def delete_metrics(subject: Subject, given: Json) -> Json:
    options = {"names": given.get("names", ()), "from_step": given.get("from_step", 0)}
    return {"count": await _ps(subject, given).runs.delete_metrics(given["run_id"], **options)}


async def server_info(subject: Subject, given: Json) -> Json:
    info = await _ps(subject, given).operations.server_info(given["service"])
    return {
        "service": info.service,
        "revision": info.contract_revision,
        "max_message_bytes": info.max_message_bytes,
    }


COMMANDS: Final[Mapping[str, Callable[[Subject, Json], Awaitable[Json | None]]]] = {
    **SANDBOXES,
    **{
    function.__name__: function
    for function in (
                                terminal_open, terminal_run, terminal_answer, terminal_get,
        terminal_close, agent_list, agent_get, agent_register, agent_delete, agent_check, policy_version,
        update_weights, update_weights_from, init_transfer, transfer, load_adapter, load_adapter_from, adapter_list,
        unload_adapter, pause_engine, resume_engine, score, score_batch, score_each, offer_tools, tool_called, let_tool,
        lease_calls, extend_leases, watch_rollouts, export, server_info, log_metrics, metrics, delete_metrics,
    )
    },
}  # fmt: skip
