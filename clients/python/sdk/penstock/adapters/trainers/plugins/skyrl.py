"""SkyRL (0.3.0): a generator. SkyRL's trainer calls it, and SkyRL's own inference engines answer the agent's calls.

    class Experiment(BasePPOExp):  # skyrl.train.entrypoints.main_base
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            rollouts = AgentRollouts.load("tasks", "shell")
            return PenstockGenerator(
                rollouts,
                inference_engine_client,
                filler_token_id=tokenizer.pad_token_id,
                engine_init_kwargs=cfg.generator.inference_engine.engine_init_kwargs,
            )

A row of the data set names its task in `task_id` (SkyRL gives what is beside the prompt as `env_extras`).
`generator.sampling_params.logprobs` must be set.
"""

from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput, InferenceEngineInterface
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID

from penstock.adapters.trainers import skyrl
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, logprobs_of_vllm, sampling_sent, together
from penstock.adapters.trainers.selection import Place, Selection, select
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import Completion, FinishReason


class PenstockGenerator(GeneratorInterface):  # type: ignore[misc]
    """A rollout of an agent for each prompt of a batch."""

    def __init__(
        self,
        rollouts: AgentRollouts,
        engine: InferenceEngineInterface,
        *,
        filler_token_id: int,
        step_wise: bool = False,
        engine_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            rollouts: what is run for each prompt.
            engine: SkyRL's engines.
            filler_token_id: for dropped rollouts; the tokenizer's padding.
            step_wise: as SkyRL's `generator.step_wise_trajectories`: a row per sequence, else one per rollout.
            engine_init_kwargs: SkyRL's `generator.inference_engine.engine_init_kwargs`, whose `logprobs_mode` says of
                which kind the logprobs are; None = vLLM's default, raw ones.

        Raises:
            InvalidArgument: `NO_LOGPROBS`: by its `logprobs_mode`, vLLM returns logits.
        """
        self._logprobs_mode = logprobs_of_vllm((engine_init_kwargs or {}).get("logprobs_mode"))
        self.rollouts, self.engine = rollouts, engine
        self.filler_token_id, self.step_wise = filler_token_id, step_wise

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Returns the rollouts in the order of the prompts; a dropped one is masked (see `skyrl.generator_output`).

        Raises:
            InvalidArgument: `TASK_UNKNOWN`; `NO_LOGPROBS`: the engines return none.
        """
        params = dict(input_batch.get("sampling_params") or {})
        extras = input_batch.get("env_extras") or [{} for _ in input_batch["prompts"]]
        task_ids = [extra.get("task_id") for extra in extras]
        for task_id in task_ids:
            self.rollouts.task(task_id)

        async def sample(call: ModelCall) -> Completion:
            return await self._sample(call, params)

        async with together() as running:
            made = [running.create_task(self.rollouts.run(task_id, sample)) for task_id in task_ids]
        found = select([task.result() for task in made], one_sequence=not self.step_wise)
        ids = input_batch.get("trajectory_ids") or [TrajectoryID(str(task_id), 0) for task_id in task_ids]
        grouped = zip(found.places, ids, strict=True)
        selection = Selection(
            tuple(Place(place.rollout_id, one.instance_id, place.rows, place.dropped) for place, one in grouped),
            found.siblings,
        )
        output = skyrl.generator_output(selection, filler_token_id=self.filler_token_id, step_wise=self.step_wise)
        rows = [one for place, one in zip(selection.places, ids, strict=True) for _ in place.rows or (None,)]
        return GeneratorOutput(**{**output, "trajectory_ids": rows})

    async def _sample(self, call: ModelCall, params: Mapping[str, Any]) -> Completion:
        """Asks SkyRL's engines; a rollout's calls are one session, for their prefix cache."""
        given = [most for most in (params.get("max_tokens"), call.sampling.max_tokens) if most is not None]
        sent = {**params, **({"max_tokens": min(given)} if given else {})}
        output = await self.engine.generate(
            InferenceEngineInput(
                prompts=None,
                prompt_token_ids=[call.prompt_token_ids.tolist()],
                sampling_params=sent,
                session_ids=[call.rollout_id],
            )
        )
        logprobs = output.get("response_logprobs")
        if not logprobs or logprobs[0] is None:
            raise InvalidArgument(
                "SkyRL's engines return no logprobs: set generator.sampling_params.logprobs", reason="NO_LOGPROBS"
            )
        return Completion.of_tokens(
            output["response_ids"][0],
            logprobs[0],
            finish_reason=FinishReason.LENGTH if output["stop_reasons"][0] == "length" else FinishReason.STOP,
            logprobs_mode=self._logprobs_mode,
            sampling_used=sampling_sent(sent),
            engine="skyrl",
        )
