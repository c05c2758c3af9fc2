"""What the inference service tells operators of now: its gauges, and what it takes for trouble. It only looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock_chassis.metrics import Read, Reader, Values
from penstock_chassis.operations import Trouble
from penstock_inference import metrics
from penstock_inference.engines.base import Engine, EngineStats, GenerateRequest
from penstock_inference.engines.optional import Adapters
from penstock_inference.gaps import GapReports

Reading: TypeAlias = Callable[[EngineStats], Values | float]

_FIGURES: Final = ("mean_abs", "max_abs", "kl", "ratio_mean", "clipped_share", "effective_share")


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A request that takes only a policy version, and when it came."""

    request: GenerateRequest
    least: int
    since: float


class Oversight:
    """Looks at one engine. `clock` gives seconds and never jumps."""

    def __init__(self, engine: Engine, gaps: GapReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._gaps = gaps
        self._clock = clock
        # The policy version that the engine was paused with, and since when; a newer one is the work of somebody alive.
        self._paused: tuple[int, float] | None = None
        self._waits: set[_Wait] = set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, the metrics tell of this engine."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reading]] = [
                (metrics.RUNNING, lambda stats: stats.running),
                (metrics.WAITING, lambda stats: stats.waiting),
                (metrics.SLOTS, lambda stats: stats.slots),
                (metrics.CACHE_USE, lambda stats: stats.cache_use),
                (metrics.POLICY_VERSION, lambda stats: stats.policy_version),
                (metrics.PAUSED, lambda stats: float(stats.paused)),
                (metrics.REPLICAS, _replicas),
                (metrics.RESTARTS, lambda stats: sum(replica.restarts for replica in stats.replicas)),
                (metrics.TOKENS, _tokens),
                (metrics.REQUESTS, _requests),
                (metrics.BUSY, lambda stats: stats.busy_s),
            ]
            for told, read in reading:
                stack.enter_context(told.told_by(self._reading(read)))
            stack.enter_context(metrics.LOGPROB_GAP.told_by(self._gap))
            yield

    def look(self) -> None:
        """Whoever may have paused the engine or let it go on says so: nothing else tells how long it has been paused.

        Every look at the figures does it too. An engine that an update stops is paused as well, for a moment.
        """
        self._stats()

    @contextmanager
    def generating(self, request: GenerateRequest) -> Iterator[None]:
        """Inside, the engine has this request: it may wait for a policy version."""
        if request.min_policy_version is None:
            yield
            return
        wait = _Wait(request, request.min_policy_version, self._clock())
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def troubles(self, patience_s: float) -> Iterator[Trouble]:
        """A paused or dead engine, replicas that are down, a queue that grows, weights that never come."""
        stats = self._stats()
        if stats.failure:
            yield Trouble("ENGINE_DEAD", f"the engine answers nothing: {stats.failure}", _RESTART)
        down = tuple(replica.name for replica in stats.replicas if not replica.live)
        if down and len(down) == len(stats.replicas):
            yield Trouble("ENGINE_DEAD", "every engine behind the service died and is being started again", _RESTART)
        elif down:
            yield Trouble(
                "REPLICAS_DOWN",
                f"{len(down)} of {len(stats.replicas)} engines died and are being started again",
                "the others answer meanwhile; look in the service's log why they died if it goes on",
                grave=False,
                subjects=down,
            )
        early = [
            wait for wait in self._waits if self._clock() - wait.since >= patience_s and self._is_early(wait, stats)
        ]
        if early:
            yield Trouble(
                "POLICY_STUCK",
                f"{len(early)} request{'s wait' if len(early) > 1 else ' waits'} for policy version"
                f" {min(wait.least for wait in early)}, which the engine does not have; its own is"
                f" {stats.policy_version}",
                "push the weights (ps.inference.update_weights), or look why the trainer announced a version that it"
                " has not pushed",
                subjects=tuple(dict.fromkeys(wait.request.session_id or wait.request.request_id for wait in early)),
            )
        paused_for = 0.0 if self._paused is None else self._clock() - self._paused[1]
        if stats.paused and paused_for >= patience_s:
            waits = f", and {stats.running + stats.waiting} requests wait" if stats.running + stats.waiting else ""
            yield Trouble(
                "ENGINE_PAUSED",
                f"the engine has been paused or asleep for {paused_for:.0f} s{waits}",
                "whoever paused it resumes it (ps.inference.resume() or wake()); if that one is gone, do it by hand",
            )
        elif stats.slots and stats.waiting > 4 * stats.slots:
            yield Trouble(
                "ENGINE_QUEUE_LONG",
                f"{stats.waiting} requests wait for {stats.slots} place{'s' * (stats.slots > 1)} in the batch",
                "fewer rollouts at once (max_running of the driver), more slots, or another replica",
                grave=False,
            )

    def _reading(self, read: Reading) -> Reader:
        return lambda: read(self._stats())

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        if not stats.paused:
            self._paused = None
        elif self._paused is None or self._paused[0] != stats.policy_version:
            self._paused = (stats.policy_version, self._clock())
        return stats

    def _is_early(self, wait: _Wait, stats: EngineStats) -> bool:
        """Whether the version that it takes is not there. Versions only grow: one that began is not early."""
        if not wait.request.adapter or not isinstance(self._engine, Adapters):
            return wait.least > stats.policy_version
        versions = {adapter.name: adapter.policy_version for adapter in self._engine.adapters()}
        return wait.least > versions.get(wait.request.adapter, -1)

    def _gap(self) -> dict[tuple[str, ...], float]:
        reports = self._gaps.all()
        return {(name,): getattr(reports[-1], name) for name in _FIGURES} if reports else {}


_RESTART: Final = (
    "look in the service's log for its last words; one that dies at once each time it is started has too little memory,"
    " or its model or options are at fault"
)


def _replicas(stats: EngineStats) -> dict[tuple[str, ...], float]:
    live = sum(replica.live for replica in stats.replicas) if stats.replicas else 1
    return {("live",): live, ("down",): max(1, len(stats.replicas)) - live}


def _tokens(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {("prompt",): stats.prompt_tokens, ("cached",): stats.cached_tokens, ("sampled",): stats.sampled_tokens}


def _requests(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {("finished",): stats.finished, ("aborted",): stats.aborted, ("failed",): stats.failed}
