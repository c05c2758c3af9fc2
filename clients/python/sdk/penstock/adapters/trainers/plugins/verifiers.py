"""prime-rl, by verifiers (0.3.1.dev62): a harness and a taskset. prime-rl's inference servers answer the agent's calls.

`taskset.id = "penstock_agent"` of an environment names an installed module, penstock_agent.py:

    from penstock.adapters.trainers.plugins import verifiers
    from penstock.adapters.trainers.plugins.rollouts import AgentRollouts

    __all__ = ["Agent", "Tasks"]
    ROLLOUTS = AgentRollouts.load("tasks", "shell")

    class Agent(verifiers.PenstockHarness):
        rollouts = ROLLOUTS

    class Tasks(verifiers.PenstockTaskset):
        rollouts = ROLLOUTS

The runtime of verifiers runs nothing, so that it may be `subprocess`: the agent is in a sandbox of Penstock.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.trace import ModelCall as TraceCall

from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, sampling_sent
from penstock.adapters.trainers.selection import Row
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason, LogprobsMode


class PenstockTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):  # type: ignore[misc]
    """The tasks of `rollouts`, by id. A subclass sets `rollouts`."""

    rollouts: ClassVar[AgentRollouts]

    def load(self) -> Iterator[vf.Task]:
        """Yields a task for each; Penstock grades it, so that it has no reward of its own here."""
        for task in self.rollouts.tasks.values():
            yield vf.Task(vf.TaskData(name=task.task_id, prompt=task.instruction), self.config.task)


class PenstockHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A rollout of an agent for each task, whose name is the id of ours. A subclass sets `rollouts`."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    rollouts: ClassVar[AgentRollouts]

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Writes the rollout's sequence with most trained tokens into the trace, and its reward as `penstock`.

        The trace has tokens, masks and logprobs; its messages are empty, and `info["penstock_rollout_id"]` names the
        rollout that has them.

        Raises:
            InvalidArgument: `TASK_UNKNOWN`; `NO_LOGPROBS`: the servers return none.
            RolloutFailed: as `AgentRollouts.row`.
        """
        async with build_async_openai(ctx.client) as client:

            async def sample(call: ModelCall) -> Completion:
                return await _sample(client, ctx, trace.id, call)

            row = await self.rollouts.row(data.name, sample)
        _record(trace, ctx, row)
        trace.record_reward("penstock", row.reward)
        trace.info["penstock_rollout_id"] = row.trajectory.rollout_id
        return ProgramResult(0, "", "")


async def _sample(client: Any, ctx: Any, session: str, call: ModelCall) -> Completion:
    """Asks prime-rl's servers, at the root of the address and not under /v1, as verifiers' own client does."""
    params = ctx.sampling.model_dump(exclude_none=True)
    limits = [limit for limit in (params.get("max_tokens"), call.sampling.max_tokens) if limit is not None]
    if limits:
        params["max_tokens"] = min(limits)
    answer = await client.post(
        f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/inference/v1/generate",
        cast_to=httpx.Response,
        body={
            "model": ctx.model,
            "token_ids": call.prompt_token_ids.tolist(),
            "sampling_params": {**params, "logprobs": 1, "skip_special_tokens": False},
        },
        options={"headers": {SESSION_ID_HEADER: session}},
    )
    (choice,) = answer.json()["choices"]
    content = (choice.get("logprobs") or {}).get("content")
    if content is None:
        raise InvalidArgument("The servers return no logprobs", reason="NO_LOGPROBS")
    return Completion.of_tokens(
        choice["token_ids"],
        [item["logprob"] for item in content],
        finish_reason=FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP,
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling_used=sampling_sent(params),
        engine="prime-rl",
    )


def _record(trace: Any, ctx: Any, row: Row) -> None:
    """Makes a chain of the trace's nodes: what was given, then what was sampled, turn by turn."""
    sample, end = row.sample, 0

    def add(message: Any, start: int, stop: int, *, sampled: bool) -> None:
        mask = sample.loss_mask[start:stop]
        trace.nodes.append(
            MessageNode(
                parent=len(trace.nodes) - 1 if trace.nodes else None,
                message=message,
                sampled=sampled,
                token_ids=sample.input_ids[start:stop].tolist(),
                mask=mask.tolist(),
                logprobs=row.logprobs[start:stop][mask].tolist(),
            )
        )

    for turn in sample.turns:
        if turn.start > end:
            add(vf.UserMessage(content=""), end, turn.start, sampled=False)
        add(vf.AssistantMessage(content=""), turn.start, turn.end, sampled=True)
        usage = vf.Usage(prompt_tokens=turn.start, completion_tokens=turn.end - turn.start)
        trace.calls.append(
            TraceCall(
                node=len(trace.nodes) - 1, model=ctx.model, sampling=ctx.sampling, finish_reason="stop", usage=usage
            )
        )
        end = turn.end
    if end < len(sample):
        add(vf.UserMessage(content=""), end, len(sample), sampled=False)
