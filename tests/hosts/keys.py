"""Keys of agents whose attempts are over because a node or a gate was cut: no gate may accept them."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.hosts.fleet import Fleet

REFUSED_S: Final = 90.0
"""How long after a gate's return it may still accept the keys of attempts that were lost with it."""
_REFUSED: Final = {401, 403}
_PAUSE_S: Final = 0.2


@dataclass(frozen=True)
class Key:
    """An agent's key, and the path of its rollout at the gate."""

    path: str
    secret: str

    @property
    def rollout_id(self) -> str:
        """The rollout."""
        return self.path.strip("/").split("/")[1]


def on(fleet: Fleet, node: str) -> list[Key]:
    """The keys of the agents in a node's sandboxes, as their configuration files have them.

    Sandboxes may end meanwhile.
    """
    found = set()
    for folder, _, files in os.walk(fleet.folder / "state" / node / "local" / "sandboxes"):
        if not folder.endswith("/.shell-agent") or "config.json" not in files:
            continue
        with suppress(FileNotFoundError):  # the sandbox ends meanwhile
            config = json.loads(Path(folder, "config.json").read_text())
            found.add(Key(urlsplit(config["base_url"]).path, config["key"]))
    return sorted(found, key=lambda key: key.path)


def at(fleet: Fleet, rollouts: Collection[str]) -> list[Key]:
    """The keys of these rollouts' agents, on all nodes."""
    found = (key for node in fleet.size.names("sandbox") for key in on(fleet, node))
    return [key for key in found if key.rollout_id in rollouts]


async def until_refused(fleet: Fleet, keys: Sequence[Key], gate: str) -> tuple[list[str], float]:
    """Wait until a gate refuses these keys, at most REFUSED_S. Returns those it accepts, and the seconds it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        found = await accepted(fleet, keys, [gate])
        took = loop.time() - began
        if not found or took > REFUSED_S:
            return found, took
        await asyncio.sleep(_PAUSE_S)


async def accepted(fleet: Fleet, keys: Sequence[Key], gates: Sequence[str]) -> list[str]:
    """Paths of those keys that one of these gates does not refuse, with its answer."""
    found = []
    for gate in gates:
        for key in keys:
            status = await asyncio.to_thread(_asked, fleet, gate, key)
            if status not in _REFUSED:
                found.append(f"{key.path} at {gate}: {status}")
    return found


def _asked(fleet: Fleet, gate: str, key: Key) -> int:
    body = {"model": "any", "messages": [{"role": "user", "content": "Is anybody there?"}]}
    request = urllib.request.Request(
        f"https://{fleet.ingress(gate)}{key.path}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key.secret}"},
    )
    trusted = ssl.create_default_context(cafile=str(fleet.folder / "credentials" / "ca.pem"))
    try:
        with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
