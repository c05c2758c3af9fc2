"""E2B's cloud for this backend: the few SDK calls, typed, with our errors and our labels.

Purpose: the only module that calls the SDK's classes, so that its frequent releases affect one place. The SDK is
imported here and in ``errors`` only when the backend is used: it is an optional dependency (R48, R53).

Invariants
- Everything made carries ``penstock_instance`` (this service's state) and ``penstock_sandbox``; nothing without the
  first is ever touched (R50).
- The key is given to the SDK for the configured address only, and is in no label, log or error message (R8, R11).
- Idempotent calls are retried with backoff; the SDK itself honours E2B's Retry-After (R51).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import SecretStr

from penstock_chassis.aio.retry import Delays, retry
from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_sandbox.backends.e2b.errors import Denied, Gone, asked
from penstock_sandbox.domain.model import NetworkKind

if TYPE_CHECKING:
    from e2b import AsyncSandbox, SandboxMetrics, SnapshotMode

INSTANCE: Final = "penstock_instance"
SANDBOX: Final = "penstock_sandbox"
_REQUEST_TIMEOUT_S = 30.0
_ATTEMPTS = 4
_DELAYS = Delays(0.5, 2.0, jitter=(0.5, 1.0))

T = TypeVar("T")


def installed() -> bool:
    """Whether the SDK is installed."""
    return importlib.util.find_spec("e2b") is not None


@dataclass(frozen=True, slots=True)
class Address:
    """E2B's address and API key; an empty address is E2B's own cloud."""

    api_key: SecretStr
    domain: str = ""
    api_url: str = ""
    sandbox_url: str = ""

    def options(self) -> dict[str, Any]:
        """Returns the SDK's connection options, without empty strings, which would mean the environment's values."""
        given = {"domain": self.domain, "api_url": self.api_url, "sandbox_url": self.sandbox_url}
        options: dict[str, Any] = {name: value for name, value in given.items() if value}
        # Overrides the environment's debug, with which creating and killing do nothing.
        return {**options, "api_key": self.api_key.get_secret_value(), "debug": False}


@dataclass(frozen=True, slots=True)
class Listed:
    """One of our sandboxes in E2B's listing."""

    id: str
    sandbox_id: str


