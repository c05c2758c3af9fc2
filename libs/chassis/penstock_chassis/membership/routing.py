"""Chooses the engine of a request among several: a pure decision over the routing history.

The members are the replicas of an inference service, or the inference services of a gate's pool. A session stays with
the member that has its cache. A prompt without a session goes to the member that recently computed most of it. Neither
applies to a member with far more load than the others; then the least loaded one is chosen. There is no clock and no
randomness: the same history gives the same choice.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

BLOCK_TOKENS = 64
"""Granularity of prefix matching, in tokens."""
MAX_PREFIX_TOKENS = 512 * BLOCK_TOKENS
"""Longest prefix that is matched."""
SKEW = 1.25
SLACK_TOKENS = 4096
"""Affinity holds while a member's load is at most `SKEW` times the mean plus this."""

_DIGEST_BYTES = 8


def prefix_blocks(tokens: bytes, adapter: str = "") -> tuple[bytes, ...]:
    """A digest per whole block of a prompt, which covers everything up to the block's end.

    Args:
        tokens: the prompt as little-endian int32; what is beyond `MAX_PREFIX_TOKENS` may be left out.
        adapter: empty = the base weights.
    """
    step = 4 * BLOCK_TOKENS
    digest = hashlib.blake2b(adapter.encode(), digest_size=_DIGEST_BYTES).digest()
    blocks = []
    for start in range(0, min(len(tokens), 4 * MAX_PREFIX_TOKENS) - step + 1, step):
        digest = hashlib.blake2b(digest + tokens[start : start + step], digest_size=_DIGEST_BYTES).digest()
        blocks.append(digest)
    return tuple(blocks)


@dataclass(slots=True)
class _Known:
    """The load and the recently computed blocks of one member."""

    load: int = 0
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Route:
    """A choice; return it with `Router.ended`."""

    member: str
    cost: int
    """Tokens that it adds to the member's load."""
    cached_blocks: int
    """Blocks of the prompt that the member has computed before."""
    _known: _Known = field(repr=False, compare=False)
    """The member's state when it was chosen; a restarted member has another one."""


class Router:
    """Routes to the members that joined.

    Args:
        max_sessions: sessions remembered; the least recently used one is dropped first.
        max_blocks: the same for prefix blocks, per member.
    """

    def __init__(self, max_sessions: int = 65536, max_blocks: int = 65536) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._members: dict[str, _Known] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    @property
    def members(self) -> tuple[str, ...]:
        """The members that get requests."""
        return tuple(self._members)

    def load(self, member: str) -> int:
        """Tokens in flight on a member that joined."""
        return self._members[member].load

    def join(self, member: str) -> None:
        """Add a member with an empty cache; it gets requests from now on."""
        self._members[member] = _Known()

    def leave(self, member: str) -> None:
        """Remove a member; its sessions move with their next requests. Idempotent."""
        self._members.pop(member, None)

    def forget_prefixes(self, member: str = "") -> None:
        """Drop the known prefixes of a member, of all if it is empty: other weights are in force there."""
        for name, known in self._members.items():
            if member in ("", name):
                known.blocks.clear()

    def knows(self, session: str) -> bool:
        """Whether a session has a member."""
        return session in self._sessions

    def route(
        self,
        blocks: tuple[bytes, ...],
        prompt_tokens: int,
        max_tokens: int,
        session: str = "",
        among: Collection[str] | None = None,
    ) -> Route | None:
        """Choose the member of a request and count its load; None when there is no member.

        Args:
            blocks: `prefix_blocks` of the prompt.
            prompt_tokens: length of the prompt.
            max_tokens: most tokens to sample.
            session: empty for none.
            among: names that may be chosen; None = all.
        """
        loads = {name: known.load for name, known in self._members.items() if among is None or name in among}
        if not loads:
            return None
        mean = sum(loads.values()) / len(loads)
        allowed = [name for name, load in loads.items() if load <= SKEW * mean + SLACK_TOKENS]
        cached = {name: self._cached(name, blocks) for name in allowed}
        stays = self._sessions.get(session) if session else None
        # Else by longest prefix, then least load, then name.
        chosen = stays if stays in cached else min(allowed, key=lambda name: (-cached[name], loads[name], name))
        cost = max(1, prompt_tokens - cached[chosen] * BLOCK_TOKENS) + max_tokens
        self._members[chosen].load += cost
        self._remember(chosen, blocks, session)
        return Route(chosen, cost, cached[chosen], self._members[chosen])

    def ended(self, route: Route) -> None:
        """End a routed request; call it once. Harmless when its member is gone or has restarted."""
        route._known.load -= route.cost  # noqa: SLF001 - private to this module

    def _cached(self, member: str, blocks: tuple[bytes, ...]) -> int:
        known = self._members[member].blocks
        return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, member: str, blocks: tuple[bytes, ...], session: str) -> None:
        known = self._members[member].blocks
        # In reverse order, so that the beginning of a long prefix is dropped last.
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)
        if session:
            self._sessions[session] = member
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
