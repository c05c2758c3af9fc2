"""Supervises the replicas: restarts dead ones and gives a restarted one the state that all have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog

from penstock_chassis.aio.retry import Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import PenstockError
from penstock_chassis.membership.routing import Router
from penstock_inference.domain.engine_info import EngineInfo, EngineStats
from penstock_inference.domain.weights import PauseMode, UpdateFormat
from penstock_inference.engines.checkpoint import Checkpoint
from penstock_inference.engines.checks import closed
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.replicas import wire
from penstock_inference.replicas.replica_process import ReplicaProcess, replica_died
from penstock_inference.replicas.wire import Stage, WeightFile


@dataclass(frozen=True, slots=True)
class Policy:
    """A version and its weights. `files` are those pushed since the model directory, oldest first."""

    checkpoint: Checkpoint
    version: int = 0
    label: str = ""
    files: tuple[Path, ...] = field(default=())

    def updated(self, version: int, label: str, files: Sequence[Path], update_format: UpdateFormat) -> Policy:
        """The policy after an update, whose files are read completely. Raises the errors of `Checkpoint.updated`."""
        checkpoint = self.checkpoint.updated(files, update_format)
        used = set(checkpoint.sources.values())
        # A path that is pushed again becomes the newest.
        order = [path for path in self.files if path not in files] + list(dict.fromkeys(files))
        return replace(
            self, checkpoint=checkpoint, version=version, label=label, files=tuple(p for p in order if p in used)
        )

    def stage(self) -> Stage:
        """The complete update, for a replica that has the model directory's weights."""
        return Stage(self.version, self.label, UpdateFormat.DELTA, self._of(self.files))

    def stage_only(self, files: Sequence[Path], update_format: UpdateFormat) -> Stage:
        """Stages only the last update, for a replica that has the previous policy."""
        return Stage(self.version, self.label, update_format, self._of([p for p in self.files if p in set(files)]))

    def _of(self, files: Sequence[Path]) -> tuple[WeightFile, ...]:
        names: dict[Path, list[str]] = {}
        for name, path in self.checkpoint.sources.items():
            names.setdefault(path, []).append(name)
        return tuple(WeightFile(path, tuple(sorted(names[path]))) for path in files)


HOPELESS_DEATHS = 4
"""If every replica died this often without sampling a token, requests no longer wait for a restart."""
DELAYS = Delays(0.5, 30.0)
"""Before the second restart in a row and each further one. The first has no delay."""

_DEATHS = frozenset({"ENGINE_DIED", "ENGINE_FAILED", "ENGINE_CLOSED"})

_log = structlog.get_logger("penstock.inference")


@dataclass(slots=True, eq=False)
class Replica:
    """One replica slot, across all its processes."""

    name: str
    environment: Mapping[str, str]
    life: ReplicaProcess | None = None
    """Its process, set while it gets requests."""
    deaths: int = 0
    """Deaths since it last generated anything."""
    restarts: int = 0
    past: EngineStats = field(default_factory=EngineStats)
    """Counters of its earlier processes."""

    @property
    def live(self) -> bool:
        """Whether it gets requests."""
        return self.life is not None

    def stats(self) -> EngineStats:
        """Current gauges, and counters of all its processes."""
        return self.past if self.life is None else _sum(self.past, self.life.stats)


