"""Every cache on a model call's path. All are bounded and thread-safe, and a miss gives the same result as a hit.

What is cached, its key, and its bounds (characters and bytes of keys; values are of the same order):

- `messages`: a rollout's last parsed conversation; the rollout's id, and the messages as the body has them: a message
  is reused only where both bodies agree up to it. One for each rollout, 128 MiB for all by `weight`, an eighth for one.
- `fingerprinted`: the fingerprints of that conversation's prompt; the same entry, and the messages' identity.
- `sha256`: hash states; the pieces of 4 KiB that a text starts with. 4,096 pieces, 20 MiB.
- `REPLY_KEYS`: the fingerprints of replies; a digest of a reply as written. 32,768 entries, 8 MiB.
- `TOOL_KEYS`: the fingerprints of tool sets; the identity of a set of `TOOL_SETS`. 128 sets of `TOOLS_CHARS` at most.
- `TOOL_SETS`: one object for equal tools, and their digest; the tools. 128 sets of `TOOLS_CHARS` at most.
- `CHAT_TOOLS`: parsed tools of Chat Completions; their JSON text. 128 texts of `TOOLS_CHARS` at most.
- `CHAT_SETTINGS`: parsed settings of Chat Completions; their JSON text and the tools. 128 texts of 4 KiB at most.
- `LABELS`: the children of a metric; its label values. 128 of each metric.
- `VALIDATORS`: compiled schemas of host tools; their JSON text. 128 texts of 64 KiB, as long as an offer may be.

Larger values are computed each time. The codec's caches are in `penstock_codec.cache`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock_codec.cache import Memo, Table
from penstock_codec.chat import Message, Role, Tool
from penstock_codec.fast_dataclass import quick

if TYPE_CHECKING:
    from hashlib import _Hash

V = TypeVar("V")

TOOLS_CHARS: Final = 256 << 10
"""Largest cached set of tools, in characters. A group's rollouts have the same tools."""


def characters(tools: Sequence[Tool]) -> int:
    """Returns the size of a set of tools."""
    return sum([len(tool.description) + len(tool.parameters_json_schema) for tool in tools])


REPLY_KEYS: Final[Table[bytes, bytes]] = Table(1 << 15)
TOOL_KEYS: Final[Table[int, tuple[tuple[Tool, ...], bytes]]] = Table(128)
TOOL_SETS: Final = Memo(128, TOOLS_CHARS, characters)
CHAT_TOOLS: Final = Memo(128, TOOLS_CHARS)
CHAT_SETTINGS: Final = Memo(128, 4 << 10)
LABELS: Final = Memo(128)
VALIDATORS: Final = Memo(128)


# Parsed bodies -------------------------------------------------------------------------------------------------------

KEPT_BYTES: Final = 128 << 20
"""Memory limit for all rollouts' conversations together, as estimated by `weight`."""
ROLLOUT_SHARE: Final = 8
"""One rollout gets at most this fraction of it, so that it cannot evict all others."""
_VALUE_BYTES: Final = 64


@quick
@dataclass(frozen=True, slots=True, eq=False)
class Fingerprinted:
    """A prompt's messages with their keys, and the states: of the tools, then after each message.

    `split` is the index of the first reply that directly follows another one; the number of messages if none does.
    `by` is the object that made the keys: keys of another one may differ.
    """

    messages: Sequence[Message]
    keys: Sequence[bytes]
    states: Sequence[bytes]
    split: int
    by: object


class _ParsedBody:
    """One rollout's conversation at its last call. Each attribute is replaced as a whole, never changed."""

    __slots__ = ("parsed", "prompt", "size")

    def __init__(self, size: int, parsed: tuple[Sequence[Any], Sequence[Message]]) -> None:
        self.size = size
        self.parsed = parsed
        self.prompt: Fingerprinted | None = None


class ParsedBodies:
    """The last conversation of each rollout, least recently used evicted first. Only continued ones are cached."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._held = 0
        self._known: OrderedDict[str, _ParsedBody] = OrderedDict()
        self._lock = Lock()
        self.get = self._known.get
        """Returns a rollout's conversation, or None."""

    def keep(self, rollout_id: str, body: bytes, raw: Sequence[Any], parsed: Sequence[Message]) -> None:
        """Caches a conversation in place of the rollout's last one, if it has a reply and is not too large."""
        if not any(message.role is Role.ASSISTANT for message in parsed):
            return
        most = self._kept_bytes // ROLLOUT_SHARE
        size = weight(body) if len(body) <= most else len(body)
        if size > most:
            self.forget(rollout_id)
            return
        with self._lock:
            known = self._known.get(rollout_id)
            if known is None:
                self._known[rollout_id] = _ParsedBody(size, (raw, parsed))
                self._held += size
            else:
                self._known.move_to_end(rollout_id)
                self._held += size - known.size
                known.size, known.parsed = size, (raw, parsed)
            while self._held > self._kept_bytes:
                self._held -= self._known.popitem(last=False)[1].size

    def forget(self, rollout_id: str) -> None:
        """Evicts a rollout's conversation. Idempotent."""
        with self._lock:
            known = self._known.pop(rollout_id, None)
            if known is not None:
                self._held -= known.size

    def clear(self) -> None:
        """Evicts everything."""
        with self._lock:
            self._known.clear()
            self._held = 0


