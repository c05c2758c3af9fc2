"""The tools of the MCP server."""

from collections.abc import Sequence

from penstock.assistant.tools.base import Tool
from penstock.assistant.tools.calls import CALLS
from penstock.assistant.tools.reports import REPORTS
from penstock.assistant.tools.rollout import ROLLOUT
from penstock.assistant.tools.rollouts import ROLLOUTS
from penstock.assistant.tools.runs import RUNS
from penstock.assistant.tools.services import SERVICES
from penstock.assistant.tools.writing import WRITING


def tools(*, allow_writes: bool) -> Sequence[Tool]:
    """Returns the tools in the order in which an assistant sees them, those that change something only if allowed."""
    return (*RUNS, *ROLLOUTS, *ROLLOUT, *CALLS, *REPORTS, *SERVICES, *(WRITING if allow_writes else ()))
