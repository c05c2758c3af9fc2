"""Services are drained and restarted one after another while rollouts run: no rollout fails, and none is repeated.

Two sandbox services, two gates and two drivers share this machine, with one engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
import tomlkit
from tests.hosts import model
from tests.hosts.draining import drained, firsts
from tests.support.endpoints.loopback import unused_port
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.client import CallFinished, Mode, Penstock, Phase, RolloutResult, SeedFile, connect
from penstock.client.transport.endpoints import SERVICES
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

_AT_ONCE = 4
_MOST = 80
"""Bound of the load."""
_UIDS = 512
_DRAIN_S = 300.0


@dataclass
class Pairs:
    """A stack, and beside its sandbox service n0, its gate g0 and its driver d0 a second one of each: n1, g1, d1."""

    stack: LocalStack
    ps: Penstock
    folder: Path
    address: Mapping[str, str]
    tables: Mapping[str, dict[str, Any]]
    processes: dict[str, asyncio.subprocess.Process]

    async def start(self, name: str) -> None:
        """Start n1, g1 or d1; return when it is ready."""
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

    def log(self, name: str) -> str:
        """What a service has logged."""
        own = self.folder / "state" / "logs" / f"{_KINDS[name[0]]}.log"
        return (self.folder / f"{name}.log" if name in self.processes else own).read_text()

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


_KINDS = {"n": "sandbox", "g": "interception", "d": "driver", "e": "inference"}


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
    names = ("n0", "n1", "g0", "g1", "d0", "d1")
    *ports, in0, in1 = (unused_port() for _ in range(len(names) + 2))
    port = dict(zip(names, ports, strict=True))
    address = {name: f"127.0.0.1:{number}" for name, number in port.items()}
    uids = disjoint_uids()
    sandbox = {
        "drain_s": _DRAIN_S,
        "allowed_upstreams": [f"127.0.0.1:{in0}", f"127.0.0.1:{in1}"],
        "uid_count": _UIDS,
    }
    driver = {
        f"{_KINDS[letter]}_members": f"static:{letter}0={address[f'{letter}0']},{letter}1={address[f'{letter}1']}"
        for letter in "ngd"
    } | {"drain_s": _DRAIN_S}
    settings: dict[str, dict[str, Any]] = {
        "sandbox": {**sandbox, "name": "n0", "first_uid": uids},
        "interception": {"name": "g0", "drain_s": _DRAIN_S},
        "driver": {**driver, "name": "d0"},
    }
    stack = LocalStack(
        model_dir=folder / "model",
        engine="scripted",
        engine_options={"script": str(folder / "script.yaml")},
        state_dir=folder / "state",
        ports={"sandbox": port["n0"], "interception": port["g0"], "driver": port["d0"], "ingress": in0},
        settings=settings,
    )
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(stack)
        own = {"operator_token": stack.operator_token, "parent_pid": os.getpid()}
        tables: dict[str, dict[str, Any]] = {
            "n1": {
                **own,
                **sandbox,
                "name": "n1",
                "port": port["n1"],
                "state_dir": str(folder / "n1"),
                "first_uid": uids + _UIDS,
            },
            "g1": {
                **own,
                "name": "g1",
                "port": port["g1"],
                "ingress_port": in1,
                "state_dir": str(folder / "g1"),
                "drain_s": _DRAIN_S,
                "inference_address": stack.address("inference"),
                "inference_token": stack.operator_token,
            },
            "d1": {
                **own,
                **driver,
                "name": "d1",
                "port": port["d1"],
                "state_dir": str(folder / "d1"),
                "sandbox_token": stack.operator_token,
                "interception_token": stack.operator_token,
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
    """It is given by its name in the driver's list, of which the connection has one member of each kind."""
    async with pairs.load() as results:
        busy, other = sorted(("n0", "n1"), key=lambda name: name != _home(results[0]))
        code, output = await pairs.cli("drain", busy, "--wait")
        assert (code, busy in output and "is drained" in output) == (0, True), output
        after = [await pairs.one(number) for number in range(2)]
    check([*results, *after])
    assert {_home(item) for item in after} == {other}
    _, answered = drained(pairs.log(busy))
    assert {one.asked < answered for one in firsts(pairs.log(busy))} == {True}
    assert True in {one.asked > answered for one in firsts(pairs.log(other))}
    for name in ("sandbox/n0", pairs.address["n1"]):
        code, output = await pairs.cli("drain", name, "--undo")
        assert (code, "takes new work again" in output) == (0, True), output
    told = {trouble.reason for trouble in (await pairs.ps.operations.status("sandbox")).troubles}
    assert told <= {"LOOP_LAG"}


