"""A stack in a Ray cluster: a named actor for each service that is not here.

Ray places and restarts the actors. Those of sandbox services, with `nodes`, are in the bundles of a placement group,
each on a machine of its own, for which an autoscaler adds machines; without, one is bound to each machine's resource of
its own (`node:ADDRESS`), and machines that come later get one too: with `max_nodes` the autoscaler is asked for as many
as the sandbox services' load needs. Drivers, gates and engines are in a placement group
that spreads them as far as there are machines. The actors end with the process that has the stack, and their services.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.errors import ConfigurationError, PenstockError
from penstock.client.transport.background import TaskOwner
from penstock.client.transport.endpoints import ServiceName, Tls
from penstock.launchers.cluster import ClusterStack
from penstock.launchers.growth import NodeReader, wanted
from penstock.launchers.ray_actor import NodeActor

_log = logging.getLogger("penstock.stack")
_RESERVED: Final = {"CPU": 1.0}
"""What a sandbox service reserves by default, and a driver, a gate or an engine without GPUs always."""
_LOOK_S: Final = 2.0
"""How often the machines of the cluster are listed, and an actor that does not answer is asked again."""
_GONE_S: Final = 300.0
"""How long a machine may be away before its actor is abandoned."""
_STOP_S: Final = 45.0
_BOUND: Final = 0.001
"""Amount of a machine's own resource that binds an actor to it."""


@dataclass(eq=False, slots=True)
class _Slot:
    """One actor. `address` is of the machine that it is bound to, empty where Ray chooses."""

    name: str
    service: ServiceName
    number: int
    actor: Any
    address: str = ""
    gone_at: float | None = None
    task: asyncio.Task[None] | None = None
    is_ordered: bool = False
    """Whether an order was sent, so that there may be something to stop and to remove."""


