"""Watches the deaths of containers: one stream of the daemon's events for all sandboxes.

Invariants
- A death is reported at least once, even if the stream breaks: it is resumed at the time of the last event, and after
  each break the expected containers are compared with the running ones. Receivers must tolerate duplicates.
- A signal sent through the daemon is reported before the death that it caused, if the stream did not break.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.docker.cleanup.reaper import Owner
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Refused

_DELAYS = Delays(0.1, 5.0)

_log = structlog.get_logger(__name__)


class Deaths:
    """Watches until closed. ``died`` gets a container's name, and whether the daemon reported it live.

    ``signalled`` gets the name of a container signalled through the daemon; ``expected`` returns those to be alive.
    """

    def __init__(
        self,
        daemon: Daemon,
        owner: Owner,
        since: str,
        died: Callable[[str, bool], None],
        signalled: Callable[[str], None],
        expected: Callable[[], Collection[str]],
    ) -> None:
        self._daemon = daemon
        self._owner = owner
        self._since = since
        self._died = died
        self._expected = expected
        self._signalled = signalled
        self._task = asyncio.create_task(self._watch(), name="docker-deaths")

    async def aclose(self) -> None:
        """Stops watching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        backoff = Backoff(_DELAYS)
        while True:
            try:
                async for event in self._daemon.events(self._query()):
                    backoff.reset()
                    self._since = f"{event['time']}"
                    self._happened(event["Action"], event["Actor"]["Attributes"]["name"])
            except (Refused, PenstockError, LookupError) as error:
                _log.warning("the daemon's event stream broke", error=str(error))
            await backoff.wait()
            await self._compare()

    def _happened(self, action: str, name: str) -> None:
        if action == "die":
            self._died(name, True)
        else:
            self._signalled(name)

    def _query(self) -> dict[str, str]:
        # Podman filters by its own word for a death, and reports it as Docker does.
        filters = {"type": ["container"], "event": ["kill", "die", "died"], "label": [self._owner.filter]}
        return {"since": self._since, "filters": json.dumps(filters)}

    async def _compare(self) -> None:
        """Reports those that died while the stream was broken."""
        # Before the request: containers made meanwhile are not missed.
        expected = set(self._expected())
        try:
            running = await self._daemon.containers(self._owner.filter, running=True)
        except (Refused, PenstockError):
            return  # the daemon is away: the next round tries again
        names = {name.lstrip("/") for one in running for name in one.get("Names") or ()}
        for name in expected - names:
            self._died(name, False)
