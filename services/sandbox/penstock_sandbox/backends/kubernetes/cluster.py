"""The cluster, as one instance of this service uses it: the few calls of the official client, typed.

Purpose: the only module that calls the client's classes, which are imported when the backend is used: they are an
optional dependency. Objects are those of kubernetes-sigs/agent-sandbox, extensions.agents.x-k8s.io/v1beta1.

Invariants
- Every claim carries the label of this instance; nothing without it is ever touched.
- A claim's name follows from the sandbox's id, so that a repeated create whose answer was lost finds its claim.
- Idempotent calls are retried with growing delays, at least as long as the API server's Retry-After.
- Credentials that expire are read again (see ``connection``).
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import importlib
import importlib.util
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock_chassis.aio.retry import Delays, retry
from penstock_chassis.errors import FailedPrecondition, ResourceExhausted, Unavailable
from penstock_sandbox.backends.kubernetes.connection import Connection
from penstock_sandbox.backends.kubernetes.errors import Conflict, Gone, asked

INSTANCE: Final = "penstock-instance"
SANDBOX: Final = "penstock-sandbox"
CLAIM_UID: Final = "agents.x-k8s.io/claim-uid"
POD_NAME: Final = "agents.x-k8s.io/pod-name"
GROUP: Final = "extensions.agents.x-k8s.io"
CORE_GROUP: Final = "agents.x-k8s.io"
VERSION: Final = "v1beta1"
_CLAIMS: Final = "sandboxclaims"
_REQUEST_S: Final = 30.0
_WATCH_S: Final = 240
_PAGE: Final = 500
_ATTEMPTS: Final = 4
_DELAYS: Final = Delays(0.5, 4.0, jitter=(0.5, 1.0))
_MERGE: Final = "application/merge-patch+json"

T = TypeVar("T")
Object = Mapping[str, Any]


def missing() -> str:
    """Returns which of the optional dependencies is not installed, or ""."""
    for name in ("kubernetes_asyncio", "cryptography"):
        try:
            if importlib.util.find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    return ""


@dataclass(frozen=True, slots=True)
class ClaimState:
    """What matters of a claim. ``deleting``: it is there until its pod has ended."""

    name: str
    uid: str
    sandbox_id: str = ""
    ready: bool = False
    reason: str = ""
    message: str = ""
    sandbox: str = ""
    """Name of the Sandbox object, which is its pod's unless that was adopted under another name."""
    address: str = ""
    finished: str = ""
    """Why its pod has ended; empty while it has not."""
    deleting: bool = False
    pool: str = ""
    """The warm pool that it was made for."""

    @classmethod
    def of(cls, claim: Object) -> ClaimState:
        """Returns the state of an object of the API."""
        metadata, status = claim["metadata"], claim.get("status") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        ready, finished = conditions.get("Ready", {}), conditions.get("Finished", {})
        bound = status.get("sandbox") or {}
        return cls(
            metadata["name"],
            metadata.get("uid", ""),
            (metadata.get("annotations") or {}).get(SANDBOX, ""),
            ready.get("status") == "True",
            ready.get("reason", ""),
            ready.get("message", ""),
            bound.get("name", ""),
            next(iter(bound.get("podIPs") or ()), ""),
            finished.get("reason", "") if finished.get("status") == "True" else "",
            "deletionTimestamp" in metadata,
            ((claim.get("spec") or {}).get("warmPoolRef") or {}).get("name", ""),
        )