@pytest.mark.requirement("R128")
async def test_an_attempt_replays_at_another_gate_while_its_own_drains(pairs: Pairs) -> None:
    """Its sandbox is lost after the first answer: the next attempt is at the other gate, and asks nothing again."""
    task = model.task(0, 0.0)
    (work,) = task.files
    # The first attempt never ends by itself, however long the drain takes.
    held = replace(task, files=[SeedFile(work.path, b"until [ -e go ]; do sleep 0.1; done\n" + work.content)])
    handle = await pairs.ps.rollouts.create(held, "shell", mode=Mode.TRANSPARENT_PROXY, max_attempts=2)
    async for event in handle.events():
        if isinstance(event.payload, CallFinished):
            break
    home = (await handle.refresh()).home
    assert home is not None
    code, output = await pairs.cli("drain", home.gate)
    assert code == 0, output
    try:
        sandbox = await pairs.ps.sandboxes.attach(home.sandbox_id)
        await sandbox.delete()

        async def works_again() -> bool:
            seen = await handle.refresh()
            return seen.attempts == 2 and seen.phase is Phase.RUNNING

        await eventually_async(works_again, "the second attempt's agent runs")
        second = handle.info.home
        assert second is not None
        sandbox = await pairs.ps.sandboxes.attach(second.sandbox_id)
        assert (await sandbox.run(["touch", "go"])).exit.code == 0
        result = await handle.result()
    finally:
        code, output = await pairs.cli("drain", home.gate, "--undo")
        assert code == 0, output
    assert result.rollout.attempts == 2 and result.rollout.home is not None
    assert result.reward is not None and result.reward.value == 1.0, result.outcome
    assert result.rollout.home.gate != home.gate
    trajectory = await handle.trajectory()
    assert [one.replayed_from is not None for one in trajectory.calls] == [True, False]


@pytest.mark.parametrize("name", ["g1", "d1"])
async def test_any_member_of_the_driver_s_lists_is_drained_by_name(pairs: Pairs, name: str) -> None:
    kind = _KINDS[name[0]]
    code, output = await pairs.cli("drain", name)
    assert (code, f"{kind} service {name} takes no new work" in output) == (0, True), output

    async def is_listed_as(state: str) -> bool:
        members = await pairs.ps.operations.members("interception" if kind == "interception" else "driver")
        return [one.state for one in members if one.name == name] == [state]

    await eventually_async(lambda: is_listed_as("draining"), f"{name} drains")
    code, output = await pairs.cli("drain", f"{kind}/{name}", "--undo")
    assert code == 0, output
    await eventually_async(lambda: is_listed_as("up"), f"{name} takes work again")


async def test_a_name_that_nobody_has_is_refused_with_those_there_are(pairs: Pairs) -> None:
    code, output = await pairs.cli("drain", "n7")
    assert code == 2
    for name in pairs.address:
        assert f"{_KINDS[name[0]]}/{name}" in output


@pytest.mark.requirement("R117")
@pytest.mark.parametrize(
    "names", [("n0", "n1"), ("e0",), ("g0", "g1"), ("d0", "d1")], ids=["sandbox services", "engine", "gates", "drivers"]
)
async def test_a_restart_of_each_service_in_turn_fails_no_rollout(pairs: Pairs, names: Sequence[str]) -> None:
    async with pairs.load() as results:
        for name in names:
            await pairs.restart(name)
    check(results)
