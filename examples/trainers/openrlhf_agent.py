"""OpenRLHF trains on rollouts of an agent: `--train.agent_func_path examples/trainers/openrlhf_agent.py`.

The label of a row (`--data.label_key task_id`) names a task in ./tasks. Its logprobs are needed: importance sampling
correction must be on (`--algo.advantage.is_correction_level` not `off`).
"""

from penstock.adapters.trainers.plugins.openrlhf import PenstockExecutor
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts


class AgentExecutor(PenstockExecutor):
    """A rollout of `shell` for each sample; OpenRLHF's vLLM actors answer its model calls."""

    rollouts = AgentRollouts.load("tasks", "shell")
