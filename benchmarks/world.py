"""The four services as every benchmark starts them, and where their CPU time goes."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks import processes
from penstock.client import Penstock, connect
from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer
from penstock_inference.testing import random_config, random_tensors, write_model

NOTE: Final = "kiwi"
REPLIES: Final = (
    '<tool_call>\n{"name": "bash", "arguments": {"command": "cat note.txt"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "cat note.txt > out.txt"}}\n</tool_call>',
    "done",
)
"""What the policy says, call by call: the shape of the demo's task."""

SERVICES: Final = ("driver", "sandbox", "interception", "inference")


@dataclass(frozen=True, slots=True)
class World:
    """A running stack, a client of it, and the ids of its processes."""

    stack: LocalStack
    ps: Penstock
    pids: Mapping[str, int]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by part; `sandboxes` is the spawner with all that ran in sandboxes which are gone."""
        used = {name: processes.cpu(pid).own for name, pid in self.pids.items()}
        spawners = [processes.cpu(child) for child in processes.children(self.pids["sandbox"])]
        used["sandboxes"] = sum(spawner.own + spawner.ended for spawner in spawners)
        own = resource.getrusage(resource.RUSAGE_SELF)
        used["client"] = own.ru_utime + own.ru_stime
        return used


def write_demo_model(directory: Path) -> Path:
    """A random model of the demo's size with a tokenizer of our own."""
    files = tiny_tokenizer.build([*REPLIES, "You are a shell agent.", "Copy the word in note.txt to out.txt"], 384)
    config = random_config(
        "qwen3",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=files.stop_token_ids[0],
    )
    write_model(directory, config, random_tensors(config))
    files.write(directory)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


@asynccontextmanager
async def scripted(place: Path, sandbox: Mapping[str, Any] = MappingProxyType({})) -> AsyncIterator[World]:
    """The stack with an engine that answers each session with REPLIES; `place` is an empty directory.

    `sandbox` are further settings of the sandbox service.
    """
    script = place / "script.json"
    turns = [{"when": {"has_tool_result": False}, "reply": REPLIES[0]}, *({"reply": reply} for reply in REPLIES[1:])]
    script.write_text(json.dumps({"strict": False, "turns": turns}), "utf-8")
    async with _running(place, "scripted", {"script": str(script)}, sandbox) as world:
        yield world


@asynccontextmanager
async def numpy_engine(place: Path) -> AsyncIterator[World]:
    """The stack with the embedded engine."""
    async with _running(place, "numpy", {}) as world:
        yield world


@asynccontextmanager
async def _running(
    place: Path, engine: str, options: Mapping[str, str], sandbox: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[World]:
    raise_open_files()
    stack = LocalStack(
        model_dir=write_demo_model(place / "model"),
        engine=engine,
        engine_options=options,
        state_dir=place / "state",
        settings={"sandbox": sandbox},
    )
    async with stack, connect(stack.endpoints) as ps:
        pids = {pid_name(pid): pid for pid in processes.children(os.getpid())}
        yield World(stack, ps, {name: pids[name] for name in SERVICES})


def pid_name(pid: int) -> str:
    """The service that a process runs; empty when it is none."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return next((part.decode().removeprefix("penstock_") for part in arguments if part.startswith(b"penstock_")), "")


def raise_open_files() -> None:
    """Thousands of connections, here and in the services that inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 65_536 else 65_536, hard))
