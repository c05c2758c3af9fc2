"""Keys of agents on a node that is cut: their attempts are over, so no gate may accept them."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from tests.hosts.fleet import Fleet

_REFUSED: Final = {401, 403}


@dataclass(frozen=True)
class Key:
    """An agent's key, and the path of its rollout at the gate."""

    path: str
    secret: str


def on(fleet: Fleet, node: str) -> list[Key]:
    """The keys of the agents in a node's sandboxes, as their configuration files have them."""
    found = set()
    for file in (fleet.folder / "state" / node / "local" / "sandboxes").glob("**/.shell-agent/config.json"):
        config = json.loads(file.read_text())
        found.add(Key(urlsplit(config["base_url"]).path, config["key"]))
    return sorted(found, key=lambda key: key.path)


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
