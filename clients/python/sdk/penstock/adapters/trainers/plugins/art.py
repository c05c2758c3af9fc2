"""ART (openpipe-art 0.5.23): a rollout function. ART gathers trajectories; its servers answer the agent's calls.

    rollout = rollout_with(AgentRollouts.load("tasks", "shell"))
    group = await art.trajectory_group((rollout(model, task_id) for _ in range(8)), return_exceptions=True)

With `return_exceptions` a rollout that nothing can be learned from is one of the group's `exceptions`; without it, it
ends the gathering.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import art

# Versions of ART without this module would render and tokenise the conversation again: with them, this import fails.
from art.preprocessing import vllm_tokens as _vllm_tokens  # noqa: F401
from art.trajectories import PydanticException
from openai.types.chat.chat_completion import Choice

from penstock.adapters.trainers import art as form
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason, LogprobsMode, Sampling

_STEP: Final = re.compile(r"(?:@|:step)(\d+)$")
"""The end of a model's name at ART's servers: `NAME@STEP` at its own, `NAME:stepSTEP` at W&B's."""

_SAMPLING: Final = Sampling(temperature=1.0, top_p=1.0)
"""ART's loss is about the model's own distribution, of which vLLM's logprobs are."""

Rollout = Callable[[Any, str], Awaitable[art.Trajectory]]
"""From a registered model and a task's id to a trajectory."""


def rollout_with(rollouts: AgentRollouts) -> Rollout:
    """Returns a rollout function for `art.trajectory_group`. Its trajectories have all sequences of a rollout.

    It raises:
        InvalidArgument: `TASK_UNKNOWN`; `NO_TOKEN_IDS`, `NO_LOGPROBS`: ART's servers return none.
        RolloutFailed: as `AgentRollouts.place`.
    """

    async def rollout(model: Any, task_id: str) -> art.Trajectory:
        async def sample(call: ModelCall) -> Completion:
            return await _sample(model, call)

        return made(form.trajectory(await rollouts.place(task_id, sample)))

    return rollout


def made(trajectory: form.Trajectory) -> art.Trajectory:
    """Returns ART's trajectory of the form's."""
    choices = [Choice(**choice) for choice in trajectory["messages_and_choices"]]
    return art.Trajectory(**{**trajectory, "messages_and_choices": choices})


def made_group(group: form.TrajectoryGroup) -> art.TrajectoryGroup:
    """Returns ART's group of the form's: `[made_group(one) for one in art.trajectory_groups(selection)]`."""
    return art.TrajectoryGroup(
        [made(one) for one in group["trajectories"]],
        exceptions=[PydanticException(**one) for one in group["exceptions"]],
        metadata=dict(group["metadata"]),
    )


async def _sample(model: Any, call: ModelCall) -> Completion:
    """Asks ART's servers to complete the prompt's ids; a chat completion would render the conversation again."""
    name = model.get_inference_name()
    answer = await model.openai_client().completions.create(
        model=name,
        prompt=call.prompt_token_ids.tolist(),
        # None is sent: it means the rest of the context, and leaving it out would mean 16 tokens.
        max_tokens=call.sampling.max_tokens,
        temperature=_SAMPLING.temperature,
        top_p=_SAMPLING.top_p,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    ids = (choice.model_extra or {}).get("token_ids")
    if ids is None:
        raise InvalidArgument("ART's servers return no token ids: vLLM's return_token_ids", reason="NO_TOKEN_IDS")
    logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
    if logprobs is None:
        raise InvalidArgument("ART's servers return no logprobs", reason="NO_LOGPROBS")
    step = _STEP.search(name)
    return Completion.of_tokens(
        ids,
        logprobs,
        policy_version=None if step is None else int(step[1]),
        finish_reason=FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP,
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling_used=_SAMPLING,
        engine="art",
    )
