"""`python -m tests.support.installed_agents` installs every built-in agent beforehand, into the store of `toolboxes`.

Continuous integration does it while it looks at the code, so that no two stacks install the same. An agent that is
missing there is installed by the stack whose rollout asks for it, and fails there if it cannot be.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.services.stack import running


async def _install() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="penstock-agents-") as folder:
        async with running(Path(folder)) as started:
            for agent in [agent.name async for agent in started.ps.agents.list()]:
                async for finding in started.ps.agents.check(agent):
                    if finding.outcome in ("ok", "failed"):
                        print(f"{agent}: {finding.step}: {finding.outcome}: {finding.message}", flush=True)
                    failed += finding.outcome == "failed"
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(_install()) and 1)
