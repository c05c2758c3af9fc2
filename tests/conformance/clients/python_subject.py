"""The Python client's subject: carries out the commands that come on standard input, as README.md defines them.

    python -m tests.conformance.clients.python_subject

Each command is a task of its own, so that one that waits holds up none of the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from tests.conformance.clients.python_surface import COMMANDS

from penstock.client import (
    Annotation,
    Assays,
    Budgets,
    CallRule,
    Command,
    Completion,
    GroupHandle,
    InterceptSession,
    Limits,
    ModelCall,
    Penstock,
    PenstockError,
    PolicyConstraint,
    RewardFrom,
    RolloutHandle,
    RolloutModel,
    RolloutResult,
    Sample,
    SeedFile,
    Task,
    Tls,
    Verifier,
    connect,
)
from penstock.client.errors import EnginesFailed
from penstock.client.transport.endpoints import resolve

Json = dict[str, Any]


def kind_of(error: PenstockError) -> str:
    """The word of a class: `not_found` of NotFound."""
    return re.sub(r"(?<=.)(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def observed_error(error: PenstockError) -> Json:
    """What is told of an error."""
    return {
        "kind": kind_of(error),
        "reason": error.reason,
        "message": str(error),
        "metadata": dict(error.metadata),
        "violations": [{"field": item.field, "description": item.description} for item in error.violations],
        "retry_after_s": error.retry_after,
        **_of_engines(error),
    }


def _of_engines(error: PenstockError) -> Json:
    """What is told of an error of some of several engines."""
    if not isinstance(error, EnginesFailed):
        return {}
    failures = {name: one.reason for name, one in error.failures.items()}
    return {"failures": failures, "in_force": dict(error.in_force)}


def observed_result(result: RolloutResult) -> Json:
    """What is told of a rollout that has ended."""
    failure, trajectory = result.failure, result.trajectory
    return {
        "rollout_id": result.rollout_id,
        "index": result.rollout.index,
        "reward": None if result.reward is None else result.reward.value,
        "failure": None
        if failure is None
        else {"cause": str(failure.cause), "reason": failure.reason, "retriable": failure.retriable},
        "grade": None if trajectory is None else trajectory.grade,
        "samples": [
            {
                "input_ids": sample.input_ids.tobytes().hex(),
                "loss_mask": sample.loss_mask.tobytes().hex(),
                "logprobs": None if sample.logprobs is None else sample.logprobs.tobytes().hex(),
                "versions": [[item.policy_version, item.start, item.end] for item in sample.versions],
                "turns": [[item.call_id, item.start, item.end, item.untrained_reason] for item in sample.turns],
                "prompt_count": sample.prompt_count,
                "weight": sample.weight,
                "branch_class": sample.branch_class,
                "truncated": sample.truncated,
                "top": observed_top(sample),
                "turn_rewards": [turn.reward for turn in sample.turns],
                "token_rewards": None if sample.token_rewards is None else sample.token_rewards.tobytes().hex(),
                "policy_id": sample.policy_id,
                "turn_policies": [turn.policy_id for turn in sample.turns],
            }
            for sample in (() if trajectory is None else trajectory.samples)
        ],
        "annotations": [observed_annotation(one) for one in (() if trajectory is None else trajectory.annotations)],
    }


def observed_annotation(one: Annotation) -> Json:
    """Returns an annotation as it is printed."""
    return {
        "name": one.name,
        "author": one.author,
        "call_id": one.call_id,
        "value": one.value,
        "token_values": None if one.token_values is None else one.token_values.tobytes().hex(),
        "details": dict(one.details),
    }


def observed_top(sample: Sample) -> Json | None:
    """Returns a sample's alternatives as they are printed."""
    ids, logprobs = sample.top_token_ids, sample.top_logprobs
    if ids is None or logprobs is None:
        return None
    return {"count": ids.shape[1], "token_ids": ids.tobytes().hex(), "logprobs": logprobs.tobytes().hex()}


def observed_call(call: ModelCall) -> Json:
    """What is told of a call."""
    return {
        "call_id": call.call_id,
        "rollout_id": call.rollout_id,
        "index": call.index,
        "prompt": call.prompt_token_ids.tobytes().hex(),
        "prompt_count": call.prompt_count,
        "max_tokens": call.sampling.max_tokens,
        "lease_attempt": call.lease_attempt,
        "policy_id": call.policy_id,
        "min_policy_version": call.min_policy_version,
        "messages": [{"role": str(item.role), "text": item.text} for item in call.messages],
    }


