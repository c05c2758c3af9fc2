"""For tests: the interception service's domain without ingress and RPCs, wired as `app.build` wires it.

A gate's real journal and a tokenizer's real codec; no engine, so a test plays the trainer. Its time stands still: a
test moves it with `OpenGate.passes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from penstock_codec.chat import Sampling
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec, TokenizerRef
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call, Credits, Rollout, Selector, Session, SessionRequest
from penstock_interception.gate.context import GateLimits
from penstock_interception.ingress.dialects.base import Ask, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.interceptor import Interceptor
from penstock_interception.sources.codecs import CodecCache
from penstock_interception.sources.registry import Sources
from penstock_interception.store.store import CallStore

BEGAN = 1_000_000.0
"""The time at which a gate opens, in seconds on both of its clocks."""
SPEC = RolloutSpec("open-r1", "r1", Mode.INTERCEPTION_GATE, TokenizerRef("test"))
"""A rollout whose calls a trainer answers; `test` is the tokenizer that `open_interceptor` was given."""


def parse(dialect: Dialect, body: bytes) -> ChatRequest:
    """Parses a body of Chat Completions, the only dialect of these gates. Raises BadRequest."""
    if dialect is not Dialect.CHAT_COMPLETIONS:
        raise ValueError(f"{dialect} is not spoken here")
    return ChatCompletions().parse(body, Route(Ask.COMPLETION))


@asynccontextmanager
async def open_interceptor(
    directory: Path,
    tokenizer: Path,
    *,
    clock: Clock,
    limits: GateLimits | None = None,
    closed_kept: int = 256,
    codecs: CodecCache | None = None,
) -> AsyncIterator[Interceptor]:
    """Opens an interceptor on the journal in `directory`, restored; stops it in order at the end.

    Args:
        directory: the state directory; made if it does not exist.
        tokenizer: a directory with a tokenizer's files; rollouts name it `TokenizerRef("test")`.
        clock: the clocks of the gate. No task watches them: call `Interceptor.tick` after moving them.
        limits: the operator's limits; None means the defaults.
        closed_kept: how many closed rollouts stay in memory.
        codecs: loaded codecs to share between gates; None loads its own.
    """
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        store = await CallStore.open(directory)
        stack.push_async_callback(store.aclose)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        sources = Sources(
            codecs or CodecCache(directory / "tokenizers", pool),
            http,
            parse,
            inference={},
            upstreams={},
            tokenizers={"test": tokenizer},
            caller_endpoints=False,
        )
        interceptor = Interceptor(
            store, sources, tasks, pool, parse=parse, limits=limits, clock=clock, closed_kept=closed_kept
        )
        await interceptor.restore()
        yield interceptor


@dataclass
class OpenGate:
    """A running gate whose time stands still but for `passes`. `now` holds the seconds of both clocks."""

    interceptor: Interceptor
    now: list[float]
    asked: int = field(default=0, init=False)

    @property
    def store(self) -> CallStore:
        """The journal."""
        return self.interceptor.store

    async def passes(self, seconds: float) -> None:
        """Moves the clocks, and handles what is due then."""
        self.now[0] += seconds
        await self.interceptor.tick()

    async def open(self, spec: RolloutSpec = SPEC, **changed: Any) -> Rollout:
        """Opens a rollout; `changed` are fields of its spec."""
        return await self.interceptor.rollouts.open(replace(spec, **changed), None)

    async def ask(self, rollout: Rollout, *texts: str, key: str = "", **changed: Any) -> Call:
        """Begins an agent's call with this conversation, user and assistant in turn; `changed`: fields of the request.

        `key` is the retry key; "" makes a new one.
        """
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        body = orjson.dumps({"messages": messages})
        self.asked += 1
        request = CallRequest(
            Dialect.CHAT_COMPLETIONS, body, sha256(body).digest(), key or f"k{self.asked}", False, Sampling(), "m"
        )
        parsed = parse(Dialect.CHAT_COMPLETIONS, body)
        return await self.interceptor.begin(rollout, replace(request, **changed), parsed)

    def join(
        self,
        calls: int = 16,
        selector: Selector | None = None,
        *,
        resume: str = "",
        policy_version: int | None = None,
        **asked: Any,
    ) -> Session:
        """Opens a trainer's session with credit for this many calls; `asked`: other fields of SessionRequest.

        Without a selector it receives every rollout's calls. `policy_version` is of the only trained policy.
        """
        if policy_version is not None:
            asked["versions"] = {"": policy_version}
        request = SessionRequest(selector or Selector(), Credits(calls), identity="t", **asked)
        return self.interceptor.join(request, resume=resume)


@asynccontextmanager
async def open_gate(
    directory: Path,
    tokenizer: Path,
    *,
    limits: GateLimits | None = None,
    closed_kept: int = 256,
    began: float = BEGAN,
    codecs: CodecCache | None = None,
) -> AsyncIterator[OpenGate]:
    """Opens a gate as `open_interceptor` does, on clocks that begin at `began` seconds."""
    now = [began]
    clock = Clock(lambda: now[0], lambda: now[0])
    async with open_interceptor(
        directory, tokenizer, clock=clock, limits=limits, closed_kept=closed_kept, codecs=codecs
    ) as interceptor:
        yield OpenGate(interceptor, now)
