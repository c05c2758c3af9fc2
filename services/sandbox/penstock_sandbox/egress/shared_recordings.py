"""Recordings that several sandbox services have together, in a place that all of them reach (R141).

Invariants
- The first response that is stored for a request is that of all services: it is created if absent, and never replaced.
- A claim keeps others from asking upstream meanwhile. It orders them, no more: where one is lost or late, upstream is
  asked once more, and what was stored first still counts.
- What is read has the digest that it was stored with, or is refused. A body that was found damaged is stored again with
  the next response that has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import h11
import structlog

from penstock_chassis.aio.retry import Backoff, Delays, Pause
from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.recording_stores import Place
from penstock_sandbox.egress.store import Part, as_bytes

BEAT_S: Final = 4.0
LEASE_S: Final = 20.0
"""A claim that has not changed for so long is of a service that was lost."""
FRESH_S: Final = 86_400.0
"""A body that is older is stored again for a new response: operators delete by age."""
_CALL_S: Final = 30.0
_POLLS: Final = Delays(0.05, 1.0, jitter=(0.75, 1.25))
_MOVES: Final = 4
"""Bodies that are sent or received at a time."""
_PIECE: Final = 4 * 1024 * 1024
_MOST_ENTRY_BYTES: Final = 1024 * 1024
_MOST_CLAIM_BYTES: Final = 128
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

P = ParamSpec("P")
T = TypeVar("T")

Run = Callable[[Callable[[], T]], Awaitable[T]]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded response; its body has a file of its own, by its digest, for all recordings."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    digest: str
    size: int


@dataclass(slots=True)
class _Claim:
    name: str
    token: str = field(repr=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SharedRecordings:
    """One service's view of them.

    Args:
        place: where they are.
        pool: threads for the place's calls.
        name: of the place in this service's own store, which may have had another one before.
        transfer_s: seconds that a body may take to be sent, and that another service may take to answer.
        pause: waits between looks.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        place: Place,
        pool: Executor | None,
        *,
        name: str,
        transfer_s: float,
        pause: Pause = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._pool = pool
        self._name = name
        self._transfer_s = transfer_s
        self._pause = pause
        self._clock = clock
        self._moving = asyncio.Semaphore(_MOVES)
        self._tasks = TaskOwner()

    async def aclose(self) -> None:
        """Ends what goes on. Claims that are left count until their lease ends."""
        await self._tasks.aclose()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def own(self, recording: str) -> str:
        """Returns the name that this service's own store has for what it keeps of a recording here."""
        return f"{self._name}/{recording}"

    async def find(self, recording: str, key: str) -> Entry | None:
        """Returns what is recorded. Raises Refusal (RECORDINGS_AWAY, RECORDING_DAMAGED)."""
        data = await self._call(self._place.read, _entry(recording, key), 0, _MOST_ENTRY_BYTES)
        return None if data is None else _parsed(data, recording, key)

    @asynccontextmanager
    async def turn(self, recording: str, key: str) -> AsyncIterator[Entry | None]:
        """Yields what is recorded, or None: then the caller asks upstream, and other services wait for the block's end.

        Raises Refusal (RECORDINGS_AWAY, RECORDING_DAMAGED; UPSTREAM_TIMEOUT if another service takes too long).
        """
        found = await self._found_or_claimed(recording, key)
        if isinstance(found, Entry):
            yield found
            return
        beats = self._tasks.start(self._beat(found))
        try:
            yield None
        finally:
            # The response need not wait for it.
            self._tasks.start(self._release(found, beats))

    async def publish(self, recording: str, key: str, entry: Entry, body: Path) -> Entry:
        """Stores a response. Returns what counts: this one, or the one that was stored before it.

        Raises Refusal (RECORDINGS_AWAY, RECORDING_DAMAGED, RESPONSE_TOO_LARGE).
        """
        data = _written(entry, recording, key)
        if len(data) > _MOST_ENTRY_BYTES:
            raise Refusal("RESPONSE_TOO_LARGE", "a response has too many headers to be recorded")
        if entry.size:
            async with self._moving:
                if not await self._is_sound(entry):
                    await self._within(self._transfer_s, partial(self._place.send, _body(entry.digest), body))
                    await self._call(self._place.remove, _mark(entry.digest))
        if await self._call(self._place.create, _entry(recording, key), data):
            return entry
        first = await self.find(recording, key)
        if first is None:
            raise _away()  # removed meanwhile
        return first

    async def receive(self, entry: Entry, part: Part) -> None:
        """Writes a response's body. Raises Refusal (RECORDINGS_AWAY, RECORDING_DAMAGED), and as `Part.write`."""
        name = _body(entry.digest)
        async with self._moving:
            while part.size < entry.size:
                end = min(part.size + _PIECE, entry.size)
                data = await self._call(self._place.read, name, part.size, end)
                if not data:
                    _log.error("a recorded body is cut off or gone", file=name)
                    await self._mark_damaged(entry)
                    raise _damaged()
                part.write(data)
        if part.digest != entry.digest:
            _log.error("a recorded body has another digest", file=name)
            await self._mark_damaged(entry)
            raise _damaged()

    async def _is_sound(self, entry: Entry) -> bool:
        """Whether a body is there, young, of its length, and not known to be damaged."""
        name = _body(entry.digest)
        age_s = await self._call(self._place.age_s, name)
        if age_s is None or age_s > FRESH_S:
            return False
        last = await self._call(self._place.read, name, entry.size - 1, entry.size + 1)
        if last is None or len(last) != 1:
            return False
        return await self._call(self._place.read, _mark(entry.digest), 0, 1) is None

    async def _mark_damaged(self, entry: Entry) -> None:
        # The body is not removed: another service may have stored it again since.
        try:
            await self._call(self._place.replace, _mark(entry.digest), b"damaged")
        except Refusal as error:
            _log.warning("a damaged body was not marked", cause=repr(error.__cause__))

    async def _found_or_claimed(self, recording: str, key: str) -> Entry | _Claim:
        claim = _Claim(f"claims/{_hashed(recording, key)}", secrets.token_hex(16))
        began, polls = self._clock(), Backoff(_POLLS, pause=self._pause)
        seen, since = b"", began
        while (found := await self.find(recording, key)) is None:
            created = await self._call(self._place.create, claim.name, claim.token.encode())
            held = None if created else await self._call(self._place.read, claim.name, 0, _MOST_CLAIM_BYTES)
            if created or held == claim.token.encode():  # a creation whose answer was lost finds itself
                try:
                    # Another service may have recorded it, and given its claim up, since the look above.
                    found = await self.find(recording, key)
                except Refusal:
                    self._tasks.start(self._release(claim, None))
                    raise
                if found is None:
                    return claim
                self._tasks.start(self._release(claim, None))
                break
            if held is None or held != seen:
                seen, since = held or b"", self._clock()
            elif self._clock() - since > LEASE_S:
                _log.warning("a sandbox service was lost as it asked upstream", claim=claim.name)
                await self._call(self._place.remove, claim.name)
                continue
            if self._clock() - began > self._transfer_s:
                message = f"another sandbox service asks for this, and has no answer after {self._transfer_s:g} s"
                raise Refusal("UPSTREAM_TIMEOUT", message, 504)
            await polls.wait()
        return found

    async def _beat(self, claim: _Claim) -> None:
        beats = 0
        while True:
            await self._pause(BEAT_S)
            beats += 1
            async with claim.lock:
                try:
                    await self._call(self._place.replace, claim.name, f"{claim.token} {beats}".encode())
                except Refusal as error:
                    _log.warning("a claim was not renewed", cause=repr(error.__cause__))

    async def _release(self, claim: _Claim, beats: asyncio.Task[None] | None) -> None:
        if beats is not None:
            async with claim.lock:  # a beat that is under way would store the claim again
                beats.cancel()
        try:
            held = await self._call(self._place.read, claim.name, 0, _MOST_CLAIM_BYTES)
            if held is not None and held.startswith(claim.token.encode()):
                await self._call(self._place.remove, claim.name)
        except Refusal as error:
            _log.warning("a claim was not released", cause=repr(error.__cause__))

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._within(_CALL_S, partial(work, *args, **kwargs))

    async def _within(self, seconds: float, work: Callable[[], T]) -> T:
        """Waits for the work for a limited time; its thread goes on after that."""
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except Exception as error:
            raise _away() from error


