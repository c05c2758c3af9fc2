"""A client outside the services' network, which reaches them by forwarded ports and not by their addresses."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, Process
from tests.integration.driver.test_service import echo_agent
from tests.support.services.stack import disjoint_uids

from penstock.client import Penstock, Task, Tokenizer, connect
from penstock_chassis.membership.door import Door

_TASK = Task(task_id="echo", instruction="hello there")


@dataclass(frozen=True, slots=True)
class Services:
    """A driver that has lists with one member of each kind, and the addresses of a second gate."""

    addresses: dict[str, str]
    other_gate: str


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("forwarded")
    with ExitStack() as stack:

        def start(kind: str, name: str, **settings: str) -> Process:
            (folder / name).mkdir()
            process = Process(kind, folder / name, {"name": name, **settings})
            process.start()
            stack.callback(process.stop)
            return process

        tokenizers = json.dumps({"tiny": str(tokenizer_dir)})
        gate, other = (
            start("interception", name, inference_address="", tokenizers=tokenizers) for name in ("g0", "g1")
        )
        sandbox = start(
            "sandbox", "n0", allowed_upstreams=json.dumps([gate.endpoints["ingress"]]), first_uid=str(disjoint_uids())
        )
        driver = start(
            "driver",
            "d0",
            sandbox_members=f"static:n0={sandbox.address}",
            sandbox_token=TOKEN,
            interception_members=f"static:g0={gate.address}",
            interception_token=TOKEN,
        )
        addresses = {"driver": driver.address, "sandbox": sandbox.address, "interception": gate.address}
        yield Services({**addresses, "inference": ""}, other.address)


@asynccontextmanager
async def forwarded(address: str) -> AsyncIterator[str]:
    """A port that leads to an address."""
    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(Door(host, int(port)).enter, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def used(ps: Penstock) -> list[str]:
    """The addresses at which the client calls gates."""
    return [member.service.address for member in await ps._cluster.members("interception")]


async def test_the_only_gate_is_reached_by_the_port_that_leads_to_it(services: Services) -> None:
    async with (
        forwarded(services.addresses["interception"]) as port,
        connect({**services.addresses, "interception": port}, TOKEN) as ps,
    ):
        assert await used(ps) == [port]
        await ps.agents.register(echo_agent())
        run = secrets.token_hex(4)
        async with ps.intercept(run_id=run):
            handle = await ps.rollouts.create(_TASK, "echo", source=Tokenizer("tiny"), run_id=run)
            assert (await handle.result()).outcome.completed
        await ps.operations.drain("interception", name="g0")
        await ps.operations.undrain("interception", name="g0")


async def test_a_port_that_leads_to_another_gate_is_not_used_for_it(services: Services) -> None:
    async with (
        forwarded(services.other_gate) as port,
        connect({**services.addresses, "interception": port}, TOKEN) as ps,
    ):
        assert await used(ps) == [services.addresses["interception"]]
