"""A stack over many machines: a driver, a gate and an engine here, what else there is where a cluster manager puts it.

What is the same for all cluster managers: one authority and its certificates, the tokens, TLS on every hop, and the
membership, a file for each kind of service with addresses by name. A cluster manager starts one process for each
order, which reports where its service listens; `joined` writes that into the files here, and they are sent to the
machines whose services read them too. It carries no call, and no service asks it for anything.
"""

import asyncio
import logging
import os
import secrets
import shutil
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from penstock.client.errors import ConfigurationError
from penstock.client.transport.atomic_files import write_whole
from penstock.client.transport.endpoints import CONNECTION_FILE, SERVICES, Endpoints, ServiceName, Tls
from penstock.launchers.directories import hold_directory
from penstock.launchers.orders import (
    GATE_NAME,
    MEMBER_FILES,
    WIDE,
    Order,
    bracketed,
    dump_members,
    member_settings,
    scratch_root,
)
from penstock.local.certificates import Authority
from penstock.local.processes import START_TIMEOUT_S, StackFailed
from penstock.local.stack import LocalStack, UpstreamEndpoint
from penstock.local.supervision import MAX_RESTARTS, ServiceRestart

_log = logging.getLogger("penstock.stack")

_LETTERS: Final[Mapping[ServiceName, str]] = MappingProxyType({"driver": "d", "interception": "g", "inference": "e"})
"""The first letter of the names of a kind: the driver here is d0."""
_PLURALS: Final[Mapping[ServiceName, str]] = MappingProxyType(
    {"sandbox": "sandbox services", "driver": "drivers", "interception": "gates", "inference": "engines"}
)
MAX_OF_A_KIND: Final = 100
"""Most drivers, gates or engines of one stack."""
_FIRST_REMOVED: Final[tuple[ServiceName, ...]] = ("driver",)
_LAST_REMOVED: Final[tuple[ServiceName, ...]] = ("interception", "inference", "sandbox")
_DAYS: Final = 365
_FIRST_UID: Final = 200_000
_UIDS: Final = 4096
_CERTIFICATE: Final = "head.pem"
_KEY: Final = "head.key"


