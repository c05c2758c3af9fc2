"""The deaths of containers, told as they happen: one stream of the daemon's events for all sandboxes.

Invariants
- A death is told at least once, whatever breaks in between: the stream is resumed at the time of the last event, and
  after each break those who should live are compared with those who do. Who is told must bear repetition.
- A signal that somebody had the daemon send is told before the death that it brought, where nothing broke.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection

import structlog

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.docker.daemon import Daemon, Refused
from penstock_sandbox.backends.docker.reaper import Owner
from penstock_sandbox.backends.docker.wire import Wire

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0

_log = structlog.get_logger(__name__)


class Deaths:
    """Watches until closed. ``died`` gets a container's name, and whether the daemon said so as it happened.

    ``signalled`` gets the name of one that somebody had the daemon signal; ``expected`` are those that should live.
    """

    def __init__(
        self,
        daemon: Daemon,
        wire: Wire,
        owner: Owner,
        since: str,
        died: Callable[[str, bool], None],
        signalled: Callable[[str], None],
        expected: Callable[[], Collection[str]],
    ) -> None:
        self._daemon = daemon
        self._wire = wire
        self._owner = owner
        self._since = since
        self._died = died
        self._expected = expected
        self._signalled = signalled
        self._task = asyncio.create_task(self._watch(), name="docker-deaths")

    async def aclose(self) -> None:
        """Stop watching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async for event in self._wire.objects("GET", "/events", self._query()):
                    pause_s = _FIRST_PAUSE_S
                    self._since = f"{event['time']}"
                    self._happened(event["Action"], event["Actor"]["Attributes"]["name"])
            except (Refused, PenstockError, LookupError) as error:
                _log.warning("the daemon's events broke off", error=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            await self._compare()

    def _happened(self, action: str, name: str) -> None:
        if action == "die":
            self._died(name, True)
        else:
            self._signalled(name)

    def _query(self) -> dict[str, str]:
        filters = {"type": ["container"], "event": ["kill", "die"], "label": [self._owner.filter]}
        return {"since": self._since, "filters": json.dumps(filters)}

    async def _compare(self) -> None:
        """Tell of those that died while nobody listened."""
        # Before asking: who is made meanwhile is not missed.
        expected = set(self._expected())
        try:
            running = await self._daemon.containers(self._owner.filter, running=True)
        except (Refused, PenstockError):
            return  # the daemon is away: the next round asks again
        names = {name.lstrip("/") for one in running for name in one.get("Names") or ()}
        for name in expected - names:
            self._died(name, False)
