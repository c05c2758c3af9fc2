"""Chooses the replica of a request: a pure decision over the routing history.

A session stays on the replica that has its cache. A prompt without a session goes to the replica that recently computed
most of it. Neither applies to a replica with far more load than the others; then the least loaded one is chosen. There
is no clock and no randomness: the same history gives the same choice.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from penstock_inference.engines.base import TokenIds

BLOCK_TOKENS = 64
"""Granularity of prefix matching, in tokens."""
MAX_BLOCKS = 512
"""Longest prefix that is matched: 32768 tokens."""
SKEW = 1.25
SLACK_TOKENS = 4096
"""Affinity holds while a replica's load is at most `SKEW` times the mean plus this."""

_DIGEST_BYTES = 8


def prefix_blocks(prompt: TokenIds, adapter: str = "") -> tuple[bytes, ...]:
    """A digest per whole block of a prompt, which covers everything up to the block's end."""
    data = prompt[: MAX_BLOCKS * BLOCK_TOKENS].astype("<i4", copy=False).tobytes()
    step = 4 * BLOCK_TOKENS
    digest = hashlib.blake2b(adapter.encode(), digest_size=_DIGEST_BYTES).digest()
    blocks = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.blake2b(digest + data[start : start + step], digest_size=_DIGEST_BYTES).digest()
        blocks.append(digest)
    return tuple(blocks)


@dataclass(slots=True)
class _Known:
    """The load and the recently computed blocks of one replica."""

    load: int = 0
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Route:
    """A choice; return it with `Router.ended`."""

    replica: str
    cost: int
    """Tokens that it adds to the replica's load."""
    cached_blocks: int
    """Blocks of the prompt that the replica has computed before."""
    _known: _Known = field(repr=False, compare=False)
    """The replica's state when it was chosen; a restarted replica has another one."""


class Router:
    """Routes to the replicas that joined.

    Args:
        max_sessions: sessions remembered; the least recently used one is dropped first.
        max_blocks: the same for prefix blocks, per replica.
    """

    def __init__(self, max_sessions: int = 65536, max_blocks: int = 65536) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._replicas: dict[str, _Known] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that get requests."""
        return tuple(self._replicas)

    def load(self, replica: str) -> int:
        """Tokens in flight on a replica that joined."""
        return self._replicas[replica].load

    def join(self, replica: str) -> None:
        """Add a replica with an empty cache; it gets requests from now on."""
        self._replicas[replica] = _Known()

    def leave(self, replica: str) -> None:
        """Remove a replica; its sessions move with their next requests. Idempotent."""
        self._replicas.pop(replica, None)

    def forget_prefixes(self) -> None:
        """Drop all known prefixes: other weights are in force."""
        for known in self._replicas.values():
            known.blocks.clear()

    def route(self, blocks: tuple[bytes, ...], prompt_tokens: int, max_tokens: int, session: str = "") -> Route | None:
        """Choose the replica of a request and count its load; None when there is no replica.

        Args:
            blocks: `prefix_blocks` of the prompt.
            prompt_tokens: length of the prompt.
            max_tokens: most tokens to sample.
            session: empty for none.
        """
        if not self._replicas:
            return None
        mean = sum(known.load for known in self._replicas.values()) / len(self._replicas)
        allowed = [name for name, known in self._replicas.items() if known.load <= SKEW * mean + SLACK_TOKENS]
        cached = {name: self._cached(name, blocks) for name in allowed}
        stays = self._sessions.get(session) if session else None
        if stays in cached:
            chosen = stays
        else:
            # By longest prefix, then least load, then name.
            chosen = min(allowed, key=lambda name: (-cached[name], self._replicas[name].load, name))
        cost = max(1, prompt_tokens - cached[chosen] * BLOCK_TOKENS) + max_tokens
        self._replicas[chosen].load += cost
        self._remember(chosen, blocks, session)
        return Route(chosen, cost, cached[chosen], self._replicas[chosen])

    def ended(self, route: Route) -> None:
        """End a routed request; call it once. Harmless when its replica is gone or has restarted."""
        route._known.load -= route.cost  # noqa: SLF001 - private to this module

    def _cached(self, replica: str, blocks: tuple[bytes, ...]) -> int:
        known = self._replicas[replica].blocks
        return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, replica: str, blocks: tuple[bytes, ...], session: str) -> None:
        known = self._replicas[replica].blocks
        # In reverse order, so that the beginning of a long prefix is dropped last.
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)
        if session:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
