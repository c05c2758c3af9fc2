"""ART trains on rollouts of an agent: `python art_agent.py`; its own vLLM servers answer the agent's model calls."""

import asyncio

import art
from art.local import LocalBackend

from penstock.adapters.trainers.plugins.art import rollout_with
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts

ROLLOUTS = AgentRollouts.load("tasks", "shell")
rollout = rollout_with(ROLLOUTS)


async def gather(model: art.TrainableModel, task_id: str, size: int = 8) -> art.TrajectoryGroup:
    """A group of rollouts of a task in ./tasks; those that failed are its exceptions."""
    return await art.trajectory_group((rollout(model, task_id) for _ in range(size)), return_exceptions=True)


async def main() -> None:
    """Twenty steps."""
    model = art.TrainableModel(name="agent", run_name="agent", project="penstock", base_model="Qwen/Qwen3-4B")
    await model.register(backend := LocalBackend())
    for _ in range(await model.get_step(), 20):
        groups = await art.gather_trajectory_groups(gather(model, task_id) for task_id in ROLLOUTS.tasks)
        await backend.train(model, groups)


if __name__ == "__main__":
    asyncio.run(main())
