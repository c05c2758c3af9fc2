"""The client of the API server, made anew when the cluster does not accept its credentials any more.

Purpose: a kubeconfig may name a program, a file or an issuer that gives tokens or certificates which expire, and the
library asks it once. So a refusal (401) has the configuration read again, and the refused request repeated.

Invariants
- The configuration is read again once for all requests that were refused beside each other.
- A request is repeated once: a second refusal goes to its caller. A refused one has changed nothing in the cluster.
- The client before the present one stays open, for the requests that still run on it; older ones are closed.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable
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


class Connection:
    """See the module. Call `open` first. ``objects`` and ``core`` are the library's APIs."""

    def __init__(self, kubeconfig: Path | None, context: str) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._reading: SingleFlight[Any, None] = SingleFlight(keep=0, finish=True)
        self._client: Any = None
        self._before: Any = None
        self.objects: Any = None
        self.core: Any = None

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
            fresh = client.ApiClient(configuration)
        except Exception as error:  # noqa: BLE001 - whatever its parsers raise, which may quote the file's secrets
            cause = str(error) if isinstance(error, config.ConfigException | OSError) else type(error).__name__
            raise FailedPrecondition(
                f"no cluster is configured ({cause}): set kubernetes_config, or run this service in the cluster",
                reason="BACKEND_UNAVAILABLE",
            ) from None
        oldest, self._before, self._client = self._before, self._client, fresh
        self.objects = client.CustomObjectsApi(self._client)
        self.core = client.CoreV1Api(self._client)
        if oldest is not None:
            await oldest.close()

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._reading.aclose()
        for client in (self._before, self._client):
            if client is not None:
                await client.close()

    async def accepted(self, request: Callable[[], Awaitable[T]]) -> T:
        """Returns what a request does, repeated with fresh credentials if those at hand are refused.

        Raises what the request raises; Unavailable if the configuration cannot be read now.
        """
        client = self._client
        try:
            return await request()
        except NotAccepted:
            # Where another request was refused before, the fresh ones are there.
            if client is self._client:
                await self._renew(client)
            return await request()

    async def _renew(self, refused: Any) -> None:
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
