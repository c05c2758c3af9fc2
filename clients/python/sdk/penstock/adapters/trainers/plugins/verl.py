"""verl (0.9.1): an agent loop. verl's workers load it by name, and its own LLM servers answer the agent's calls.

`agent_loop_config_path` names a file with

    - name: penstock
      _target_: penstock.adapters.trainers.plugins.verl.PenstockAgentLoop
      tasks: tasks            # a directory with files of tasks, or a task file
      agent: shell

and `rollout.agent.default_agent_loop: penstock`. A row of the data set names its task in `task_id`, or in
`extra_info["task_id"]`. `rollout.calculate_log_probs` must be on.
"""

from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from penstock.adapters.trainers import verl
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, CannotAnswer, logprobs_of_vllm, sampling_sent
from penstock.adapters.trainers.selection import Place, Selection
from penstock.client.errors import InvalidArgument, Unavailable
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason, LogprobsMode


class PenstockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """A rollout of an agent for each row."""

    def __init__(
        self,
        *args: Any,
        tasks: str,
        agent: str,
        connection: str | None = None,
        tries: int = 3,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """`tasks`, `agent`, `connection`, `tries` and `options` are those of `AgentRollouts.load`; others verl's."""
        super().__init__(*args, **kwargs)
        self.rollouts = AgentRollouts.load(tasks, agent, connection=connection, tries=tries, **(options or {}))

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Returns the rollout's sequence with most trained tokens.

        One whose response is longer than `rollout.response_length` keeps its reward, which its group's mean counts; it
        is cut and trains nothing.

        Raises:
            InvalidArgument: `TASK_UNKNOWN`; `NO_LOGPROBS`: the servers return none, or logits; `PROMPT_TOO_LONG`.
            RolloutFailed: as `AgentRollouts.row`.
        """
        task_id = kwargs.get("task_id") or (kwargs.get("extra_info") or {}).get("task_id")

        async def sample(call: ModelCall) -> Completion:
            return await self._sample(call, sampling_params)

        row = await self.rollouts.row(task_id, sample)
        (output,) = verl.agent_loop_outputs(Selection((Place(row.trajectory.rollout_id, "", (row,)),)))
        most = self.rollout_config.prompt_length
        if len(output["prompt_ids"]) > most:
            raise InvalidArgument(
                f"{task_id}: a prompt of {len(output['prompt_ids'])} tokens, more than rollout.prompt_length={most}",
                reason="PROMPT_TOO_LONG",
            )
        length = self.rollout_config.response_length
        if len(output["response_ids"]) > length:
            output["response_ids"] = output["response_ids"][:length]
            output["response_logprobs"] = output["response_logprobs"][:length]
            output["response_mask"] = [0] * length
            output["extra_fields"]["truncated"] = True
        # verl has the group's; ours is of this rollout alone.
        del output["extra_fields"]["uid"]
        return AgentLoopOutput(**output)

    async def _sample(self, call: ModelCall, sampling_params: dict[str, Any]) -> Completion:
        """Asks verl's servers; a rollout's calls go to the same one, for its prefix cache.

        They cut an answer at limits of their own without a word, so that the smallest of all is sent.
        """
        config = self.rollout_config
        context = getattr(config, "max_model_len", None) or config.prompt_length + config.response_length
        room = context - call.prompt_count
        if room < 1:
            raise CannotAnswer(f"The prompt has {call.prompt_count} tokens, and the trainer's context {context}")
        given = (room, sampling_params.get("max_tokens"), call.sampling.max_tokens)
        limit = min(most for most in given if most is not None)
        # A setting of vLLM alone: the other servers' are of the distribution that was sampled from.
        is_vllm = config.name == "vllm"
        mode = logprobs_of_vllm(config.logprobs_mode) if is_vllm else LogprobsMode.PROCESSED
        sent = {**sampling_params, "max_tokens": limit}
        output = await self.server_manager.generate(
            request_id=call.rollout_id,
            prompt_ids=call.prompt_token_ids.tolist(),
            sampling_params=sent,
        )
        if output.log_probs is None:
            raise InvalidArgument(
                "verl's servers return no logprobs: set rollout.calculate_log_probs", reason="NO_LOGPROBS"
            )
        version = output.extra_fields.get("global_steps")
        stopped = getattr(output, "stop_reason", None)
        if stopped in ("abort", "aborted"):
            raise Unavailable("verl's server aborted the answer", reason="ENGINE_ABORTED")
        is_cut = stopped == "length" or len(output.token_ids) >= limit
        return Completion.of_tokens(
            output.token_ids,
            output.log_probs,
            policy_version=version,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            logprobs_mode=mode,
            sampling_used=sampling_sent(sent),
            engine="verl",
        )
