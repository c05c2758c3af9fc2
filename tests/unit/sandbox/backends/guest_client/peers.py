"""What answers in a guest agent's place: it says what a test tells it to, and need not read or answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from penstock_sandbox.backends.guest_client.pipe import Pipe
from penstock_sandbox.guest import frames
from penstock_sandbox.guest.frames import Frame

GREETING = {
    "version": frames.VERSION,
    "instance": "one",
    "attachment": "one",
    "python": "",
    "user_switch": True,
    "pty": True,
}


def ready() -> bytes:
    """The frame that begins a pipe."""
    return frames.encode(frames.READY, 0, 0, frames.pack_message(GREETING))


def acknowledgement(number: int) -> bytes:
    """Everything up to this frame is said to be received."""
    return frames.encode(frames.ACK, 0, 0, number.to_bytes(8, "big"))


class Peer:
    """A conversation's other end. The first of its pipes is attached; later ones say nothing.

    It answers all requests but those in ``unanswered``.
    """

    def __init__(self, *, unanswered: Collection[str] = ()) -> None:
        self._unanswered = unanswered
        self.pipes: list[PeerPipe] = []
        self.heard: list[Frame] = []
        self.asked: list[frames.Message] = []
        self._said = 0

    async def open(self) -> Pipe:
        """An opener of pipes."""
        self.pipes.append(PeerPipe(self))
        if len(self.pipes) == 1:
            self.pipes[0].say(ready())
        return self.pipes[-1]

    def numbered(self, kind: int, stream: int, payload: bytes = b"") -> bytes:
        """The next frame of the conversation."""
        self._said += 1
        return frames.encode(kind, stream, self._said, payload)

    def opened(self, count: int, port: int = 1) -> bytes:
        """So many connections to an endpoint."""
        payload = frames.pack_message({"port": port})
        first = self._said
        numbers = range(first, first + count)
        return b"".join(self.numbered(frames.OPEN, frames.FROM_ATTENDANT | number, payload) for number in numbers)

    def hear(self, pipe: PeerPipe, frame: Frame) -> None:
        """Handle what the service sent."""
        self.heard.append(frame)
        if frame.kind == frames.HELLO:
            hello = frames.parse_message(frame.payload)
            answer = {"attachment": hello["attachment"], "received": 0}
            pipe.say(frames.encode(frames.HELLO, 0, 0, frames.pack_message(answer)))
        elif frame.kind == frames.REQUEST:
            request = frames.parse_message(frame.payload)
            self.asked.append(request)
            if request["op"] not in self._unanswered:
                pipe.say(self.numbered(frames.REPLY, frame.stream, b"{}"))


class PeerPipe:
    """One pipe to it. It reads while ``reads`` is set."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._decoder = frames.Decoder()
        self._saying: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_closed = False

    def say(self, data: bytes) -> None:
        """Bytes that arrive at once."""
        self._saying.put_nowait(data)

    async def said(self) -> None:
        """Wait until the service has handled what was said."""
        await self._saying.join()

    async def send(self, data: bytes) -> None:
        await self.reads.wait()
        for frame in self._decoder.feed(data):
            self._peer.hear(self, frame)

    async def received(self) -> AsyncIterator[bytes]:
        while True:
            data = await self._saying.get()
            try:
                yield data
            finally:
                self._saying.task_done()

    async def aclose(self) -> None:
        self.is_closed = True
