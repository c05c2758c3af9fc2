"""The pool: an engine made of replicas. See `base.Engine` and `optional` for what each method promises.

Generating is routed, and goes on elsewhere when a replica dies; everything else is told to all. What all were told is
remembered, so that a replica that comes back is told it too, before it gets a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock_chassis.errors import AlreadyExists, PenstockError, Violation
from penstock_inference.engines.base import (
    EngineInfo,
    EngineStats,
    GenerateEvent,
    GenerateRequest,
    PauseMode,
    ReplicaStats,
    Scores,
    Tensors,
    TokenIds,
    UpdateFormat,
    UpdatePhases,
)
from penstock_inference.engines.checks import raise_violations
from penstock_inference.engines.continuation import MAX_DEATHS, unbroken
from penstock_inference.engines.optional import AdapterInfo, AdapterSource
from penstock_inference.replicas.keeper import Keeper, is_death
from penstock_inference.replicas.life import Life, replica_died
from penstock_inference.replicas.routing import Router, prefix_blocks
from penstock_inference.replicas.updates import Updates


@dataclass(slots=True, eq=False)
class _Flight:
    """A request, while the caller waits for it."""

    request: GenerateRequest
    life: Life | None = None
    """Where it is; None between two replicas."""
    aborted: bool = False
    """It is to end, and goes nowhere else if its replica dies first."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is worth looking for a replica again."""


