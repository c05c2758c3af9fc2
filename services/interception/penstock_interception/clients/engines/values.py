"""Engines, the calls that are there, and what a call needs of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.membership.peers import Peer

EXPECTED_TOKENS: Final = 1024
"""Most sampled tokens that a call counts in its engine's load: agents seldom set a limit, and seldom reach one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What an engine has, as it said last.

    Attributes:
        version: of the base weights.
        adapters: their versions by namespace and name.
        tokenizer_sha256: empty for an engine without token ids.
    """

    version: int
    tokenizer_sha256: str = ""
    adapters: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine must have for a call.

    Attributes:
        min_version: of the weights, or of the adapter; None = any.
        adapter: namespace and name; None = the base weights.
        tokenizer_sha256: of the token ids of its prompt; empty = it has none.
    """

    min_version: int | None = None
    adapter: tuple[str, str] | None = None
    tokenizer_sha256: str = ""

    def are_met(self, weights: Weights) -> bool:
        """Whether an engine with these weights can answer at once."""
        version = weights.version if self.adapter is None else weights.adapters.get(self.adapter)
        return version is not None and (self.min_version is None or version >= self.min_version)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests at an engine, of all its callers: those that it answers, and those that wait."""

    running: int
    waiting: int


@dataclass(eq=False, slots=True)
class Engine:
    """One inference service.

    Attributes:
        weights: None until it has said so.
        load: None while it does not say so. Only shown: calls are spread by what this gate has there.
        behind: the version that it must reach before it gets calls; None = it has reached it.
        flights: the calls that are there.
    """

    peer: Peer
    stub: Any
    weights: Weights | None = None
    load: Load | None = None
    behind: int | None = None
    flights: set[Flight] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The service's name among the members."""
        return self.peer.name


@dataclass(eq=False, slots=True)
class Flight:
    """A call at an engine. `moved_for` is set when it is taken from there."""

    needs: Needs
    stream: Any
    moved_for: str = ""


class Moved(Exception):
    """A call was taken from its engine, which is lost or does not have the weights that another one has."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A call for one of the engines.

    Attributes:
        request: makes the request of the n-th try, from 0: its id must be fresh at an engine that has been tried.
        needs: what the engine must have.
        session: calls of one session stay at one engine.
        blocks: `prefix_blocks` of the prompt, asked for only if the session is new.
        new_tokens: tokens of the prompt that no engine has computed for this session.
        max_tokens: most tokens to sample.
    """

    request: Callable[[int], pb.GenerateRequest]
    needs: Needs
    session: str
    blocks: Callable[[], tuple[bytes, ...]] = tuple
    new_tokens: int = 1
    max_tokens: int = EXPECTED_TOKENS


def fits(engine: Engine, needs: Needs) -> bool:
    """Whether the token ids of a prompt mean the same there."""
    return engine.weights is not None and needs.tokenizer_sha256 in ("", engine.weights.tokenizer_sha256)