def task_of(spec: Json) -> Task:
    verify = spec.get("verify")
    return Task(
        task_id=spec["task_id"],
        instruction=spec["instruction"],
        files=[SeedFile(path, text.encode()) for path, text in spec.get("files", {}).items()],
        setup=[Command(shell=line) for line in spec.get("setup", ())],
        verifier=None
        if verify is None
        else Verifier(
            commands=[Command(shell=line) for line in verify],
            reward=RewardFrom(spec["reward"]),
            fresh_fork=spec.get("fresh_fork"),
        ),
    )


def _options(spec: Json) -> Json:
    given: Json = {name: spec[name] for name in ("run_id", "labels", "options", "mode") if name in spec}
    if "max_calls" in spec:
        given["budgets"] = Budgets(max_calls=spec["max_calls"])
    if "agent_timeout_s" in spec:
        given["limits"] = Limits(agent=spec["agent_timeout_s"])
    if "min_policy_version" in spec:
        given["policy"] = PolicyConstraint(min_version=spec["min_policy_version"])
    if "max_staleness" in spec:
        given["policy"] = PolicyConstraint(max_staleness=spec["max_staleness"])
    if "models" in spec:
        given["models"] = [_model(**item) for item in spec["models"]]
    return given


def _model(policy_id: str, from_index: int | None = None, until_index: int | None = None) -> RolloutModel:
    is_rest = from_index is None and until_index is None
    calls = None if is_rest else CallRule(from_index=from_index, until_index=until_index)
    return RolloutModel(policy_id=policy_id, calls=calls)


def _assay(given: Json) -> Json:
    return {"require_assay": Assays.load(given["assay"])} if "assay" in given else {}


