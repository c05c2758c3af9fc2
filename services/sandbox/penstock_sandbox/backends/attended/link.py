"""The service's end of the conversation with an attendant: requests and streams over pipes that may break.

Purpose: a ``Link`` opens pipes one after another, as they break, and carries one conversation over them: what was said
is said again until it was heard, in order, once. Requests have replies; streams have windows in both directions.

Invariants
- A broken pipe is nobody's business but the link's. The link is lost when no pipe could be used for ``lost_after_s``,
  when the backend says that the sandbox is gone, or when the attendant is another one than before: then every waiter
  fails with ``LinkLost``, and ``on_lost`` is called once; before that, ``judge`` finds out what brought it about, for
  which it has a few seconds.
- Memory is bounded whatever the other end sends: a stream that exceeds its window breaks the rules.
- While suspended it opens no pipe and counts no silence: what is said waits, and is said over the next pipe.
- No task outlives ``aclose``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from penstock_sandbox.attendant import frames
from penstock_sandbox.attendant.frames import Malformed
from penstock_sandbox.backends.attended.messages import Greeting, Hello, Refusal
from penstock_sandbox.backends.attended.pipe import Opener, Pipe, SandboxGone
from penstock_sandbox.backends.attended.stream import LinkLost, Stream
from penstock_sandbox.backends.refusals import Refused
from penstock_sandbox.model import ENDED_INSIDE

LOST_AFTER_S = 30.0
HEARTBEAT_S = 10.0

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 2.0
_SILENT_BEATS = 3
_JUDGE_S = 10.0
_BATCH = 1024 * 1024
_MALFORMED_LIMIT = 8

_M = TypeVar("_M", bound=BaseModel)

_log = structlog.get_logger(__name__)


Judge = Callable[[str], Awaitable[str]]
"""The reason of a sandbox's loss, given how that showed: one of ``ENDED_INSIDE`` where what ran in it brought it about.

