"""The client of the API server, made anew when the cluster does not accept its credentials any more.

Purpose: a kubeconfig may name a program, a file or an issuer that gives tokens or certificates which expire, and the
library asks it once. So a refusal (401) has the configuration read again, and the refused request repeated.

Invariants
- The configuration is read again once for all requests that were refused beside each other.
- A request is repeated once: a second refusal goes to its caller. A refused one has changed nothing in the cluster.
- A replaced client is closed when nothing runs on it any more: a watch whose client is closed gets no event and no end.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.kubernetes.errors import NotAccepted

_READ_S: Final = 30.0
"""So long a request waits for the configuration, whose programs may ask somebody else."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Client:
    """A client of the library; ``users`` run on it."""

    api: Any
    objects: Any
    core: Any
    users: int = 0


class Connection:
    """See the module. Call `open` first. What uses ``objects`` and ``core``, the library's APIs, is in `accepted` or
    `lent`."""

    def __init__(self, kubeconfig: Path | None, context: str) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._reading: SingleFlight[Any, None] = SingleFlight(keep=0, finish=True)
        self._client: _Client | None = None
        self._open: set[_Client] = set()

    @property
    def objects(self) -> Any:
        """The API of custom objects."""
        return self._present.objects

    @property
    def core(self) -> Any:
        """The API of pods."""
        return self._present.core

    @property
    def in_cluster(self) -> bool:
        """Whether this is the account of the pod in which this service runs."""
        return self._kubeconfig is None and bool(os.environ.get("KUBERNETES_SERVICE_HOST"))

    async def open(self) -> None:
        """Imports the library and reads the configuration. Raises FailedPrecondition with what to set."""
        # A second of imports.
        client = await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.client")
        config = await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.config")
        configuration = client.Configuration()
        try:
            if self.in_cluster:
                config.load_incluster_config(client_configuration=configuration)
            else:
                await config.load_kube_config(
                    config_file=str(self._kubeconfig) if self._kubeconfig is not None else None,
                    context=self._context or None,
                    client_configuration=configuration,
                )
            api = client.ApiClient(configuration)
        except Exception as error:  # noqa: BLE001 - whatever its parsers raise, which may quote the file's secrets
            cause = str(error) if isinstance(error, config.ConfigException | OSError) else type(error).__name__
            raise FailedPrecondition(
                f"no cluster is configured ({cause}): set kubernetes_config, or run this service in the cluster",
                reason="BACKEND_UNAVAILABLE",
            ) from None
        before, self._client = self._client, _Client(api, client.CustomObjectsApi(api), client.CoreV1Api(api))
        self._open.add(self._client)
        if before is not None:
            await self._close_unused(before)

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._reading.aclose()
        while self._open:
            await self._open.pop().api.close()

    async def accepted(self, request: Callable[[], Awaitable[T]]) -> T:
        """Returns what a request does, repeated with fresh credentials if those at hand are refused.

        Raises what the request raises; Unavailable if the configuration cannot be read now.
        """
        client = self._present
        try:
            async with self.lent():
                return await request()
        except NotAccepted:
            # Where another request was refused before, the fresh ones are there.
            if client is self._client:
                await self._renew(client)
            async with self.lent():
                return await request()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Keeps the present client open meanwhile."""
        client = self._present
        client.users += 1
        try:
            yield
        finally:
            client.users -= 1
            await self._close_unused(client)

    @property
    def _present(self) -> _Client:
        assert self._client is not None, "it is opened first"
        return self._client

    async def _close_unused(self, client: _Client) -> None:
        if client is not self._client and not client.users and client in self._open:
            self._open.remove(client)
            await client.api.close()

    async def _renew(self, refused: _Client) -> None:
        _log.info("the cluster does not accept the credentials any more; the configuration is read again")
        try:
            async with asyncio.timeout(_READ_S):
                await self._reading.get(refused, self.open)
        except (TimeoutError, FailedPrecondition) as error:
            _log.warning("the configuration was not read", why=str(error) or f"not within {_READ_S:g} s")
            # It worked at the start: what gives the credentials may do so again.
            raise Unavailable(
                "the cluster does not accept this service's credentials any more, and kubernetes_config gave no fresh "
                "ones; the service's log has the cause",
                reason="PROVIDER_FAILED",
            ) from None
