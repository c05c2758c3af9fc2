"""prime-rl trains on rollouts of an agent: `taskset.id = "penstock_agent"` of an environment, with this directory on
PYTHONPATH.

verifiers takes the taskset and the harness from this module. prime-rl's inference servers answer the model calls.
"""

from penstock.adapters.trainers.plugins import verifiers
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts

__all__ = ["Agent", "Tasks"]

ROLLOUTS = AgentRollouts.load("tasks", "shell")


class Agent(verifiers.PenstockHarness):
    """A rollout of `shell` for each task."""

    rollouts = ROLLOUTS


class Tasks(verifiers.PenstockTaskset):
    """The tasks in ./tasks."""

    rollouts = ROLLOUTS