class ReplicaPool:
    """Replicas behind `base.Engine`."""

    def __init__(self, keeper: Keeper, updates: Updates, router: Router) -> None:
        self._keeper = keeper
        self._updates = updates
        self._router = router
        self._flights: dict[str, _Flight] = {}
        self._closed = False
        keeper.changed = self._look_again
        updates.aborts = lambda: self._abort_flights(lambda _: True)

    def info(self) -> EngineInfo:
        """What one replica is, with room for as many requests as all have."""
        first, keeper = self._keeper.info, self._keeper
        can = first.capabilities
        pushable = bool(keeper.policy.checkpoint.shapes)
        return replace(
            first,
            max_concurrency=first.max_concurrency * len(keeper.replicas),
            policy_version=keeper.policy.version,
            policy_label=keeper.policy.label,
            paused=keeper.paused is not None or keeper.asleep > 0,
            capabilities=replace(
                can,
                weight_update=can.weight_update and pushable,
                in_flight_update=can.in_flight_update and pushable,
                # Weights that came so are in no file, and a replica that comes back could not have them.
                transfer_backends=(),
            ),
        )

    def stats(self) -> EngineStats:
        """Sums over the replicas, and each by its name; counters include lives that are over."""
        keeper = self._keeper
        each = [(replica, replica.stats()) for replica in keeper.replicas]
        by_version: dict[int, int] = {}
        for _, stats in each:
            for version, count in stats.tokens_by_version.items():
                by_version[version] = by_version.get(version, 0) + count
        between = sum(flight.life is None for flight in self._flights.values())
        live = sum(replica.live for replica, _ in each)
        return EngineStats(
            running=sum(stats.running for _, stats in each),
            waiting=sum(stats.waiting for _, stats in each) + between,
            slots=sum(stats.slots for _, stats in each),
            cache_use=sum(stats.cache_use for _, stats in each) / max(1, live),
            policy_version=keeper.policy.version,
            paused=keeper.paused is not None or keeper.asleep > 0,
            steps=sum(stats.steps for _, stats in each),
            prompt_tokens=sum(stats.prompt_tokens for _, stats in each),
            cached_tokens=sum(stats.cached_tokens for _, stats in each),
            sampled_tokens=sum(stats.sampled_tokens for _, stats in each),
            finished=sum(stats.finished for _, stats in each),
            aborted=sum(stats.aborted for _, stats in each),
            failed=sum(stats.failed for _, stats in each),
            busy_s=sum(stats.busy_s for _, stats in each),
            tokens_by_version=by_version,
            replicas=tuple(
                ReplicaStats(
                    replica.name,
                    replica.live,
                    replica.restarts,
                    stats.running,
                    stats.waiting,
                    self._router.load(replica.name) if replica.live else 0,
                    stats.sampled_tokens,
                    stats.cached_tokens,
                    stats.cache_use,
                )
                for replica, stats in each
            ),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Sample a completion, on one replica or, when that dies, on several."""
        self._keeper.check_some_live()
        if request.request_id in self._flights:
            raise AlreadyExists(f"request {request.request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        flight = self._flights[request.request_id] = _Flight(request)
        journey = unbroken(
            request,
            self._keeper.info.stop_token_ids,
            lambda asked: self._attempt(flight, asked),
            lambda: self._ready(flight),
        )
        try:
            async with aclosing(journey) as events:
                async for event in events:
                    yield event
        finally:
            del self._flights[request.request_id]

    async def score(self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "") -> Scores:
        """Logprobs of `token_ids[1:]`, by the replica that has most of them computed."""
        blocks, deaths = prefix_blocks(token_ids, adapter), 0
        while True:
            self._keeper.check_some_live()
            route = self._router.route(blocks, token_ids.size, 1)
            if route is None:
                raise replica_died()
            life = self._keeper.life(route.replica)
            try:
                scores: Scores = await life.ask("score", token_ids, temperature, adapter)
            except PenstockError as error:
                if self._closed or not is_death(error):
                    raise
                self._keeper.end(life)
                deaths += 1
                if deaths >= MAX_DEATHS:
                    raise replica_died(life.name) from error
            else:
                return scores
            finally:
                self._router.ended(route)

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """End the generations named, wherever they are; how many were ended."""
        ids = frozenset(request_ids)
        at = self._abort_flights(
            lambda r: everything or r.request_id in ids or (bool(session_id) and r.session_id == session_id)
        )
        lives = self._keeper.lives()
        outcomes = await self._keeper.ask(lives, "abort", tuple(request_ids), session_id, everything)
        answers = {life: outcome for life, outcome in zip(lives, outcomes, strict=True) if not is_death(outcome)}
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return int(sum(answers.values())) + sum(life not in answers for life in at)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling on all; returns once all have stopped."""
        keeper = self._keeper
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(keeper.freezing)
            await self._updates.settled()
            if mode is PauseMode.WAIT:
                await stack.aclose()  # what runs may take long to finish, and an update may come meanwhile
            await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> None:
        self._keeper.check_some_live()
        keeper, before = self._keeper, self._keeper.paused
        keeper.paused = mode if before in (None, PauseMode.WAIT) else before
        try:
            if mode is PauseMode.ABORT:
                self._abort_flights(lambda _: True)
            await keeper.tell_all("pause", mode)
        except PenstockError:
            # Who hears that it failed will not resume.
            if before is None:
                await self.resume()
            raise

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._updates.settled()
        self._keeper.paused = None
        await self._keeper.tell_all("resume")

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """Open the one update that may be open."""
        await self._updates.begin(version, label, update_format)

    async def push_tensors(self, tensors: Tensors) -> None:
        """Add tensors to the open update."""
        await self._updates.push_tensors(tensors)

    async def push_file(self, path: Path) -> None:
        """Add a file, which is taken away."""
        await self._updates.push_file(path)

    async def push_path(self, path: Path) -> None:
        """Add a file, or a directory's, which stay."""
        await self._updates.push_path(path)

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Have all replicas check the update, then all switch, or none."""
        return await self._updates.commit(mode)

    async def abort_update(self) -> None:
        """Drop the open update, if any."""
        await self._updates.abort()

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Put an adapter in force on all. The first replica that takes it decides for all."""
        return await self._keeper.load_adapter(source, mode)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter on all."""
        await self._keeper.unload_adapter(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those in force, by name."""
        return self._keeper.adapter_infos()

    async def sleep(self, level: int) -> None:
        """All finish what runs and give their memory back."""
        raise_violations([Violation("level", "must be 1 or 2")] if level not in (1, 2) else [])
        keeper = self._keeper
        keeper.check_some_live()
        if keeper.asleep:
            return
        keeper.asleep = level
        try:
            await keeper.tell_all("sleep", level)
        except BaseException:
            keeper.asleep = 0
            await keeper.tell_all("wake")
            raise

    async def wake(self) -> None:
        """All take their memory again."""
        self._keeper.asleep = 0
        await self._keeper.tell_all("wake")

    async def aclose(self) -> None:
        """End everything in flight and the replicas. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._updates.aclose()
        await self._keeper.aclose()

    def _abort_flights(self, chosen: Callable[[GenerateRequest], bool]) -> list[Life | None]:
        """End those that no replica has, now or once it dies before it hears of the abort; where each is."""
        flights = [each for each in self._flights.values() if not each.aborted and chosen(each.request)]
        for flight in flights:
            flight.aborted = True
            flight.moved.set()
        return [flight.life for flight in flights]

    def _look_again(self) -> None:
        for flight in self._flights.values():
            flight.moved.set()

    async def _ready(self, flight: _Flight) -> bool:
        """Until a replica can take it, or it is aborted (False). Raises Unavailable when none is likely to come."""
        while not flight.aborted:
            self._keeper.check_some_may_come()
            if self._router.replicas and not self._updates.switching:
                return True
            flight.moved.clear()
            await flight.moved.wait()
        return False

    async def _attempt(self, flight: _Flight, asked: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """On whichever replica is best now. When that dies: raises Unavailable (ENGINE_DIED), or ends if aborted."""
        blocks = prefix_blocks(asked.prompt_token_ids, asked.adapter)
        route = self._router.route(blocks, asked.prompt_token_ids.size, asked.sampling.max_tokens, asked.session_id)
        if route is None:
            raise replica_died()
        replica = self._keeper.replica(route.replica)
        life = flight.life = self._keeper.life(route.replica)
        try:
            async with aclosing(life.generate(asked)) as events:
                async for event in events:
                    replica.deaths = 0
                    yield event
        except PenstockError as error:
            if self._closed or not is_death(error):
                raise
            self._keeper.end(life)
            if flight.aborted:
                return
            raise replica_died(life.name) from error
        finally:
            flight.life = None
            self._router.ended(route)
