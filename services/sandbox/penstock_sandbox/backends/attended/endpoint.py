"""The service's end of an attended sandbox's one endpoint: streams of the link, carried to one upstream.

Invariants: connected is what the policy names and nothing else; half-closes are carried; a side that breaks off resets
the other one; closing cuts every connection at once; a program's end is passed on only once all that came for it is at
its socket (R105). A pipe of the link that breaks does not show here.
"""

from __future__ import annotations

import asyncio

import structlog

from penstock_sandbox.backends.attended.stream import LinkLost, Stream, StreamReset
from penstock_sandbox.backends.relaying import Answers
from penstock_sandbox.backends.upstream import Streams, connect, reset
from penstock_sandbox.model import NetworkPolicy

_CONNECTIONS = 256

_log = structlog.get_logger(__name__)


class Endpoint:
    """Carries what the attendant's listener accepts, until closed."""

    def __init__(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        self._sandbox_id = sandbox_id
        self._policy = policy
        self._connections: set[asyncio.Task[None]] = set()

    def accept(self, stream: Stream) -> None:
        """A program in the sandbox connected."""
        if len(self._connections) >= _CONNECTIONS:
            stream.reset()
            return
        task = asyncio.create_task(self._carry(stream))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def aclose(self) -> None:
        """Cut every connection."""
        tasks = [*self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, stream: Stream) -> None:
        try:
            try:
                outside = await connect(self._policy)
            except (OSError, TimeoutError) as error:
                # The agent sees a reset; the operator sees why.
                _log.warning(
                    "upstream unreachable", sandbox=self._sandbox_id, upstream=self._policy.upstream, error=str(error)
                )
            else:
                await _splice(stream, outside)
        finally:
            # Harmless after both ends: the stream is over by then.
            stream.reset()


async def _splice(stream: Stream, outside: Streams) -> None:
    ended = False
    try:
        async with asyncio.TaskGroup() as both:
            answers = Answers(outside, stream.write, stream.has_arrived)
            both.create_task(_outwards(stream, outside, answers))
            both.create_task(_inwards(stream, answers))
        ended = True
    except* (OSError, StreamReset, LinkLost):
        pass  # one side broke off: both are cut
    finally:
        if ended:
            outside[1].transport.abort()
        else:  # the upstream must not take bytes for read that ended here (R105)
            reset(outside[1])


async def _outwards(stream: Stream, outside: Streams, answers: Answers) -> None:
    while data := await stream.read():
        outside[1].write(data)
        await outside[1].drain()
    await answers.arrive()
    if outside[1].can_write_eof():
        outside[1].write_eof()


async def _inwards(stream: Stream, answers: Answers) -> None:
    await answers.carry()
    stream.end()