def _hashed(recording: str, key: str) -> str:
    return hashlib.sha256(f"{recording}\0{key}".encode()).hexdigest()


def _entry(recording: str, key: str) -> str:
    return f"responses/{hashlib.sha256(recording.encode()).hexdigest()}/{key}"


def _body(digest: str) -> str:
    return f"bodies/{digest[:2]}/{digest}"


def _mark(digest: str) -> str:
    """The file that says that a body is damaged. Operators delete it with the claims, after `FRESH_S`."""
    return f"claims/damaged-{digest}"


def _written(entry: Entry, recording: str, key: str) -> bytes:
    """An entry's file: the digest of what follows, and that as JSON, on a line each."""
    data = json.dumps({"recording": recording, "key": key, **asdict(entry)}).encode()
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def _parsed(written: bytes, recording: str, key: str) -> Entry:
    digest, _, data = written.partition(b"\n")
    try:
        if hashlib.sha256(data).hexdigest().encode() != digest:
            raise ValueError("it has another digest")
        fields: dict[str, Any] = json.loads(data)
        if (fields.pop("recording"), fields.pop("key")) != (recording, key):
            raise ValueError("it is of another request")
        headers = tuple((str(name), str(value)) for name, value in fields.pop("headers"))
        entry = Entry(headers=headers, **fields)
        h11.Response(status_code=entry.status, headers=as_bytes(headers), reason=entry.reason.encode("latin-1"))
        if not _DIGEST.fullmatch(entry.digest) or type(entry.size) is not int or entry.size < 0:
            raise ValueError("it names no body")
    except (ValueError, TypeError, KeyError, AttributeError, h11.LocalProtocolError) as error:
        _log.error("a recorded response is damaged", file=_entry(recording, key), error=repr(error))
        raise _damaged() from error
    return entry


def _away() -> Refusal:
    return Refusal("RECORDINGS_AWAY", "the recordings that sandbox services share cannot be reached now", 503)


def _damaged() -> Refusal:
    return Refusal("RECORDING_DAMAGED", "what is recorded for this request is not what was stored")
