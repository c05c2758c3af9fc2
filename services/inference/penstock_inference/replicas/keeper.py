"""Keeps the replicas alive, and tells each that comes back what all were told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from penstock_chassis.errors import PenstockError, Unavailable
from penstock_inference.engines.base import EngineInfo, EngineStats, PauseMode
from penstock_inference.engines.optional import AdapterInfo, AdapterSource
from penstock_inference.replicas import wire
from penstock_inference.replicas.life import Life, replica_died
from penstock_inference.replicas.routing import Router
from penstock_inference.replicas.weights import Policy

HOPELESS_DEATHS = 4
"""Deaths of every replica without a token in between, after which nobody waits for one to come back."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Before the second start in a row, doubled before each further one. The first is at once."""

_DEATHS = frozenset({"ENGINE_DIED", "ENGINE_FAILED", "ENGINE_CLOSED"})

_log = structlog.get_logger("penstock.inference")


@dataclass(slots=True, eq=False)
class Replica:
    """One place among the replicas, whatever process has it."""

    name: str
    environment: Mapping[str, str]
    life: Life | None = None
    """Set while it gets requests."""
    deaths: int = 0
    """Since it last generated anything."""
    restarts: int = 0
    past: EngineStats = field(default_factory=EngineStats)
    """Counters of the lives that are over."""

    @property
    def live(self) -> bool:
        """Whether it gets requests."""
        return self.life is not None

    def stats(self) -> EngineStats:
        """Gauges of now, counters of all lives."""
        return self.past if self.life is None else _sum(self.past, self.life.stats)