class ClusterStack(LocalStack):
    """Driver d0, gate g0 and, without `gpus`, engine e0 here; the rest where the cluster manager puts it.

    Args:
        nodes: how many machines have a sandbox service; None = all that the cluster manager has.
        drivers: how many drivers there are; those after the first are placed, as are gates and engines.
        gates: how many gates there are.
        engines: how many inference services there are.
        gpus: GPUs of each inference service, all of which the cluster manager then places by them; 0 = none.
        host: address of this machine for the others; None = the cluster manager's.
        scratch: directory on a local disk of each machine for the services' state; None = the temporary directory.
        state_dir: for the connection file, the authority and logs; None = in `scratch`.
        other arguments: as in `LocalStack`. Of `settings`, `sandbox` is for the service of each machine.
    """

    def __init__(
        self,
        *,
        nodes: int | None = None,
        drivers: int = 1,
        gates: int = 1,
        engines: int = 1,
        gpus: int = 0,
        host: str | None = None,
        scratch: Path | str | None = None,
        model_dir: Path | str | None = None,
        engine: str = "numpy",
        engine_options: Mapping[str, str] = MappingProxyType({}),
        upstreams: Mapping[str, UpstreamEndpoint] = MappingProxyType({}),
        tokenizers: Mapping[str, Path | str] = MappingProxyType({}),
        ports: Mapping[str, int] = MappingProxyType({}),
        state_dir: Path | str | None = None,
        settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        start_timeout: float = START_TIMEOUT_S,
        max_restarts: int = MAX_RESTARTS,
        on_restart: Callable[[ServiceRestart], None] | None = None,
    ) -> None:
        if nodes is not None and nodes < 1:
            raise ConfigurationError(f"nodes={nodes}: at least 1, or None for all machines", reason="STACK_OPTION")
        for option, count in (("drivers", drivers), ("gates", gates), ("engines", engines)):
            if not 1 <= count <= MAX_OF_A_KIND:
                raise ConfigurationError(f"{option}={count}: from 1 to {MAX_OF_A_KIND}", reason="STACK_OPTION")
        if engines > 1 and model_dir is None:
            raise ConfigurationError(f"engines={engines}: an inference service needs model_dir", reason="STACK_OPTION")
        if gpus < 0 or (gpus and model_dir is None):
            raise ConfigurationError(
                f"gpus={gpus}: they are for inference services, which need model_dir", reason="STACK_OPTION"
            )
        self.id = f"penstock-{secrets.token_hex(4)}"
        """In the names of this stack's processes and directories, on all machines."""
        self.nodes = nodes
        self.gpus = gpus
        self.host = host or ""
        """Address of this machine for the others, once the cluster manager is found."""
        self._counts: dict[ServiceName, int] = {"sandbox": nodes or 1, "interception": gates, "driver": drivers}
        if model_dir is not None:
            self._counts["inference"] = engines
        self.members: dict[ServiceName, dict[str, str]] = {kind: {} for kind in self._counts}
        """Addresses of the services that have been ready, by kind and name."""
        self._scratch = scratch_root(scratch)
        head = self._scratch / f"{self.id}-head"
        self.directory = Path(state_dir).absolute() if state_dir is not None else head
        """Where the connection file and the logs are."""
        super().__init__(
            model_dir=model_dir,
            engine=engine,
            engine_options=engine_options,
            upstreams=upstreams,
            tokenizers=tokenizers,
            ports=ports,
            state_dir=head,
            log_dir=self.directory / "logs",
            settings=settings,
            start_timeout=start_timeout,
            max_restarts=max_restarts,
            on_restart=on_restart,
        )
        self.connection_file = self.directory / CONNECTION_FILE
        self._node_token = secrets.token_hex(32)
        self._made: Authority | None = None
        self._directory_lock: int | None = None
        self._is_ours = False
        """Whether no other stack has `directory`."""
        self._given_up: set[tuple[ServiceName, str]] = set()
        self._were_ready: set[tuple[ServiceName, str]] = set()
        self._started = False
        """Whether all was ready once that the block waits for."""
        self._changes = 0
        """How often `members` has changed."""
        self._changed = asyncio.Event()

    @abstractmethod
    async def find(self) -> None:
        """Finds the cluster manager, and sets `host` where it is empty.

        Raises:
            ConfigurationError: it cannot be used.
        """

    @abstractmethod
    async def place(self, services: Mapping[str, ServiceName]) -> None:
        """Has services started, each on a machine of its own that is not this one, where there are enough.

        Inference services among them are put where their GPUs are, if they have any. For each, `joined` is called when
        it is ready, and again wherever it is started anew; while it runs, it is sent what `member_lists` yields.
        """

    @abstractmethod
    async def place_nodes(self) -> None:
        """Has sandbox services started. For each, `joined` is called when it is ready, and after each restart."""

    @abstractmethod
    async def remove(self, kinds: Collection[ServiceName]) -> None:
        """Stops what was placed of these kinds, with all that its sandboxes have. Nothing may have been placed."""

    @abstractmethod
    async def close(self) -> None:
        """Ends what is left of the use of the cluster manager, once all is removed."""

    def hint(self) -> str:
        """Returns why machines may be missing, for an error: a sentence that begins with a blank."""
        return ""

    @property
    def services(self) -> Sequence[ServiceName]:
        """The services of this machine, in starting order."""
        here: tuple[ServiceName, ...] = ("inference",) if self._model_dir is not None and not self.gpus else ()
        return (*here, "interception", "driver")

    @property
    def placed(self) -> Mapping[str, ServiceName]:
        """Kinds, by name, of the services that the cluster manager places, but for sandbox services."""
        return {
            f"{_LETTERS[kind]}{number}": kind
            for kind, count in self._counts.items()
            if kind != "sandbox"
            for number in range(1 if kind in self.services else 0, count)
        }

    @property
    def endpoints(self) -> Endpoints:
        """For `connect`: the operator's token, and the authority's certificate, a file of this machine."""
        of_others = {kind: next(iter(self.members.get(kind, {}).values()), "") for kind in SERVICES}
        addresses: dict[ServiceName, str] = {**of_others, **self._addresses}
        return Endpoints(
            **addresses,
            token=self.operator_token,
            tls=Tls(self._authority_file),
            discover=True,
            origin=f"the stack {self.id}",
        )

    def order(
        self, name: str, service: ServiceName, hosts: Mapping[str, str], number: int = 0, start: int = 0
    ) -> Order:
        """Returns the order for a machine.

        Args:
            name: of the service, such as n0.
            service: its kind.
            hosts: addresses of the machines it may run on; see Order.
            number: of the machine, from 0.
            start: how often it was started on other machines before; each start has a state of its own.
        """
        settings: dict[str, Any]
        if service == "sandbox":
            more = dict(self._more_settings.get(service, {}))
            uids = int(more.get("uid_count", _UIDS))
            settings = {
                "operator_token": self._node_token,
                "trainer_token": self.trainer_token,
                # Gates come and go; only one of this authority can answer by this name.
                "allowed_upstreams": [f"tls:{GATE_NAME}@*"],
                **more,
                "uid_count": uids,
                # Two machines of a cluster may be one: then their sandboxes must not be the same users.
                "first_uid": int(more.get("first_uid", _FIRST_UID)) + number * uids,
            }
        else:
            settings = self._common_settings(service)
            for ours in ("port", "ingress_port", "state_dir"):
                settings.pop(ours, None)
        names = [GATE_NAME] if service == "interception" else []
        signed = self._authority.sign(name, [name, *names, "localhost", "127.0.0.1", *hosts.values()])
        return Order(
            name=name,
            service=service,
            settings=settings,
            hosts=hosts,
            members=self.members,
            authority=self._authority.certificate.decode(),
            certificate=signed.certificate.decode(),
            key=signed.key.decode(),
            scratch=str(self._scratch / "-".join((self.id, service, name, *([str(start)] if start else [])))),
            log_dir=self.log_dir_of(name),
            start_timeout=self._start_timeout,
            stop_timeout=self.stop_timeout,
            max_restarts=self._max_restarts,
        )

    def log_dir_of(self, name: str) -> str | None:
        """Returns where another machine's service logs; None = beside its state, and removed with it."""
        return None

    def joined(self, name: str, service: ServiceName, address: str) -> None:
        """Records that a service is ready, at first or again."""
        if not self._stopping:
            self._were_ready.add((service, name))
            self.members[service][name] = address
            self._members_changed(service)

    def was_ready(self, name: str, service: ServiceName) -> bool:
        """Whether a service was ready once and is not abandoned."""
        return (service, name) in self._were_ready - self._given_up

    def left(self, name: str, service: ServiceName) -> None:
        """Records that a service is not there, until it joins again."""
        if self.members[service].pop(name, None) is not None and not self._stopping:
            self._members_changed(service)

    def forget(self, name: str, service: ServiceName) -> None:
        """Forgets a service that does not come back: another one may get its name, and is judged for itself."""
        self.left(name, service)
        self._given_up.discard((service, name))
        self._were_ready.discard((service, name))

    def gave_up(self, name: str, service: ServiceName, text: str) -> None:
        """Handles that a service of another machine has failed for good; see `lost_for_good`."""
        why = f"The {service} service {name} failed: {text}"
        self.lost_for_good(name, service, StackFailed(why, reason="SERVICE_DIED"))

    def lost_for_good(self, name: str, service: ServiceName, failure: StackFailed) -> None:
        """Handles that a service of another machine has failed for good.

        The stack ends if no other of its kind is left, or if it has not started yet and too few of its kind are ready.
        """
        if (service, name) in self._given_up or self._stopping or self._failure is not None:
            return
        self._given_up.add((service, name))
        needed = 1 if self._started else (self._counts | {"sandbox": self.nodes or 1})[service]
        if len(self.members[service].keys() - {name}) >= needed:
            _log.error("%s", failure)
            self.left(name, service)
        else:
            self._fail(failure)

    async def member_lists(self) -> AsyncGenerator[bytes, None]:
        """Yields all members as `dump_members` has them, and again after changes. Never ends."""
        while True:
            number = self._changes
            yield dump_members(self.members)
            while self._changes == number:
                await self._next_change()

    def settings_of(self, service: ServiceName) -> dict[str, Any]:
        """See ServiceProcesses."""
        certificate, key = str(self.private / _CERTIFICATE), str(self.private / _KEY)
        table: dict[str, Any] = {
            "name": f"{_LETTERS[service]}0",
            "host": WIDE,
            "tls_cert": certificate,
            "tls_key": key,
            **member_settings(service, self.private, self.members),
        }
        authority = str(self._authority_file)
        if service == "interception":
            table |= {
                "ingress_host": WIDE,
                "ingress_address": f"tls:{GATE_NAME}@{bracketed(self.host)}:0",
                "ingress_tls_cert": certificate,
                "ingress_tls_key": key,
                "inference_ca": authority,
            }
        elif service == "driver":
            table |= {"services_ca": authority}
        elif service == "inference":
            table |= {"pool_ca": authority}
        return table | self._common_settings(service)

    def _common_settings(self, service: ServiceName) -> dict[str, Any]:
        """Returns the settings that a service of this kind has on each machine, and those of the machine alone."""
        table = super().settings_of(service)
        if service == "interception" and "inference" in self.members:
            table.setdefault("inference_token", self.operator_token)
        elif service == "inference" and self._counts["inference"] == 1:
            table["pool_members"] = ""  # what engines keep for others costs disk
        elif service == "driver":
            table["sandbox_token"] = self._node_token
        return table

    def reached_at(self, listening: str) -> str:
        """See ServiceProcesses."""
        return f"{bracketed(self.host)}:{listening.rpartition(':')[2]}"

    @property
    def _authority(self) -> Authority:
        if self._made is None:
            raise AssertionError("made at the start")
        return self._made

    @property
    def _authority_file(self) -> Path:
        return self.directory / "ca.pem"

    def _members_changed(self, service: ServiceName) -> None:
        self.keep(MEMBER_FILES[service], orjson.dumps(self.members[service]))
        self._changes += 1
        self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _start_all(self) -> None:
        await self.find()
        self._prepare()
        if self.directory != self.state_dir:  # which is held already
            self._directory_lock = hold_directory(self.directory)
        self._is_ours = True
        self._certify()
        try:
            async with asyncio.timeout(self._start_timeout):
                await self._start_each()
        except TimeoutError:
            counts = self._counts | {"sandbox": self.nodes or 1}
            ready = {kind: len(self.members[kind]) for kind in counts}
            what = ", ".join(f"{ready[kind]} of {counts[kind]} {_PLURALS[kind]}" for kind in counts)
            raise StackFailed(
                f"After {self._start_timeout:.0f} s {what} were ready.{self.hint()}", reason="SERVICE_SLOW"
            ) from None
        self._started = True

    async def _start_each(self) -> None:
        if self.placed:
            await self.place(self.placed)
        await self.place_nodes()
        for service in self.services:
            await self._start(service)
            self.joined(f"{_LETTERS[service]}0", service, self._addresses[service])
        counts = self._counts | {"sandbox": self.nodes or 1}
        while any(len(self.members[kind]) < count for kind, count in counts.items()):
            await self._next_change()

    def _certify(self) -> None:
        """Makes the authority, and what the services of this machine and the clients need of it."""
        try:
            self._made = Authority(_DAYS)
        except ImportError:
            raise ConfigurationError(
                "Services on many machines need certificates, and these a package: pip install 'penstock[credentials]'",
                reason="CRYPTOGRAPHY_MISSING",
            ) from None
        write_whole(self._authority_file, self._made.certificate)
        signed = self._made.sign("penstock", sorted({self.host, GATE_NAME, "localhost", "127.0.0.1"}))
        self.keep(_CERTIFICATE, signed.certificate)
        self.keep(_KEY, signed.key)
        for kind in self.members:
            self._members_changed(kind)

    async def _stop(self) -> None:
        self._stopping = True
        try:
            await self.remove(_FIRST_REMOVED)  # while what they have to release elsewhere is there
            await super()._stop()
        finally:
            try:
                await self.remove(_LAST_REMOVED)
                await self.close()
            finally:
                if self._directory_lock is not None:
                    os.close(self._directory_lock)
                    self._directory_lock = None
                await asyncio.to_thread(shutil.rmtree, self.state_dir, ignore_errors=True)
