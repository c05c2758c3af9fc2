"""A stack on Kubernetes: a release of the Helm chart, for the time of a block.

The cluster places, restarts and removes all services, driver and gate too. This process makes Secrets and the release,
waits until the pods are ready, and removes both. In a pod of the cluster services are called by their names; outside,
`kubectl port-forward` leads to one of each kind, again after each time that it ends.
"""

import asyncio
import logging
import os
import re
import secrets
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar

import orjson

from penstock.client.errors import ConfigurationError, PenstockError
from penstock.client.transport.atomic_files import write_whole
from penstock.client.transport.background import TaskOwner
from penstock.client.transport.endpoints import (
    CONNECTION_FILE,
    DEFAULT_INGRESS_PORT,
    DEFAULT_PORTS,
    Endpoints,
    ServiceName,
    Tls,
)
from penstock.client.transport.private_files import open_private, private_directory
from penstock.launchers.directories import hold_directory
from penstock.launchers.kubernetes_release import (
    COMPONENT,
    Progress,
    Release,
    chart_values,
    progress,
    read_values,
    secrets_of,
    settings_tables,
)
from penstock.launchers.kubernetes_tools import Tools, chart, is_inside
from penstock.local.certificates import Authority
from penstock.local.processes import START_TIMEOUT_S, StackFailed
from penstock.local.stack import UpstreamEndpoint
from penstock.local.supervision import MAX_RESTARTS, ServiceRestart

_log = logging.getLogger("penstock.stack")
_DAYS: Final = 365
_LOOK_S: Final = 2.0
_AWAY_S: Final = 300.0
"""How long a forwarded port may lead nowhere, while its pod is started again."""
_PAUSE_S: Final = 1.0
_REMOVE_S: Final = 120.0
"""Seconds for the removal, beside what pods have to stop."""
_NEVER_INSTALLED_S: Final = 20.0
"""Seconds for the removal of what was never installed."""
_LASTING: Final = ("forbidden", "unauthorized", "must be logged in", "provide credentials")
"""What a cluster answers, in small letters, that is the same however often it is asked."""
_FORWARDS: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) -> ")
_WORKLOADS: Final = "statefulsets,daemonsets,pods"
_LEFT: Final = "secrets,persistentvolumeclaims"

T = TypeVar("T")


