"""The agents of null sandboxes, as a program: each is a coroutine that calls the gate as the `shell` agent does.

Sandbox services connect to a socket and say which agents to start and to kill; the end of a connection ends its agents.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from benchmarks.gate.answering import lines, say
from benchmarks.gate.doors import Door
from benchmarks.scale import world

_RETRIES = 60
_RETRY_S = 1.0
_GONE = (OSError, RuntimeError)


class Agents:
    """All that run, and how long their calls took after the first one of each."""

    def __init__(self, calls: int) -> None:
        self.waiting = 0
        """Agents in their first call."""
        self.calls_s: list[float] = []
        self.failures: list[str] = []
        self._calls = calls
        # Bounded, as in a sandbox service: fewer connections at once than a listener lets wait.
        self._opening = asyncio.Semaphore(64)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One sandbox service."""
        running: dict[int, asyncio.Task[None]] = {}

        async def run(number: int, base_url: str, key: str) -> None:
            try:
                code = await self._agent(base_url, key)
                writer.write(json.dumps([number, code]).encode() + b"\n")
            finally:
                del running[number]

        try:
            while line := await reader.readline():
                said = orjson.loads(line)
                if "key" in said:
                    running[said["number"]] = asyncio.create_task(run(**said))
                elif said["number"] in running:
                    running[said["number"]].cancel()
        finally:
            ended = list(running.values())
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            writer.close()

    async def _agent(self, base_url: str, key: str) -> int:
        place = urlsplit(base_url)
        door = Door(place.netloc, f"{place.path}/chat/completions", key)
        messages = list(world.MESSAGES)
        try:
            await self._open(door)
            for call in range(self._calls):
                began = time.monotonic()
                self.waiting += not call
                try:
                    answer = await self._post(door, world.body(messages))
                finally:
                    self.waiting -= not call
                if call:
                    self.calls_s.append(time.monotonic() - began)
                said = orjson.loads(answer)["choices"][0]["message"]
                messages += [said, *world.results(said)]
        except _GONE as error:
            self.failures.append(str(error)[:300])
            return 1
        finally:
            door.close()
        return 0

    async def _open(self, door: Door) -> None:
        async with self._opening:
            await door.open()

    async def _post(self, door: Door, body: bytes) -> bytes:
        """As agents do: the same call again where its connection broke, which the gate knows by its body."""
        is_open = True
        for _ in range(_RETRIES):
            try:
                if not is_open:
                    await self._open(door)
                return await door.post(body)
            except OSError:
                pass  # the gate is not back yet
            except RuntimeError as error:
                if "connection ended" not in str(error) and "503" not in str(error):
                    raise
            door.close()
            is_open = False
            await asyncio.sleep(_RETRY_S)
        raise RuntimeError("the gate did not come back")


async def main() -> None:
    """`start` has the socket's path and the number of calls of an agent."""
    orders = lines()
    start = await anext(orders)
    agents = Agents(start["calls"])
    server = await asyncio.start_unix_server(agents.serve, Path(start["socket"]))
    say({})
    async with server:
        async for order in orders:
            match order["do"]:
                case "waiting":
                    say({"waiting": agents.waiting, "failures": agents.failures[:3]})
                case "calls":
                    say({"calls_s": agents.calls_s, "failures": agents.failures})
    del server


if __name__ == "__main__":
    asyncio.run(main())
