"""The service's end of the connection to a guest agent: requests and streams over pipes that may break.

Purpose: a ``Link`` replaces each broken pipe and carries one conversation over all of them: frames are resent until
acknowledged, and delivered in order, once. Requests have replies; streams have windows in both directions.

Invariants
- Only the link sees a broken pipe. The link is lost when no pipe worked for ``lost_after_s``, when the backend reports
  that the sandbox is gone, or when the guest agent is another instance than before. Then every waiter fails with
  ``LinkLost`` and, after ``judge`` has had a few seconds to find the cause, ``on_lost`` is called once.
- Memory is bounded whatever the peer sends, and however little it reads: a stream that exceeds its window is a protocol
  violation, as is an acknowledgement of what was not sent; a peer that causes frames and acknowledges none is lost.
- While suspended it opens no pipe and counts no silence; outgoing frames wait for the next pipe.
- No task outlives ``aclose``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_sandbox.backends.guest_client.messages import Greeting, Hello, Opened, Refusal
from penstock_sandbox.backends.guest_client.pipe import Opener, Pipe, SandboxGone
from penstock_sandbox.backends.guest_client.stream import LinkLost, Stream
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import ENDED_INSIDE
from penstock_sandbox.guest import frames
from penstock_sandbox.guest.frames import Malformed

LOST_AFTER_S = 30.0
HEARTBEAT_S = 10.0

_DELAYS = Delays(0.02, 2.0)
_SILENT_BEATS = 3
_JUDGE_S = 10.0
_BATCH = 1024 * 1024
_MALFORMED_LIMIT = 8

_M = TypeVar("_M", bound=BaseModel)

_log = structlog.get_logger(__name__)


Judge = Callable[[str], Awaitable[str]]
"""Returns the reason of a sandbox's loss, given how it showed: one of ``ENDED_INSIDE`` if its workload caused it.

