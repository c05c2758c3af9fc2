"""The OpenEnv-compatible server on real services, and users of the `openenv` package in an environment of their own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.copy_script import COPY_SCRIPT

from penstock.adapters.openenv.rollout_arguments import Defaults
from penstock.adapters.openenv.serving import Listen, serving
from penstock.client import Penstock, connect
from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer

TOKEN = "a-token-of-the-tests"
PYTHON = Path(__file__).parents[3] / ".venv-openenv/bin/python"
"""Made by `make`: the package wants other versions of what our own tests use."""
CALLER = Path(__file__).with_name("caller.py")
COPY = {
    "endpoint": "inference",
    "instruction": "Copy note.txt to out.txt.",
    "setup": ["echo word > note.txt"],
    "verify": ["grep -q word out.txt", "echo told; false"],
    "task_id": "copy/1",
}
STUCK = {**COPY, "setup": ["mkfifo note.txt"], "task_id": "stuck"}
"""The agent's first command reads a pipe that nobody writes."""


@dataclass(frozen=True)
class Server:
    """A server, its address with the token in it, a client of the services behind it, and who calls it."""

    address: str
    bare: str
    ps: Penstock
    caller: asyncio.subprocess.Process

    async def call(self, scenario: str, arguments: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What the caller has told, from the scenario's start to its end."""
        assert self.caller.stdin is not None and self.caller.stdout is not None
        order = {"scenario": scenario, "address": self.address, "arguments": arguments or {}}
        self.caller.stdin.write(json.dumps(order).encode() + b"\n")
        told: list[dict[str, Any]] = []
        async for line in self.caller.stdout:
            said = json.loads(line)
            if "over" in said:
                assert said["broke"] is None, said["broke"]
                return told
            told.append(said)
        raise AssertionError("the caller is gone")

    async def start(self, scenario: str, arguments: Mapping[str, Any] | None = None) -> asyncio.subprocess.Process:
        """A caller of its own, running."""
        return await started(scenario, self.address, json.dumps(arguments or {}))


async def started(*argv: str) -> asyncio.subprocess.Process:
    """A process of `caller.py`."""
    return await asyncio.create_subprocess_exec(
        str(PYTHON),
        str(CALLER),
        *argv,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )


@asynccontextmanager
async def calling() -> AsyncIterator[asyncio.subprocess.Process]:
    """A caller that takes one scenario after another."""
    process = await started()
    try:
        yield process
    finally:
        await process.communicate(b"")  # closes its input, and reads its output to the end


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def caller() -> AsyncIterator[asyncio.subprocess.Process]:
    """One for all tests: it takes longer to start than most of them."""
    async with calling() as process:
        yield process


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """All four services, once for all tests."""
    folder = tmp_path_factory.mktemp("services")
    tiny_tokenizer.build().write(folder / "model")
    (folder / "script.yaml").write_text(COPY_SCRIPT)
    made = LocalStack(
        model_dir=folder / "model",
        engine="scripted",
        engine_options={"script": str(folder / "script.yaml")},
        state_dir=folder / "state",
    )
    async with made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def server(stack: LocalStack, caller: asyncio.subprocess.Process) -> AsyncIterator[Server]:
    """A server with two places and a token, whose agent is the reference agent."""
    async with (
        connect(stack.endpoints) as ps,
        serving(ps, Listen(port=0, token=TOKEN), Defaults(agent="shell"), max_sessions=2) as bare,
    ):
        yield Server(bare.replace("://", f"://user:{TOKEN}@"), bare, ps, caller)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the connection file of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