PARSED_BODIES: Final = ParsedBodies()
_rollout: Final[ContextVar[str]] = ContextVar("rollout", default="")


def weight(body: bytes) -> int:
    """Estimates the memory of a parsed body: its bytes, plus one object per value, counted by commas and brackets."""
    return len(body) + _VALUE_BYTES * (body.count(b",") + body.count(b"[") + body.count(b"{"))


def for_rollout(rollout_id: str, work: Callable[[], V]) -> V:
    """Does work whose conversation is cached as this rollout's. Elsewhere nothing is known and nothing is kept."""
    token = _rollout.set(rollout_id)
    try:
        return work()
    finally:
        _rollout.reset(token)


def messages(body: bytes, raw: list[Any], read: Callable[[Any], Message]) -> tuple[Message, ...]:
    """Returns `read` of each raw message of a body. Raises what `read` raises.

    An agent repeats its whole conversation with each call: repeated messages are not read again.
    """
    rollout_id = _rollout.get()
    if not rollout_id:
        return tuple(map(read, raw))
    known = PARSED_BODIES.get(rollout_id)
    repeated = () if known is None else _repeated(raw, *known.parsed)
    found = (*repeated, *map(read, raw[len(repeated) :]))
    PARSED_BODIES.keep(rollout_id, body, raw, found)
    return found


def _repeated(raw: list[Any], before: Sequence[Any], parsed: Sequence[Message]) -> Sequence[Message]:
    """Returns the parsed messages up to the first one that differs.

    Comparing True and 1 as equal is harmless, since no message field that is read accepts either.
    """
    count, most = 0, min(len(before), len(raw))
    try:
        while count < most and raw[count] == before[count]:
            count += 1
    except RecursionError:  # an ignored field has JSON's full nesting depth
        return ()
    return parsed[:count]


def fingerprinted(rollout_id: str, make: Callable[[Fingerprinted | None], Fingerprinted]) -> Fingerprinted:
    """Returns the fingerprints of a rollout's prompt, which do not depend on what `make` gets.

    `make` gets those of the rollout's last prompt, or None, and reuses what stands for the same messages.
    """
    known = PARSED_BODIES.get(rollout_id)
    if known is None:
        return make(None)
    made = make(known.prompt)
    if made.messages[0] is known.parsed[1][0]:  # what the next prompt cannot share is not kept
        known.prompt = made
    return made


# Digests -------------------------------------------------------------------------------------------------------------

PIECE: Final = 4 << 10
"""Piece size in bytes."""
KEPT_PIECES: Final = 4096
"""Cached pieces, least recently used evicted first; some 5 KiB each."""


class PrefixDigests:
    """SHA-256 with cached prefixes: the known beginning of a text is not hashed again.

    An agent repeats its conversation with each call, and a group's agents share the system prompt and tools. A text is
    processed in pieces; the hash state after each known piece with the same beginning is cached, and a lookup costs an
    eighth of the hashing. A text shorter than a piece is hashed directly.
    """

    def __init__(self, kept: int = KEPT_PIECES) -> None:
        self.kept = kept
        # (number of the previous state, 0 for none; the piece) -> (its own number, the state).
        self._known: OrderedDict[tuple[int, bytes], tuple[int, _Hash]] = OrderedDict()
        self._numbers = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def sha256(self, text: bytes) -> bytes:
        """Returns the SHA-256 of a text. CPU work: about 5 us per 1,000 new bytes."""
        length = len(text)
        if length < PIECE:
            return hashlib.sha256(text).digest()
        number, state = 0, hashlib.sha256()
        at = 0
        with self._lock:
            while at + PIECE <= length:
                key = (number, text[at : at + PIECE])
                found = self._known.get(key)
                if found is None:
                    break
                self._known.move_to_end(key)
                number, state = found
                at += PIECE
        state = state.copy()
        fresh: list[tuple[bytes, _Hash]] = []
        while at + PIECE <= length:
            piece = text[at : at + PIECE]
            state.update(piece)
            fresh.append((piece, state.copy()))
            at += PIECE
        if fresh:
            self._keep(number, fresh)
        state.update(text[at:])
        return state.digest()

    def clear(self) -> None:
        """Evicts everything."""
        with self._lock:
            self._known.clear()

    def _keep(self, number: int, fresh: list[tuple[bytes, _Hash]]) -> None:
        with self._lock:
            for piece, state in fresh:
                known = self._known.get((number, piece))  # another thread may have been first
                if known is None:
                    self._numbers += 1
                    known = self._known[number, piece] = (self._numbers, state)
                number = known[0]
            while len(self._known) > self.kept:
                self._known.popitem(last=False)


DIGESTS: Final = PrefixDigests()
sha256: Final = DIGESTS.sha256
EVERY: Final = (
    PARSED_BODIES,
    DIGESTS,
    REPLY_KEYS,
    TOOL_KEYS,
    TOOL_SETS,
    CHAT_TOOLS,
    CHAT_SETTINGS,
    LABELS,
    VALIDATORS,
)