It may raise where that cannot be found out."""


class NotExecuted(Refused):
    """The program that a request was to start cannot be executed."""


class _PipeBroken(Exception):
    """The pipe ended."""


class Link:
    """One conversation. ``on_event`` gets each event, ``on_open`` each stream that the attendant opens."""

    def __init__(
        self,
        opener: Opener,
        on_event: Callable[[frames.Message], None],
        on_open: Callable[[Stream], None],
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
        self._queued = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._last = 0
        self._replies: dict[int, asyncio.Future[frames.Message]] = {}
        self._streams: dict[int, Stream] = {}
        self._heard_anything = False
        self._malformed = 0
        self._runner: asyncio.Task[None] | None = None
        self._suspended = False
        self.greeting: Greeting | None = None
        self.lost: LinkLost | None = None
        self._ready: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()

    async def open(self) -> Greeting:
        """Attach for the first time. Raises LinkLost when that does not succeed in time."""
        self._runner = asyncio.create_task(self._run(), name="attendant-link")
        return await asyncio.shield(self._ready)

    async def aclose(self) -> None:
        """End the conversation: every waiter fails, nothing is announced."""
        self._end("CLOSED")
        ending = [task for task in (self._runner, self._judging) if task is not None]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def suspend(self) -> None:
        """Close the pipe and open none until ``resume``: what it leads to will not answer meanwhile."""
        self._suspended = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])

    def resume(self) -> None:
        """Go on after ``suspend`` where it stopped; harmless when it was not suspended, or is lost."""
        if self._suspended:
            self._suspended = False
            if self.lost is None and self._judging is None:
                self._runner = asyncio.create_task(self._run(), name="attendant-link")

    def lose(self, reason: str) -> None:
        """The sandbox is gone."""
        if self.lost is not None or (self._judging is not None and reason not in ENDED_INSIDE):
            return
        if self._runner is not None:
            self._runner.cancel()
        if reason in ENDED_INSIDE:
            # At once: nothing may be asked of it any more.
            self._announce(reason)
        else:
            self._judging = asyncio.create_task(self._judged(reason), name="attendant-judge")

    async def _judged(self, reason: str) -> None:
        try:
            async with asyncio.timeout(_JUDGE_S):
                reason = await self._judge(reason)
        except Exception as error:  # noqa: BLE001
            # A daemon or a provider that is away itself: then the loss is no agent's doing.
            _log.warning("what ended a sandbox is not known", reason=reason, error=repr(error))
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
            self._ready.exception()  # whoever opened it may have given up
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(lost)
                reply.exception()  # it may be one that nobody waits for
        self._replies.clear()
        for stream in list(self._streams.values()):
            stream.fail(lost)
        self._streams.clear()
        self._room.set()
        self._queued.set()

    # Saying ------------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number that no request, stream or process of this link had."""
        self._last = self._last % (frames.FROM_ATTENDANT - 1) + 1
        return self._last

    def ask(self, op: str, **fields: object) -> asyncio.Future[frames.Message]:
        """Say a request; what is asked first is done first. Answers its reply to come (see ``outcome``)."""
        if self.lost is not None:
            raise self.lost
        number = self.next_number()
        payload = frames.pack_message({"op": op, **fields})
        if len(payload) > frames.MAX_PAYLOAD:
            raise NotExecuted(7, "the request is longer than an attendant takes")
        reply: asyncio.Future[frames.Message] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self.say(frames.REQUEST, number, payload)
        return reply

    async def request(self, op: str, **fields: object) -> frames.Message:
        """Ask, and wait for the reply. Raises Refused (NotExecuted for a program that cannot be) or LinkLost."""
        return self.outcome(await self.ask(op, **fields))

    def outcome(self, reply: frames.Message) -> frames.Message:
        """A reply that is not a refusal. Raises Refused or NotExecuted."""
        if "errno" not in reply:
            return reply
        refusal = self.checked(Refusal, reply)
        kind = NotExecuted if refusal.failed else Refused
        raise kind(refusal.errno, refusal.what)

    def checked(self, kind: type[_M], message: frames.Message) -> _M:
        """A message as what it should be; an attendant that says something else is lost. Raises LinkLost."""
        try:
            return kind.model_validate(message)
        except ValidationError as error:
            _log.warning("an attendant's message is not what it should be", kind=kind.__name__)
            self.lose("ATTENDANT_MISBEHAVED")
            raise LinkLost("ATTENDANT_MISBEHAVED") from error

    def say(self, kind: int, stream: int, payload: bytes) -> None:
        """Say a frame: now, or over the next pipe."""
        frame = self._ledger.say(kind, stream, payload)
        if self._ledger.full:
            self._room.clear()
        if self._attached.is_set():
            self._queue.append(frame)
            self._queued.set()

    async def room(self) -> None:
        """Wait while too much is said and not heard. Raises LinkLost."""
        await self._room.wait()
        if self.lost is not None:
            raise self.lost

    def stream(self, *, window: int, credit: int) -> Stream:
        """A new stream: ``window`` is what may come unread, ``credit`` what may be sent before it is taken."""
        return self._add_stream(self.next_number(), window, credit)

    def _add_stream(self, number: int, window: int, credit: int) -> Stream:
        stream = Stream(self, number, window, credit)
        if self.lost is not None:
            stream.fail(self.lost)
        else:
            self._streams[number] = stream
        return stream

    def forget(self, number: int) -> None:
        """A stream is over: what still comes on it is for nobody."""
        self._streams.pop(number, None)

    # Pipes -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        deadline = loop.time() + self._lost_after_s
        problem = ""
        # A task group that fails as it is cancelled forgets the cancellation (until Python 3.13): the state decides.
        while not self._is_over():
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    pipe = await self._opener()
                    try:
                        await self._converse(pipe, limit)
                    finally:
                        if self._attached.is_set():
                            deadline = loop.time() + self._lost_after_s
                            pause = _FIRST_PAUSE_S
                        self._attached.clear()
                        self._queue.clear()
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
                # Whatever a provider's client raises: the next pipe may do, until the deadline.
                problem = str(error) or type(error).__name__
            if self._is_over():
                return
            if loop.time() + pause >= deadline:
                _log.warning("no pipe to the attendant", problem=problem)
                self.lose("ATTENDANT_UNREACHABLE")
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _is_over(self) -> bool:
        return self.lost is not None or self._judging is not None or self._suspended

    async def _converse(self, pipe: Pipe, limit: asyncio.Timeout) -> None:
        """Use a pipe until it breaks. Raises what broke it."""
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
            while self._queue:
                size = count = 0
                while count < len(self._queue) and size < _BATCH:
                    size += len(self._queue[count])
                    count += 1
                batch = b"".join(self._queue[:count])
                del self._queue[:count]
                await pipe.send(batch)

    async def _watch_silence(self) -> None:
        """A pipe that is broken without saying so shows in that nothing comes back."""
        silent = 0
        while True:
            self._heard_anything = False
            await asyncio.sleep(self._heartbeat_s)
            silent = 0 if self._heard_anything else silent + 1
            if silent >= _SILENT_BEATS:
                raise _PipeBroken("nothing comes back")
            if silent and self._attached.is_set():
                self.ask("ping")

    async def _listen(self, pipe: Pipe, limit: asyncio.Timeout) -> None:
        decoder = frames.Decoder()
        attachment = ""
        async for data in pipe.received():
            self._heard_anything = True
            for frame in decoder.feed(data):
                if frame.kind == frames.READY:
                    attachment = self._greeted(frame)
                    hello = {"attachment": attachment, "session": self._session, "heard": self._ledger.heard}
                    self._queue.append(frames.encode(frames.HELLO, 0, 0, frames.pack_message(hello)))
                    self._queued.set()
                elif frame.kind == frames.HELLO:
                    said = self.checked(Hello, frames.parse_message(frame.payload))
                    if attachment and said.attachment == attachment and not self._attached.is_set():
                        self._go_on(said.heard)
                        limit.reschedule(None)
                elif not self._attached.is_set():
                    raise Malformed("a frame before HELLO")
                elif frame.kind == frames.ACK:
                    self._acknowledged(frames.parse_number(frame.payload))
                elif self._ledger.hear(frame):
                    self._heard(frame)
                    if acknowledgement := self._ledger.acknowledgement():
                        self._queue.append(acknowledgement)
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

    def _go_on(self, heard: int) -> None:
        self._queue += self._ledger.after(heard)
        self._queued.set()
        self._attached.set()
        if not self._ledger.full:
            self._room.set()
        if not self._ready.done():
            assert self.greeting is not None
            self._ready.set_result(self.greeting)

    def _acknowledged(self, number: int) -> None:
        self._ledger.acknowledged(number)
        if not self._ledger.full:
            self._room.set()

    # Hearing -----------------------------------------------------------------------------------------------------

    def _heard(self, frame: frames.Frame) -> None:
        match frame.kind:
            case frames.REPLY:
                reply = self._replies.pop(frame.stream, None)
                if reply is None:
                    raise Malformed("a reply that nobody asked for")
                if not reply.done():
                    reply.set_result(frames.parse_message(frame.payload))
            case frames.EVENT:
                self._on_event(frames.parse_message(frame.payload))
            case frames.OPEN:
                if not frame.stream & frames.FROM_ATTENDANT or frame.stream in self._streams:
                    raise Malformed("a stream that cannot be opened")
                self._on_open(self._add_stream(frame.stream, frames.ENDPOINT_WINDOW, frames.ENDPOINT_WINDOW))
            case frames.DATA | frames.END | frames.RESET | frames.CREDIT:
                stream = self._streams.get(frame.stream)
                if stream is not None:
                    stream.heard(frame)
            case _:
                raise Malformed(f"a frame of kind {frame.kind}")


def _gravest(group: ExceptionGroup[Exception]) -> Exception:
    """What a pipe broke of: a sandbox that is gone says more than a pipe that ended by it."""
    for kind in (SandboxGone, LinkLost, Malformed):
        part = group.subgroup(kind)
        if part is not None:
            group = part
            break
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
