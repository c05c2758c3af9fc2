"""SkyRL trains on rollouts of an agent: `python skyrl_experiment.py generator.sampling_params.logprobs=0 ...`.

A row of the data set has a `prompt`, which SkyRL wants, and the `task_id` of a task in ./tasks.
"""

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

from penstock.adapters.trainers.plugins.rollouts import AgentRollouts
from penstock.adapters.trainers.plugins.skyrl import PenstockGenerator


class Experiment(BasePPOExp):  # type: ignore[misc]
    """SkyRL's, with our generator."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> PenstockGenerator:
        """A rollout of `shell` for each prompt; SkyRL's engines answer its model calls."""
        rollouts = AgentRollouts.load("tasks", "shell")
        return PenstockGenerator(
            rollouts,
            inference_engine_client,
            filler_token_id=tokenizer.pad_token_id,
            engine_init_kwargs=cfg.generator.inference_engine.engine_init_kwargs,
        )


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def train(cfg: SkyRLTrainConfig) -> None:
    """Not on the head node."""
    Experiment(cfg).run()


if __name__ == "__main__":
    given = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(given)
    initialize_ray(given)
    ray.get(train.remote(given))
