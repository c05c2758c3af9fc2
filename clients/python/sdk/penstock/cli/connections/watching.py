"""Watches rollouts across reconnects: the one place where the command line receives changes from the driver.

Invariants: after a disconnect everything is requested anew, with the current connection (restarted services have other
addresses and tokens); only permanent errors end it. Interactively it also waits for services that never answered; a
program gets an error.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli.connections.service_selection import running
from penstock.cli.views.live_table import MOST_ENDED
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
from penstock.client.transport.rpc import Backoff
from penstock.client.types.results import RolloutChanges, RolloutSummary

_LASTING = (InvalidArgument, NotFound, Unsupported)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selection of watched rollouts, and their services."""

    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    agent: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ended_limit: int = MOST_ENDED
    """Number of ended rollouts shown, the newest, with the rest of their groups."""
    state_dir: Path | None = None
    all_namespaces: bool = False

    def __str__(self) -> str:
        given = {"run": self.run_id, "group": self.group_id, "task": self.task_id, "agent": self.agent, **self.labels}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value) or "all rollouts"


@dataclass(frozen=True, slots=True)
class Connected:
    """The driver answers; the full state follows."""

    address: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """The driver does not answer; the text describes why. It is retried."""

    message: str


async def follow(chosen: Chosen, *, waits: bool = True) -> AsyncGenerator[RolloutChanges | Connected | Trouble, None]:
    """Yields changes among the chosen rollouts, forever.

    Args:
        chosen: the selection.
        waits: also for a driver that has not answered yet; False = an error before its first answer is raised.

    Raises:
        PenstockError: a permanent error: an invalid filter, an older driver, a connection that never existed.
    """
    backoff = Backoff()
    seen = False
    while True:
        error: PenstockError = Unavailable("The driver ended the stream", reason="STREAM_ENDED")
        try:
            async with connect(running(chosen.state_dir)) as ps, aclosing(_changes(ps, chosen)) as changes:
                reported = False
                async for change in changes:
                    if not reported:
                        backoff.reset()
                        seen = reported = True
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
    """Returns the current state of the chosen rollouts.

    Raises:
        PenstockError: any error.
    """
    found: list[RolloutSummary] = []
    away: tuple[str, ...] = ()
    async with connect(running(chosen.state_dir)) as ps, aclosing(_changes(ps, chosen)) as changes:
        async for change in changes:
            found += change.rollouts
            away = change.away
            if change.complete:
                break
    return RolloutChanges(tuple(found), complete=True, away=away)


def _changes(ps: Penstock, chosen: Chosen) -> AsyncGenerator[RolloutChanges, None]:
    def watch(group_id: str | None) -> AsyncGenerator[RolloutChanges, None]:
        return ps.rollouts.watch(
            run_id=chosen.run_id,
            group_id=group_id or chosen.group_id,
            labels=chosen.labels,
            task_id=chosen.task_id,
            agent=chosen.agent,
            ended_limit=MOST_ENDED,
            all_namespaces=chosen.all_namespaces,
        )

    return whole_groups(watch)


async def whole_groups(
    watch: Callable[[str | None], AsyncGenerator[RolloutChanges, None]], most: int = MOST_ENDED
) -> AsyncGenerator[RolloutChanges, None]:
    """Yields the changes of `watch(None)`, and members of groups that the driver's limit cut off before the initial
    state was complete.

    Args:
        watch: a stream of all rollouts, or of a group's.
        most: the driver's maximum of ended rollouts, the newest.
    """
    listed: list[RolloutSummary] | None = []
    async with aclosing(watch(None)) as changes:
        async for change in changes:
            if listed is not None:
                listed += change.rollouts
                if change.complete:
                    for group_id in _cut(listed, most):
                        async with aclosing(watch(group_id)) as siblings:
                            async for part in siblings:
                                yield RolloutChanges(part.rollouts)
                                if part.complete:
                                    break
                    listed = None
            yield change


def _cut(listed: list[RolloutSummary], most: int) -> list[str]:
    """Returns groups that the limit may have cut off: a group's rollouts are created together."""
    ended = [item.create_time for item in listed if item.ended and item.create_time is not None]
    if len(ended) < most or not ended:
        return []
    oldest = min(ended)
    early = (item for item in listed if item.create_time is None or item.create_time <= oldest)
    return sorted({item.group_id for item in early if item.group_id is not None})


def _words(error: PenstockError) -> str:
    """Describes an error for one line of the screen: the subject comes first."""
    refused = isinstance(error, Unauthenticated | PermissionDenied)
    return f"the token is invalid: {error.message}" if refused else error.message
