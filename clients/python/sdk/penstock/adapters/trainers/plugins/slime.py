"""slime: a generate function. slime's rollout calls it for each sample; its SGLang router answers the agent's calls.

`--custom-generate-function-path agent.generate`, where agent.py is

    from penstock.adapters.trainers.plugins.rollouts import AgentRollouts
    from penstock.adapters.trainers.plugins.slime import generate_with

    generate = generate_with(AgentRollouts.load("tasks", "shell"))

The label of a row (`--label-key task_id`) names its task. Form: slime at commit 624b824 (2026-08-21).
"""

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from slime.rollout.sglang_rollout import GenerateState
from slime.utils import http_utils
from slime.utils.types import Sample

from penstock.adapters.trainers import slime
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, sampling_sent
from penstock.adapters.trainers.selection import Place, Row, Selection
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason, LogprobsMode

_TAKEN: Final = (
    "tokens",
    "response_length",
    "reward",
    "loss_mask",
    "weight_versions",
    "rollout_log_probs",
)
"""What a sample gets from the rollout; slime gave it the rest."""

_LOOK_S: Final = 0.5
"""Seconds between looks at whether slime aborts: it sets a flag that nothing can wait for."""

Generate = Callable[[Namespace, Sample, dict[str, Any]], Awaitable[Sample]]


class _Aborted(Exception):
    """slime aborts: it has enough samples, and waits until every rollout that is left has ended."""


def generate_with(rollouts: AgentRollouts) -> Generate:
    """Returns the function that `--custom-generate-function-path` names.

    It returns the sample with the rollout's sequence that has most trained tokens, and with its reward. Once slime
    aborts, the rollout is cancelled, whatever it does, and the sample is ABORTED.

    Raises:
        InvalidArgument: `TASK_UNKNOWN`; `TOP_P`: slime replays the tokens that top_p left, which no agent's calls have.
        RolloutFailed: as `AgentRollouts.row`.
    """

    async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if args.rollout_top_p != 1.0:
            raise InvalidArgument(f"rollout_top_p: 1.0, not {args.rollout_top_p}", reason="TOP_P")

        state = GenerateState(args)

        async def answer(call: ModelCall) -> Completion:
            if state.aborted:  # its servers are to become idle
                raise _Aborted
            return await _sample(args, call, sampling_params)

        try:
            row = await _unless_aborted(state, rollouts.row(sample.label, answer))
        except _Aborted:
            return replace(sample, status=Sample.Status.ABORTED)
        ((made,),) = slime.samples(Selection((Place(row.trajectory.rollout_id, "", (row,)),)), filler_token_id=0)
        return replace(
            sample,
            **{name: made[name] for name in _TAKEN},
            status=Sample.Status(made["status"]),
            metadata={**sample.metadata, **made["metadata"], "penstock_rollout_id": row.trajectory.rollout_id},
        )

    return generate


async def _unless_aborted(state: GenerateState, work: Coroutine[Any, Any, Row]) -> Row:
    """Awaits the work; cancels it, and raises _Aborted, once slime aborts."""
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            if state.aborted:
                raise _Aborted
            await asyncio.wait([working], timeout=_LOOK_S)
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _sample(args: Namespace, call: ModelCall, sampling_params: dict[str, Any]) -> Completion:
    """Asks slime's router; a rollout's calls have one routing key, for the servers' prefix caches."""
    most = min(sampling_params["max_new_tokens"], call.sampling.max_tokens or sampling_params["max_new_tokens"])
    output = await http_utils.post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "input_ids": call.prompt_token_ids.tolist(),
            "sampling_params": {**sampling_params, "max_new_tokens": most},
            "return_logprob": True,
        },
        headers={"X-SMG-Routing-Key": call.rollout_id},
    )
    meta = output["meta_info"]
    ended = meta["finish_reason"]["type"]
    if ended == "abort":
        raise _Aborted
    found = meta["output_token_logprobs"]
    version = str(meta.get("weight_version", ""))
    return Completion.of_tokens(
        [item[1] for item in found],
        [item[0] for item in found],
        policy_version=int(version) if version.isdecimal() else None,
        finish_reason=FinishReason.LENGTH if ended == "length" else FinishReason.STOP,
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling_used=sampling_sent(sampling_params),
        engine="slime",
    )
