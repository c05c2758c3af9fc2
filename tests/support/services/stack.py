"""A real stack of four processes on free ports with tokens on, as `penstock up` starts it, with a scripted engine."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from tests.support import toolboxes
from tests.support.policy import FILES, SHELLS, TITLE_SYSTEM_PROMPT, bash

from penstock.client import Penstock, connect
from penstock.local.stack import LocalStack
from penstock_driver.agents.registry import built_in_specs


@dataclass(frozen=True)
class Running:
    """A stack with its client."""

    stack: LocalStack
    ps: Penstock
    state_dir: Path

    @property
    def logs(self) -> str:
        """All that the services have logged so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.stack.log_dir.glob("*.log")))

    @property
    def ports(self) -> dict[str, int]:
        """Every port of the stack on the host's loopback, by who listens."""
        addresses: dict[str, str] = {name: self.stack.address(name) for name in self.stack.services}
        addresses["ingress"] = self.stack.ingress_address
        return {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}

    def pid(self, service: str) -> int:
        """The process of a service."""
        (found,) = [item.process.pid for item in self.stack._processes if item.name == service]
        return found


OBSERVER_TOKEN: Final = secrets.token_hex(32)
"""Of the role that reads, at every service of every stack of this process."""

SCRIPT: dict[str, Any] = {
    # Which entries a session comes to depends on what its rollouts ask: leftovers are no error here.
    "strict": False,
    "turns": [
        {"when": {"prompt_contains": TITLE_SYSTEM_PROMPT}, "repeat": True, "reply": "A title"},
        *[
            {
                "when": {"prompt_contains": mark, "has_tool_result": False},
                "repeat": True,
                "reply": write("bash work.sh"),
            }
            for mark, write in SHELLS.items()
        ],
        {
            "when": {"has_tool_result": False},
            "repeat": True,
            "reply": bash("bash work.sh", description="Does the work"),
        },
        *[
            {"when": {"prompt_contains": end}, "repeat": True, "reply": bash(end)}
            for end in [spec.trial.end_command for spec in built_in_specs() if spec.trial and spec.trial.end_command]
        ],
        {"repeat": True, "reply": "The word is copied."},
    ],
}
"""The scripted engine's: every agent runs `work.sh`, which the task brings, and says so."""


def disjoint_uids() -> int:
    """A first host user for a sandbox service of this process: several services on one machine share none."""
    return 300_000 + 4096 * (os.getpid() % 512)


def stack_in(
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    kind: type[LocalStack] = LocalStack,
    ports: Mapping[str, int] = MappingProxyType({}),
) -> LocalStack:
    """A stack, not yet started, whose state is under `folder`; `settings` and `ports` by service."""
    folder.chmod(0o755)
    model = folder / "model"
    FILES.write(model)
    script = folder / "script.yaml"
    script.write_text(yaml.safe_dump(SCRIPT, sort_keys=False))
    given: dict[str, dict[str, Any]] = {
        name: {"observer_token": OBSERVER_TOKEN} for name in ("inference", "interception", "sandbox", "driver")
    }
    for name, table in (settings or {}).items():
        given[name] |= table
    given["sandbox"].setdefault("first_uid", disjoint_uids())
    return kind(
        model_dir=model,
        engine="scripted",
        engine_options={"script": str(script)},
        state_dir=folder / "state",
        ports=ports,
        settings=given,
    )


@asynccontextmanager
async def running(
    folder: Path, settings: Mapping[str, Mapping[str, Any]] | None = None, *, agents: bool = True
) -> AsyncIterator[Running]:
    """A stack whose state is under `folder`; without `agents` none are installed there."""
    stack = stack_in(folder, settings)
    with toolboxes.brought(stack.state_dir / "sandbox") if agents else nullcontext():
        async with stack, connect(stack.endpoints) as ps:
            yield Running(stack, ps, stack.state_dir)
