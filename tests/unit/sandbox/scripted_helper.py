"""A helper of a local sandbox that is the test: it reads the requests and sends the replies."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from tests.unit.sandbox.scripted_domain import pass_turns

from penstock_sandbox.backends.local.spawner import wire


class ScriptedHelper:
    """A spawner whose sandbox's helper is the test."""

    def __init__(self) -> None:
        self.end: socket.socket | None = None

    async def create(self, sandbox_id: str, arguments: object, helper: socket.socket, **_: object) -> tuple[int, int]:
        self.end = helper.dup()
        self.end.setblocking(False)
        self.send({"event": "ready"})
        return 1, 2

    def send(self, message: wire.Message, descriptors: Sequence[int] = ()) -> None:
        assert self.end is not None
        wire.send(self.end, message, descriptors)

    async def asked(self) -> wire.Message:
        """The next request, without its descriptors."""
        assert self.end is not None
        await pass_turns()
        received = wire.receive(self.end)
        assert received is not None
        for descriptor in received[1]:
            os.close(descriptor)
        return received[0]

    def exits(self, start: wire.Message, code: int) -> None:
        self.send({"event": "exit", "process": start["seq"], "status": code << 8, "cpu_s": 0.0, "peak_bytes": 0})
