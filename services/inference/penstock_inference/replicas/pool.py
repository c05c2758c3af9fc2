"""The pool: an engine made of replicas. See `base.Engine` and `optional` for the contract of each method.

Generations are routed to one replica and continue on another if it dies; every other call goes to all. The pool
remembers the resulting state, so a restarted replica gets it before its first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock_chassis.errors import AlreadyExists, PenstockError, Violation
from penstock_chassis.membership.routing import MAX_PREFIX_TOKENS, Router, prefix_blocks
from penstock_inference.domain.engine_info import EngineInfo, EngineStats, ReplicaStats
from penstock_inference.domain.generation import GenerateEvent, GenerateRequest, Scores, TokenIds
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.checks import raise_violations
from penstock_inference.engines.continuation import MAX_DEATHS, unbroken
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.replicas.replica_process import ReplicaProcess, replica_died
from penstock_inference.replicas.supervisor import ReplicaSupervisor, is_death
from penstock_inference.replicas.weight_updates import Updates


@dataclass(slots=True, eq=False)
class _Flight:
    """A request, while its caller waits."""

    request: GenerateRequest
    life: ReplicaProcess | None = None
    """The process that has it; None between two replicas."""
    aborted: bool = False
    """It ends, and does not move to another replica if its own dies first."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is worth checking for a replica again."""


