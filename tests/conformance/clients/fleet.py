"""Two of each service for the cases of many services; the network to most can fail."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import numpy as np
from tests.conformance.clients.proxies import Proxy
from tests.integration.driver.stack import TOKEN, Process
from tests.support.policy import FILES
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.client import Endpoints, GateRolloutHandle, Penstock, connect
from penstock.client.transport.endpoints import ServiceName
from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as pb_grpc

DRIVERS: Final = ("d0", "d1")
GATES: Final = ("g0", "g1")
NODES: Final = ("n0", "n1")
ENGINES: Final = ("e0", "e1")
_SERVICES: Final[Mapping[str, ServiceName]] = {"d": "driver", "g": "interception", "n": "sandbox", "e": "inference"}
_FIRST_UIDS: Final = 2_400_000


@dataclass(frozen=True)
class _Listed:
    """An engine as a gate lists it."""

    name: str
    state: str


@dataclass
class Fleet:
    """The services by name. Drivers learn of drivers and gates from files, as from a launcher; gates have a list of
    engines.
    """

    folder: Path
    processes: dict[str, Process] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    opened: dict[str, GateRolloutHandle] = field(default_factory=dict)
    """By the gate's name, the newest rollout that the runner opened there."""
    _clients: dict[str, Penstock] = field(default_factory=dict)
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _draining: set[str] = field(default_factory=set)
    _moves: int = 0
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    async def start(cls, folder: Path) -> Self:
        """Starts all; `stop` ends them."""
        fleet = cls(folder)
        try:
            await fleet._start()
        except BaseException:
            await fleet.stop()
            raise
        return fleet

    async def stop(self) -> None:
        """Ends all."""
        for task in self._asking.values():
            task.cancel()
        await self._stack.aclose()
        for process in reversed(self.processes.values()):
            await asyncio.to_thread(process.stop)

    async def _start(self) -> None:
        model = self.folder / "fleet-model"
        FILES.write(model)
        for name in ENGINES:
            script = self.folder / f"{name}.json"
            script.write_text(json.dumps({"strict": False, "turns": [{"reply": name, "repeat": True}]}))
            options = json.dumps({"script": str(script)})
            await self._run(name, model_dir=str(model), engine="scripted", engine_options=options)
            await self._through_a_proxy(name)
        engines = ",".join(f"{name}={self.proxies[name].address}" for name in ENGINES)
        for name in GATES:
            await self._run(name, inference_members=f"static:{engines}", inference_token=TOKEN)
        ingresses = json.dumps([self.processes[name].endpoints["ingress"] for name in GATES])
        for at, name in enumerate(NODES):
            peers = json.dumps({other: self.processes[other].address for other in NODES[:at]})
            first_uid = str(disjoint_uids() + _FIRST_UIDS * (at + 1))
            await self._run(name, allowed_upstreams=ingresses, first_uid=first_uid, peers=peers)
        nodes = ",".join(f"{name}={self.processes[name].address}" for name in NODES)
        for name in DRIVERS:
            await self._run(
                name,
                sandbox_members=f"static:{nodes}",
                sandbox_token=TOKEN,
                interception_members=f"file:{self.folder / 'gates.json'}",
                interception_token=TOKEN,
                driver_members=f"file:{self.folder / 'drivers.json'}",
                drain_s="0",
            )
        for name in (*DRIVERS, *GATES):
            await self._through_a_proxy(name)
        self._list("drivers.json", DRIVERS)
        await self.list_gates(GATES)

    async def _run(self, name: str, **settings: str) -> Process:
        there = self.folder / name
        there.mkdir()
        process = Process(_SERVICES[name[0]], there, {"name": name, **settings})
        await asyncio.to_thread(process.start)
        self.processes[name] = process
        return process

    async def _through_a_proxy(self, name: str) -> None:
        self.proxies[name] = await self._stack.enter_async_context(Proxy(self.processes[name].address))

    def addresses(self, driver: str) -> dict[str, str]:
        """What a client of one driver is given. The gate is one that it might have to do without; the sandbox service
        knows the address of the other one; the gates know the other engine.
        """
        return {
            "driver": self.proxies[driver].address,
            "interception": self.proxies["g0"].address,
            "sandbox": self.processes["n1"].address,
            "inference": self.proxies["e0"].address,
        }

    # What the runner does.

    async def list_gates(self, names: Sequence[str]) -> None:
        """Replaces the drivers' list of gates, and waits until both drivers have found all up."""
        self._list("gates.json", names)
        for driver in DRIVERS:
            await self._are(driver, "interception", dict.fromkeys(names, "up"))
            await self._are(driver, "driver", dict.fromkeys(DRIVERS, "up"))

    async def state(self, name: str, state: str) -> None:
        """Waits until the first driver says this of a service; of an engine, until both gates do."""

        async def said() -> bool:
            askers = GATES if name in ENGINES else ("d0",)
            listed = [await self._members(asked, _SERVICES[name[0]]) for asked in askers]
            return all((name, state) in [(item.name, item.state) for item in items] for items in listed)

        await eventually_async(said, f"{name} is {state}")

    async def push(self, engine: str, version: int) -> None:
        """Puts a policy version in force at one engine alone, as another trainer would."""
        await (await self._at(engine)).inference.update_weights(version, {"w": np.zeros(2, np.float32)})

    async def in_force(self) -> dict[str, int]:
        """The policy version of each engine."""
        return {name: (await (await self._at(name)).inference.info()).policy_version for name in ENGINES}

    async def paused(self) -> dict[str, bool]:
        """Whether each engine is paused."""
        return {name: (await (await self._at(name)).inference.info()).paused for name in ENGINES}

    async def kill(self, name: str) -> None:
        """kill -9."""
        self._dead.add(name)
        await asyncio.to_thread(self.processes[name].kill)

    async def restart(self, name: str) -> None:
        """On the same state and port."""
        await asyncio.to_thread(self.processes[name].start)
        self._dead.discard(name)

    async def move(self, driver: str) -> None:
        """Its host is gone, and its state directory was brought to another one: it is started and listed there."""
        process = self.processes[driver]
        await asyncio.to_thread(process.kill)
        await self.proxies[driver].refuse()
        self._moves += 1
        await asyncio.to_thread(process.move, self.folder / f"moved-{self._moves}")
        await asyncio.to_thread(process.start)
        self.proxies[driver] = await self._stack.enter_async_context(Proxy(process.address))
        self._clients.pop(driver, None)  # it has the old address
        self._list("drivers.json", DRIVERS)

    async def drain(self, name: str) -> None:
        """Has a driver take no new work."""
        self._draining.add(name)
        await (await self._at(name)).operations.drain("driver")

    async def heal(self) -> None:
        """As new, for the next case."""
        for name in sorted(self._dead):
            await self.restart(name)
        for proxy in self.proxies.values():
            await proxy.heal()
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()
        self.opened.clear()
        for name in self._draining:
            await (await self._at(name)).operations.undrain("driver")
        self._draining.clear()
        await self.list_gates(GATES)
        newest = max((await self.in_force()).values())
        for name, version in (await self.in_force()).items():
            await (await self._at(name)).inference.resume()
            if version < newest:
                await self.push(name, newest)
            await self.state(name, "up")

    async def open(self, gate: str, run_id: str) -> None:
        """A rollout at a gate alone, whose agent is the runner."""
        self.opened[gate] = await (await self._at(gate)).gate.open(run_id=run_id)

    def ask(self, gate: str, name: str) -> None:
        """A model call of that agent, which is repeated while the gate is away; `answered` waits for it."""
        self._asking[name] = asyncio.create_task(self._ask(self.opened[gate], name))

    async def answered(self, name: str) -> None:
        """Waits until the call has its answer."""
        async with asyncio.timeout(60):
            await self._asking.pop(name)

    async def calls(self, gate: str) -> dict[str, int]:
        """How many calls of that rollout are in each state."""
        found: dict[str, int] = {}
        async for call in (await self._at(gate)).gate.calls(self.opened[gate].rollout_id):
            found[call.state] = found.get(call.state, 0) + 1
        return found

    async def holds(self, gate: str) -> None:
        """Waits until the gate holds a call for a pause."""

        async def holds() -> bool:
            async for load in (await self._at(gate)).gate.watch(0.5):
                return load.paused_calls > 0
            return False

        await eventually_async(holds, f"{gate} holds a call")

    async def offers(self, gate: str, run_id: str, names: Sequence[str]) -> None:
        """Waits until the gate offers these tools to the agents of new rollouts."""
        client = (await self._at(gate)).gate

        async def offered() -> bool:
            async with await client.open(run_id=run_id) as rollout:
                return list(rollout.host_tools) == names

        await eventually_async(offered, f"{gate} offers {names}")

    async def has(self, driver: str, rollout_id: str) -> None:
        """Raises NotFound unless this very driver has the rollout."""
        await (await self._at(driver)).rollouts.get(rollout_id)

    async def _ask(self, rollout: GateRolloutHandle, name: str) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": name}]}
        headers = {"authorization": f"Bearer {rollout.token}", "x-stainless-retry-count": "0", "idempotency-key": name}
        async with aiohttp.ClientSession() as http:

            async def answered() -> bool:
                try:
                    async with http.post(
                        f"{rollout.base_url()}/chat/completions", json=body, headers=headers
                    ) as answer:
                        await answer.read()
                        return answer.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually_async(answered, f"the answer to {name}")

    async def _are(self, driver: str, kind: ServiceName, wanted: Mapping[str, str]) -> None:
        async def known() -> bool:
            members = await self._members(driver, kind)
            return {item.name: item.state for item in members} == wanted

        await eventually_async(known, f"{driver} knows {dict(wanted)}")

    async def _members(self, asked: str, kind: ServiceName) -> Sequence[Any]:
        """What a driver lists, or a gate: that has the list of engines."""
        ps = await self._at(asked)
        if asked not in GATES:
            return await ps.operations.members(kind)
        of = ps._services["interception"]
        stub = pb_grpc.OperationsServiceStub(of.channel)
        answer = await of.call(stub.GetServerInfo, pb.GetServerInfoRequest(), repeatable=True)
        return [_Listed(item.name, pb.MemberState.Name(item.state)[13:].lower()) for item in answer.members]

    async def _at(self, name: str) -> Penstock:
        """A client of one service, which no network of the cases disturbs."""
        if name not in self._clients:
            kind, address = _SERVICES[name[0]], self.processes[name].address
            where = Endpoints(
                driver=address if kind == "driver" else "",
                interception=address if kind == "interception" else "",
                sandbox="",
                inference=address if kind == "inference" else "",
                token=TOKEN,
                discover=False,
            )
            self._clients[name] = await self._stack.enter_async_context(connect(where))
        return self._clients[name]

    def _list(self, file: str, names: Sequence[str]) -> None:
        path, new = self.folder / file, self.folder / f".{secrets.token_hex(4)}"
        new.write_text(json.dumps({name: self.proxies[name].address for name in names}))
        new.replace(path)
