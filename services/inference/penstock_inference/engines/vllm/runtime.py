"""vLLM's processes: start, calls, monitoring, stop.

One `Runtime` is one run of them. When they die, every waiting caller gets ENGINE_DIED, even where vLLM's own futures
would wait forever; the engine starts the next run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import structlog
import vllm.envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_inference.engines.vllm.features import Features

RETRY_AFTER_S = 5.0
SHUTDOWN_S = 10.0
_WATCH_S = 0.25

_Result = TypeVar("_Result")
_log = structlog.get_logger("penstock.inference")


def engine_died() -> Unavailable:
    """The error when vLLM's processes died and new ones are being started."""
    return Unavailable(
        "the engine's processes died; it is restarting", reason="ENGINE_DIED", retry_after_s=RETRY_AFTER_S
    )


class Gauges:
    """The figures that vLLM's scheduler reports after each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.cache_use = 0.0


class Runtime:
    """One vLLM. Every method belongs to the event loop that called `start`."""

    def __init__(self, llm: AsyncLLM, gauges: Gauges) -> None:
        self.llm: Any = llm
        self.gauges = gauges
        self.death_handled = asyncio.Event()
        """Set when every caller has the error of its death; nothing is admitted until another one runs."""
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._wait_for_death(), name="vllm-watch")

    @classmethod
    async def start(cls, arguments: Mapping[str, Any], transfer_backend: str = "") -> Runtime:
        """Start the processes and load the model: half a minute or more.

        Raises FailedPrecondition (ENGINE_NOT_STARTED).
        """
        gauges = Gauges()

        def build() -> AsyncLLM:
            known = {name: value for name, value in arguments.items() if name in Features.argument_names()}
            if transfer_backend:
                from vllm.config.weight_transfer import WeightTransferConfig

                known["weight_transfer_config"] = WeightTransferConfig(backend=transfer_backend)
            args = AsyncEngineArgs(**known, disable_log_stats=True)
            return AsyncLLM.from_engine_args(args, stat_loggers=[_logger_into(gauges)])

        _remember_environment(False)
        try:
            llm = await asyncio.to_thread(build)
        except Exception as error:
            # vLLM's errors concern its configuration, the model or the machine: report its own words.
            raise FailedPrecondition(
                f"vLLM did not start: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                reason="ENGINE_NOT_STARTED",
            ) from error
        _remember_environment(True)
        return cls(llm, gauges)

    @property
    def alive(self) -> bool:
        """Whether the processes run, as far as known."""
        return not self._died.done()

    async def died(self) -> None:
        """Wait until they are dead."""
        await asyncio.shield(self._died)

    async def ask(self, call: Awaitable[_Result]) -> _Result:
        """Await a call of vLLM.

        Raises Unavailable (ENGINE_DIED) instead of waiting for an answer that will not come.
        """
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, self._died), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise engine_died()
            return task.result()
        except EngineDeadError as error:
            self.kill()
            raise engine_died() from error
        finally:
            if not task.done():
                task.cancel()

    def is_death(self, error: BaseException) -> bool:
        """Whether an error of vLLM's means that it is dead."""
        if isinstance(error, EngineDeadError) or bool(self.llm.errored):
            self.kill()
            return True
        return False

    def kill(self) -> None:
        """Treat it as dead from now on, in any state."""
        if not self._died.done():
            _log.error("vLLM is dead")
            self._died.set_result(None)

    async def aclose(self) -> None:
        """End the processes. Idempotent."""
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        # Joins processes, and kills those that do not end in time.
        await asyncio.to_thread(self.llm.shutdown, *([SHUTDOWN_S] if Features.shutdown_timeout() else []))

    async def _wait_for_death(self) -> None:
        # vLLM detects this itself, sets a flag, and notifies only callers that wait for tokens.
        while not self.llm.errored:  # noqa: ASYNC110 - the flag is vLLM's, and it has no event
            await asyncio.sleep(_WATCH_S)
        self.kill()


def _remember_environment(yes: bool) -> None:
    """Set whether vLLM caches its environment variables, as its own processes do, or reads them for every token."""
    switch = getattr(vllm.envs, "enable_envs_cache" if yes else "disable_envs_cache", None)
    if switch is not None:
        switch()


def _logger_into(gauges: Gauges) -> type[PrometheusStatLogger]:
    """A stat logger that writes into `gauges`; with one, vLLM also times each request.

    It replaces vLLM's default one for Prometheus, which feeds a histogram for every token: that took as long as all
    other work for a token in this process.
    """

    class Logger(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
            gauges.steps += 1
            if scheduler_stats is not None:
                gauges.cache_use = float(getattr(scheduler_stats, "kv_cache_usage", 0.0))

        def log_engine_initialized(self) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def record_sleep_state(self, *_: Any, **__: Any) -> None:
            pass

    return Logger
