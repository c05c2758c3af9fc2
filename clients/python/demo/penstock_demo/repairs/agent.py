"""mini-SWE-agent as the demo runs it: the built-in agent, with other texts in its configuration file.

The agent is the package from PyPI. Its own settings make its prompts short and its actions plain text: what the model
answers is the command, and what the command prints is the next message.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.struct_pb2 import Struct

from penstock.client import AgentChoice, Penstock, PenstockError
from penstock.driver.v1 import agent_pb2
from penstock_demo.display import Display
from penstock_demo.repairs.tasks import SYSTEM_PROMPT

BUILT_IN: Final = "mini-swe-agent"
STEPS: Final = 4  # a good rollout has 3
CHOICE: Final = AgentChoice(name="mini-swe-agent-demo", options={"max_turns": STEPS})
# With a space inside the braces: those are the agent's own templates, not the driver's.
AGENT: Final = {"system_template": SYSTEM_PROMPT, "instance_template": "{{ task }}"}
MODEL: Final = {
    "model_class": "litellm_textbased",
    "action_regex": "^(.*)$",
    "observation_template": "{{ output.output }}",
}


def configured(built_in: agent_pb2.AgentSpec) -> agent_pb2.AgentSpec:
    """The spec of the built-in agent with the demo's texts in its configuration file."""
    spec = agent_pb2.AgentSpec()
    spec.CopyFrom(built_in)
    spec.name = CHOICE.name
    spec.description = "mini-SWE-agent with short prompts, whose actions are plain text."
    (file,) = spec.files
    for part, ours in (("agent", AGENT), ("model", MODEL)):
        settings = file.json[part]
        assert isinstance(settings, Struct)
        settings.update(ours)
    return spec


async def install(ps: Penstock, display: Display) -> None:
    """Registers the agent and installs it, which takes minutes where it never was.

    Raises:
        PenstockError: it cannot be installed, or does not run in a sandbox; the message has the finding.
    """
    display.begin(f"installing {BUILT_IN} from PyPI (kept for the next run) ...")
    await ps.agents.register(configured((await ps.agents.get(BUILT_IN)).spec))
    async for finding in ps.agents.check(CHOICE.name):
        if finding.outcome == "failed":
            raise PenstockError(f"{BUILT_IN} is not usable here: {finding.step}: {finding.message}")
