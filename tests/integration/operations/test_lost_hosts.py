"""`penstock doctor --live` names each service that is lost among two of a kind, from the connection to the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import pytest_asyncio
import tomlkit
from tests.hosts import model
from tests.support.endpoints.loopback import unused_port
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.cli.commands.doctor.live import examine
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

_KINDS: Final = {"n": "sandbox", "g": "interception", "d": "driver", "e": "inference"}
_UIDS: Final = 64


@dataclass
class Pairs:
    """A stack of n0, g0, d0 and e0, which the client knows, and the processes of n1, g1, d1 and e1 beside them."""

    stack: LocalStack
    processes: Mapping[str, asyncio.subprocess.Process]

    async def lost(self) -> set[str]:
        """The services that the doctor says are lost."""
        diagnosis = await examine(self.stack.endpoints, 60.0, 0)
        found = [trouble for trouble in diagnosis.troubles if trouble.reason == "MEMBER_LOST"]
        assert all(trouble.grave for trouble in found), found
        return {name for trouble in found for name in trouble.subjects}


async def _start(name: str, folder: Path, table: dict[str, Any]) -> asyncio.subprocess.Process:
    """Starts a service beside the stack; returns when it is ready."""
    kind = _KINDS[name[0]]
    config = folder / f"{name}.toml"
    config.write_text(tomlkit.dumps({kind: {"name": name, "state_dir": str(folder / name), **table}}))
    config.chmod(0o600)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", f"penstock_{kind}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment | {"PENSTOCK_CONFIG": str(config)},
        )
    assert process.stdout is not None
    assert orjson.loads(await process.stdout.readline())["event"] == "ready", name
    return process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    folder = tmp_path_factory.mktemp("lost")
    folder.chmod(0o755)
    model.write(folder)
    *ports, ingress0, ingress1 = (unused_port() for _ in range(10))
    port = dict(zip([f"{letter}{number}" for letter in _KINDS for number in (0, 1)], ports, strict=True))
    lists = {
        f"{kind}_members": ",".join(
            [f"static:{letter}0=127.0.0.1:{port[f'{letter}0']}", f"{letter}1=127.0.0.1:{port[f'{letter}1']}"]
        )
        for letter, kind in _KINDS.items()
    }
    engines = {"inference_members": lists.pop("inference_members")}
    uids = disjoint_uids()
    engine = {"model_dir": str(folder / "model"), "engine": "scripted"}
    script = {"script": str(folder / "script.yaml")}
    stack = LocalStack(
        **engine,  # type: ignore[arg-type]
        engine_options=script,
        state_dir=folder / "state",
        ports={kind: port[f"{letter}0"] for letter, kind in _KINDS.items()} | {"ingress": ingress0},
        settings={
            "sandbox": {"name": "n0", "first_uid": uids, "uid_count": _UIDS},
            "interception": {"name": "g0", **engines},
            "driver": {"name": "d0", **lists},
            "inference": {"name": "e0"},
        },
    )
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(stack)
        token = stack.operator_token
        tables: dict[str, dict[str, Any]] = {
            "n1": {"first_uid": uids + _UIDS, "uid_count": _UIDS},
            "g1": {"ingress_port": ingress1, "inference_token": token, **engines},
            "d1": {"sandbox_token": token, "interception_token": token, **lists},
            "e1": {**engine, "engine_options": script},
        }
        processes: dict[str, asyncio.subprocess.Process] = {}
        try:
            for name, table in tables.items():
                own = {"operator_token": token, "parent_pid": os.getpid(), "port": port[name]}
                processes[name] = await _start(name, folder, own | table)
            yield Pairs(stack, processes)
        finally:
            for process in processes.values():
                if process.returncode is None:
                    process.kill()
                await process.wait()


@pytest.mark.requirement("R119")
async def test_doctor_names_each_lost_service_of_every_kind(pairs: Pairs) -> None:
    """A sandbox service, a gate, a driver and an engine, each by the name that its list has for it."""

    async def none_is_lost() -> bool:
        return await pairs.lost() == set()

    await eventually_async(none_is_lost, "all are found")
    lost: set[str] = set()
    for name, process in pairs.processes.items():
        process.send_signal(signal.SIGKILL)
        await process.wait()
        lost.add(name)

        async def are_named() -> bool:
            return await pairs.lost() == lost

        await eventually_async(are_named, f"the loss of {name} is named")