class KubernetesStack:
    """All services in a cluster, as `Stack(on="kubernetes")` says. Arguments are those of `Stack`."""

    def __init__(
        self,
        *,
        nodes: int | None = None,
        gpus: int = 0,
        values: Mapping[str, Any] | Path | str | None = None,
        kube_namespace: str | None = None,
        kube_context: str | None = None,
        state_dir: Path | str | None = None,
        model_dir: Path | str | None = None,
        engine: str = "numpy",
        engine_options: Mapping[str, str] = MappingProxyType({}),
        upstreams: Mapping[str, UpstreamEndpoint] = MappingProxyType({}),
        tokenizers: Mapping[str, Path | str] = MappingProxyType({}),
        settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        start_timeout: float = START_TIMEOUT_S,
        max_restarts: int = MAX_RESTARTS,
        on_restart: Callable[[ServiceRestart], None] | None = None,
    ) -> None:
        del max_restarts, on_restart  # the cluster restarts services, without end
        if nodes is not None and nodes < 1:
            raise ConfigurationError(f"nodes={nodes}: at least 1, or None for those of values", reason="STACK_OPTION")
        for name, given, place in (
            ("model_dir", model_dir, "a PersistentVolumeClaim, which values name: inference.model.claim"),
            ("engine", engine if engine != "numpy" else None, "named by values: inference.engine"),
            ("engine_options", engine_options, "in values: inference.engineOptions"),
            (
                "tokenizers",
                tokenizers,
                "a directory of the gates' image: settings={'interception': {'tokenizers': ...}}",
            ),
        ):
            if given:
                raise ConfigurationError(
                    f"{name} is a file of this machine, or of an engine here. On Kubernetes it is {place}.",
                    reason="STACK_OPTION",
                )
        self.id = f"penstock-{secrets.token_hex(3)}"
        """The release's name, which all that it has in the cluster begins with."""
        self.directory = Path(state_dir or Path(tempfile.gettempdir()) / self.id).absolute()
        """Where the connection file, the authority's certificate and logs of the forwarded ports are."""
        self._temporary = state_dir is None
        self.connection_file = self.directory / CONNECTION_FILE
        self.log_dir = self.directory / "logs"
        self.ingress_address = ""
        self.operator_token = secrets.token_hex(32)
        """The token that may call everything but sandbox services."""
        self.trainer_token = secrets.token_hex(32)
        """The token for a trainer in another process or language."""
        context = kube_context or ""
        self._inside = is_inside(context)
        self._values = chart_values(
            read_values(values), nodes=nodes, gpus=gpus, settings=settings, outside=not self._inside
        )
        self._settings = settings
        self._upstreams = {
            name: {"base_url": item.base_url, **({"api_key": item.api_key} if item.api_key else {})}
            for name, item in upstreams.items()
        }
        self._namespace = kube_namespace or ""
        self._tools = Tools(context)
        self._start_timeout = start_timeout
        self._release = Release(self.id, self._namespace, self._values)
        self._lock: int | None = None
        self._placed = False
        self._is_installed = False
        self._last = Progress(0, 0)
        self._away = ""
        """Why the cluster gave no answer at last; empty = it did."""
        self._addresses: dict[ServiceName, str] = {}
        self._forwards = TaskOwner()
        self._owner: asyncio.Task[Any] | None = None
        self._failure: StackFailed | None = None
        self._stopping = False

    @property
    def services(self) -> Sequence[ServiceName]:
        """All kinds of services that the release has."""
        return self._release.services

    @property
    def endpoints(self) -> Endpoints:
        """For `connect`, with the operator's token: by names in the cluster, else by forwarded ports."""
        addresses: dict[ServiceName, str] = {"inference": "", **self._addresses}
        return Endpoints(
            **addresses,
            token=self.operator_token,
            tls=Tls(self._authority_file),
            # Members are listed by their addresses in the cluster.
            discover=self._inside,
            origin=f"the stack {self.id}",
        )

    async def wait(self) -> None:
        """Waits forever; a failure cancels it, as it does everything inside the block."""
        await asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        limit = asyncio.timeout(self._start_timeout)
        try:
            async with limit:
                await self._start()
        except BaseException as error:
            slow = self._slow() if isinstance(error, TimeoutError) and limit.expired() else None
            failed = self._failure
            await self._stop(error)
            if isinstance(error, asyncio.CancelledError) and failed is not None:
                self._uncancel()
                raise failed from None
            if slow is not None:
                raise slow from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._failure
        await self._stop(error)
        if failure is not None:
            if isinstance(error, asyncio.CancelledError):
                self._uncancel()
            raise failure from None

    @property
    def _authority_file(self) -> Path:
        return self.directory / "ca.pem"

    def _uncancel(self) -> None:
        if self._owner is not None:
            self._owner.uncancel()

    def _fail(self, failure: StackFailed) -> None:
        """Ends the block with this failure."""
        self._failure = failure
        if self._owner is not None:
            self._owner.cancel()

    async def _start(self) -> None:
        self._tools.find()
        folder = chart()
        namespace = self._namespace or await self._tools.namespace()
        release = self._release = Release(self.id, namespace, self._values)
        authority = _authority()
        self._lock = hold_directory(self.directory)
        private_directory(self.log_dir)
        write_whole(self._authority_file, authority.certificate)
        tables = settings_tables(
            release,
            self._settings,
            self._upstreams,
            operator=self.operator_token,
            trainer=self.trainer_token,
            node=secrets.token_hex(32),
        )
        self._placed = True
        await self._tools.kubectl("create", "--filename=-", data=orjson.dumps(secrets_of(release, authority, tables)))
        place = (self.id, str(folder), f"--namespace={namespace}")
        self._is_installed = True
        await self._tools.helm("install", *place, "--values=-", data=orjson.dumps(release.values))
        await self._until_ready()
        self.ingress_address = f"{release.host('interception')}:{DEFAULT_INGRESS_PORT}"
        if self._inside:
            self._addresses = {name: f"{release.client_host(name)}:{DEFAULT_PORTS[name]}" for name in release.services}
            return
        ports: dict[ServiceName, asyncio.Future[int]] = {}
        for service in release.services:
            ports[service] = asyncio.get_running_loop().create_future()
            self._forwards.start(self._forward(service, ports[service]), f"penstock-forward-{service}")
        self._addresses = {service: f"127.0.0.1:{await port}" for service, port in ports.items()}

    async def _until_ready(self) -> None:
        release = self._release
        look = partial(self._tools.listed, _WORKLOADS, release.namespaces, release.selector)
        while True:
            listed = await self._until_done(look)
            self._last = progress(listed, len(release.services))
            if self._last.complete:
                return
            if self._last.hopeless:
                raise StackFailed(self._last.hopeless + await self._log_of_the_crashed(), reason="POD_FAILED")
            await asyncio.sleep(_LOOK_S)

    async def _log_of_the_crashed(self) -> str:
        if self._last.crashed is None:
            return ""
        namespace, pod, container = self._last.crashed
        words = (f"--namespace={namespace}", pod, f"--container={container}", "--previous", "--tail=20")
        try:
            return f" Its log ends with:\n{await self._tools.kubectl('logs', *words)}"
        except StackFailed as error:
            return f" Its log cannot be read: {error}"

    def _slow(self) -> StackFailed:
        last = self._last
        if last.complete:
            return StackFailed(
                f"After {self._start_timeout:.0f} s no port led to the services, which are ready: kubectl port-forward "
                "needs the right `create pods/portforward`. Or start the stack in a pod of the cluster.",
                reason="SERVICE_SLOW",
            )
        waits = (*last.waits, *([self._away] if self._away else []))
        why = f" {'; '.join(waits)}." if waits else ""
        return StackFailed(
            f"After {self._start_timeout:.0f} s {last.ready} of {last.wanted} pods were ready.{why} To look before the "
            f"end: kubectl -n {self._release.namespace} describe pods -l {self._release.selector}. To wait longer: "
            "Stack(start_timeout=...).",
            reason="SERVICE_SLOW",
        )

    async def _forward(self, service: ServiceName, first: "asyncio.Future[int]") -> None:
        """Keeps a port of this machine that leads to a pod of a service: the same one, for the time of the block."""
        loop = asyncio.get_running_loop()
        port, remote = "", DEFAULT_PORTS[service]
        words = ("port-forward", "--address=127.0.0.1", f"--namespace={self._release.namespace_of(service)}")
        alive_at = loop.time()
        log = self.log_dir / f"forward-{service}.log"
        while True:
            with os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab") as errors:
                process = await asyncio.create_subprocess_exec(
                    *self._tools.kubectl_command(*words, f"service/{self.id}-{service}", f"{port}:{remote}"),
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=errors,
                    start_new_session=True,  # an interrupt at the terminal is ours
                )
            has_forwarded = False
            try:
                if process.stdout is None:
                    raise AssertionError("started with a pipe")
                async for line in process.stdout:
                    if found := _FORWARDS.match(line.decode(errors="replace")):
                        has_forwarded = True
                        port = found[1]
                        if not first.done():
                            first.set_result(int(port))
                await process.wait()
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.terminate()
                    await process.wait()
            if has_forwarded:  # until now: it prints nothing while one connection lasts
                alive_at = loop.time()
            if loop.time() - alive_at > _AWAY_S:
                text = f"The port of {service} has led nowhere for {_AWAY_S:.0f} s; {log} says why."
                self._fail(StackFailed(text, reason="FORWARD_LOST"))
                return
            _log.warning("kubectl port-forward of %s ended and is started again", service)
            await asyncio.sleep(_PAUSE_S)

    async def _stop(self, error: BaseException | None) -> None:
        if self._stopping:
            return
        self._stopping = True
        try:
            await self._forwards.close()
            if self._placed:
                await self._remove(error)
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            if self._temporary:
                await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    async def _remove(self, error: BaseException | None) -> None:
        """Removes the release, its Secrets and volumes, and waits for the end of its pods.

        Raises:
            StackFailed: something is left; where the block has failed already, that is logged.
        """
        if error is not None:
            _log.warning(
                "What there is of the release %s is removed: %s", self._release.name, str(error) or "interrupted"
            )
        ends_claims = self._release.claims and self._is_installed
        # Without an installation there are no pods, and the cluster that did not take it may be away for good.
        limit = _NEVER_INSTALLED_S
        if self._is_installed:
            limit = (2 if ends_claims else 1) * self._release.stop_s + _REMOVE_S
        try:
            async with asyncio.timeout(limit):
                if ends_claims:
                    await self._end_claims()
                await self._remove_all()
        except (PenstockError, TimeoutError, asyncio.CancelledError) as cause:
            release = self._release
            deletions = [f"kubectl -n {name} delete {_LEFT} -l {release.selector}" for name in release.namespaces]
            by_hand = "; ".join([f"helm uninstall {release.name} -n {release.namespace}", *deletions])
            is_interrupted = isinstance(cause, asyncio.CancelledError)
            why = str(cause) or self._away or ("interrupted" if is_interrupted else "pods did not end in time")
            text = f"The release {release.name} is not wholly removed ({why}). By hand: {by_hand}"
            if is_interrupted:
                _log.error("%s", text)
                raise
            if error is None:
                raise StackFailed(text, reason="RELEASE_LEFT") from None
            _log.error("%s", text)

    async def _remove_all(self) -> None:
        release = self._release
        await self._until_done(self._uninstall)
        for namespace in release.namespaces:
            of_it = (f"--namespace={namespace}", f"--selector={release.selector}")
            await self._until_done(partial(self._tools.kubectl, "delete", _LEFT, *of_it, "--wait=false"))
        await self._until_gone(release.selector)

    async def _end_claims(self) -> None:
        """Ends drivers, then sandbox services, which delete the sandboxes that they have claimed.

        Without the release they have no right to do so. What does not end in time is removed with it all the same.
        """
        release = self._release
        services: tuple[ServiceName, ...] = ("driver", "sandbox")
        try:
            async with asyncio.timeout(release.stop_s):
                for service in services:
                    place = (f"statefulset/{release.name}-{service}", f"--namespace={release.namespace_of(service)}")
                    scale = partial(self._tools.kubectl, "scale", *place, "--replicas=0")
                    await self._until_done(partial(_if_there, scale))
                    await self._until_gone(f"{release.selector},{COMPONENT}={service}")
        except TimeoutError:
            _log.warning("pods of %s did not end in time: sandboxes that they claimed may be left", release.name)

    async def _until_gone(self, selector: str) -> None:
        look = partial(self._tools.listed, "pods", self._release.namespaces, selector)
        while True:
            if not await self._until_done(look):
                return
            await asyncio.sleep(_LOOK_S)

    async def _uninstall(self) -> None:
        release = self._release
        await _if_there(partial(self._tools.helm, "uninstall", release.name, f"--namespace={release.namespace}"))

    async def _until_done(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeats what the cluster has failed: its API server may be away for a while. The caller limits the time."""
        while True:
            try:
                answer = await ask()
            except StackFailed as error:
                if error.reason != "KUBERNETES_FAILED" or any(words in str(error).lower() for words in _LASTING):
                    raise
                if not self._away:
                    _log.warning("%s. It is tried again.", error)
                self._away = str(error)
            else:
                self._away = ""
                return answer
            await asyncio.sleep(_LOOK_S)


async def _if_there(remove: Callable[[], Awaitable[str]]) -> None:
    """Removes what may be absent: the failure that ends a stack may have come before the installation."""
    try:
        await remove()
    except StackFailed as error:
        if "not found" not in str(error):
            raise


def _authority() -> Authority:
    try:
        return Authority(_DAYS)
    except ImportError:
        raise ConfigurationError(
            "Services on many machines need certificates, and these a package: pip install 'penstock[credentials]'",
            reason="CRYPTOGRAPHY_MISSING",
        ) from None
