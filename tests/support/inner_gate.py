"""The gate's domain in one process, over its real journal: for tests of one interleaving, or of all of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from penstock_codec import Codec, tiny
from penstock_codec.chat import FinishReason, Sampling
from penstock_codec.files import TokenizerFiles
from penstock_interception.calls import Arrival, Call, Dialect, Mode, Opening, Rollout, TokenizerRef
from penstock_interception.clock import Clock
from penstock_interception.codecs import CodecCache
from penstock_interception.completions import Completion, Tokens
from penstock_interception.graph import LogprobsMode
from penstock_interception.graph.model import VersionSpan
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import Ask, Route
from penstock_interception.limits import GateLimits
from penstock_interception.requests import ChatRequest
from penstock_interception.sessions import Credits, Selector, Session, View
from penstock_interception.sources.registry import Sources
from penstock_interception.store import CallStore
from penstock_interception.turns import Turns

BEGAN = 1_000_000.0
OPENING = Opening("open-r1", "r1", Mode.INTERCEPTION_GATE, TokenizerRef("tiny"))


@cache
def tokenizer() -> Path:
    """The tiny tokenizer's files, made once."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-tiny-"))
    tiny.build(["list the files"]).write(directory)
    return directory


@cache
def codec() -> Codec:
    """Its codec."""
    return Codec.load(TokenizerFiles.from_directory(tokenizer()))


@cache
def _codecs() -> CodecCache:
    """Its codec once more, as sources keep it: it is the same for all gates of a test."""
    return CodecCache(tokenizer(), ThreadPoolExecutor(1))


def completion(
    text: str, *, mode: LogprobsMode = LogprobsMode.PROCESSED, times: int = 1, version: int | None = None
) -> Completion:
    """What an engine would have sampled for a text, so many times over."""
    ids = np.asarray([*list(codec().encode(text)) * times, codec().end_of_turn_id], np.int32)
    versions = (VersionSpan(version, 0, ids.size),) if version is not None else ()
    tokens = Tokens(ids, np.full(ids.size, -0.5, np.float32), mode, versions)
    return Completion(tokens, finish_reason=FinishReason.STOP)


def parse(_: Dialect, body: bytes) -> ChatRequest:
    """A body of the one dialect that is spoken here."""
    return ChatCompletions().parse(body, Route(Ask.COMPLETION))


@dataclass
class InnerGate:
    """A running gate, whose time stands still but for `passes`."""

    turns: Turns
    store: CallStore
    pool: ThreadPoolExecutor
    now: list[float]
    asked: int = 0

    async def passes(self, seconds: float) -> None:
        """Time, and what was due meanwhile is done."""
        self.now[0] += seconds
        await self.turns.gate.tick()

    async def open(self, opening: Opening = OPENING, **changed: Any) -> Rollout:
        """A rollout."""
        return await self.turns.open(replace(opening, **changed), None)

    async def ask(self, rollout: Rollout, *said: str, key: str = "", **changed: Any) -> Call:
        """An agent's call: user and assistant in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(said)]
        body = orjson.dumps({"messages": messages})
        self.asked += 1
        arrival = Arrival(
            Dialect.CHAT_COMPLETIONS, body, sha256(body).digest(), key or f"k{self.asked}", False, Sampling(), "m"
        )
        call = await self.turns.begin(rollout, replace(arrival, **changed), parse(Dialect.CHAT_COMPLETIONS, body))
        self.turns.gate.attach(call)
        return call

    def join(self, calls: int = 16, **changed: Any) -> Session:
        """A trainer that takes any rollout's calls."""
        return self.turns.gate.dispatcher.join(Selector(), Credits(calls), identity="t", view=View(), **changed)


@asynccontextmanager
async def inner_gate(
    directory: Path, *, limits: GateLimits | None = None, closed_kept: int = 256, began: float = BEGAN
) -> AsyncIterator[InnerGate]:
    """A gate on what is in `directory`, restored; it is stopped in order at the end."""
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        store = await CallStore.open(directory)
        stack.push_async_callback(store.aclose)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        sources = Sources(
            _codecs(),
            http,
            parse,
            inference={},
            upstreams={},
            tokenizers={"tiny": tokenizer()},
            caller_endpoints=False,
        )
        now = [began]
        clock = Clock(lambda: now[0], lambda: now[0])
        turns = Turns(store, sources, tasks, pool, parse=parse, limits=limits, clock=clock, closed_kept=closed_kept)
        await turns.restore()
        yield InnerGate(turns, store, pool, now)