May raise if the cause cannot be found."""


class NotExecuted(Refused):
    """The program of a start request cannot be executed."""


class _PipeBroken(Exception):
    """The pipe ended."""


class Link:
    """One conversation. ``on_event`` gets each event, ``on_open`` each stream that the guest agent opens.

    A stream comes with the port of its endpoint.
    """

    def __init__(
        self,
        opener: Opener,
        on_event: Callable[[frames.Message], None],
        on_open: Callable[[Stream, int], None],
        on_lost: Callable[[str], None],
        *,
        judge: Judge,
        lost_after_s: float = LOST_AFTER_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._opener = opener
        self._on_event = on_event
        self._on_open = on_open
        self._on_lost = on_lost
        self._judge = judge
        self._judging: asyncio.Task[None] | None = None
        self._lost_after_s = lost_after_s
        self._heartbeat_s = heartbeat_s
        self._session = secrets.token_hex(8)
        self._ledger = frames.Ledger()
        self._attached = asyncio.Event()
        self._queue: list[bytes] = []
        """While attached: the ledger's last frames, which are not sent over this pipe yet."""
        self._acknowledgement = b""
        """The newest that is not sent yet; it stands for those before."""
        self._handed = 0
        """The last frame that was sent over any pipe."""
        self._queued = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._last = 0
        self._replies: dict[int, asyncio.Future[frames.Message]] = {}
        self._streams: dict[int, Stream] = {}
        self._received_anything = False
        self._malformed = 0
        self._runner: asyncio.Task[None] | None = None
        self._suspended = False
        self._suspensions = 0
        self.greeting: Greeting | None = None
        self.lost: LinkLost | None = None
        self._ready: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()

    async def open(self) -> Greeting:
        """Attaches for the first time. Raises LinkLost if that fails for too long."""
        self._runner = asyncio.create_task(self._run(), name="attendant-link")
        return await asyncio.shield(self._ready)

    async def aclose(self) -> None:
        """Ends the conversation: every waiter fails; ``on_lost`` is not called."""
        self._end("CLOSED")
        ending = [task for task in (self._runner, self._judging) if task is not None]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def suspend(self) -> None:
        """Closes the pipe and opens none until ``resume``, because the guest agent is going to be frozen."""
        self._suspended = True
        self._suspensions += 1
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])

    def resume(self) -> None:
        """Continues after ``suspend``; harmless if it was not suspended, or is lost."""
        if self._suspended:
            self._suspended = False
            if self.lost is None and self._judging is None:
                self._runner = asyncio.create_task(self._run(), name="attendant-link")

    def lose(self, reason: str) -> None:
        """Marks the sandbox as gone."""
        if self.lost is not None or (self._judging is not None and reason not in ENDED_INSIDE):
            return
        if self._runner is not None:
            self._runner.cancel()
        if reason in ENDED_INSIDE:
            # At once: it must not be used any more.
            self._announce(reason)
        else:
            self._judging = asyncio.create_task(self._judged(reason), name="attendant-judge")

    async def _judged(self, reason: str) -> None:
        try:
            async with asyncio.timeout(_JUDGE_S):
                reason = await self._judge(reason)
        except Exception as error:  # noqa: BLE001
            # The daemon or provider is itself unreachable: then the loss is not blamed on the agent.
            _log.warning("the reason why a sandbox ended is unknown", reason=reason, error=repr(error))
        self._announce(reason)

    def _announce(self, reason: str) -> None:
        if self.lost is None:
            self._end(reason)
            self._on_lost(reason)

    def _end(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = lost = LinkLost(reason)
        if not self._ready.done():
            self._ready.set_exception(lost)
            self._ready.exception()  # its opener may have been cancelled
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(lost)
                reply.exception()  # there may be no waiter
        self._replies.clear()
        for stream in list(self._streams.values()):
            stream.fail(lost)
        self._streams.clear()
        self._room.set()
        self._queued.set()

    # Sending -----------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Returns a number that no request, stream or process of this link has had."""
        self._last = self._last % (frames.FROM_ATTENDANT - 1) + 1
        return self._last

    def ask(self, op: str, **fields: object) -> asyncio.Future[frames.Message]:
        """Sends a request; requests are executed in order. Returns the future of its reply (see ``outcome``)."""
        if self.lost is not None:
            raise self.lost
        number = self.next_number()
        payload = frames.pack_message({"op": op, **fields})
        if len(payload) > frames.MAX_PAYLOAD:
            raise NotExecuted(7, "the request is too long for the guest")
        reply: asyncio.Future[frames.Message] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self.send_frame(frames.REQUEST, number, payload)
        return reply

    async def request(self, op: str, *, within_s: float | None = None, **fields: object) -> frames.Message:
        """Sends a request and waits for its reply, with ``within_s`` so many seconds, anew after each suspension.

        Raises Refused (NotExecuted if a program cannot run), LinkLost, TimeoutError (a later reply is ignored).
        """
        reply = self.ask(op, **fields)
        while within_s is not None:
            suspensions = self._suspensions
            await asyncio.wait([reply], timeout=within_s)
            if reply.done():
                break
            if not self._suspended and suspensions == self._suspensions:
                reply.cancel()
                raise TimeoutError(op)
        return self.outcome(await reply)

    def outcome(self, reply: frames.Message) -> frames.Message:
        """Returns a reply that is not a refusal. Raises Refused or NotExecuted."""
        if "errno" not in reply:
            return reply
        refusal = self.checked(Refusal, reply)
        kind = NotExecuted if refusal.failed else Refused
        raise kind(refusal.errno, refusal.what)

    def checked(self, kind: type[_M], message: frames.Message) -> _M:
        """Parses a message as ``kind``; an invalid one loses the guest agent. Raises LinkLost."""
        try:
            return kind.model_validate(message)
        except ValidationError as error:
            _log.warning("a guest's message is malformed", kind=kind.__name__)
            self.lose("ATTENDANT_MISBEHAVED")
            raise LinkLost("ATTENDANT_MISBEHAVED") from error

    def send_frame(self, kind: int, stream: int, payload: bytes) -> None:
        """Sends a frame, now or over the next pipe."""
        frame = self._ledger.number_frame(kind, stream, payload)
        if self._ledger.full:
            self._room.clear()
        if self._attached.is_set():
            self._queue.append(frame)
            self._queued.set()

    async def room(self) -> None:
        """Waits while too many bytes are unacknowledged. Raises LinkLost."""
        await self._room.wait()
        if self.lost is not None:
            raise self.lost

    def stream(self, *, window: int, credit: int) -> Stream:
        """Opens a stream: ``window`` is the limit of unread incoming bytes, ``credit`` that of outgoing ones."""
        return self._add_stream(self.next_number(), window, credit)

    def _add_stream(self, number: int, window: int, credit: int) -> Stream:
        stream = Stream(self, number, window, credit)
        if self.lost is not None:
            stream.fail(self.lost)
        else:
            self._streams[number] = stream
        return stream

    def forget(self, number: int) -> None:
        """Drops a stream that is over: later frames on it are ignored."""
        self._streams.pop(number, None)

    # Pipes -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(_DELAYS)
        deadline = loop.time() + self._lost_after_s
        problem = ""
        # A task group that fails while it is cancelled loses the cancellation (until Python 3.13): the state decides.
        while not self._is_over():
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    pipe = await self._opener()
                    try:
                        await self._converse(pipe, limit)
                    finally:
                        if self._attached.is_set():
                            deadline = loop.time() + self._lost_after_s
                            backoff.reset()
                        self._attached.clear()
                        self._queue.clear()
                        self._acknowledgement = b""
                        await pipe.aclose()
            except SandboxGone as gone:
                self.lose(gone.reason)
                return
            except Malformed as error:
                self._malformed += 1
                problem = str(error)
                if self._malformed > _MALFORMED_LIMIT:
                    self.lose("ATTENDANT_MISBEHAVED")
                    return
            except Exception as error:  # noqa: BLE001
                # Any exception of a provider's client: the next pipe may work, until the deadline.
                problem = str(error) or type(error).__name__
            if self._is_over():
                return
            pause = backoff.next()
            if loop.time() + pause >= deadline:
                _log.warning("no pipe to the guest", problem=problem)
                self.lose("ATTENDANT_UNREACHABLE")
                return
            await asyncio.sleep(pause)

    def _is_over(self) -> bool:
        return self.lost is not None or self._judging is not None or self._suspended

    async def _converse(self, pipe: Pipe, limit: asyncio.Timeout) -> None:
        """Uses a pipe until it breaks. Raises what broke it."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(pipe, limit))
                both.create_task(self._send(pipe))
                both.create_task(self._watch_silence())
        except ExceptionGroup as broken:
            raise _gravest(broken) from None

    async def _send(self, pipe: Pipe) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue or self._acknowledgement:
                size = count = 0
                while count < len(self._queue) and size < _BATCH:
                    size += len(self._queue[count])
                    count += 1
                batch = b"".join((*self._queue[:count], self._acknowledgement))
                del self._queue[:count]
                self._acknowledgement = b""
                if self._attached.is_set():
                    self._handed = max(self._handed, self._ledger.sent - len(self._queue))
                await pipe.send(batch)

    async def _watch_silence(self) -> None:
        """Detects a pipe that is broken without an error: nothing comes back."""
        silent = 0
        while True:
            self._received_anything = False
            await asyncio.sleep(self._heartbeat_s)
            silent = 0 if self._received_anything else silent + 1
            if silent >= _SILENT_BEATS:
                raise _PipeBroken("nothing comes back")
            if silent and self._attached.is_set():
                self.ask("ping")

    async def _listen(self, pipe: Pipe, limit: asyncio.Timeout) -> None:
        decoder = frames.Decoder()
        attachment = ""
        async for data in pipe.received():
            self._received_anything = True
            for frame in decoder.feed(data):
                if frame.kind == frames.READY:
                    if attachment:
                        raise Malformed("a second READY")
                    attachment = self._greeted(frame)
                    hello = {"attachment": attachment, "session": self._session, "received": self._ledger.received}
                    self._queue.append(frames.encode(frames.HELLO, 0, 0, frames.pack_message(hello)))
                    self._queued.set()
                elif frame.kind == frames.HELLO:
                    peer = self.checked(Hello, frames.parse_message(frame.payload))
                    if attachment and peer.attachment == attachment and not self._attached.is_set():
                        self._go_on(peer.received)
                        limit.reschedule(None)
                elif not self._attached.is_set():
                    raise Malformed("a frame before HELLO")
                elif frame.kind == frames.ACK:
                    self._acknowledged(frames.parse_number(frame.payload))
                elif self._ledger.receive(frame):
                    self._receive(frame)
                    if self._ledger.overfull:
                        _log.warning("a guest acknowledges nothing")
                        self.lose("ATTENDANT_MISBEHAVED")
                        raise LinkLost("ATTENDANT_MISBEHAVED")
                    if acknowledgement := self._ledger.acknowledgement():
                        self._acknowledgement = acknowledgement
                        self._queued.set()
        raise _PipeBroken("the pipe ended")

    def _greeted(self, frame: frames.Frame) -> str:
        greeting = self.checked(Greeting, frames.parse_message(frame.payload))
        if greeting.version != frames.VERSION:
            raise SandboxGone("ATTENDANT_VERSION")
        if self.greeting is not None and self.greeting.instance != greeting.instance:
            raise SandboxGone("ATTENDANT_RESTARTED")
        self.greeting = greeting
        return greeting.attachment

    def _go_on(self, received: int) -> None:
        self._queue += self._ledger.after(received)
        self._queued.set()
        self._attached.set()
        if not self._ledger.full:
            self._room.set()
        if not self._ready.done():
            assert self.greeting is not None
            self._ready.set_result(self.greeting)

    def _acknowledged(self, number: int) -> None:
        if number > self._handed:
            # It would make room for more frames, beside those that still wait for the pipe.
            raise Malformed(f"frame {number} is acknowledged and not sent, of {self._handed}")
        self._ledger.acknowledged(number)
        if not self._ledger.full:
            self._room.set()

    # Receiving ---------------------------------------------------------------------------------------------------

    def _receive(self, frame: frames.Frame) -> None:
        match frame.kind:
            case frames.REPLY:
                reply = self._replies.pop(frame.stream, None)
                if reply is None:
                    raise Malformed("a reply without a request")
                if not reply.done():
                    reply.set_result(frames.parse_message(frame.payload))
            case frames.EVENT:
                self._on_event(frames.parse_message(frame.payload))
            case frames.OPEN:
                if not frame.stream & frames.FROM_ATTENDANT or frame.stream in self._streams:
                    raise Malformed("a stream that cannot be opened")
                port = self.checked(Opened, frames.parse_message(frame.payload)).port
                self._on_open(self._add_stream(frame.stream, frames.ENDPOINT_WINDOW, frames.ENDPOINT_WINDOW), port)
            case frames.DATA | frames.END | frames.RESET | frames.CREDIT:
                stream = self._streams.get(frame.stream)
                if stream is not None:
                    stream.receive(frame)
            case _:
                raise Malformed(f"a frame of kind {frame.kind}")


def _gravest(group: ExceptionGroup[Exception]) -> Exception:
    """Returns the most informative error of a broken pipe: SandboxGone comes before the pipe's end that it caused."""
    for kind in (SandboxGone, LinkLost, Malformed):
        part = group.subgroup(kind)
        if part is not None:
            group = part
            break
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
