"""The engine pool: several inference services as one model source. Any number of engines, one included.

Each engine is probed for its health, and asked each second which weights it has. A session stays with its engine, whose
cache has the conversation, until that has clearly more to do than the others (`membership.routing`, the rule of an
inference service's replicas). A call that needs a policy version goes to an engine that has it; if none has, the call
waits at an engine for it. Nothing of an answer leaves the gate before it is whole, so a call whose engine is lost is
repeated at another one unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import grpc
import structlog

from penstock.chat.v1 import completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock.values.token_tensors import MOST_BYTES, MOST_PIECES
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_chassis.membership.members import Member, Source, Static
from penstock_chassis.membership.peers import Peer, Peers, State, following
from penstock_chassis.membership.routing import Route, Router
from penstock_interception.clients.engines.values import (
    EXPECTED_TOKENS,
    Asked,
    Engine,
    Flight,
    Load,
    Moved,
    Needs,
    Weights,
    fits,
)
from penstock_interception.metrics import ENGINE_MOVES

PATIENCE_S: Final = 30.0
"""How long a call waits for an engine of a list, if none can take it."""
ASK_EVERY_S: Final = 1.0
LOADS_EVERY_S: Final = 5.0
"""How often engines are asked for their load."""
ASK_S: Final = 1.5
"""Deadline of one question to an engine."""
MAX_LOSSES: Final = 3
"""A call under which so many engines were lost may be the cause, and fails."""
MAX_BLOCKS: Final = 8192
"""Prefix blocks that are remembered of each engine."""

_MOST_KEPT: Final = MOST_BYTES + 128 * MOST_PIECES
"""Bytes of the messages with a call's tensors: their data, and what describes it."""
_FULL: Final = "QUEUE_FULL"
_DRAINS: Final = "DRAINING"
_LOST: Final = frozenset({"ENGINE_DIED", "ENGINE_CLOSED"})
_REFUSED: Final = frozenset({_FULL, _DRAINS, "UPSTREAM_UNREACHABLE"})
"""Refusals before anything was generated, each of one engine."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class EnginePool:
    """The engines of one source. `follow` runs beside it.

    Args:
        name: of the source, for logs and people.
        peers: who they are, and whether they answer.
        is_list: whether they are listed. An address alone is not: it is used as it is, without waiting for it, and its
            own answer says what is wrong.
    """

    def __init__(self, name: str, peers: Peers, *, is_list: bool) -> None:
        self.name = name
        self.is_list = is_list
        self._peers = peers
        self._router = Router(max_blocks=MAX_BLOCKS)
        self._engines: dict[Peer, Engine] = {}
        self._sees_all = True
        self._take_members()

    def peers(self) -> Sequence[Peer]:
        """All members, in the order of their names."""
        return self._peers.all()

    def engines(self) -> Sequence[Engine]:
        """All engines, in the order of their names."""
        self._take_members()
        return [self._engines[peer] for peer in self._peers.all()]

    def is_reachable(self) -> bool:
        """Whether an engine takes calls, or may: nobody has asked it yet."""
        return any(engine.peer.state in (State.SERVING, State.NEW) for engine in self.engines())

    def behind(self) -> Sequence[Engine]:
        """Engines that came with older weights than the others have, and get no calls until they have newer ones."""
        return [engine for engine in self.engines() if engine.behind is not None and not engine.peer.is_lost]

    async def settled(self, timeout_s: float) -> None:
        """Waits until every engine has been asked once, at most `timeout_s` seconds."""
        await self._peers.settled(timeout_s)
        await self._ask_all()

    async def follow(self) -> None:
        """Asks the engines for their weights, and moves calls away from lost ones. Never returns; cancel it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._peers.until_broken())
            if self.is_list:
                tasks.create_task(self._follow_loads())
                tasks.create_task(self._follow_losses())
                tasks.create_task(self._follow_weights())

    async def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Returns the answer of the first engine that can be asked; all give the same one.

        Raises:
            PenstockError, grpc.aio.AioRpcError: the error of the last one; Unavailable, INFERENCE_UNREACHABLE, if no
                engine answers.
        """
        last: Exception = self.unreachable()
        for engine in self._usable(()):
            try:
                return await question(engine.stub)
            except (grpc.aio.AioRpcError, PenstockError) as error:
                last = error
        raise last

    async def generate(self, asked: Asked) -> pb.GenerateResponse | None:
        """Returns the last message of a generation, from the engine that the session has or gets; None without one.

        Raises:
            PenstockError: the engine's error; ENGINE_DIED if engines were lost under it; INFERENCE_UNREACHABLE if none
                takes calls.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (PATIENCE_S if self.is_list else 0.0)
        tried: set[Engine] = set()
        failure: PenstockError | None = None
        attempts = losses = 0
        while True:
            number = self._peers.changed.number
            chosen = self._choose(asked, tried)
            if chosen is None:
                is_full = failure is not None and failure.reason == _FULL
                if is_full or not await self._changed(number, until - loop.time()):
                    raise failure or self.unreachable()
                tried.clear()
                continue
            engine, route = chosen
            try:
                return await self._at(engine, asked.needs, asked.request(attempts))
            except Moved as moved:
                losses += engine.peer.is_lost
                failure = _died(engine.name)
                _left(self.name, engine, str(moved))
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                is_lost = failure.reason in _LOST or failure.reason.startswith("TRANSPORT_")
                if not is_lost and failure.reason not in _REFUSED:
                    raise failure from error
                losses += is_lost
                _left(self.name, engine, failure.reason)
            finally:
                if route is not None:
                    self._router.ended(route)
            attempts += 1
            tried.add(engine)
            if losses >= MAX_LOSSES:
                raise failure
            if len(self._engines) == 1 and not self.is_list:
                raise failure

    def unreachable(self) -> Unavailable:
        """The error when no engine takes calls."""
        what = "The inference service does not answer" if not self.is_list else f"No engine of {self.name} takes calls"
        return Unavailable(
            f"{what}: `penstock doctor --live` says why.", reason="INFERENCE_UNREACHABLE", retry_after_s=2.0
        )

    def _choose(self, asked: Asked, tried: Collection[Engine]) -> tuple[Engine, Route | None] | None:
        usable = self._usable(tried)
        if not self.is_list:
            return (usable[0], None) if usable else None
        fitting = [engine for engine in usable if fits(engine, asked.needs)]
        ready = [engine for engine in fitting if engine.weights and asked.needs.are_met(engine.weights)] or fitting
        if not ready:
            return None
        blocks = () if self._router.knows(asked.session) else asked.blocks()
        route = self._router.route(
            blocks,
            asked.new_tokens,
            min(asked.max_tokens, EXPECTED_TOKENS),
            asked.session,
            {engine.name for engine in ready},
        )
        return None if route is None else (next(one for one in ready if one.name == route.member), route)

    def _usable(self, tried: Collection[Engine]) -> Sequence[Engine]:
        """The engines that take calls, but for `tried` ones."""
        engines = [engine for engine in self.engines() if engine not in tried]
        if not self.is_list:
            return engines
        return [
            engine
            for engine in engines
            if engine.peer.state is State.SERVING and engine.weights is not None and engine.behind is None
        ]

    async def _at(self, engine: Engine, needs: Needs, request: pb.GenerateRequest) -> pb.GenerateResponse | None:
        """The end of a generation at one engine. Raises grpc.aio.AioRpcError, and Moved if the call is taken away."""
        flight = Flight(needs, engine.stub.Generate(request))
        engine.flights.add(flight)
        done = None
        tensors: list[completion_pb2.TokenTensor] = []
        size = 0
        try:
            async for event in flight.stream:
                if event.HasField("delta") and event.delta.tensors:
                    # A tensor keeps the memory of the whole message that it came in.
                    size += event.ByteSize()
                    if size > _MOST_KEPT or len(tensors) + len(event.delta.tensors) > MOST_PIECES:
                        raise _too_large()
                    tensors += event.delta.tensors
                if event.HasField("done"):
                    done = event
                    done.done.completion.tensors.extend(tensors)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not flight.moved_for or (task is not None and task.cancelling()):
                raise
            raise Moved(flight.moved_for) from None
        finally:
            engine.flights.discard(flight)
            flight.stream.cancel()
        return done

    async def _changed(self, number: int, timeout_s: float) -> bool:
        """Waits for news of the engines; returns False if there is no time left."""
        return timeout_s > 0 and await self._peers.changed.wait(number, timeout_s)

    # What the engines have -------------------------------------------------------------------------------------------

    def _take_members(self) -> None:
        present = self._peers.all()
        if len(present) == len(self._engines) and all(peer in self._engines for peer in present):
            return
        for peer in self._engines.keys() - set(present):
            self._leave(self._engines.pop(peer), "ENGINE_REMOVED")
        for peer in present:
            if peer not in self._engines:
                self._engines[peer] = Engine(peer, pb_grpc.InferenceServiceStub(peer.channel))

    def _leave(self, engine: Engine, why: str) -> None:
        self._router.leave(engine.name)
        engine.weights, engine.behind = None, None
        for flight in list(engine.flights):
            self._move(flight, why)

    async def _follow_losses(self) -> None:
        while True:
            number = self._peers.changed.number
            for engine in self.engines():
                if engine.peer.is_lost:
                    self._leave(engine, "ENGINE_LOST")
            await self._peers.changed.wait(number)

    async def _follow_weights(self) -> None:
        while True:
            number = self._peers.changed.number
            await self._ask_all()
            await self._peers.changed.wait(number, ASK_EVERY_S)

    async def _follow_loads(self) -> None:
        while True:
            engines = self.engines()
            loads = await asyncio.gather(*(self._load_of(engine) for engine in engines))
            for engine, load in zip(engines, loads, strict=True):
                engine.load = load
            await asyncio.sleep(LOADS_EVERY_S)

    @staticmethod
    async def _load_of(engine: Engine) -> Load | None:
        """What an engine has to do; None if it does not answer. Whether it is lost, the probes say."""
        if engine.peer.is_lost:
            return None
        stream = engine.stub.WatchStats(pb.WatchStatsRequest(), timeout=ASK_S)
        try:
            stats = await stream.read()
        except grpc.aio.AioRpcError:
            return None
        finally:
            stream.cancel()
        return None if stats is grpc.aio.EOF else Load(stats.running, stats.waiting)

    async def _ask_all(self) -> None:
        if not self.is_list:
            return
        asked = [engine for engine in self.engines() if engine.peer.state is State.SERVING]
        found = await asyncio.gather(*(self._weights_of(engine) for engine in asked))
        is_news = False
        for engine, weights in zip(asked, found, strict=True):
            if weights != engine.weights and not engine.peer.is_lost:
                is_news = True
                self._take_weights(engine, weights)
        if is_news:
            self._move_to_weights()
            self._peers.changed.notify()

    def _take_weights(self, engine: Engine, weights: Weights | None) -> None:
        before, engine.weights = engine.weights, weights
        if weights is None:
            self._router.leave(engine.name)
            return
        if before is None:
            self._router.join(engine.name)
            engine.behind = self._newest_elsewhere(engine)
        elif before.version != weights.version:
            self._router.forget_prefixes(engine.name)
        if engine.behind is not None and weights.version >= engine.behind:
            engine.behind = None
        if engine.behind is not None:
            _log.warning(
                "an engine came with old weights and gets no calls until it has newer ones",
                pool=self.name,
                name=engine.name,
                policy_version=weights.version,
                needed=engine.behind,
            )

    def _newest_elsewhere(self, engine: Engine) -> int | None:
        """The newest version that another engine takes calls with; None if none does."""
        versions = [one.weights.version for one in self._usable((engine,)) if one.weights is not None]
        return max(versions, default=None)

    def _move_to_weights(self) -> None:
        """Takes calls from engines without the weights that they need, if another engine has these."""
        usable = self._usable(())
        for engine in self.engines():
            for flight in list(engine.flights):
                if engine.weights is None or flight.needs.are_met(engine.weights):
                    continue
                if any(one.weights and fits(one, flight.needs) and flight.needs.are_met(one.weights) for one in usable):
                    self._move(flight, "WEIGHTS_ELSEWHERE")

    @staticmethod
    def _move(flight: Flight, why: str) -> None:
        flight.moved_for = why
        flight.stream.cancel()

    async def _weights_of(self, engine: Engine) -> Weights | None:
        """What an engine has; None if it says that it cannot answer calls."""
        try:
            info = await engine.stub.GetInfo(pb.GetInfoRequest(), timeout=ASK_S)
            adapters = await self._adapters_of(engine) if info.capabilities.adapters else {}
        except grpc.aio.AioRpcError as error:
            reason = error_from_rpc(error).reason
            if reason.startswith("TRANSPORT_"):  # slow, or lost: the probes say which
                return engine.weights
            if engine.weights is not None:
                _log.warning("an engine cannot answer calls", pool=self.name, name=engine.name, reason=reason)
            return None
        return Weights(info.policy_version, info.tokenizer_sha256.hex(), adapters)

    async def _adapters_of(self, engine: Engine) -> dict[tuple[str, str], int]:
        request = pb.ListAdaptersRequest(page_size=1000, all_namespaces=self._sees_all)
        try:
            answer = await engine.stub.ListAdapters(request, timeout=ASK_S)
        except grpc.aio.AioRpcError as error:
            if not self._sees_all or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            self._sees_all = False  # a trainer's token, of one namespace
            return await self._adapters_of(engine)
        return {(item.namespace, item.name): item.policy_version for item in answer.adapters}


