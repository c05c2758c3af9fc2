"""The shared state of the vLLM engine: the running vLLM, its weights and their version, and admission.

Invariants:

- Weights change only while vLLM is stopped (`stopped`). vLLM itself reports which weights sampled a token. Before 0.32
  it does not: then a token is labelled on arrival, the label may be a step late, and exact spans are not declared.
- No weights change while a request is on its way into vLLM (`handing_over`), so its salt is of those that compute it.
- `checkpoint` and `version` always describe the weights in force. A dead vLLM is restarted with exactly these, and one
  with doubtful weights is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError
from penstock_inference.domain.generation import FinishReason, GenerateRequest
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.adapters import AdapterTable, LoadedAdapter
from penstock_inference.engines.admission import Admission
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checkpoint import Checkpoint, Spool
from penstock_inference.engines.vllm.adapters import lora_request
from penstock_inference.engines.vllm.features import Features
from penstock_inference.engines.vllm.in_flight import Flight
from penstock_inference.engines.vllm.options import VllmOptions, engine_arguments
from penstock_inference.engines.vllm.runtime import Runtime, engine_died

MAX_RESTARTS = 3
"""Deaths without a completion in between, after which the engine is not restarted."""
_REMEMBERED_VERSIONS = 16

_Result = TypeVar("_Result")
_log = structlog.get_logger("penstock.inference")


@dataclass(slots=True)
class Counts:
    """Counters since the engine opened."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    by_version: dict[int, int] = field(default_factory=dict)

    def add(self, flight: Flight) -> None:
        self.prompt_tokens += flight.request.prompt_token_ids.size - flight.cached
        self.cached_tokens += flight.cached
        self.sampled_tokens += len(flight.token_ids)
        self.failed += flight.error is not None
        self.aborted += flight.error is None and flight.finish in (None, FinishReason.ABORT)
        self.finished += flight.finish in (FinishReason.STOP, FinishReason.LENGTH)
        for span in flight.spans():
            self.by_version[span.policy_version] = self.by_version.get(span.policy_version, 0) + span.end - span.start
        while len(self.by_version) > _REMEMBERED_VERSIONS:
            del self.by_version[min(self.by_version)]