class Cluster:
    """See the module. Call `open` first."""

    def __init__(self, namespace: str, instance: str, kubeconfig: Path | None, context: str) -> None:
        self.namespace = namespace
        self._instance = instance
        self._connection = Connection(kubeconfig, context)

    async def open(self) -> None:
        """Imports the client and reads its configuration. Raises FailedPrecondition with what to set."""
        await self._connection.open()
        if not self.namespace and self._connection.in_cluster:
            self.namespace = await asyncio.to_thread(_own_namespace)
        self.namespace = self.namespace or "default"
        self._watch = (await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.watch")).Watch

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._connection.aclose()

    # Claims ------------------------------------------------------------------------------------------------------

    def claim_name(self, sandbox_id: str) -> str:
        """Returns the name of a sandbox's claim: ids may have characters that names may not."""
        digest = hashlib.sha256(f"{self._instance}/{sandbox_id}".encode()).hexdigest()
        return f"penstock-{digest[:40]}"

    async def create_claim(self, sandbox_id: str, warm_pool: str, until: float) -> ClaimState:
        """Claims a sandbox until a time (seconds since the epoch), after which the cluster ends it by itself.

        Raises FailedPrecondition, ResourceExhausted or Unavailable; the claim may exist then.
        """
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": {
                "name": self.claim_name(sandbox_id),
                "labels": {INSTANCE: self._instance},
                "annotations": {SANDBOX: sandbox_id},
            },
            "spec": {
                "warmPoolRef": {"name": warm_pool},
                "lifecycle": {"shutdownTime": _time(until), "shutdownPolicy": "DeleteForeground"},
            },
        }

        async def once() -> ClaimState:
            try:
                made = await asked(
                    "create claim",
                    self._connection.objects.create_namespaced_custom_object(
                        **self._of(_CLAIMS), body=body, _request_timeout=_REQUEST_S
                    ),
                )
            except Conflict:
                # By us, in an attempt whose answer was lost: nobody else makes this name.
                made = await asked("get claim", self._get(_CLAIMS, self.claim_name(sandbox_id)))
            return ClaimState.of(made)

        return await self._repeated(once)

    async def claim(self, name: str) -> ClaimState:
        """Returns a claim. Raises Gone or PenstockError."""
        return ClaimState.of(await self._repeated(lambda: asked("get claim", self._get(_CLAIMS, name))))

    async def extend_claim(self, name: str, until: float) -> None:
        """Moves the time at which the cluster ends a claim. Raises Gone or PenstockError."""
        body = {"spec": {"lifecycle": {"shutdownTime": _time(until)}}}

        async def once() -> None:
            try:
                await asked(
                    "patch claim",
                    self._connection.objects.patch_namespaced_custom_object(
                        **self._of(_CLAIMS), name=name, body=body, _content_type=_MERGE, _request_timeout=_REQUEST_S
                    ),
                )
            except Conflict:
                raise Unavailable("the claim was changed at the same time", reason="PROVIDER_FAILED") from None

        await self._repeated(once)

    async def delete_claim(self, name: str) -> None:
        """Begins to delete a claim, with its pod first; harmless if repeated. Raises Gone or PenstockError."""

        async def once() -> None:
            try:
                await asked(
                    "delete claim",
                    self._connection.objects.delete_namespaced_custom_object(
                        **self._of(_CLAIMS), name=name, propagation_policy="Foreground", _request_timeout=_REQUEST_S
                    ),
                )
            except Conflict:
                raise Unavailable("the claim was changed at the same time", reason="PROVIDER_FAILED") from None

        await self._repeated(once)

    async def claims(self) -> tuple[list[ClaimState], str]:
        """Returns the claims of this instance, and the version from which a watch goes on."""

        async def once() -> tuple[list[ClaimState], str]:
            found: list[ClaimState] = []
            more: str | None = None
            while True:
                page = await asked(
                    "list claims",
                    self._connection.objects.list_namespaced_custom_object(
                        **self._of(_CLAIMS),
                        label_selector=self._selector,
                        limit=_PAGE,
                        _continue=more,
                        _request_timeout=_REQUEST_S,
                    ),
                )
                # Filtered again: a server that ignores selectors must not cost others their claims.
                found += [ClaimState.of(one) for one in page["items"] if self._is_ours(one)]
                more = page["metadata"].get("continue")
                if not more:
                    return found, page["metadata"]["resourceVersion"]

        return await self._repeated(once)

    async def watch_claims(self, version: str) -> AsyncGenerator[tuple[str, ClaimState | None, str], None]:
        """Yields (kind, claim, version) of changes after `version`; ends now and then.

        Kinds are ADDED, MODIFIED, DELETED, and BOOKMARK, which has no claim. Raises Gone if the version is too old,
        or PenstockError.
        """
        watch = self._watch()
        async with self._connection.lent():
            events = watch.stream(
                self._connection.objects.list_namespaced_custom_object,
                **self._of(_CLAIMS),
                label_selector=self._selector,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_S,
                _request_timeout=_WATCH_S + _REQUEST_S,
            )
            try:
                while True:
                    try:
                        event = await asked("watch claims", anext(events))
                    except StopAsyncIteration:
                        return
                    changed = event["raw_object"]
                    version = changed["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        yield event["type"], None, version
                    elif self._is_ours(changed):
                        yield event["type"], ClaimState.of(changed), version
            finally:
                await watch.close()

    @property
    def _selector(self) -> str:
        return f"{INSTANCE}={self._instance}"

    def _is_ours(self, claim: Object) -> bool:
        return (claim["metadata"].get("labels") or {}).get(INSTANCE) == self._instance

    # Others' objects -----------------------------------------------------------------------------------------------

    async def template_of(self, warm_pool: str) -> Object:
        """Returns the SandboxTemplate of a warm pool. Raises FailedPrecondition naming what is not there."""
        try:
            pool = await self._repeated(lambda: asked("get pool", self._get("sandboxwarmpools", warm_pool)))
        except Gone:
            raise _absent("SandboxWarmPool", warm_pool, self.namespace) from None
        name = pool["spec"]["sandboxTemplateRef"]["name"]
        try:
            return await self._repeated(lambda: asked("get template", self._get("sandboxtemplates", name)))
        except Gone:
            raise _absent("SandboxTemplate", name, self.namespace) from None

    async def pod_name(self, sandbox: str) -> str:
        """Returns the name of a Sandbox's pod. Raises Gone or PenstockError."""
        found = await self._repeated(lambda: asked("get sandbox", self._get("sandboxes", sandbox, group=CORE_GROUP)))
        return str((found["metadata"].get("annotations") or {}).get(POD_NAME) or sandbox)

    async def pods_of(self, claim_uid: str) -> Sequence[Any]:
        """Returns the pods of a claim, as the client's models. Raises PenstockError."""
        found = await self._repeated(
            lambda: asked(
                "list pods",
                self._connection.core.list_namespaced_pod(
                    self.namespace, label_selector=f"{CLAIM_UID}={claim_uid}", _request_timeout=_REQUEST_S
                ),
            )
        )
        return list(found.items)

    # Parts -------------------------------------------------------------------------------------------------------

    def _of(self, plural: str, group: str = GROUP) -> dict[str, str]:
        return {"group": group, "version": VERSION, "namespace": self.namespace, "plural": plural}

    async def _get(self, plural: str, name: str, group: str = GROUP) -> Object:
        found: Object = await self._connection.objects.get_namespaced_custom_object(
            **self._of(plural, group), name=name, _request_timeout=_REQUEST_S
        )
        return found

    async def _repeated(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await retry(lambda: self._connection.accepted(once), _DELAYS, patience_s=_patience, attempts=_ATTEMPTS)


def _patience(error: Exception) -> float:
    # A quota is not used up for a moment only: its caller decides.
    passing = isinstance(error, Unavailable | ResourceExhausted) and "limit" not in error.metadata
    return math.inf if passing else 0.0


def _absent(kind: str, name: str, namespace: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"there is no {kind} {name!r} in the namespace {namespace!r}, or agent-sandbox {VERSION} (0.5 or newer, with "
        "its extensions) is not installed: apply the manifests of the guide",
        reason="BACKEND_UNAVAILABLE",
        metadata={"backend": "kubernetes"},
    )


def _time(at: float) -> str:
    # As metav1.Time: whole seconds, UTC.
    return datetime.datetime.fromtimestamp(math.ceil(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _own_namespace() -> str:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()


__all__ = ["ClaimState", "Cluster", "Gone", "missing"]
