"""The inference service's health: its gauges and its diagnostics. Read-only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader, Values
from penstock_inference import metrics
from penstock_inference.domain.engine_info import EngineStats
from penstock_inference.domain.generation import GenerateRequest
from penstock_inference.domain.logprob_diff import GapReports
from penstock_inference.engines.base import Engine
from penstock_inference.engines.optional_features import Adapters

Reading: TypeAlias = Callable[[EngineStats], Values | float]

_FIGURES: Final = ("mean_abs", "max_abs", "kl", "ratio_mean", "clipped_share", "effective_share")


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A request that requires a policy version, and its arrival time."""

    request: GenerateRequest
    least: int
    since: float


class Health:
    """Observes one engine. `clock` gives monotonic seconds."""

    def __init__(self, engine: Engine, gaps: GapReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._gaps = gaps
        self._clock = clock
        # The policy version at which the engine was paused, and since when. A newer version shows that the trainer is
        # alive.
        self._paused: tuple[int, float] | None = None
        self._waits: set[_Wait] = set()

    @contextmanager
    def reported(self) -> Iterator[None]:
        """While the context is open, the metrics report this engine's values."""
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
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(self._reading(read)))
            stack.enter_context(metrics.LOGPROB_GAP.supplied_by(self._gap))
            yield

    def look(self) -> None:
        """Update how long the engine has been paused; call it after every call that may pause or resume it.

        Every read of the figures does the same. An update that stops the engine also counts as paused, for a moment.
        """
        self._stats()

    @contextmanager
    def generating(self, request: GenerateRequest) -> Iterator[None]:
        """While the context is open, the engine has this request, which may wait for a policy version."""
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
        """A paused or dead engine, replicas that are down, a growing queue, weights that never arrive."""
        stats = self._stats()
        if stats.failure:
            yield Trouble("ENGINE_DEAD", f"the engine fails: {stats.failure}", _RESTART)
        down = tuple(replica.name for replica in stats.replicas if not replica.live)
        if down and len(down) == len(stats.replicas):
            yield Trouble("ENGINE_DEAD", "every engine of the service died and is restarting", _RESTART)
        elif down:
            yield Trouble(
                "REPLICAS_DOWN",
                f"{len(down)} of {len(stats.replicas)} engines died and are restarting",
                "the others answer meanwhile; if it continues, read in the service's log why they died",
                grave=False,
                subjects=down,
            )
        early = [
            wait for wait in self._waits if self._clock() - wait.since >= patience_s and self._is_early(wait, stats)
        ]
        if early:
            waiting = tuple(dict.fromkeys(wait.request.session_id or wait.request.request_id for wait in early))
            yield Trouble(
                "POLICY_STUCK",
                f"{len(early)} request{'s wait' if len(early) > 1 else ' waits'} for policy version"
                f" {min(wait.least for wait in early)}, which the engine lacks; its version is"
                f" {stats.policy_version}",
                "push the weights (ps.inference.update_weights), or check why the trainer announced a version that "
                "it has not pushed",
                subjects=waiting,
                owners=("",) * len(waiting),
            )
        paused_for = 0.0 if self._paused is None else self._clock() - self._paused[1]
        if stats.paused and paused_for >= patience_s:
            waits = f", and {stats.running + stats.waiting} requests wait" if stats.running + stats.waiting else ""
            yield Trouble(
                "ENGINE_PAUSED",
                f"the engine has been paused or asleep for {paused_for:.0f} s{waits}",
                "the caller that paused it must resume it (ps.inference.resume() or wake()); if that program has "
                "ended, do it by hand",
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
        """Whether the required version is not in force yet. Versions only grow: a request that began is not early."""
        if not wait.request.adapter or not isinstance(self._engine, Adapters):
            return wait.least > stats.policy_version
        versions = {adapter.name: adapter.policy_version for adapter in self._engine.adapters()}
        return wait.least > versions.get(wait.request.adapter, -1)

    def _gap(self) -> dict[tuple[str, ...], float]:
        reports = self._gaps.all()
        return {(name,): getattr(reports[-1], name) for name in _FIGURES} if reports else {}


_RESTART: Final = (
    "read the end of its output in the service's log; an engine that dies at each start has too little memory, or "
    "an invalid model or options"
)


def _replicas(stats: EngineStats) -> dict[tuple[str, ...], float]:
    live = sum(replica.live for replica in stats.replicas) if stats.replicas else 1
    return {("live",): live, ("down",): max(1, len(stats.replicas)) - live}


def _tokens(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {("prompt",): stats.prompt_tokens, ("cached",): stats.cached_tokens, ("sampled",): stats.sampled_tokens}


def _requests(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {("finished",): stats.finished, ("aborted",): stats.aborted, ("failed",): stats.failed}