class ReplicaPool:
    """Replicas behind `base.Engine`."""

    def __init__(self, supervisor: ReplicaSupervisor, updates: Updates, router: Router) -> None:
        self._supervisor = supervisor
        self._updates = updates
        self._router = router
        self._flights: dict[str, _Flight] = {}
        self._closed = False
        self._sleeping = asyncio.Lock()
        supervisor.changed = self._look_again
        updates.aborts = lambda: self._abort_flights(lambda _: True)

    def info(self) -> EngineInfo:
        """The info of one replica, with the concurrency of all."""
        first, supervisor = self._supervisor.info, self._supervisor
        can = first.capabilities
        pushable = bool(supervisor.policy.checkpoint.shapes)
        return replace(
            first,
            max_concurrency=first.max_concurrency * len(supervisor.replicas),
            policy_version=supervisor.policy.version,
            policy_label=supervisor.policy.label,
            paused=supervisor.paused is not None or supervisor.asleep > 0,
            capabilities=replace(
                can,
                weight_update=can.weight_update and pushable,
                in_flight_update=can.in_flight_update and pushable,
                # Transferred weights are in no file, so a restarted replica could not load them.
                transfer_backends=(),
            ),
        )

    def stats(self) -> EngineStats:
        """Sums over the replicas, and each replica by name; counters include earlier processes."""
        supervisor = self._supervisor
        each = [(replica, replica.stats()) for replica in supervisor.replicas]
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
            policy_version=supervisor.policy.version,
            paused=supervisor.paused is not None or supervisor.asleep > 0,
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
        """Sample a completion, on one replica or, if that dies, on several."""
        self._supervisor.check_some_live()
        if request.request_id in self._flights:
            raise AlreadyExists(f"request {request.request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        flight = self._flights[request.request_id] = _Flight(request)
        journey = unbroken(
            request,
            self._supervisor.info.stop_token_ids,
            lambda asked: self._attempt(flight, asked),
            lambda: self._ready(flight),
        )
        try:
            async with aclosing(journey) as events:
                async for event in events:
                    yield event
        finally:
            del self._flights[request.request_id]

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Logprobs of `token_ids[1:]`, from the replica that the router chooses."""
        blocks, deaths = _blocks(token_ids, adapter), 0
        while True:
            self._supervisor.check_some_live()
            route = self._router.route(blocks, token_ids.size, 1)
            if route is None:
                raise replica_died()
            life = self._supervisor.life(route.member)
            try:
                scores: Scores = await life.ask("score", token_ids, temperature, adapter, top_logprobs)
            except PenstockError as error:
                if self._closed or not is_death(error):
                    raise
                self._supervisor.end(life)
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
        """Abort the named generations on any replica; return their number."""
        ids = frozenset(request_ids)
        at = self._abort_flights(
            lambda r: everything or r.request_id in ids or (bool(session_id) and r.session_id == session_id)
        )
        lives = self._supervisor.lives()
        outcomes = await self._supervisor.ask(lives, "abort", tuple(request_ids), session_id, everything)
        answers = {life: outcome for life, outcome in zip(lives, outcomes, strict=True) if not is_death(outcome)}
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return int(sum(answers.values())) + sum(life not in answers for life in at)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling on all replicas; returns once all have stopped."""
        supervisor = self._supervisor
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(supervisor.freezing)
            await self._updates.settled()
            if mode is PauseMode.WAIT:
                await stack.aclose()  # running generations may take long; an update may arrive meanwhile
            await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> None:
        self._supervisor.check_some_live()
        supervisor, before = self._supervisor, self._supervisor.paused
        supervisor.paused = mode if before in (None, PauseMode.WAIT) else before
        try:
            if mode is PauseMode.ABORT:
                self._abort_flights(lambda _: True)
            await supervisor.call_all("pause", mode)
        except PenstockError:
            # A caller that gets an error will not resume.
            if before is None:
                await self.resume()
            raise

    async def resume(self) -> None:
        await self._updates.settled()
        self._supervisor.paused = None
        await self._supervisor.call_all("resume")

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        await self._updates.begin(version, label, update_format)

    async def push_tensors(self, tensors: Tensors) -> None:
        await self._updates.push_tensors(tensors)

    async def push_file(self, path: Path) -> None:
        """Add a file, which is moved away."""
        await self._updates.push_file(path)

    async def push_path(self, path: Path) -> None:
        """Add a file, or the files of a directory, which stay in place."""
        await self._updates.push_path(path)

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Have all replicas check the update; then all switch, or none."""
        return await self._updates.commit(mode)

    async def abort_update(self) -> None:
        await self._updates.abort()

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Put an adapter in force on all replicas. The first one that answers decides for all."""
        return await self._supervisor.load_adapter(source, mode)

    async def unload_adapter(self, name: str) -> None:
        await self._supervisor.unload_adapter(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters in force, by name."""
        return self._supervisor.adapter_infos()

    async def sleep(self, level: int) -> None:
        """All replicas finish their generations and free their memory."""
        raise_violations([Violation("level", "must be 1 or 2")] if level not in (1, 2) else [])
        supervisor = self._supervisor
        async with self._sleeping:  # a second call returns when the memory is free, too
            supervisor.check_some_live()
            if supervisor.asleep:
                return
            supervisor.asleep = level
            try:
                await supervisor.call_all("sleep", level)
            except BaseException:
                supervisor.asleep = 0
                await supervisor.call_all("wake")
                raise

    async def wake(self) -> None:
        """All replicas take their memory again."""
        async with self._sleeping:
            self._supervisor.asleep = 0
            await self._supervisor.call_all("wake")

    async def aclose(self) -> None:
        """End everything in flight and all replicas. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._updates.aclose()
        await self._supervisor.aclose()

    def _abort_flights(self, chosen: Callable[[GenerateRequest], bool]) -> list[ReplicaProcess | None]:
        """Mark requests as aborted, also if their replica dies before the abort reaches it; return their processes."""
        flights = [each for each in self._flights.values() if not each.aborted and chosen(each.request)]
        for flight in flights:
            flight.aborted = True
            flight.moved.set()
        return [flight.life for flight in flights]

    def _look_again(self) -> None:
        for flight in self._flights.values():
            flight.moved.set()

    async def _ready(self, flight: _Flight) -> bool:
        """Wait for a replica; False if aborted. Raises Unavailable when none is likely to come."""
        while not flight.aborted:
            self._supervisor.check_some_may_come()
            if self._router.members and not self._updates.switching:
                return True
            flight.moved.clear()
            await flight.moved.wait()
        return False

    async def _attempt(self, flight: _Flight, asked: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Generate on the best replica. If that dies: raises Unavailable (ENGINE_DIED), or ends if aborted."""
        blocks = _blocks(asked.prompt_token_ids, asked.adapter)
        route = self._router.route(blocks, asked.prompt_token_ids.size, asked.sampling.max_tokens, asked.session_id)
        if route is None:
            raise replica_died()
        replica = self._supervisor.replica(route.member)
        life = flight.life = self._supervisor.life(route.member)
        try:
            async with aclosing(life.generate(asked)) as events:
                async for event in events:
                    replica.deaths = 0
                    yield event
        except PenstockError as error:
            if self._closed or not is_death(error):
                raise
            self._supervisor.end(life)
            if flight.aborted:
                return
            raise replica_died(life.name) from error
        finally:
            flight.life = None
            self._router.ended(route)


def _blocks(prompt: TokenIds, adapter: str) -> tuple[bytes, ...]:
    return prefix_blocks(prompt[:MAX_PREFIX_TOKENS].astype("<i4", copy=False).tobytes(), adapter)