class Core:
    """One engine's shared state; its methods belong to one event loop."""

    def __init__(
        self, options: EngineOptions, chosen: VllmOptions, features: Features, checkpoint: Checkpoint, spool: Spool
    ) -> None:
        self.options = options
        self.chosen = chosen
        self.features = features
        self.checkpoint = checkpoint
        self.spool = spool
        self.version = 0
        self.label = ""
        self.unsaved = False
        """The weights in force were transferred and are in no file."""
        self.adapters = AdapterTable(
            chosen.max_adapters, chosen.max_adapter_rank, limit_each=chosen.max_adapters_per_namespace
        )
        self.admission = Admission(options.max_concurrency, options.max_waiting, self.version_of)
        self.flights: set[Flight] = set()
        """The admitted requests."""
        self.counts = Counts()
        self._arguments: Mapping[str, Any] = engine_arguments(options, chosen, features)
        self._original = checkpoint
        self._runtime: Runtime | None = None
        self._absent: Callable[[], PenstockError] = engine_died
        """The error while there is no vLLM."""
        self._restarts = 0
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._drops = TaskOwner()
        self._frozen_for: set[str] = set()
        self._frozen = False
        self._freezing = asyncio.Lock()
        self._handing_over = 0
        self._updates = 0
        self._turns = Signal()
        """Counts changes of these two: how many requests are on their way into vLLM, and how many updates are open."""
        self._settling = TaskOwner()
        """Stops and continuations of vLLM, which must not be cancelled halfway: it would be unknown which one it is."""

    async def start(self) -> None:
        """Start vLLM, and restart it whenever it dies. Raises FailedPrecondition (ENGINE_NOT_STARTED)."""
        self._runtime = await self._new_life()
        self._keep_alive_task = asyncio.create_task(self._keep_alive(), name="vllm-keep-alive")

    async def aclose(self, error: Callable[[], PenstockError]) -> None:
        """End everything in flight with `error`. Idempotent."""
        task, self._keep_alive_task = self._keep_alive_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
            await self._drops.wait()
        runtime, self._runtime = self._runtime, None
        self._gone(error)
        if runtime is not None:
            runtime.death_handled.set()
            await runtime.aclose()
        await self._settling.aclose()

    async def ready_again(self) -> bool:
        """After a death, wait until a request may be submitted again; admission then holds it."""
        runtime = self._runtime
        if runtime is not None and not runtime.alive:
            await runtime.death_handled.wait()
        return True

    @property
    def runtime(self) -> Runtime:
        """The running vLLM. Raises Unavailable (ENGINE_DIED, ENGINE_CLOSED) or Internal (ENGINE_FAILED) without one."""
        if self._runtime is None or not self._runtime.alive:
            raise self._absent()
        return self._runtime

    @property
    def frozen_by_pause(self) -> bool:
        """Whether a pause froze vLLM itself."""
        return "pause" in self._frozen_for

    def version_of(self, adapter: str) -> int:
        """The version in force of the base weights (""), or of an adapter; raises the errors of `AdapterTable.get`."""
        return self.adapters.get(adapter).info.policy_version if adapter else self.version

    async def ask(self, call: Callable[[Any], Awaitable[_Result]]) -> _Result:
        """Await a call of vLLM: `await core.ask(lambda llm: llm.abort("r"))`."""
        runtime = self.runtime
        return await runtime.ask(call(runtime.llm))

    async def load(self, checkpoint: Checkpoint) -> None:
        """Have all workers load these weights; call it while vLLM is stopped.

        Raises Internal (WEIGHTS_NOT_LOADED) on failure, and restarts vLLM with the weights in force: the result of a
        partial load is unknown.
        """
        await self._load(self.runtime, checkpoint)

    async def put_in_force(self, version: int, label: str, checkpoint: Checkpoint | None) -> None:
        """Record the weights that vLLM now has; `checkpoint` is None for those that are in no file."""
        if self.features.weight_version:
            await self.ask(lambda llm: llm.update_weight_version(str(version)))
        self.version, self.label = version, label
        self.unsaved = checkpoint is None
        if checkpoint is not None:
            self.checkpoint = checkpoint
        for flight in self.flights:
            if not flight.pinned and not flight.aborted:
                flight.version = version
        self.admission.look()

    async def freeze(self, reason: str) -> None:
        """Stop vLLM between two steps, until `thaw` was called for every reason. If it fails, it continues."""
        is_new = reason not in self._frozen_for
        self._frozen_for.add(reason)
        try:
            await self._settling.run(self._settle(), "vllm-freeze")
        except BaseException:
            if is_new:
                with suppress(PenstockError):  # the caller gets the first error
                    await self.thaw(reason)
            raise

    async def thaw(self, reason: str) -> None:
        """Let vLLM continue, unless another reason keeps it frozen."""
        self._frozen_for.discard(reason)
        if self._runtime is not None and self._runtime.alive:
            await self._settling.run(self._settle(), "vllm-thaw")

    async def idle(self) -> None:
        """Wait until nothing runs, or until a pause has frozen what runs."""
        while self.admission.running and not self.frozen_by_pause:
            await self.admission.idle()

    async def unused(self, adapter: LoadedAdapter) -> None:
        """Wait until no request uses it, or until a pause has frozen what runs."""
        while adapter.users and not self.frozen_by_pause:
            await self.admission.woken()

    @asynccontextmanager
    async def stopped(self, mode: PauseMode) -> AsyncIterator[None]:
        """While the context is open, vLLM is stopped and nothing is admitted. See `PauseMode`."""
        self.admission.hold()
        try:
            if mode is PauseMode.WAIT:
                await self.idle()
            async with self._nothing_handed_over():
                await self.freeze("update")
                try:
                    if mode is PauseMode.ABORT:
                        await self.abort(lambda _: True, waiting=False)
                    yield
                finally:
                    await self.thaw("update")
        finally:
            self.admission.release()

    @asynccontextmanager
    async def handing_over(self) -> AsyncIterator[None]:
        """While the context is open, the weights in force stay: a request's salt is chosen, and vLLM takes the request.

        That may take long: vLLM processes images before its core gets them. Waits for an update that is under way.
        """
        while self._updates:
            await self._turns.wait(self._turns.number)
        self._handing_over += 1
        try:
            yield
        finally:
            self._handing_over -= 1
            self._turns.notify()

    @asynccontextmanager
    async def _nothing_handed_over(self) -> AsyncIterator[None]:
        """While the context is open, no request is on its way into vLLM: those that were have arrived, others wait."""
        self._updates += 1
        try:
            while self._handing_over:
                await self._turns.wait(self._turns.number)
            yield
        finally:
            self._updates -= 1
            self._turns.notify()

    async def abort(self, chosen: Callable[[GenerateRequest], bool], *, waiting: bool = True) -> int:
        """Abort the generations for which `chosen` is true; return their number."""
        count = self.admission.abort(chosen) if waiting else 0
        self.counts.aborted += count
        for flight in [f for f in self.flights if not f.over and not f.aborted and chosen(f.request)]:
            count += 1
            flight.aborted = True
            if flight.handed_over:
                await self.abort_in_vllm(flight)
        return count

    async def abort_in_vllm(self, flight: Flight) -> None:
        """Abort it in vLLM. Harmless if it is over there."""
        await self.ask(lambda llm: llm.abort(flight.request.request_id))

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Have vLLM load it; raises vLLM's errors."""
        await self.ask(lambda llm: llm.add_lora(lora_request(adapter)))

    def came_to_an_end(self, flight: Flight) -> None:
        """Remove a flight that is over or abandoned."""
        self.flights.discard(flight)
        self.counts.add(flight)
        if flight.finish is not None:
            self._restarts = 0

    def drop_if_unused(self, adapter: LoadedAdapter) -> None:
        """Have vLLM unload a replaced version of an adapter, once it is unused, and remove the files kept for it."""
        if adapter.replaced and not adapter.users and self._keep_alive_task is not None:
            self._drops.start(self._drop(adapter), "vllm-drop-adapter")

    async def _drop(self, adapter: LoadedAdapter) -> None:
        try:
            await self.ask(lambda llm: llm.remove_lora(adapter.number))
        except PenstockError:
            pass  # vLLM is gone, and the adapter with it
        except Exception:  # noqa: BLE001 - costs only memory
            _log.exception("an adapter could not be dropped", adapter=adapter.info.name)
        # Not before: vLLM may evict an adapter that still waits for its turn, and then reads its files again.
        await asyncio.to_thread(adapter.remove_files)

    async def _settle(self) -> None:
        async with self._freezing:
            wanted = bool(self._frozen_for)
            if wanted == self._frozen:
                return
            if wanted:
                await self.ask(lambda llm: llm.pause_generation(mode="keep", clear_cache=False))
            else:
                await self.ask(lambda llm: llm.resume_generation())
            self._frozen = wanted

    async def _load(self, runtime: Runtime, checkpoint: Checkpoint) -> None:
        plan = await asyncio.to_thread(checkpoint.plan)
        try:
            await runtime.ask(runtime.llm.collective_rpc("penstock_load", args=(plan,)))
        except PenstockError:
            raise
        except Exception as error:
            _log.exception("the workers could not load the weights")
            runtime.kill()
            raise Internal(
                "the workers could not load the weights; the engine restarts with the old ones",
                reason="WEIGHTS_NOT_LOADED",
            ) from error

    async def _new_life(self) -> Runtime:
        """Start a vLLM with the weights in force, before it is used by anything."""
        if self.unsaved:
            raise FailedPrecondition(
                "the weights in force came by a transfer and are lost with the engine's processes",
                reason="WEIGHTS_LOST",
            )
        runtime = await Runtime.start(self._arguments, self.chosen.transfer_backend)
        try:
            await runtime.ask(runtime.llm.collective_rpc("penstock_follow", args=(os.getpid(),)))
            if self.features.weight_version:
                await runtime.ask(runtime.llm.update_weight_version(str(self.version)))
            if self.checkpoint is not self._original:
                await self._load(runtime, self.checkpoint)
            for adapter in self.adapters:
                await runtime.ask(runtime.llm.add_lora(lora_request(adapter)))
            frozen = bool(self._frozen_for)
            if frozen:
                await runtime.ask(runtime.llm.pause_generation(mode="keep", clear_cache=False))
        except BaseException:
            await runtime.aclose()
            raise
        self._frozen = frozen
        return runtime

    async def _keep_alive(self) -> None:
        while (runtime := self._runtime) is not None:
            await runtime.died()
            self._runtime = None
            self.admission.hold()
            self._gone(engine_died)
            runtime.death_handled.set()
            await runtime.aclose()
            self._restarts += 1
            try:
                if not self.options.waits_for_itself:
                    raise Internal("vLLM died", reason="ENGINE_FAILED")
                if self._restarts > MAX_RESTARTS:
                    raise Internal(f"vLLM died {self._restarts} times without a completion", reason="ENGINE_FAILED")
                self._runtime = await self._new_life()
                await self._settle()  # a resume may have come while it started
            except Exception as error:  # noqa: BLE001 - raised to every caller from now on
                _log.exception("the engine stays dead")
                why = error.message if isinstance(error, PenstockError) else type(error).__name__
                self._gone(partial(_failed, why))
            else:
                _log.info("vLLM runs again", policy_version=self.version)
            self.admission.release()

    def _gone(self, error: Callable[[], PenstockError]) -> None:
        """Fail everything that waits. Each gets its own error instance, because raising one extends its traceback."""
        self._absent = error
        self.admission.fail(error)
        self.admission.wake_idle()
        for flight in self.flights:
            flight.fail(error())


def _failed(why: str) -> Internal:
    return Internal(f"the engine failed: {why}; restart the inference service", reason="ENGINE_FAILED")