class RayStack(ClusterStack):
    """See `ClusterStack`.

    Args:
        resources: what each sandbox service reserves of a machine; None = one CPU.
        max_nodes: the most machines that Ray's autoscaler is asked for; None = it is not asked. Not with `nodes`.
        options: of `ClusterStack`.
    """

    def __init__(
        self, *, resources: Mapping[str, float] | None = None, max_nodes: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if max_nodes is not None and (self.nodes is not None or max_nodes < 1):
            raise ConfigurationError(
                f"max_nodes={max_nodes}: at least 1, and without nodes, which is a fixed number", reason="STACK_OPTION"
            )
        self._max_nodes = max_nodes
        self._asked = 0
        """For how many machines the autoscaler is asked."""
        self._resources = dict(_RESERVED if resources is None else resources)
        self._slots: list[_Slot] = []
        self._groups: list[Any] = []
        self._connected = False
        self._here = ""
        self._following = TaskOwner()
        self._watching = TaskOwner()

    async def find(self) -> None:
        """See ClusterStack."""
        try:
            import ray
        except ImportError:
            raise ConfigurationError(
                "A stack on Ray needs Ray: pip install 'penstock[ray]', in the cluster's version.", reason="RAY_MISSING"
            ) from None
        if not ray.is_initialized():
            try:
                await asyncio.to_thread(ray.init, address="auto", log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError:
                raise ConfigurationError(
                    "No Ray cluster runs here: connect to one first (ray.init), set RAY_ADDRESS, or start one with "
                    "`ray start --head`.",
                    reason="RAY_NOT_RUNNING",
                ) from None
            self._connected = True
        from ray.util import get_node_ip_address

        self._here = str(await asyncio.to_thread(get_node_ip_address))
        self.host = self.host or self._here

    async def place(self, services: Mapping[str, ServiceName]) -> None:
        """See ClusterStack."""
        reserved = [
            {"GPU": float(self.gpus)} if kind == "inference" and self.gpus else _RESERVED for kind in services.values()
        ]
        # The first bundle is for what is here, so that the others are spread over other machines.
        group = await self._grouped([{f"node:{self._here}": _BOUND}, *reserved], "SPREAD", "services")
        for number, (name, kind) in enumerate(services.items()):
            actor = self._actor(name, reserved[number], scheduling_strategy=_bundle(group, number + 1))
            self._start_slot(_Slot(name, kind, number, actor))

    async def place_nodes(self) -> None:
        """See ClusterStack."""
        if self.nodes is None:
            self._watching.start(self._watch_machines(), "penstock-ray-machines")
            if self._max_nodes is not None:
                self._watching.start(self._ask_for_machines(self._max_nodes), "penstock-ray-growth")
            return
        group = await self._grouped([self._resources] * self.nodes, "STRICT_SPREAD", "nodes")
        for number in range(self.nodes):
            actor = self._actor(f"n{number}", self._resources, scheduling_strategy=_bundle(group, number))
            self._start_slot(_Slot(f"n{number}", "sandbox", number, actor))

    async def remove(self, kinds: Collection[ServiceName]) -> None:
        """See ClusterStack."""
        if "sandbox" in kinds:
            await self._watching.close()
            if self._asked:
                await self._ask(0)
        ending = [slot for slot in self._slots if slot.service in kinds]
        for slot in ending:
            self._slots.remove(slot)
            if slot.task is not None:
                slot.task.cancel()
        await asyncio.gather(*(self._removed(slot) for slot in ending))

    async def close(self) -> None:
        """See ClusterStack."""
        await self._following.close()
        if self._groups:
            from ray.util.placement_group import remove_placement_group

            for group in self._groups:
                await asyncio.to_thread(remove_placement_group, group)
        if self._connected:
            import ray

            await asyncio.to_thread(ray.shutdown)

    def hint(self) -> str:
        """See ClusterStack."""
        return (
            f" A sandbox service reserves {self._resources} of a machine of its own: `ray status` shows what is free,"
            " and `ray list actors` which actors wait."
        )

    async def _grouped(self, bundles: list[dict[str, float]], strategy: str, what: str) -> Any:
        """Returns a new placement group, which Ray places now or later."""
        from ray.util.placement_group import placement_group

        name = f"{self.id}-{what}"
        group = await asyncio.to_thread(placement_group, bundles, strategy=strategy, name=name)
        self._groups.append(group)
        return group

    def _actor(self, name: str, resources: Mapping[str, float], **options: Any) -> Any:
        """Returns a new actor, which Ray places now or later, and restarts without end."""
        import ray

        others = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU", "memory")}
        reserved = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
        if "memory" in resources:
            reserved["memory"] = resources["memory"]
        made = ray.remote(NodeActor)
        return made.options(name=f"{self.id}-{name}", max_restarts=-1, **reserved, **options).remote()

    def _start_slot(self, slot: _Slot) -> None:
        self._slots.append(slot)
        slot.task = self._following.start(self._follow(slot), f"penstock-ray-{slot.name}")

    async def _follow(self, slot: _Slot) -> None:
        """Gives an actor its order, again after each restart, until its service has died too often."""
        from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

        while True:
            try:
                host = await slot.actor.host.remote()
                order = self.order(slot.name, slot.service, {"": host}, slot.number)
                slot.is_ordered = True
                self.joined(slot.name, slot.service, await slot.actor.run.remote(order.dumps()))
                text = await self._until_failed(slot)
            except (ActorDiedError, RayTaskError) as error:
                text = str(error.cause if isinstance(error, RayTaskError) else error)
            except RayActorError as error:
                _log.info("the actor of %s is away: %s", slot.name, error)
                await asyncio.sleep(_LOOK_S)
                continue
            except PenstockError as error:
                text = str(error)
            self.gave_up(slot.name, slot.service, text)
            return

    async def _until_failed(self, slot: _Slot) -> str:
        """Sends an actor the members until its service has died too often; returns how. Raises RayActorError."""
        failing = asyncio.ensure_future(_awaited(slot.actor.failure.remote()))
        telling = asyncio.create_task(self._tell(slot), name=f"penstock-ray-{slot.name}-members")
        try:
            await asyncio.wait([failing, telling], return_when=asyncio.FIRST_COMPLETED)
            return failing.result() if failing.done() else telling.result()
        finally:
            for task in (failing, telling):
                task.cancel()
            await asyncio.wait([failing, telling])

    async def _tell(self, slot: _Slot) -> str:
        """Never returns. Raises RayActorError, after which the actor gets an order with the members of then."""
        async with aclosing(self.member_lists()) as changes:
            async for members in changes:
                if slot.service != "sandbox":
                    await slot.actor.take.remote(members)
        raise AssertionError("the lists have no end")

    async def _watch_machines(self) -> None:
        """Has one actor on each machine that has what a sandbox service reserves."""
        import ray

        loop = asyncio.get_running_loop()
        while True:
            listed = await asyncio.to_thread(ray.nodes)
            living = {item["NodeManagerAddress"]: item["Resources"] for item in listed if item["Alive"]}
            bound = {slot.address: slot for slot in self._slots if slot.address}
            for address, has in sorted(living.items()):
                enough = all(has.get(name, 0) >= amount for name, amount in self._resources.items())
                if address not in bound and enough:
                    number = self._free_number()
                    resources = {**self._resources, f"node:{address}": _BOUND}
                    actor = self._actor(f"n{number}", resources)
                    self._start_slot(_Slot(f"n{number}", "sandbox", number, actor, address))
            for address, slot in bound.items():
                if address in living:
                    slot.gone_at = None
                elif slot.gone_at is None:
                    slot.gone_at = loop.time()
                elif loop.time() - slot.gone_at > _GONE_S:
                    await self._retire(slot)
            await asyncio.sleep(_LOOK_S)

    async def _ask_for_machines(self, most: int) -> None:
        """Has Ray's autoscaler add machines while what runs and waits in sandbox services needs them."""
        reader = NodeReader(self._node_token, Tls(self._authority_file))
        try:
            while True:
                if (count := wanted(await reader.read(self.members["sandbox"]), most)) != self._asked:
                    await self._ask(count)
                await asyncio.sleep(_LOOK_S)
        finally:
            await reader.close()

    async def _ask(self, machines: int) -> None:
        """Replaces what the cluster's autoscaler was asked for; Ray knows one such request of all its programs."""
        from ray.autoscaler.sdk import request_resources
        from ray.exceptions import RayError

        try:
            await asyncio.to_thread(request_resources, bundles=[dict(self._resources)] * machines)
        except RayError as error:
            _log.warning("the autoscaler could not be asked for %d machines: %s", machines, error)
            return
        _log.info("the autoscaler is asked for %d machines, before for %d", machines, self._asked)
        self._asked = machines

    def _free_number(self) -> int:
        used = {slot.number for slot in self._slots if slot.service == "sandbox"}
        return next(number for number in range(len(used) + 1) if number not in used)

    async def _retire(self, slot: _Slot) -> None:
        """Abandons an actor whose machine does not come back."""
        self._slots.remove(slot)
        if slot.task is not None:
            slot.task.cancel()
        await self._removed(slot, graceful=False)
        self.forget(slot.name, slot.service)

    async def _removed(self, slot: _Slot, *, graceful: bool = True) -> None:
        import ray
        from ray.exceptions import RayError

        if graceful and slot.is_ordered:
            try:
                async with asyncio.timeout(_STOP_S):
                    await slot.actor.stop.remote()
            except (RayError, TimeoutError) as error:
                _log.warning("the %s service %s could not be asked to stop: %s", slot.service, slot.name, error)
        with suppress(RayError, ValueError):
            await asyncio.to_thread(ray.kill, slot.actor, no_restart=True)


async def _awaited(reference: Any) -> str:
    return str(await reference)


def _bundle(group: Any, number: int) -> Any:
    """Returns the strategy that places an actor in a bundle of a group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