class Subject:
    """The clients, sessions, handles and calls of the case that runs."""

    def __init__(self) -> None:
        self._clients: dict[str, Penstock] = {}
        self._rollouts: dict[str, RolloutHandle] = {}
        self._groups: dict[str, GroupHandle] = {}
        self._sessions: dict[str, InterceptSession] = {}
        self._iterators: dict[str, AsyncGenerator[ModelCall, None]] = {}
        self._calls: dict[str, ModelCall] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._more: dict[str, dict[str, Any]] = {"sessions": self._sessions, "calls": self._calls}
        self._stack = AsyncExitStack()

    def client(self, given: Json) -> Penstock:
        """The client that the command names."""
        return self._clients[given["client"]]

    def kept(self, kind: str) -> dict[str, Any]:
        """What the case that runs has of this kind, by name."""
        return self._more.setdefault(kind, {})

    task = staticmethod(task_of)
    observed_call = staticmethod(observed_call)

    async def run(self) -> None:
        """Until the input ends."""
        reader = asyncio.StreamReader(limit=1 << 27)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            command = orjson.loads(line)
            task = asyncio.create_task(self._answer(command))
            self._running[command["id"]] = task
        await self.reset({})

    async def _answer(self, command: Json) -> None:
        said: Json
        try:
            async with asyncio.timeout(command.get("timeout_s")):
                said = {"ok": await self._carry_out(command["do"], command) or {}}
        except PenstockError as error:
            said = {"error": observed_error(error)}
        except TimeoutError:
            said = {"error": {"kind": "timeout"}}
        except asyncio.CancelledError:
            said = {"error": {"kind": "aborted"}}
        del self._running[command["id"]]
        sys.stdout.buffer.write(orjson.dumps({"id": command["id"], **said}) + b"\n")
        sys.stdout.buffer.flush()

    async def _carry_out(self, name: str, command: Json) -> Json | None:
        return await _COMMANDS[name](self, command)

    async def reset(self, _: Json) -> None:
        """Ends all that a case left open."""
        others = [task for task in self._running.values() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for iterator in self._iterators.values():
            await iterator.aclose()
        await self._stack.aclose()
        everything: list[dict[str, Any]] = [self._clients, self._rollouts, self._groups, self._iterators]
        for kept in everything + list(self._more.values()):
            kept.clear()

    async def connect(self, given: Json) -> None:
        target = given.get("addresses", given.get("host"))
        tls = None if "tls" not in given else Tls(ca=Path(given["tls"]["ca"]))
        if "connection_file" in given:
            target = Path(given["connection_file"])
        where = resolve(target, given.get("token"), tls, given.get("namespace"))
        ps = connect(where if given.get("discover", True) else replace(where, discover=False))
        self._clients[given["client"]] = await self._stack.enter_async_context(ps)

    async def close(self, given: Json) -> None:
        await self._clients.pop(given["client"]).__aexit__(None, None, None)

    async def create_rollout(self, given: Json) -> Json:
        spec = given["spec"]
        handle = await self._clients[given["client"]].rollouts.create(
            task_of(spec), spec["agent"], rollout_id=given.get("rollout_id", ""), **_options(spec), **_assay(given)
        )
        self._rollouts[handle.rollout_id] = handle
        return {"rollout_id": handle.rollout_id}

    async def create_group(self, given: Json) -> Json:
        spec = given["spec"]
        ps = self._clients[given["client"]]
        handle = await ps.groups.create(task_of(spec), spec["agent"], given["n"], **_options(spec), **_assay(given))
        self._groups[handle.group_id] = handle
        return {"group_id": handle.group_id, "rollout_ids": list(handle.rollout_ids)}

    async def get_rollout(self, given: Json) -> Json:
        info = await self._clients[given["client"]].rollouts.get(given["rollout_id"])
        return {"rollout_id": info.rollout_id, "phase": str(info.phase), "labels": dict(info.labels)}

    async def list_rollouts(self, given: Json) -> Json:
        listed = self._clients[given["client"]].rollouts.list(run_id=given["run_id"])
        return {"rollout_ids": [item.rollout_id async for item in listed]}

    async def events(self, given: Json) -> Json:
        handle = await self._rollout(given)
        seen = [event.sequence async for event in handle.events(after=given.get("after", 0))]
        return {"sequences": seen}

    async def result(self, given: Json) -> Json:
        handle = await self._rollout(given)
        ended = await handle.result()
        trajectory = await handle.trajectory(samples_only=True, top=given.get("top", False))
        return observed_result(RolloutResult(ended.rollout, ended.outcome, trajectory))

    async def results(self, given: Json) -> Json:
        handle = await self._group(given)
        return {"results": [observed_result(item) for item in await handle.results()]}

    async def trajectory(self, given: Json) -> Json:
        options = {name: given.get(f"with_{name}", False) for name in ("tensors", "images")}
        whole = await (await self._rollout(given)).trajectory(**options)
        completions = [call.completion for call in whole.calls if call.completion is not None]
        held = [*(one.tensors for one in completions), *(sample.tensors for sample in whole.samples)]
        images = [image for call in whole.calls for image in call.images]
        return {
            "tensors": [np.ascontiguousarray(one.rows).tobytes().hex() for tensors in held for one in tensors],
            "images": [image.data.hex() for image in images],
        }

    async def image(self, given: Json) -> Json:
        return {"data": (await (await self._rollout(given)).image(bytes.fromhex(given["sha256"]))).hex()}

    async def regrade(self, given: Json) -> Json:
        handle = await self._rollout(given)
        verifier = Verifier(commands=[Command(shell=line) for line in given["verify"]]) if "verify" in given else None
        grade = await handle.regrade(verifier, name=given.get("name", ""))
        return {
            "name": grade.name,
            "reward": None if grade.reward is None else grade.reward.value,
            "failure": None if grade.failure is None else grade.failure.reason,
        }

    async def cancel(self, given: Json) -> None:
        handle = await self._group(given) if "group_id" in given else await self._rollout(given)
        await handle.cancel(given.get("reason", ""))

    async def delete(self, given: Json) -> None:
        handle = await self._group(given) if "group_id" in given else await self._rollout(given)
        await handle.delete()

    async def branch(self, given: Json) -> Json:
        handle = await self._rollout(given)
        options = {name: given[name] for name in ("answer", "seed", "train_prefix", "replay") if name in given}
        group = await handle.branch(given["call"], given["n"], **options)
        self._groups[group.group_id] = group
        return {"group_id": group.group_id, "rollout_ids": list(group.rollout_ids)}

    async def annotate(self, given: Json) -> None:
        def read(one: Json) -> Annotation:
            tokens = one.get("token_values")
            return Annotation(
                name=one["name"],
                author=one["author"],
                call_id=one.get("call_id"),
                value=one.get("value"),
                token_values=None if tokens is None else np.frombuffer(bytes.fromhex(tokens), "<f4"),
                details=one.get("details", {}),
            )

        await (await self._rollout(given)).annotate(*map(read, given["annotations"]))

    async def pause_rollouts(self, given: Json) -> Json | None:
        if "group_id" in given:
            await (await self._group(given)).pause("conformance", max_duration=given.get("max_duration_s"))
            return None
        handle = await self._rollout(given)
        return {"frozen": await handle.pause("conformance", max_duration=given.get("max_duration_s"))}

    async def resume_rollouts(self, given: Json) -> None:
        handle = await self._group(given) if "group_id" in given else await self._rollout(given)
        await handle.resume()

    async def serve(self, given: Json) -> None:
        handle = await self._group(given) if "group_id" in given else await self._rollout(given)
        self._iterators[given["session"]] = handle.calls(credits=given["credits"])

    async def intercept(self, given: Json) -> Json:
        names = ["run_id", "group_id", "rollout_ids", "labels", "credits", "policy_version", "messages"]
        names += ["policy_ids", "policies"]
        options = {name: given[name] for name in names if name in given}
        session = self._clients[given["client"]].intercept(**options)
        await self._stack.enter_async_context(session)
        self._sessions[given["session"]] = session
        self._iterators[given["session"]] = session.calls()
        return {"session_id": session.session_id}

    async def next_call(self, given: Json) -> Json:
        call = await anext(self._iterators[given["session"]], None)
        if call is None:
            return {"end": True}
        self._calls[call.call_id] = call
        return observed_call(call)

    async def deliver(self, given: Json) -> None:
        top, rows = given.get("top"), dict[str, Any]()
        if top is not None:
            whole = np.frombuffer(bytes.fromhex(top["token_ids"]), "<i4")
            shape = (-1, top["count"]) if whole.size % top["count"] == 0 else (1, -1)
            rows = {
                "top_token_ids": whole.reshape(shape),
                "top_logprobs": np.frombuffer(bytes.fromhex(top["logprobs"]), "<f4").reshape(shape),
            }
        completion = Completion.of_tokens(
            np.frombuffer(bytes.fromhex(given["token_ids"]), "<i4"),
            np.frombuffer(bytes.fromhex(given["logprobs"]), "<f4"),
            **rows,
            policy_version=given.get("policy_version"),
            finish_reason=given.get("finish_reason", "stop"),
        )
        await self._calls[given["call_id"]].deliver(completion)

    async def deliver_text(self, given: Json) -> None:
        await self._calls[given["call_id"]].deliver(Completion.of_text(given["text"]))

    async def deliver_unsendable(self, given: Json) -> None:
        await self._calls[given["call_id"]].deliver(Completion.of_text("half a character: \ud800"))

    async def fail(self, given: Json) -> None:
        call = self._calls[given["call_id"]]
        await call.fail(given["reason"], given.get("message", ""), retriable=given["retriable"])

    async def delegate(self, given: Json) -> None:
        await self._calls[given["call_id"]].delegate()

    async def release(self, given: Json) -> None:
        await self._calls[given["call_id"]].release()

    async def call_ended(self, given: Json) -> Json:
        call = self._calls[given["call_id"]]
        await call.wait_ended()
        return {"reason": call.end_reason}

    async def announce(self, given: Json) -> None:
        self._sessions[given["session"]].announce(given["policy_version"], given.get("policy_id", ""))

    async def set_credits(self, given: Json) -> None:
        self._sessions[given["session"]].set_credits(given["calls"])

    async def pause(self, given: Json) -> Json:
        return {"open_calls": await self._sessions[given["session"]].pause("conformance")}

    async def resume(self, given: Json) -> None:
        await self._sessions[given["session"]].resume()

    async def finish(self, given: Json) -> None:
        self._sessions[given["session"]].finish()

    async def close_session(self, given: Json) -> None:
        await self._sessions[given["session"]].close()

    async def abort(self, given: Json) -> None:
        self._running[given["target"]].cancel()

    async def _rollout(self, given: Json) -> RolloutHandle:
        known = self._rollouts.get(given["rollout_id"])
        return known or await self._clients[given["client"]].rollouts.attach(given["rollout_id"])

    async def _group(self, given: Json) -> GroupHandle:
        known = self._groups.get(given["group_id"])
        return known or await self._clients[given["client"]].groups.attach(given["group_id"])


_COMMANDS: Final[Mapping[str, Callable[[Subject, Json], Awaitable[Json | None]]]] = {
    "connect": Subject.connect,
    "close": Subject.close,
    "create_rollout": Subject.create_rollout,
    "create_group": Subject.create_group,
    "get_rollout": Subject.get_rollout,
    "list_rollouts": Subject.list_rollouts,
    "events": Subject.events,
    "result": Subject.result,
    "results": Subject.results,
    "trajectory": Subject.trajectory,
    "image": Subject.image,
    "regrade": Subject.regrade,
    "cancel": Subject.cancel,
    "delete": Subject.delete,
    "branch": Subject.branch,
    "annotate": Subject.annotate,
    "pause_rollouts": Subject.pause_rollouts,
    "resume_rollouts": Subject.resume_rollouts,
    "serve": Subject.serve,
    "intercept": Subject.intercept,
    "next_call": Subject.next_call,
    "deliver": Subject.deliver,
    "deliver_text": Subject.deliver_text,
    "deliver_unsendable": Subject.deliver_unsendable,
    "fail": Subject.fail,
    "delegate": Subject.delegate,
    "release": Subject.release,
    "call_ended": Subject.call_ended,
    "announce": Subject.announce,
    "set_credits": Subject.set_credits,
    "pause": Subject.pause,
    "resume": Subject.resume,
    "finish": Subject.finish,
    "close_session": Subject.close_session,
    "abort": Subject.abort,
    "reset": Subject.reset,
    **COMMANDS,
}

if __name__ == "__main__":
    logging.getLogger("penstock").addHandler(logging.NullHandler())  # what breaks in a case's tool is no complaint
    asyncio.run(Subject().run())
