"""Where rollouts are stored: a directory, or an S3 server on a host of its own behind a proxy that fails."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Final, Protocol

from tests.hosts.fleet import ROOT, Fleet
from tests.hosts.network import HUB_ADDRESS
from tests.support.endpoints import s3
from tests.support.waiting import awaited

HOST: Final = "store"
_PORT: Final = 9000


class Store(Protocol):
    """A place for exports."""

    url: str
    can_die: bool

    def start(self, fleet: Fleet) -> None:
        """Start it, before any service is started."""

    def die(self) -> None:
        """End it by `kill -9`."""

    def start_again(self) -> None:
        """Have it back with all that it had accepted."""

    def open(self) -> None:
        """From now on this process reads it, without faults."""

    @property
    def requests(self) -> Counter[str]:
        """What the proxy did with drivers' requests."""


class Directory:
    """Of this machine."""

    can_die = False

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder / 'exports'}"
        self.requests: Counter[str] = Counter()

    def start(self, fleet: Fleet) -> None:
        """Nothing."""

    def die(self) -> None:
        """It cannot."""
        raise AssertionError("a directory does not die")

    def start_again(self) -> None:
        """It cannot die."""
        raise AssertionError("a directory does not die")

    def open(self) -> None:
        """It is."""


class S3:
    """See the module. The proxy runs in a thread of this process."""

    can_die = True
    url = f"s3://{s3.BUCKET}/all"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fleet: Fleet | None = None
        self._proxy: s3.Proxy | None = None

    def start(self, fleet: Fleet) -> None:
        """See Store."""
        self._fleet = fleet
        os.environ |= s3.CREDENTIALS
        self.start_again()
        self._proxy = s3.Proxy(self._address, HUB_ADDRESS)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), loop).result()
        s3.lead_to(self._proxy.address)

    def die(self) -> None:
        """See Store."""
        self._there.network.hosts[HOST].kill()

    def start_again(self) -> None:
        """See Store."""
        host = self._there.network.hosts[HOST]
        arguments = [host.address, str(_PORT), str(self._folder / "s3.changes")]
        host.start_module("tests.support.endpoints.s3_server", arguments, self._folder / "store.log", ROOT)
        before = os.environ.get(s3.ENDPOINT)
        s3.lead_to(self._address)
        awaited(s3.has_bucket, "the server has the bucket")
        if before is not None:
            s3.lead_to(before)

    def open(self) -> None:
        """See Store."""
        s3.lead_to(self._address)

    @property
    def requests(self) -> Counter[str]:
        """See Store."""
        assert self._proxy is not None
        return self._proxy.seen

    @property
    def _there(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    @property
    def _address(self) -> str:
        return f"http://{self._there.network.hosts[HOST].address}:{_PORT}"