class Cloud:
    """E2B, as one instance of this service uses it."""

    def __init__(self, address: Address, instance: str) -> None:
        self._options = {**address.options(), "request_timeout": _REQUEST_TIMEOUT_S}
        self._instance = instance

    async def create(self, sandbox_id: str, template: str, timeout_s: float, network: NetworkKind) -> AsyncSandbox:
        """Creates a sandbox. Raises Denied, Unavailable, ResourceExhausted or FailedPrecondition; it may exist then.

        Retries carry the same idempotency key, so a lost response makes no second sandbox.
        """
        from e2b import AsyncSandbox

        async def once() -> AsyncSandbox:
            return await AsyncSandbox.create(
                template,
                timeout=math.ceil(timeout_s),
                metadata={INSTANCE: self._instance, SANDBOX: sandbox_id},
                allow_internet_access=network is NetworkKind.OPEN,
                # Otherwise ports, including those on the sandbox's loopback, would have public addresses.
                network={"allow_public_traffic": False},
                idempotency_key=sandbox_id.replace(".", "-"),  # E2B takes no dots in it
                **self._options,
            )

        return await self._repeated("create", once)

    async def kill(self, e2b_id: str) -> None:
        """Ends a sandbox; succeeds if it is gone."""
        from e2b import AsyncSandbox

        await asked("kill", AsyncSandbox.kill(e2b_id, **self._options))

    async def pause(self, e2b_id: str) -> None:
        """Saves a sandbox's memory and files and stops it; succeeds if it is paused. Its deadline stops too.

        Raises the common errors; Gone also if the deployment cannot pause.
        """
        from e2b import AsyncSandbox

        # Strict: a sandbox whose guest does not respond would be kept, but could not be resumed correctly.
        await self._repeated("pause", lambda: AsyncSandbox.pause(e2b_id, mode="full", strict=True, **self._options))

    async def connect(self, e2b_id: str, timeout_s: float) -> AsyncSandbox:
        """Connects to a sandbox, resumed if it was paused; E2B ends it after at least this many seconds."""
        from e2b import AsyncSandbox

        return await self._repeated(
            "connect", lambda: AsyncSandbox.connect(e2b_id, math.ceil(timeout_s), **self._options)
        )

    async def metrics(self, e2b_id: str) -> Sequence[SandboxMetrics]:
        """Returns E2B's measurements of a sandbox since its start, oldest first; may be empty."""
        from e2b import AsyncSandbox

        found = await self._repeated("get_metrics", lambda: AsyncSandbox.get_metrics(e2b_id, **self._options))
        return sorted(found, key=lambda one: one.timestamp)

    async def set_timeout(self, e2b_id: str, timeout_s: float) -> None:
        """Makes E2B end the sandbox this many seconds from now."""
        from e2b import AsyncSandbox

        await self._repeated(
            "set_timeout", lambda: AsyncSandbox.set_timeout(e2b_id, math.ceil(timeout_s), **self._options)
        )

    async def close_network(self, e2b_id: str) -> None:
        """Removes a sandbox's internet access."""
        from e2b import AsyncSandbox

        await self._repeated(
            "update_network",
            lambda: AsyncSandbox.update_network(e2b_id, {"allow_internet_access": False}, **self._options),
        )

    async def is_closed(self, e2b_id: str) -> bool:
        """Whether E2B reports that the sandbox has no internet access and no public ports."""
        from e2b import AsyncSandbox

        info = await self._repeated("get_info", lambda: AsyncSandbox.get_info(e2b_id, **self._options))
        network: Mapping[str, Any] = info.network or {}
        denied = network.get("deny_out") or ()
        closed = info.allow_internet_access is False or "0.0.0.0/0" in denied
        return closed and network.get("allow_public_traffic") is not True

    async def ours(self, sandbox_id: str = "") -> list[Listed]:
        """Returns every sandbox of this instance, or those made as ``sandbox_id``."""
        from e2b import AsyncSandbox, SandboxQuery, SandboxState

        wanted = {INSTANCE: self._instance, **({SANDBOX: sandbox_id} if sandbox_id else {})}

        async def once() -> list[Listed]:
            # Both states explicitly, since paused ones cost too.
            query = SandboxQuery(metadata=wanted, state=[SandboxState.RUNNING, SandboxState.PAUSED])
            pages = AsyncSandbox.list(query=query, **self._options)
            found = []
            while pages.has_next:
                # Filtered again: a deployment that ignores the filter must not cost others their sandboxes.
                found += [
                    Listed(info.sandbox_id, info.metadata.get(SANDBOX, ""))
                    for info in await pages.next_items()
                    if wanted.items() <= info.metadata.items()
                ]
            return found

        return await self._repeated("list", once)

    # Snapshots ---------------------------------------------------------------------------------------------------

    async def create_snapshot(self, e2b_id: str, layer_id: str, *, files_only: bool = False) -> str:
        """Keeps a sandbox's state under our name; returns E2B's id. Not retried: each call may make one.

        ``files_only`` leaves its memory out: a sandbox made from it boots from disk, without the processes.
        """
        from e2b import AsyncSandbox

        mode: SnapshotMode = "filesystem" if files_only else "full"
        taking = AsyncSandbox.create_snapshot(e2b_id, name=self._name(layer_id), mode=mode, **self._options)
        return (await asked("create_snapshot", taking)).snapshot_id

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot; succeeds if it is gone."""
        from e2b import AsyncSandbox

        await asked("delete_snapshot", AsyncSandbox.delete_snapshot(snapshot_id, **self._options))

    async def our_snapshots(self) -> Mapping[str, str]:
        """Returns every snapshot of this instance: E2B's id and the layer in its name."""
        from e2b import AsyncSandbox

        async def once() -> Mapping[str, str]:
            pages = AsyncSandbox.list_snapshots(**self._options)
            found: dict[str, str] = {}
            while pages.has_next:
                for snapshot in await pages.next_items():
                    for name in map(_bare, snapshot.names):
                        if name.startswith(self._name("")):
                            found[snapshot.snapshot_id] = name.removeprefix(self._name(""))
            return found

        return await self._repeated("list_snapshots", once)

    def _name(self, layer_id: str) -> str:
        return f"penstock-{self._instance}-{layer_id}"

    # Retries -----------------------------------------------------------------------------------------------------

    @staticmethod
    async def _repeated(what: str, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await retry(
            lambda: asked(what, once()),
            _DELAYS,
            patience_s=lambda error: math.inf if isinstance(error, Unavailable | ResourceExhausted) else 0.0,
            attempts=_ATTEMPTS,
            retry_info=False,
        )


def _bare(full_name: str) -> str:
    # E2B's form is "team/name:tag".
    return full_name.rpartition("/")[2].partition(":")[0]


__all__ = ["INSTANCE", "SANDBOX", "Address", "Cloud", "Denied", "Gone", "Listed", "installed"]
