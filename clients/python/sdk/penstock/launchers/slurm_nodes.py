"""The nodes of a Slurm job, as `scontrol` shows them, and the names that services have on them."""

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client.errors import ConfigurationError

_NODE: Final = re.compile(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+) .*?\bState=(\S+)", re.MULTILINE)
_UNUSABLE: Final = re.compile(r"DOWN|FAIL|DRAIN|POWER|UNKNOWN|NOT_RESPONDING|\*")
"""In the states of nodes that are lost, or that an administrator takes away."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node. `usable`: whether a step that starts there is likely to stay."""

    name: str
    address: str
    usable: bool


async def nodes_of_job() -> Sequence[SlurmNode]:
    """Returns the nodes of the job that this process is in. Raises ConfigurationError: `scontrol` fails."""
    shown = await _output("scontrol", "--oneliner", "show", "node", os.environ.get("SLURM_JOB_NODELIST", ""))
    return [SlurmNode(name, address, not _UNUSABLE.search(state)) for name, address, state in _NODE.findall(shown)]


def service_names(nodes: Sequence[str]) -> dict[str, str]:
    """Returns a service's name for each node: the node's own, if it may be one, else n0, n1, ..."""
    found: dict[str, str] = {}
    for number, node in enumerate(nodes):
        name = re.sub(r"[^a-z0-9-]", "-", node.lower()).strip("-")
        usable = _NAME.fullmatch(name) and name not in found.values()
        found[node] = name if usable else f"n{number}"
    return found


async def _output(*command: str) -> str:
    """Returns what a program of Slurm prints. Raises ConfigurationError."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    found, errors = await process.communicate()
    if process.returncode:
        raise ConfigurationError(
            f"`{' '.join(command)}` failed: {errors.decode(errors='replace').strip()}", reason="SLURM_FAILED"
        )
    return found.decode(errors="replace")
