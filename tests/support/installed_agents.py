"""`python -m tests.support.installed_agents` installs the agents that the suite runs, into the store of `toolboxes`.

Continuous integration does it while it looks at the code, so that no two stacks install the same. An agent that is
missing there is installed by the stack whose rollout asks for it, and fails there if it cannot be.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.services.stack import running

ON_DEMAND: Final[Mapping[str, str]] = dict.fromkeys(
    ("cline", "copilot-cli", "kilo", "qwen-code"),
    "agents that are large or slow to start: opencode and pi run as they do, with npm and chat completions",
) | dict.fromkeys(
    ("kimi-cli", "openhands"),
    "agents that are large and slow to start: aider, mini-swe-agent and terminus-2 run as they do, with PyPI",
)
"""Agents that no run of the suite installs or runs unless it is asked for all, and why."""


async def _install() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="penstock-agents-") as folder:
        async with running(Path(folder)) as started:
            for agent in [agent.name async for agent in started.ps.agents.list() if agent.name not in ON_DEMAND]:
                async for finding in started.ps.agents.check(agent):
                    if finding.outcome in ("ok", "failed"):
                        print(f"{agent}: {finding.step}: {finding.outcome}: {finding.message}", flush=True)
                    failed += finding.outcome == "failed"
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(_install()) and 1)
