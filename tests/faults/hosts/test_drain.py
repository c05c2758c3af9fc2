"""Services are drained and restarted one after another while rollouts run: no rollout fails, and none is repeated.

Two sandbox services and two gates share this machine, with one driver.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
import tomlkit
from tests.hosts import model
from tests.support import toolboxes
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.client import Mode, Penstock, RolloutResult, connect
from penstock.client.transport.endpoints import SERVICES
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

_AT_ONCE = 4
_MOST = 80
"""Bound of the load."""
_UIDS = 512
_DRAIN_S = 300.0


def _ports(count: int) -> list[int]:
    """Ports that are free now, each another one."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class Pairs:
    """A stack, and beside its sandbox service n0 and its gate g0 a second one of each: n1 and g1."""

    stack: LocalStack
    ps: Penstock
    folder: Path
    address: Mapping[str, str]
    tables: Mapping[str, dict[str, Any]]
    processes: dict[str, asyncio.subprocess.Process]

    async def start(self, name: str) -> None:
        """Start n1 or g1; return when it is ready."""
        kind = _KINDS[name[0]]
        config = self.folder / f"{name}.toml"
        config.write_text(tomlkit.dumps({kind: self.tables[name]}))
        config.chmod(0o600)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", f"penstock_{kind}"),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_bare() | {"PENSTOCK_CONFIG": str(config)},
            )
        self.processes[name] = process
        assert process.stdout is not None
        assert orjson.loads(await process.stdout.readline())["event"] == "ready", name

    async def restart(self, name: str) -> None:
        """Stop a service by SIGTERM, and start it again; return when that one serves."""
        if name in self.processes:
            process = self.processes[name]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0, name
            await self.start(name)
            return
        (item,) = [one for one in self.stack._processes if one.name == _KINDS[name[0]]]
        item.process.send_signal(signal.SIGTERM)
        assert await item.process.wait() == 0, name

        async def is_back() -> bool:  # the stack starts it again
            (new,) = [one for one in self.stack._processes if one.name == item.name]
            return new is not item and new.ready.done()

        await eventually_async(is_back, f"{name} is back", within=120.0)

    async def cli(self, *argv: str) -> tuple[int, str]:
        """Exit code and output of `penstock`."""
        endpoints = self.stack.endpoints
        env = {f"PENSTOCK_{name.upper()}_ADDRESS": endpoints.address(name) for name in SERVICES}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "penstock.cli.main", *argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_bare() | env | {"PENSTOCK_TOKEN": self.stack.operator_token},
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def one(self, number: int) -> RolloutResult:
        """One rollout, which has one attempt."""
        handle = await self.ps.rollouts.create(model.task(number, 0.3), "shell", mode=Mode.TRANSPARENT_PROXY)
        return await handle.result()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[list[RolloutResult]]:
        """Rollouts, one after another in each of a few tasks, until the end of the block and their own."""
        results: list[RolloutResult] = []
        numbers, over = iter(range(_MOST)), asyncio.Event()

        async def work() -> None:
            for number in numbers:
                results.append(await self.one(number))
                if over.is_set():
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(work())
            await eventually_async(lambda: _is_long(results), "rollouts have ended", within=240.0)
            yield results
            over.set()


async def _is_long(results: Sequence[RolloutResult]) -> bool:
    return len(results) >= _AT_ONCE


_KINDS = {"n": "sandbox", "g": "interception"}


def _bare() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}


def _home(result: RolloutResult) -> str:
    home = result.rollout.home
    assert home is not None
    return home.sandbox_service


def check(results: Sequence[RolloutResult]) -> None:
    """Every rollout has its reward by its first attempt."""
    faults = [(item.outcome.failure, item.rollout.attempts) for item in results if item.rollout.attempts != 1]
    faults += [(item.outcome.failure, 1) for item in results if item.reward is None or item.reward.value != 1.0]
    assert not faults


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    folder = tmp_path_factory.mktemp("pairs")
    folder.chmod(0o755)
    model.write(folder)
    n0, n1, g0, g1, in0, in1 = _ports(6)
    address = {name: f"127.0.0.1:{port}" for name, port in {"n0": n0, "n1": n1, "g0": g0, "g1": g1}.items()}
    uids = disjoint_uids()
    sandbox = {
        "drain_s": _DRAIN_S,
        "allowed_upstreams": [f"127.0.0.1:{in0}", f"127.0.0.1:{in1}"],
        "uid_count": _UIDS,
    }
    settings: dict[str, dict[str, Any]] = {
        "sandbox": {**sandbox, "name": "n0", "first_uid": uids},
        "interception": {"name": "g0", "drain_s": _DRAIN_S},
        "driver": {
            "sandbox_members": f"static:n0={address['n0']},n1={address['n1']}",
            "interception_members": f"static:g0={address['g0']},g1={address['g1']}",
        },
    }
    stack = LocalStack(
        model_dir=folder / "model",
        engine="scripted",
        engine_options={"script": str(folder / "script.yaml")},
        state_dir=folder / "state",
        ports={"sandbox": n0, "interception": g0, "ingress": in0},
        settings=settings,
    )
    toolboxes.bring(stack.state_dir / "sandbox")
    toolboxes.bring(folder / "n1")
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(stack)
        own = {"operator_token": stack.operator_token, "parent_pid": os.getpid()}
        tables: dict[str, dict[str, Any]] = {
            "n1": {
                **own,
                **sandbox,
                "name": "n1",
                "port": n1,
                "state_dir": str(folder / "n1"),
                "first_uid": uids + _UIDS,
            },
            "g1": {
                **own,
                "name": "g1",
                "port": g1,
                "ingress_port": in1,
                "state_dir": str(folder / "g1"),
                "drain_s": _DRAIN_S,
                "inference_address": stack.address("inference"),
                "inference_token": stack.operator_token,
            },
        }
        made = Pairs(stack, await closing.enter_async_context(connect(stack.endpoints)), folder, address, tables, {})
        try:
            for name in tables:
                await made.start(name)
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                await process.wait()


async def test_a_drained_sandbox_service_ends_its_rollouts_and_gets_no_more(pairs: Pairs) -> None:
    async with pairs.load() as results:
        busy, other = sorted(("n0", "n1"), key=lambda name: name != _home(results[0]))
        code, output = await pairs.cli("drain", pairs.address[busy], "--wait")
        assert (code, busy in output and "is drained" in output) == (0, True), output
        after = [await pairs.one(number) for number in range(2)]
    check([*results, *after])
    assert {_home(item) for item in after} == {other}
    for name in ("n0", pairs.address["n1"]):
        code, output = await pairs.cli("drain", name, "--undo")
        assert (code, "takes new work again" in output) == (0, True), output
    assert not (await pairs.ps.operations.status("sandbox")).troubles


@pytest.mark.parametrize("names", [("n0", "n1"), ("g0", "g1")], ids=["sandbox services", "gates"])
async def test_a_restart_of_each_service_in_turn_fails_no_rollout(pairs: Pairs, names: Sequence[str]) -> None:
    async with pairs.load() as results:
        for name in names:
            await pairs.restart(name)
    check(results)
