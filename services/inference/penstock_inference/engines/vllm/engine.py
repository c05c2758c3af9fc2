"""The vLLM engine as the service drives it. See `base.Engine` and `optional` for the contract of each method.

It uses little of vLLM: generate from token ids, abort, pause and resume, load, adapters, sleep. Queueing, waiting for a
version, pausing with WAIT or ABORT and stop texts are implemented here, the same on every version of vLLM.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from penstock.values.token_tensors import ROUTED_EXPERTS
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.disk import on_disk
from penstock_chassis.errors import FailedPrecondition, PenstockError, Violation
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import (
    IMAGE,
    SAMPLING_FIELDS,
    GenerateEvent,
    GenerateRequest,
    LogprobsMode,
    Scores,
    TokenIds,
)
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.adapters import LoadedAdapter, adapter_invalid
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checkpoint import Checkpoint, Spool
from penstock_inference.engines.checks import closed, raise_violations
from penstock_inference.engines.continuation import unbroken
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.engines.stops import load_tokenizer
from penstock_inference.engines.vllm.core import Core
from penstock_inference.engines.vllm.features import Features
from penstock_inference.engines.vllm.generation import Generations
from penstock_inference.engines.vllm.options import VllmOptions, structured_output, takes_images
from penstock_inference.engines.vllm.weight_updates import Updates

_log = structlog.get_logger("penstock.inference")


class VllmEngine:
    """vLLM behind `base.Engine`, with adapters, sleep, weights as files and transfers if enabled."""

    def __init__(self, core: Core, generations: Generations, info: EngineInfo, directory: Any) -> None:
        self._core = core
        self._generations = generations
        self._updates = Updates(core)
        self._info = info
        self._directory = directory
        """Pushed weights, and the adapters' files; removed at the end."""
        self._paused = False
        self._asleep = 0
        """Sleep level; 0 is awake."""
        self._sleep_lock = asyncio.Lock()
        self._sleep_work = TaskOwner()
        """Sleeps and wakes, which must not be cancelled halfway."""
        self._closed = False

    @classmethod
    async def open(cls, options: EngineOptions) -> VllmEngine:
        """Start vLLM on the model directory."""
        features = Features.detect()
        chosen = VllmOptions.parse(options.extra)
        checkpoint = await asyncio.to_thread(Checkpoint.read, options.model_dir)
        tokenizer = await asyncio.to_thread(load_tokenizer, options.model_dir / "tokenizer.json")
        directory = tempfile.TemporaryDirectory(prefix="weights-", dir=options.work_dir)
        core = Core(options, chosen, features, checkpoint, Spool(Path(directory.name)))
        try:
            await core.start()
            config = core.runtime.llm.model_config
            stops = _stop_token_ids(config)
            structured = structured_output(options, chosen, features)
            info = EngineInfo(
                engine="vllm",
                engine_version=features.version,
                model=options.model_name,
                vocab_size=int(config.get_vocab_size()),
                max_context_tokens=int(config.max_model_len),
                max_concurrency=options.max_concurrency,
                stop_token_ids=stops,
                sampling_fields=tuple(name for name in SAMPLING_FIELDS if name != "stop" or tokenizer is not None),
                dtype=str(config.dtype).removeprefix("torch."),
                parameter_count=checkpoint.parameter_count,
                logprobs_mode=LogprobsMode.PROCESSED,
                capabilities=Capabilities(
                    version_spans=features.version_spans,
                    in_flight_update=bool(checkpoint.shapes),
                    weight_update=bool(checkpoint.shapes),
                    score=True,
                    seed=True,
                    adapters=chosen.max_adapters > 0,
                    sleep=chosen.sleep,
                    structured_output=structured,
                    transfer_backends=(chosen.transfer_backend,) if chosen.transfer_backend else (),
                    token_tensors=(ROUTED_EXPERTS,) if chosen.routed_experts else (),
                    modalities=(IMAGE,) if takes_images(options) and config.is_multimodal_model else (),
                ),
                policy_version=0,
                policy_label="",
                paused=False,
            )
            text_end = await _text_end_id(core.runtime.llm) if structured else None
            generations = Generations(core, info.vocab_size, info.max_context_tokens, stops, tokenizer, text_end)
        except BaseException:
            await core.aclose(closed)
            await asyncio.to_thread(directory.cleanup)
            raise
        _log.info("vllm", version=features.version, platform=features.platform, version_spans=features.version_spans)
        return cls(core, generations, info, directory)

    def info(self) -> EngineInfo:
        core = self._core
        return replace(
            self._info,
            policy_version=core.version,
            policy_label=core.label,
            paused=self._paused or self._asleep > 0,
        )

    def stats(self) -> EngineStats:
        core = self._core
        try:
            gauges = core.runtime.gauges
            steps, cache_use, failure = gauges.steps, gauges.cache_use, ""
        except PenstockError as error:
            steps, cache_use, failure = 0, 0.0, error.message
        counts = core.counts
        return EngineStats(
            running=sum(not flight.over and not flight.aborted for flight in core.flights),
            waiting=core.admission.waiting,
            slots=self._info.max_concurrency,
            cache_use=cache_use,
            policy_version=core.version,
            paused=self._paused or self._asleep > 0,
            steps=steps,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            sampled_tokens=counts.sampled_tokens,
            finished=counts.finished,
            aborted=counts.aborted,
            failed=counts.failed,
            tokens_by_version=dict(counts.by_version),
            failure=failure,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Sample a completion; it continues after vLLM died and was restarted."""
        core, attempt = self._core, self._generations.generate
        core.runtime  # noqa: B018 - raises when there is none: a new request does not wait
        if core.options.waits_for_itself:
            journey = unbroken(request, self._info.stop_token_ids, attempt, core.ready_again)
        else:
            journey = attempt(request)
        async with aclosing(journey) as events:
            async for event in events:
                yield event

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        return await self._generations.score(token_ids, temperature, adapter, top_logprobs)

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        ids = frozenset(request_ids)
        return await self._core.abort(
            lambda r: everything or r.request_id in ids or (bool(session_id) and r.session_id == session_id)
        )

    async def pause(self, mode: PauseMode) -> None:
        core = self._core
        was_paused = self._paused
        core.runtime  # noqa: B018 - raises when there is none
        if not was_paused:
            self._paused = True
            core.admission.hold()
        if mode is PauseMode.WAIT:
            # Until it is resumed: then nobody waits for a pause any more.
            while self._paused and core.admission.running and not core.frozen_by_pause:
                await core.admission.idle()
            return
        try:
            await core.freeze("pause")
            core.admission.wake_idle()
            if mode is PauseMode.ABORT:
                await core.abort(lambda _: True)
        except PenstockError:
            # A caller that gets an error will not resume.
            if not was_paused:
                await self.resume()
            raise

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            try:
                await self._core.thaw("pause")
            finally:
                self._core.admission.release()
                self._core.admission.wake_idle()

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        self._check_awake()
        await self._updates.begin(version, label, update_format)

    async def push_tensors(self, tensors: Tensors) -> None:
        await self._updates.push_tensors(tensors)

    async def push_file(self, path: Path) -> None:
        """Add a file, which is moved away."""
        await self._updates.push_file(path)

    async def push_path(self, path: Path) -> None:
        """Add a file, or the files of a directory, which stay in place."""
        await self._updates.push_path(path)

    async def stage_update(self) -> None:
        """Check the complete open update."""
        await self._updates.stage()

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        return await self._updates.commit(mode)

    async def abort_update(self) -> None:
        await self._updates.abort()

    async def init_transfer(self, backend: str, options: Mapping[str, Any]) -> None:
        """Set up how a trainer moves weights itself."""
        await self._updates.init_transfer(backend, options)

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        """Stop sampling for a new version."""
        self._check_awake()
        await self._updates.start_transfer(version, mode)

    async def transfer_tensors(self, descriptor: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Receive some tensors."""
        await self._updates.transfer_tensors(descriptor)

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        """Put the version in force, or roll back."""
        return await self._updates.finish_transfer(commit)

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Put an adapter, or a newer version of one, in force."""
        core = self._core
        adapter = core.adapters.prepare(source)
        if source.temporary:
            try:
                with on_disk("this adapter"):
                    directory = Path(self._directory.name) / f"adapter-{adapter.number}"
                    await asyncio.to_thread(adapter.keep_files, directory)
            except BaseException:
                core.adapters.give_up(adapter)
                raise
        try:
            await self._add(adapter)
            older = core.adapters.in_force(source.name)
            # No other request waits: the adapter is one namespace's, the engine everyone's.
            with core.admission.holding(source.name):
                if mode is PauseMode.ABORT:
                    await core.abort(lambda request: request.adapter == source.name, waiting=False)
                elif mode is PauseMode.WAIT and older is not None:
                    await core.unused(older)
                older = core.adapters.put(adapter)
        except BaseException:
            # vLLM may have it, under a number that no later load has.
            core.adapters.give_up(adapter)
            core.drop_if_unused(adapter)
            raise
        if older is not None:
            core.drop_if_unused(older)
        return adapter.info

    async def unload_adapter(self, name: str) -> None:
        adapter = self._core.adapters.remove(name)
        if adapter is not None:
            self._core.drop_if_unused(adapter)
            self._core.admission.look()

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters in force, by name."""
        return tuple(adapter.info for adapter in self._core.adapters)

    async def sleep(self, level: int) -> None:
        """Finish running generations, then free the memory; new requests wait."""
        raise_violations([Violation("level", "must be 1 or 2")] if level not in (1, 2) else [])
        core = self._core
        async with self._sleep_lock:
            await self._sleep_work.wait()
            if self._asleep:
                return
            if level == 2 and core.unsaved:
                raise FailedPrecondition(
                    "the weights in force came by a transfer, so no file could restore them: sleep at level 1",
                    reason="WEIGHTS_LOST",
                )
            core.admission.hold()
            try:
                await core.idle()
                if core.admission.running:
                    raise FailedPrecondition(
                        "generations are frozen by a pause and would lose their caches; resume, or abort them, first",
                        reason="GENERATIONS_IN_FLIGHT",
                    )
            except BaseException:
                core.admission.release()
                raise
            await self._sleep_work.run(self._fall_asleep(level), "vllm-sleep")

    async def wake(self) -> None:
        """Take the memory again, and reload dropped weights from their files."""
        async with self._sleep_lock:
            await self._sleep_work.wait()
            if self._asleep:
                await self._sleep_work.run(self._wake_up(), "vllm-wake")

    async def _add(self, adapter: LoadedAdapter) -> None:
        try:
            await self._core.add_adapter(adapter)
        except PenstockError:
            raise
        except Exception as error:
            lines = str(error).splitlines()
            raise adapter_invalid(f"cannot be loaded: {lines[-1] if lines else type(error).__name__}") from error

    async def _fall_asleep(self, level: int) -> None:
        try:
            await self._core.ask(lambda llm: llm.sleep(level))
            self._asleep = level
        except BaseException:
            self._core.admission.release()
            raise

    async def _wake_up(self) -> None:
        core = self._core
        await core.ask(lambda llm: llm.wake_up())
        if self._asleep == 2:
            await core.load(core.checkpoint)
        self._asleep = 0
        core.admission.release()

    def _check_awake(self) -> None:
        if self._asleep:
            raise FailedPrecondition(
                "the engine sleeps, without memory for weights: wake it first", reason="ENGINE_ASLEEP"
            )

    async def aclose(self) -> None:
        """End everything in flight and vLLM's processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._updates.aclose()
        await self._core.aclose(closed)
        await self._sleep_work.aclose()
        await asyncio.to_thread(self._directory.cleanup)


async def _text_end_id(llm: Any) -> int | None:
    """The end-of-text id of vLLM's tokenizer, which some versions return without awaiting."""
    found = llm.get_tokenizer()
    tokenizer = await found if inspect.isawaitable(found) else found
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def _stop_token_ids(config: Any) -> tuple[int, ...]:
    """The stop tokens of generation_config.json, or of config.json: never a tokenizer's, which may have others."""
    generation = config.try_get_generation_config() or {}
    found = generation.get("eos_token_id", getattr(config.hf_text_config, "eos_token_id", None))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