class ReplicaSupervisor:
    """The replicas, and the state that all of them must have.

    Args:
        environments: for each replica, its variables in addition to the service's own.
        order: the spec of every replica.
        policy: the weights of the model directory.
        router: is notified which replicas get requests.
        silence_s: see `ReplicaProcess.start`.
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
        """A pause that froze stays in force until all are resumed, whatever other pause is requested."""
        self.freezing = asyncio.Lock()
        """Held while replicas are being frozen: `paused` is set before all of them are."""
        self.asleep = 0
        self.lock = asyncio.Lock()
        """Held while replicas are called one after the other: meanwhile none joins."""
        self.changed: Callable[[], None] = lambda: None
        """Called when replicas join, leave, or are abandoned."""
        self._order = order
        self._silence_s = silence_s
        self._router = router
        self._adapters: dict[str, tuple[AdapterSource, AdapterInfo]] = {}
        # By adapter: a load may wait for completions, for which nobody else is to wait. One is kept while it is in use.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._info: EngineInfo | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loading = TaskOwner()
        self._closed = False

    async def open(self) -> None:
        """Start all replicas. If one fails, raises the first error and leaves none running."""
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
        """End all replicas; pending calls get an error. Idempotent."""
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
        """The engine info of a replica; all are equal."""
        assert self._info is not None
        return self._info

    def lives(self) -> list[ReplicaProcess]:
        """The processes of the replicas that get requests."""
        return [replica.life for replica in self.replicas if replica.life is not None and replica.life.alive]

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self.replicas if replica.name == name)

    def life(self, name: str) -> ReplicaProcess:
        """The process of a replica that gets requests."""
        life = self.replica(name).life
        assert life is not None
        return life

    def check_some_live(self) -> None:
        """Raises Unavailable (ENGINE_DIED, ENGINE_CLOSED) when no replica gets requests."""
        self._check_open()
        if not self._router.members:
            raise replica_died()

    def check_some_may_come(self) -> None:
        """Raises Unavailable when no replica gets requests and all of them died again and again."""
        self._check_open()
        if all(not replica.live and replica.deaths >= HOPELESS_DEATHS for replica in self.replicas):
            raise replica_died()

    def end(self, life: ReplicaProcess) -> None:
        """End a useless process, so that the next one starts. It gets no request from now on."""
        if life.alive:
            _log.error("a replica is ended", replica=life.name)
            life.kill()
        self._gone(life)

    async def ask(self, lives: Sequence[ReplicaProcess], method: str, *arguments: Any) -> list[Any]:
        """The result, or the error, of each. Replicas that turn out to be dead are ended."""
        outcomes = await asyncio.gather(*(life.ask(method, *arguments) for life in lives), return_exceptions=True)
        for life, outcome in zip(lives, outcomes, strict=True):
            if is_death(outcome):
                self.end(life)
        return outcomes

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all replicas and return the results of the survivors. Raises the first error that is not a death."""
        outcomes = await self.ask(self.lives(), method, *arguments)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not is_death(outcome):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def load_adapter(self, source: AdapterSource, mode: PauseMode) -> AdapterInfo:
        """See `Adapters`. The first replica that answers decides; one that then fails is restarted."""
        # Completes even if the caller is cancelled: an adapter on half of the replicas would be inconsistent.
        return await self._loading.run(self._load_adapter(source, mode), "load-adapter")

    async def unload_adapter(self, name: str) -> None:
        """See `Adapters`."""
        async with self._changing.setdefault(name, asyncio.Lock()), self.lock:
            self._adapters.pop(name, None)
            await self.call_all("unload_adapter", name)

    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """The adapters in force, by name."""
        return tuple(info for _, (_, info) in sorted(self._adapters.items()))

    async def _load_adapter(self, source: AdapterSource, mode: PauseMode) -> AdapterInfo:
        asked: set[ReplicaProcess] = set()
        info: AdapterInfo | None = None
        async with self._changing.setdefault(source.name, asyncio.Lock()):
            while True:
                async with self.lock:
                    # Those that joined meanwhile have at most the version before.
                    left = [life for life in self.lives() if life not in asked]
                    if not left:
                        if info is None:
                            raise replica_died()
                        self._adapters[source.name] = (source, info)
                        return info
                if info is None:
                    left = left[:1]
                asked.update(left)
                outcomes = await self.ask(left, "load_adapter", source, mode)
                for life, outcome in zip(left, outcomes, strict=True):
                    if isinstance(outcome, AdapterInfo):
                        info = info or outcome
                    elif info is not None:
                        self.end(life)
                    elif not is_death(outcome):
                        raise outcome

    async def _first(self, replica: Replica) -> None:
        life = await self._start(replica)
        self._info = self._info or life.info
        self._joined(replica, life)

    async def _keep(self, replica: Replica) -> None:
        """Restart the replica's process whenever it dies."""
        while (life := replica.life) is not None:
            await life.died()
            self._gone(life)
            await life.aclose()
            while replica.life is None:
                replica.deaths += 1
                _log.warning("a replica died and restarts", replica=replica.name, deaths=replica.deaths)
                self.changed()
                if replica.deaths > 1:
                    await asyncio.sleep(DELAYS.after(replica.deaths - 1))
                await self._start_again(replica)

    async def _start(self, replica: Replica) -> ReplicaProcess:
        return await ReplicaProcess.start(replica.name, self._order, replica.environment, self._silence_s)

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

    async def _catch_up(self, replica: Replica, life: ReplicaProcess) -> None:
        """Bring a new process up to the others' state, then let it join."""
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
                    continue  # a newer policy may have removed its files
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

    def _joined(self, replica: Replica, life: ReplicaProcess) -> None:
        replica.life = life
        self._router.join(replica.name)
        self.changed()

    def _gone(self, life: ReplicaProcess) -> None:
        """Stop sending requests to this process. Idempotent."""
        replica = self.replica(life.name)
        if replica.life is life:
            self._router.leave(replica.name)
            past = _sum(replica.past, life.stats)
            replica.past = replace(past, running=0, waiting=0, slots=0, cache_use=0.0, failure="")
            replica.life = None

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


def is_death(outcome: object) -> bool:
    """Whether the error means that this process answers nothing more."""
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
