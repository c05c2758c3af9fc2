"""A trainer in a Ray cluster: an actor on the head that starts a stack of its own and runs rollouts on it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.clusters import rollouts
from tests.clusters.ray_cluster import PLACE
from tests.clusters.report import answers
from tests.hosts import engine

from penstock.client import connect
from penstock.launchers import Stack

_MOST: Final = 2
"""Machines for sandboxes where their number follows their load."""


class Trainer:
    """An actor's class."""

    async def train(self, given: dict[str, Any]) -> None:
        """Run rollouts on a stack, which ends with them."""
        logging.basicConfig(level=logging.INFO)
        folder = Path(given["folder"])
        sandbox, places = {"first_uid": given["first_uid"], "uid_count": given["uids"]}, given["places"]
        if places:
            sandbox["max_sandboxes"] = places
        stack = Stack(
            on="ray",
            nodes=given["nodes"] or None,
            drivers=given["of_each"],
            gates=given["of_each"],
            engines=given["of_each"],
            gpus=given["gpus"],
            resources={"CPU": 0.5, **(PLACE if places else {})},
            max_nodes=_MOST if places else None,
            model_dir=folder / "model",
            engine=engine.NAME,
            engine_options={"script": str(folder / "script.yaml"), engine.OPTION: str(answers(folder))},
            scratch=folder / "scratch",
            state_dir=folder / "stack",
            settings={"sandbox": sandbox},
            start_timeout=120.0,
        )
        async with stack, connect(stack.endpoints) as ps:
            await rollouts.run(ps, given["at_once"], given["work"], given["max_attempts"], folder)


def main() -> None:
    """Run the actor on this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    for name in ("at-once", "max-attempts", "nodes", "of-each", "gpus", "first-uid", "uids", "places"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--work", type=float, required=True)
    given = vars(parser.parse_args())
    ray.init(address="auto")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    trainer = ray.remote(Trainer).options(num_cpus=0, scheduling_strategy=here).remote()
    ray.get(trainer.train.remote(given))


if __name__ == "__main__":
    main()
