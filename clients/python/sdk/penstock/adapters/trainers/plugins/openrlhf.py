"""OpenRLHF (0.11.2): an agent executor. OpenRLHF's vLLM actors load it from a file and answer the agent's calls.

`--train.agent_func_path agent.py`, where agent.py is

    from penstock.adapters.trainers.plugins.openrlhf import PenstockExecutor
    from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, CannotAnswer

    class AgentExecutor(PenstockExecutor):
        rollouts = AgentRollouts.load("tasks", "shell")

The label of a row (`--data.label_key task_id`) names its task. Logprobs are needed: `is_correction_level` not `off`.
"""

from copy import copy
from typing import Any, ClassVar

from openrlhf.utils.agent import AgentExecutorBase

from penstock.adapters.trainers import openrlhf
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, CannotAnswer, sampling_sent
from penstock.adapters.trainers.selection import Place, Selection
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason, LogprobsMode


class PenstockExecutor(AgentExecutorBase):  # type: ignore[misc]
    """A rollout of an agent for each sample of a prompt. A subclass sets `rollouts`."""

    rollouts: ClassVar[AgentRollouts]

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Returns the rollout's sequence with most trained tokens, as OpenRLHF's own executors do.

        One that is longer than `max_length` keeps its reward and trains nothing.

        Raises:
            InvalidArgument: `TASK_UNKNOWN`; `NO_LOGPROBS`: they are not asked for; `IMAGES`: the row has some.
            RolloutFailed: as `AgentRollouts.row`.
        """
        if images:
            raise InvalidArgument("images: those of a data set's row go to no agent", reason="IMAGES")
        if sampling_params.logprobs is None:
            raise InvalidArgument("No logprobs: set algo.advantage.is_correction_level", reason="NO_LOGPROBS")

        async def sample(call: ModelCall) -> Completion:
            return await _sample(call, sampling_params, max_length, llm_engine)

        row = await self.rollouts.row(label, sample)
        selection = Selection((Place(row.trajectory.rollout_id, "", (row,)),))
        (response,) = openrlhf.agent_responses(selection, label=label)
        if len(response["observation_tokens"]) > max_length:
            response["action_ranges"] = []
            response["truncated"] = True
        return {**response, "prompt": prompt}


async def _sample(call: ModelCall, sampling_params: Any, max_length: int, engine: Any) -> Completion:
    params = copy(sampling_params)
    room = max_length - call.prompt_count
    if room < 1:
        raise CannotAnswer(f"The prompt has {call.prompt_count} tokens, and the trainer's context {max_length}")
    params.max_tokens = min(room, call.sampling.max_tokens or room)
    request = await engine.generate(call.prompt_token_ids.tolist(), params)
    (output,) = request.outputs
    if output.logprobs is None:
        raise InvalidArgument("The engine returns no logprobs", reason="NO_LOGPROBS")
    ids = list(output.token_ids)
    return Completion.of_tokens(
        ids,
        [found[token].logprob for token, found in zip(ids, output.logprobs, strict=True)],
        finish_reason=FinishReason.LENGTH if output.finish_reason == "length" else FinishReason.STOP,
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling_used=sampling_sent(params),
        engine="openrlhf",
    )
