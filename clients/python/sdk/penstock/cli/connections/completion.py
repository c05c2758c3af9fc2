"""Shell completion of agents, rollouts, groups and files, from the services.

Invariants: it is silent and takes two seconds at most; if the services do not run it completes nothing. A shell
evaluates completions (zsh's `_arguments` does), and anybody may choose a file's or a rollout's name: a candidate with
any other than harmless characters is left out, never escaped.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

from penstock.client import Penstock, PenstockError, connect

_PATIENCE_S: Final = 2.0
_MOST: Final = 200
"""Maximum candidates; a shell shows no more at once, and the newest come first."""
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._:/@+=,-]+")
"""Text that no shell interprets, quoted, unquoted, or evaluated twice."""


def agent_names(incomplete: str) -> list[str]:
    return _asked(_agents, incomplete)


def rollout_ids(incomplete: str) -> list[str]:
    """Returns rollout ids, newest first."""
    return _asked(_rollouts, incomplete)


def group_ids(incomplete: str) -> list[str]:
    """Returns group ids, newest first."""
    return _asked(_groups, incomplete)


def recordings(incomplete: str) -> list[str]:
    """Returns rollout ids, and files and directories that may hold recordings."""
    place = Path(incomplete)
    folder, start = (place, "") if not incomplete or incomplete.endswith("/") else (place.parent, place.name)
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(start) and not path.name.startswith(".")]
    except OSError:
        found = []
    files = [f"{path}/" if path.is_dir() else str(path) for path in sorted(found)]
    offered = [name for name in files if name.startswith(incomplete) and _HARMLESS.fullmatch(name)]
    return [*rollout_ids(incomplete), *offered][:_MOST]


def _asked(source: Callable[[Penstock], AsyncGenerator[str, None]], incomplete: str) -> list[str]:
    found: list[str] = []

    async def ask() -> None:
        async with asyncio.timeout(_PATIENCE_S), connect() as ps, aclosing(source(ps)) as names:
            async for name in names:
                if name.startswith(incomplete) and _HARMLESS.fullmatch(name):
                    found.append(name)
                if len(found) == _MOST:
                    break

    # A completion must not print errors: it offers what came before one.
    with suppress(PenstockError, TimeoutError, OSError):
        asyncio.run(ask())
    return found


async def _agents(ps: Penstock) -> AsyncGenerator[str, None]:
    async for agent in ps.agents.list():
        yield agent.name


async def _rollouts(ps: Penstock) -> AsyncGenerator[str, None]:
    async for rollout in ps.rollouts.list():
        yield rollout.rollout_id


async def _groups(ps: Penstock) -> AsyncGenerator[str, None]:
    async for group in ps.groups.list():
        yield group.group_id
