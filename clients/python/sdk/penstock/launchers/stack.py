"""`Stack`: the services on this machine, or on many that a cluster manager provides."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Protocol, Self

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import Endpoints, ServiceName
from penstock.local.processes import START_TIMEOUT_S
from penstock.local.stack import UpstreamEndpoint
from penstock.local.supervision import MAX_RESTARTS, ServiceRestart
from penstock.values.similar_names import did_you_mean


class Running(Protocol):
    """What a launcher makes: services for the time of a block."""

    connection_file: Path
    log_dir: Path
    trainer_token: str
    ingress_address: str

    @property
    def services(self) -> Sequence[ServiceName]:
        """The services of this machine, in starting order."""

    @property
    def endpoints(self) -> Endpoints:
        """For `connect`, within the block."""

    async def wait(self) -> None:
        """Waits forever; a failure cancels it, as it does everything inside the block."""

    async def __aenter__(self) -> Self:
        """Starts them. Raises StackFailed or ConfigurationError."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops them. Raises StackFailed, if that cancelled the block."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A cluster manager: the class of its stacks as `module:name`, and its own options, besides those of `LocalStack`.

    A class is imported when it is used: its package may be an extra.
    """

    stack: str
    options: frozenset[str]


_ON_A_CLUSTER: Final = frozenset({"nodes", "drivers", "gates", "engines", "gpus", "scratch"})

LAUNCHERS: Final[Mapping[str, Launcher]] = MappingProxyType(
    {
        "local": Launcher("penstock.local.stack:LocalStack", frozenset()),
        "ray": Launcher("penstock.launchers.on_ray:RayStack", _ON_A_CLUSTER | {"resources", "max_nodes"}),
        "slurm": Launcher("penstock.launchers.on_slurm:SlurmStack", _ON_A_CLUSTER),
        "kubernetes": Launcher(
            "penstock.launchers.on_kubernetes:KubernetesStack",
            frozenset({"nodes", "gpus", "values", "kube_namespace", "kube_context"}),
        ),
    }
)


def launched(on: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> Running:
    """Returns a stack that is not yet started.

    Args:
        on: one of LAUNCHERS.
        own: the launcher's own options; None = not given.
        options: as in `LocalStack`.

    Raises:
        ConfigurationError: there is no such launcher, or an option is not its own.
    """
    if on not in LAUNCHERS:
        meant = did_you_mean(on, LAUNCHERS) or ":"
        raise ConfigurationError(
            f"There is no {on!r}{meant} use one of {', '.join(LAUNCHERS)}.", reason="STACK_ON_UNKNOWN"
        )
    launcher = LAUNCHERS[on]
    given = {name: value for name, value in own.items() if value is not None}
    if wrong := sorted(given.keys() - launcher.options):
        raise ConfigurationError(f"{wrong[0]} is not an option of a stack on {on}.", reason="STACK_OPTION")
    module, _, name = launcher.stack.partition(":")
    made: Running = getattr(importlib.import_module(module), name)(**given, **options)
    return made


class Stack:
    """`async with Stack(on="ray", nodes=2) as stack, connect(stack.endpoints) as ps: ...`

    Args:
        on: local (this machine), ray (the cluster that this program is connected to, or the one of this machine),
            slurm (the allocation of this job), or kubernetes (the cluster of kubectl's configuration, or of this pod).
        nodes: how many machines have a sandbox service; None = all, on Ray also those that come later; on Kubernetes
            as in `values`. Not for local.
        drivers: how many drivers there are, at least 1; None = 1, which is here. On Ray and Slurm, as the next two.
        gates: how many gates there are, at least 1; None = 1, which is here.
        engines: how many inference services there are, at least 1; None = 1, which is here if it has no GPUs. Of each
            kind those after the first are on other machines, each on one of its own if there are enough.
        gpus: GPUs of each inference service, all of which then run where the cluster manager has them; None = 0.
        resources: on Ray, what each sandbox service reserves of a machine, such as {"CPU": 8}; also how machines are
            chosen, by a resource of your own: {"CPU": 8, "sandboxes": 1}.
        max_nodes: on Ray without `nodes`, the most machines that its autoscaler is asked for, by how full the sandbox
            services are; None = it is not asked.
        values: on Kubernetes, values of the Helm chart (images, the model's claim), or the YAML file with them.
        kube_namespace: on Kubernetes, an existing namespace; None = the context's, or this pod's.
        kube_context: on Kubernetes, a context of the kubeconfig; None = its current one, or this pod's account.
        scratch: directory on a local disk of each machine for the services' state, which is removed at the end; None =
            the temporary directory.
        state_dir: for the connection file and logs; on Slurm a directory that all nodes share. None = chosen.
        model_dir, engine, engine_options, upstreams, tokenizers, settings, start_timeout, max_restarts, on_restart: as
            in `LocalStack`. On Kubernetes model, engine and tokenizers are in `values`; the cluster restarts services.

    Raises:
        ConfigurationError: there is no such cluster manager, an option is not for it, or it cannot be used.
        StackFailed: a service could not be started; the rest of the block raises it where one died too often.
    """

    def __init__(
        self,
        *,
        on: str = "local",
        nodes: int | None = None,
        drivers: int | None = None,
        gates: int | None = None,
        engines: int | None = None,
        gpus: int | None = None,
        resources: Mapping[str, float] | None = None,
        max_nodes: int | None = None,
        values: Mapping[str, Any] | Path | str | None = None,
        kube_namespace: str | None = None,
        kube_context: str | None = None,
        scratch: Path | str | None = None,
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
        self._stack = launched(
            on,
            {
                "nodes": nodes,
                "drivers": drivers,
                "gates": gates,
                "engines": engines,
                "gpus": gpus,
                "scratch": scratch,
                "resources": resources,
                "max_nodes": max_nodes,
                "values": values,
                "kube_namespace": kube_namespace,
                "kube_context": kube_context,
            },
            {
                "state_dir": state_dir,
                "model_dir": model_dir,
                "engine": engine,
                "engine_options": engine_options,
                "upstreams": upstreams,
                "tokenizers": tokenizers,
                "settings": settings,
                "start_timeout": start_timeout,
                "max_restarts": max_restarts,
                "on_restart": on_restart,
            },
        )

    @property
    def endpoints(self) -> Endpoints:
        """For `connect`, within the block."""
        return self._stack.endpoints

    async def wait(self) -> None:
        """Waits forever; a service that died too often cancels it, as it does everything inside the block."""
        await self._stack.wait()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
