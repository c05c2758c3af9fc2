"""slime trains on rollouts of an agent: `--custom-generate-function-path slime_agent.generate`, with this directory on
PYTHONPATH.

The label of a row (`--label-key task_id`) names a task in ./tasks. slime's SGLang router answers the model calls.
"""

from penstock.adapters.trainers.plugins.rollouts import AgentRollouts
from penstock.adapters.trainers.plugins.slime import generate_with

generate = generate_with(AgentRollouts.load("tasks", "shell"))