def _died(name: str) -> Unavailable:
    return Unavailable(f"Engine {name} was lost under the call.", reason="ENGINE_DIED", retry_after_s=1.0)


def _left(pool: str, engine: Engine, why: str) -> None:
    ENGINE_MOVES.labels(why).inc()
    _log.warning("a call left an engine", pool=pool, name=engine.name, why=why)


@asynccontextmanager
async def one_engine(
    name: str, member: Member, connect: Callable[[Member], grpc.aio.Channel]
) -> AsyncIterator[EnginePool]:
    """The pool of an address that is used as it is."""
    async with following("inference", Static((member,)), connect, must_have_names=False) as peers:
        yield EnginePool(name, peers, is_list=False)


@asynccontextmanager
async def engine_list(
    name: str, source: Source, connect: Callable[[Member], grpc.aio.Channel]
) -> AsyncIterator[EnginePool]:
    """The pool of a list of engines, each of which has a name."""
    async with following("inference", source, connect) as peers:
        yield EnginePool(name, peers, is_list=True)


def unreachable(pools: Iterable[EnginePool]) -> Iterator[str]:
    """The names of the pools of which no engine answers."""
    return (pool.name for pool in pools if not pool.is_reachable())


def _too_large() -> FailedPrecondition:
    return FailedPrecondition(
        f"The engine's tensors of this call have more than {MOST_BYTES} bytes, or come in more than {MOST_PIECES}: its "
        "prompt has too many new tokens for token_tensors.",
        reason="TENSORS_TOO_LARGE",
        metadata={"limit": str(MOST_BYTES)},
    )
