"""Watching rollouts through breaks: the one place where the command line and the driver exchange what changes.

Invariants: after a break everything is asked anew, with the connection as it is then (services that were started again
have other addresses and tokens); only what no waiting mends ends it. A person waits also for what was never there, a
program is told.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli.services import running
from penstock.cli.standing import MOST_ENDED
from penstock.client import (
    ConfigurationError,
    InvalidArgument,
    NotFound,
    Penstock,
    PenstockError,
    Unavailable,
    Unsupported,
    connect,
)
from penstock.client.errors import PermissionDenied, Unauthenticated
from penstock.client.results import RolloutChanges, RolloutSummary
from penstock.client.rpc import Backoff

_LASTING = (InvalidArgument, NotFound, Unsupported)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which rollouts are watched, and where."""

    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    agent: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ended_limit: int = MOST_ENDED
    """Of those that have ended, so many of the newest are shown, and the rest of their groups."""
    state_dir: Path | None = None

    def __str__(self) -> str:
        given = {"run": self.run_id, "group": self.group_id, "task": self.task_id, "agent": self.agent, **self.labels}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value) or "all rollouts"


@dataclass(frozen=True, slots=True)
class Connected:
    """The driver answers; everything anew follows."""

    address: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """The driver does not answer, in words; it is tried again."""

    message: str


async def follow(chosen: Chosen, *, waits: bool = True) -> AsyncGenerator[RolloutChanges | Connected | Trouble, None]:
    """What changes among the chosen rollouts, for ever.

    Args:
        chosen: which.
        waits: also for a driver that has not answered yet; False = what comes before its first answer is raised.

    Raises:
        PenstockError: what no waiting mends: a wrong filter, an older driver, a connection that was never there.
    """
    backoff = Backoff()
    seen = False
    while True:
        error: PenstockError = Unavailable("The driver ended the stream", reason="STREAM_ENDED")
        try:
            async with connect(running(chosen.state_dir)) as ps, aclosing(_changes(ps, chosen)) as changes:
                told = False
                async for change in changes:
                    if not told:
                        backoff.reset()
                        seen = told = True
                        yield Connected(ps.endpoints.driver)
                    yield change
        except _LASTING:
            raise
        except ConfigurationError as wrong:
            if not seen:
                raise
            error = wrong
        except PenstockError as broken:
            if not (seen or waits):
                raise
            error = broken
        yield Trouble(_words(error))
        await asyncio.sleep(backoff.next(error))


async def once(chosen: Chosen) -> RolloutChanges:
    """The chosen rollouts as they stand now.

    Raises:
        PenstockError: whatever came in the way.
    """
    found: list[RolloutSummary] = []
    async with connect(running(chosen.state_dir)) as ps, aclosing(_changes(ps, chosen)) as changes:
        async for change in changes:
            found += change.rollouts
            if change.complete:
                break
    return RolloutChanges(tuple(found), complete=True)


def _changes(ps: Penstock, chosen: Chosen) -> AsyncGenerator[RolloutChanges, None]:
    def watch(group_id: str | None) -> AsyncGenerator[RolloutChanges, None]:
        return ps.rollouts.watch(
            run_id=chosen.run_id,
            group_id=group_id or chosen.group_id,
            labels=chosen.labels,
            task_id=chosen.task_id,
            agent=chosen.agent,
            ended_limit=MOST_ENDED,
        )

    return whole_groups(watch)


async def whole_groups(
    watch: Callable[[str | None], AsyncGenerator[RolloutChanges, None]], most: int = MOST_ENDED
) -> AsyncGenerator[RolloutChanges, None]:
    """What `watch` tells of all (None), with what the driver's bound cut off from groups before all has been told.

    Args:
        watch: a stream of all rollouts, or of a group's.
        most: so many that have ended the driver tells at most, the newest.
    """
    told: list[RolloutSummary] | None = []
    async with aclosing(watch(None)) as changes:
        async for change in changes:
            if told is not None:
                told += change.rollouts
                if change.complete:
                    for group_id in _cut(told, most):
                        async with aclosing(watch(group_id)) as siblings:
                            async for part in siblings:
                                yield RolloutChanges(part.rollouts)
                                if part.complete:
                                    break
                    told = None
            yield change


def _cut(told: list[RolloutSummary], most: int) -> list[str]:
    """Groups of which some may have ended too long ago to be told: a group's rollouts are created together."""
    ended = [item.create_time for item in told if item.ended and item.create_time is not None]
    if len(ended) < most or not ended:
        return []
    oldest = min(ended)
    early = (item for item in told if item.create_time is None or item.create_time <= oldest)
    return sorted({item.group_id for item in early if item.group_id is not None})


def _words(error: PenstockError) -> str:
    """For a screen that has one line for it: what it is about comes first."""
    refused = isinstance(error, Unauthenticated | PermissionDenied)
    return f"the token does not hold: {error.message}" if refused else error.message
