"""Monitors the upstream endpoint: probes its features when it is first reached, and again after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import PenstockError, ResourceExhausted, Unavailable
from penstock_inference.domain.generation import LogprobsMode
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.probe import Level
from penstock_inference.engines.openai.wire import RETRY_S, Endpoint

DELAYS = Delays(0.25, 15.0)
_LOST = frozenset({"UPSTREAM_UNREACHABLE", "UPSTREAM_CUT_OFF", "UPSTREAM_MODEL_UNKNOWN", "UPSTREAM_KEY_REFUSED"})
"""After these errors another server may answer at the address; a replaced server cuts its streams off."""

_log = structlog.get_logger("penstock.inference")


class ProbedFacts(Protocol):
    """What every probe finds out."""

    @property
    def level(self) -> Level:
        """Which data of a completion the endpoint returns."""

    @property
    def server(self) -> str:
        """The server and its version, as far as it reports them."""

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """The distribution of its logprobs."""

    @property
    def shortfall(self) -> str:
        """Why its completions are for evaluation only; empty where they are not."""


_Facts = TypeVar("_Facts", bound=ProbedFacts)


class UpstreamMonitor(Generic[_Facts]):
    """Monitors one endpoint.

    Args:
        endpoint: the endpoint.
        probe: finds out its facts. Raises Unavailable while it is unreachable, other errors for what only a person can
            fix, such as unusable facts.
    """

    def __init__(self, endpoint: Endpoint, probe: Callable[[], Awaitable[_Facts]]) -> None:
        self._endpoint = endpoint
        self._probe = probe
        self._facts: _Facts | None = None
        self._trouble: PenstockError | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the endpoint is lost and being probed."""
        return self._lost.is_set()

    async def open(self) -> None:
        """Probe once, then monitor. An unreachable endpoint is probed again; any other error is raised."""
        try:
            self._learn(await self._probe())
        except (Unavailable, ResourceExhausted) as error:
            _log.warning("the upstream is not usable yet", base_url=self._endpoint.base_url, reason=error.reason)
            self.lose(error)
        self._task = asyncio.create_task(self._keep_looking())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def facts(self) -> _Facts:
        """The facts about the endpoint. If there are none, raises the reason."""
        if self._facts is None or self.lost:
            raise _again(self._trouble)
        return self._facts

    def failed(self, error: PenstockError) -> None:
        """Report an error; some mean that the endpoint may have changed."""
        if error.reason in _LOST:
            self.lose(error)

    def lose(self, error: PenstockError) -> None:
        """Report an error after which the endpoint must be probed, whatever its reason."""
        self._trouble = error
        self._lost.set()

    def _learn(self, facts: _Facts) -> None:
        before, self._facts, self._trouble = self._facts, facts, None
        self._lost.clear()
        if facts == before:
            return
        summary = {"level": facts.level.value, "logprobs": facts.logprobs_mode.value, "server": facts.server}
        if before is None:
            _log.info("upstream", base_url=self._endpoint.base_url, gives=summary)
        else:
            _log.warning("the upstream changed", base_url=self._endpoint.base_url, gives=summary)
        if facts.shortfall:
            _log.warning("this upstream's completions are for evaluation only", why=facts.shortfall)

    async def _keep_looking(self) -> None:
        """Whenever the endpoint is lost, probe it until it answers."""
        while True:
            await self._lost.wait()
            backoff = Backoff(DELAYS)
            while self.lost:
                try:
                    self._learn(await self._probe())
                except PenstockError as error:
                    self._trouble = error
                except Exception as error:  # noqa: BLE001 - no error may end the probing
                    _log.exception("probing the upstream failed")
                    self._trouble = broken(f"it cannot be read ({type(error).__name__})")
                if self.lost:
                    await backoff.wait()


def _again(error: PenstockError | None) -> PenstockError:
    """A copy of the error for another caller."""
    if error is None:
        return Unavailable(
            "The upstream has not been probed yet.", reason="UPSTREAM_UNREACHABLE", retry_after_s=RETRY_S
        )
    return type(error)(
        error.message,
        reason=error.reason,
        metadata=error.metadata,
        violations=error.violations,
        retry_after_s=error.retry_after_s,
    )