class Keeper:
    """The replicas, and what all of them were told.

    Args:
        environments: for each replica, the variables that it has beside the service's own.
        order: what each is to be.
        policy: the weights of the model directory.
        router: who gets requests is told to it.
        silence_s: see `Life.start`.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        order: wire.Open,
        policy: Policy,
        router: Router,
        silence_s: float,
    ) -> None:
        self.replicas = tuple(Replica(f"r{n}", environment) for n, environment in enumerate(environments))
        self.policy = policy
        self.paused: PauseMode | None = None
        self.freezing = asyncio.Lock()
        """Held while replicas are told to freeze: `paused` says that before all have."""
        """A pause that froze stays one that did, whatever other is asked for, until all are resumed."""
        self.asleep = 0
        self.lock = asyncio.Lock()
        """Held while replicas are told something one after the other: meanwhile none joins."""
        self.changed: Callable[[], None] = lambda: None
        """Called when replicas came, went, or are given up."""
        self._order = order
        self._silence_s = silence_s
        self._router = router
        self._adapters: dict[str, tuple[AdapterSource, AdapterInfo]] = {}
        self._info: EngineInfo | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def open(self) -> None:
        """Start all. Raises what the first that does not start raises, and none is left."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(self._first(replica))
        except BaseExceptionGroup as errors:
            await self.aclose()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.aclose()
            raise
        self._tasks = [
            asyncio.create_task(self._keep(replica), name=f"keep-{replica.name}") for replica in self.replicas
        ]

    async def aclose(self) -> None:
        """End all; who waits hears that. Idempotent."""
        self._closed = True
        self.changed()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        lives = [replica.life for replica in self.replicas if replica.life is not None]
        for life in lives:
            self._gone(life)
        await asyncio.gather(*(life.aclose() for life in lives))

    @property
    def info(self) -> EngineInfo:
        """What a replica says of itself."""
        assert self._info is not None
        return self._info

    def lives(self) -> list[Life]:
        """Of the replicas that get requests."""
        return [replica.life for replica in self.replicas if replica.life is not None and replica.life.alive]

    def replica(self, name: str) -> Replica:
        """The one of that name."""
        return next(replica for replica in self.replicas if replica.name == name)

    def life(self, name: str) -> Life:
        """That of a replica that gets requests."""
        life = self.replica(name).life
        assert life is not None
        return life

    def check_some_live(self) -> None:
        """Raises Unavailable (ENGINE_DIED, ENGINE_CLOSED) when no replica gets requests."""
        self._check_open()
        if not self._router.replicas:
            raise replica_died()

    def check_some_may_come(self) -> None:
        """Raises Unavailable when none gets requests and all died again and again."""
        self._check_open()
        if all(not replica.live and replica.deaths >= HOPELESS_DEATHS for replica in self.replicas):
            raise replica_died()

    def end(self, life: Life) -> None:
        """End a life that is of no use any more; the next one begins. It gets no request from now on."""
        if life.alive:
            _log.error("a replica is ended", replica=life.name)
            life.kill()
        self._gone(life)

    async def ask(self, lives: Sequence[Life], method: str, *arguments: Any) -> list[Any]:
        """The result, or the error, of each. Those that turn out to be dead are ended."""
        outcomes = await asyncio.gather(*(life.ask(method, *arguments) for life in lives), return_exceptions=True)
        for life, outcome in zip(lives, outcomes, strict=True):
            if is_death(outcome):
                self.end(life)
        return outcomes

    async def tell_all(self, method: str, *arguments: Any) -> list[Any]:
        """The results of those that live to answer. Raises the first error that is not a death."""
        outcomes = await self.ask(self.lives(), method, *arguments)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not is_death(outcome):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def load_adapter(self, source: AdapterSource, mode: PauseMode) -> AdapterInfo:
        """See `Adapters`. The first replica that takes it decides; one that does not then is started again."""
        task = asyncio.create_task(self._load_adapter(source, mode), name="load-adapter")
        # Half of the replicas with an adapter is no state to be left in, whoever waits.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def unload_adapter(self, name: str) -> None:
        """See `Adapters`."""
        async with self.lock:
            self._adapters.pop(name, None)
            await self.tell_all("unload_adapter", name)

    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """Those in force, by name."""
        return tuple(info for _, (_, info) in sorted(self._adapters.items()))

    async def _load_adapter(self, source: AdapterSource, mode: PauseMode) -> AdapterInfo:
        async with self.lock:
            left = self.lives()
            info: AdapterInfo | None = None
            while info is None:
                if not left:
                    raise replica_died()
                (outcome,) = await self.ask([left.pop(0)], "load_adapter", source, mode)
                if isinstance(outcome, AdapterInfo):
                    info = outcome
                elif not is_death(outcome):
                    raise outcome
            self._adapters[source.name] = (source, info)
            for life, outcome in zip(left, await self.ask(left, "load_adapter", source, mode), strict=True):
                if isinstance(outcome, BaseException):
                    self.end(life)
            return info

    async def _first(self, replica: Replica) -> None:
        life = await self._start(replica)
        self._info = self._info or life.info
        self._joined(replica, life)

    async def _keep(self, replica: Replica) -> None:
        """A life after the other."""
        while (life := replica.life) is not None:
            await life.died()
            self._gone(life)
            await life.aclose()
            while replica.life is None:
                replica.deaths += 1
                _log.warning("a replica died and is started again", replica=replica.name, deaths=replica.deaths)
                self.changed()
                if replica.deaths > 1:
                    await asyncio.sleep(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(replica.deaths - 2, 10)))
                await self._start_again(replica)

    async def _start(self, replica: Replica) -> Life:
        return await Life.start(replica.name, self._order, replica.environment, self._silence_s)

    async def _start_again(self, replica: Replica) -> None:
        replica.restarts += 1
        try:
            life = await self._start(replica)
        except (PenstockError, OSError):
            _log.exception("a replica does not start", replica=replica.name)
            return
        try:
            await self._catch_up(replica, life)
        except PenstockError:
            _log.exception("a replica cannot catch up", replica=replica.name)
            await life.aclose()
        except BaseException:
            await life.aclose()
            raise
        else:
            _log.info("a replica runs again", replica=replica.name, policy_version=self.policy.version)

    async def _catch_up(self, replica: Replica, life: Life) -> None:
        """Tell it what the others know, until that is everything; then it joins."""
        has = Policy(self.policy.checkpoint)
        while True:
            policy = self.policy
            if policy.version != has.version:
                try:
                    await life.ask("stage", policy.stage())
                    await life.ask("switch")
                except PenstockError:
                    if policy is self.policy or not life.alive:
                        raise
                    continue  # its files may have gone with its successor
                has = policy
            async with self.lock:
                if has.version != self.policy.version:
                    continue
                for source, _ in self._adapters.values():
                    await life.ask("load_adapter", source, PauseMode.KEEP)
                paused, asleep = False, 0
                while (paused, asleep) != (self.paused is not None, self.asleep):
                    if asleep and asleep != self.asleep:
                        asleep = 0
                        await life.ask("wake")
                    elif asleep != self.asleep:
                        asleep = self.asleep
                        await life.ask("sleep", asleep)
                    else:
                        paused = not paused
                        await (life.ask("pause", PauseMode.KEEP) if paused else life.ask("resume"))
                if not life.alive:
                    raise replica_died(replica.name)
                self._joined(replica, life)
                return

    def _joined(self, replica: Replica, life: Life) -> None:
        replica.life = life
        self._router.join(replica.name)
        self.changed()

    def _gone(self, life: Life) -> None:
        """It gets no request any more. Harmless when that is known."""
        replica = self.replica(life.name)
        if replica.life is life:
            self._router.leave(replica.name)
            past = _sum(replica.past, life.stats)
            replica.past = replace(past, running=0, waiting=0, slots=0, cache_use=0.0, failure="")
            replica.life = None

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the engine is closed", reason="ENGINE_CLOSED")


def is_death(outcome: object) -> bool:
    """Whether it is an error that says that nothing more comes of this life."""
    return isinstance(outcome, PenstockError) and outcome.reason in _DEATHS


def _sum(past: EngineStats, now: EngineStats) -> EngineStats:
    versions = dict(past.tokens_by_version)
    for version, count in now.tokens_by_version.items():
        versions[version] = versions.get(version, 0) + count
    return replace(
        now,
        steps=past.steps + now.steps,
        prompt_tokens=past.prompt_tokens + now.prompt_tokens,
        cached_tokens=past.cached_tokens + now.cached_tokens,
        sampled_tokens=past.sampled_tokens + now.sampled_tokens,
        finished=past.finished + now.finished,
        aborted=past.aborted + now.aborted,
        failed=past.failed + now.failed,
        busy_s=past.busy_s + now.busy_s,
        tokens_by_version=versions,
    )
