"""The SGLang engine as the service drives it. See `base.Engine` and `optional` for the contract of each method.

Each completion is one request to the server's own `/generate`, by token ids. While the server is unreachable every call
is UNAVAILABLE with the reason, and it is probed again with growing delays; then it gets the weights in force again.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import InvalidArgument, PenstockError, Unavailable, Violation
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import (
    GenerateEvent,
    GenerateRequest,
    LogprobsMode,
    Sampling,
    Scores,
    TokenIds,
)
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.adapters import AdapterTable, LoadedAdapter
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checkpoint import Checkpoint
from penstock_inference.engines.checks import check_prompt, check_sampling, check_score, closed, raise_violations
from penstock_inference.engines.openai.calls import Calls, check_fixed_version
from penstock_inference.engines.openai.model import Model
from penstock_inference.engines.openai.options import check_context
from penstock_inference.engines.openai.upstream_monitor import UpstreamMonitor
from penstock_inference.engines.openai.wire import Endpoint
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource, missing_capability
from penstock_inference.engines.sglang.answers import meta_info, read_scores, read_top_scores
from penstock_inference.engines.sglang.in_flight import SglangFlight
from penstock_inference.engines.sglang.options import SglangOptions
from penstock_inference.engines.sglang.probe import Facts, Wanted, identify, probe
from penstock_inference.engines.sglang.requests import (
    asked_for,
    check_request,
    generate_body,
    sampling_fields,
    score_body,
)
from penstock_inference.engines.sglang.server import Server
from penstock_inference.engines.sglang.weight_updates import Updates

MAX_ADAPTER_RANK = 1 << 16
"""Where the server states none."""
ABORT_S = 5.0
"""Seconds to wait for the end of a generation that was aborted there; then its connection is closed."""


class SglangEngine:
    """An SGLang server behind `base.Engine`; with adapters and weights as files where Penstock controls it."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: EngineOptions,
        chosen: SglangOptions,
        model: Model,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._chosen = chosen
        self._model = model
        self._vocab_size = model.vocab_size or 0
        self._stops = frozenset(model.stop_token_ids)
        self._lookout = UpstreamMonitor(endpoint, self._probe)
        self._calls = Calls(self._lookout.failed)
        self._adapters = AdapterTable(
            chosen.max_adapters, 0, "--max-lora-rank of the server", chosen.max_adapters_per_namespace
        )
        limits = (options.max_concurrency, options.max_waiting)
        self._server = Server(
            endpoint, chosen.policy_version, chosen.policy_label, self._adapters, limits, self._lookout.lose
        )
        self._admission = self._server.admission
        self._directory = tempfile.TemporaryDirectory(prefix="weights-", dir=options.work_dir)
        self._updates = None
        if chosen.control and checkpoint is not None and checkpoint.shapes:
            directory = Path(self._directory.name).resolve()
            self._updates = Updates(self._server, checkpoint, directory, self._has_spans, self._abort_running)
        self._parameter_count = 0 if checkpoint is None else checkpoint.parameter_count
        self._work = TaskOwner()
        """Aborts under way."""
        self._paused = False
        self._closed = False

    @classmethod
    async def open(cls, options: EngineOptions) -> SglangEngine:
        """Probe the server; if it is unreachable, open anyway and keep probing.

        Raises errors that only a person can fix: InvalidArgument (ENGINE_OPTIONS_INVALID), FailedPrecondition
        (UPSTREAM_KEY_REFUSED, UPSTREAM_ANSWER_INVALID, UPSTREAM_TOKENIZER_DIFFERS, MODEL_UNREADABLE).
        """
        chosen = SglangOptions.parse(options)
        key = await asyncio.to_thread(chosen.api_key, options)
        model = await asyncio.to_thread(Model.read, options.model_dir)
        if model.vocab_size is None:
            raise InvalidArgument(
                "model_dir has no tokenizer.json and no config.json, which token ids need",
                reason="ENGINE_OPTIONS_INVALID",
                violations=[Violation("model_dir", "must have tokenizer.json or config.json")],
            )
        has_config = (options.model_dir / "config.json").is_file()
        checkpoint = await asyncio.to_thread(Checkpoint.read, options.model_dir) if has_config else None
        endpoint = chosen.endpoint(key, options.max_concurrency + 4)
        engine = cls(endpoint, options, chosen, model, checkpoint)
        try:
            await engine._lookout.open()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    def info(self) -> EngineInfo:
        """The engine's properties and current state. Raises Unavailable until the server was reached."""
        facts = self._found()
        logprobs = facts.logprobs_mode is not LogprobsMode.NONE
        return EngineInfo(
            engine="sglang",
            engine_version=facts.server,
            model=self._options.model_name,
            vocab_size=self._vocab_size,
            max_context_tokens=self._context(facts),
            max_concurrency=self._options.max_concurrency,
            stop_token_ids=self._model.stop_token_ids,
            sampling_fields=sampling_fields(facts),
            dtype="unknown",
            parameter_count=self._parameter_count,
            logprobs_mode=facts.logprobs_mode,
            capabilities=Capabilities(
                logprobs=logprobs,
                version_spans=self._chosen.control and facts.version_spans,
                in_flight_update=self._updates is not None and facts.version_spans,
                weight_update=self._updates is not None,
                # A score must name its version, and its logprobs are those of temperature 1.
                score=logprobs and self._version is not None,
                seed=facts.seed,
                adapters=self._has_adapters(facts),
                structured_output=facts.grammar,
            ),
            policy_version=self._version or 0,
            policy_label=self._server.label,
            paused=self._paused,
        )

    def stats(self) -> EngineStats:
        return self._calls.stats(
            waiting=self._admission.waiting,
            slots=self._options.max_concurrency,
            policy_version=self._version or 0,
            paused=self._paused,
        )

    # Generating ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Request a completion of token ids."""
        facts = self._found()
        self._check(request, facts)
        queued_at = time.monotonic()
        with self._calls.named(request.request_id):
            let_in = await self._admission.enter(request)
            adapter = None
            try:
                if let_in:
                    self._admission.check_version(request)
                adapter = self._borrow(request.adapter)
                flight = self._flight(request, facts, adapter, queued_at)
                if not let_in:
                    flight.abort()
                    self._calls.counts["aborted"] += 1
                    yield flight.done()
                    return
                rid = uuid.uuid4().hex

                def end(follower: asyncio.Task[None]) -> bool:
                    if flight.ended.is_set() or flight.aborting:
                        return False
                    flight.aborting = True
                    self._work.start(self._abort_there(flight, rid, follower), "sglang-abort")
                    return True

                self._server.flights.add(flight)
                try:
                    follow = self._follow(flight, facts, rid, adapter)
                    async with aclosing(self._calls.fly(flight, follow, end)) as events:
                        async for event in events:
                            yield event
                finally:
                    self._server.flights.discard(flight)
            finally:
                self._give_back(adapter)
                if let_in:
                    self._admission.leave()

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Logprobs of `token_ids[1:]`; only at temperature 1, the only one at which the server scores a prompt."""
        facts = self._found()
        if facts.logprobs_mode is LogprobsMode.NONE or self._version is None:
            raise missing_capability("score")
        vocab = self._vocab_size
        violations = check_score(token_ids, top_logprobs, vocab, self._context(facts), sampled=1)
        if temperature != 1.0:
            violations.append(Violation("temperature", "must be 1, or unset, on the sglang engine"))
        raise_violations(violations)
        self._check_adapter(adapter, facts)
        count = min(top_logprobs, vocab)
        while True:
            request = GenerateRequest(f"score-{uuid.uuid4()}", token_ids, Sampling(max_tokens=1), adapter=adapter)
            if not await self._admission.enter(request):
                raise Unavailable("scoring was aborted", reason="ENGINE_ABORTED", retry_after_s=1.0)
            used = None
            try:
                used = self._borrow(adapter)
                base = self._version
                body = score_body(
                    token_ids.tolist(),
                    rid=uuid.uuid4().hex,
                    top_logprobs=count,
                    cache_salt=self._salt(),
                    adapter="" if used is None else used.versioned_name,
                )
                answer = await self._endpoint.post("/generate", body)
                if self._chosen.control:
                    await self._server.check_name(meta_info(answer).get("weight_version"), base)
            except PenstockError as error:
                self._calls.failure(error)
                raise
            finally:
                self._give_back(used)
                self._admission.leave()
            if base == self._version:
                return Scores(
                    read_scores(answer, token_ids),
                    (base or 0) if used is None else used.info.policy_version,
                    read_top_scores(answer, count, token_ids.size, vocab) if count else None,
                )
            # The weights changed meanwhile: some logprobs may be of the old ones.

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """Abort the named generations there, and read their ends."""
        ids = frozenset(request_ids)

        def chosen(request: GenerateRequest) -> bool:
            return everything or request.request_id in ids or (bool(session_id) and request.session_id == session_id)

        return self._admission.abort(chosen) + self._calls.abort(chosen)

    def _follow(self, flight: SglangFlight, facts: Facts, rid: str, adapter: LoadedAdapter | None) -> Any:
        request = flight.request
        body = generate_body(
            request,
            facts,
            rid=rid,
            stop_token_ids=flight.stop_token_ids,
            vocab_size=self._vocab_size,
            cache_salt=self._salt(),
            adapter="" if adapter is None else adapter.versioned_name,
        )

        async def follow() -> None:
            async with aclosing(self._endpoint.events("/generate", body, request.session_id)) as events:
                async for event in events:
                    flight.take(event)

        return follow

    def _flight(
        self, request: GenerateRequest, facts: Facts, adapter: LoadedAdapter | None, queued_at: float
    ) -> SglangFlight:
        sampling = request.sampling
        return SglangFlight(
            request,
            self._vocab_size,
            facts.logprobs_mode is not LogprobsMode.NONE,
            self._version if adapter is None else adapter.info.policy_version,
            frozenset() if sampling.ignore_eos else self._stops | set(sampling.stop_token_ids),
            queued_at,
            asked=asked_for(request, facts),
            pinned=adapter is not None or not self._chosen.control or not facts.version_spans,
        )

    async def _abort_there(self, flight: SglangFlight, rid: str, follower: asyncio.Task[None]) -> None:
        """Abort it, and wait for its end, which has the last tokens and their versions."""
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._endpoint.command("/abort_request", {"rid": rid})
                await flight.ended.wait()
        follower.cancel()
        flight.cut()
        flight.abort()

    def _check(self, request: GenerateRequest, facts: Facts) -> None:
        s, vocab = request.sampling, self._vocab_size
        violations = check_sampling(s, vocab)
        violations += check_prompt(request.prompt_token_ids, s.max_tokens, vocab, self._context(facts))
        violations += check_request(s, facts, vocab)
        raise_violations(violations)
        if s.response_format is not None and not facts.grammar:
            raise missing_capability("structured_output")
        self._check_adapter(request.adapter, facts)
        if not self._chosen.control:
            check_fixed_version(request, self._version)

    def _abort_running(self) -> int:
        return self._calls.abort(lambda _: True)

    # Pausing and weights ---------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. KEEP needs control of the server."""
        if mode is PauseMode.KEEP and not self._chosen.control:
            raise missing_capability("pause with PAUSE_MODE_KEEP, but with WAIT and ABORT")
        was_paused = self._paused
        if not was_paused:
            self._paused = True
            self._admission.hold()
        if mode is not PauseMode.KEEP:
            if mode is PauseMode.ABORT:
                await self.abort(everything=True)
                await self._server.idle()
                return
            # Until it is resumed: then nobody waits for a pause any more.
            while self._paused and self._admission.running and not self._server.frozen_by_pause:
                await self._admission.idle()
            return
        try:
            await self._server.freeze("pause")
        except PenstockError:
            # A caller that gets an error will not resume.
            if not was_paused:
                await self.resume()
            raise
        self._admission.wake_idle()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            try:
                if self._chosen.control:
                    await self._server.thaw("pause")
            finally:
                self._admission.release()
                self._admission.wake_idle()

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """See `Engine`. Raises Unsupported without control of the server, or without weights in model_dir."""
        self._found()
        await self._pushes().begin(version, label, update_format)

    async def push_tensors(self, tensors: Tensors) -> None:
        await self._pushes().push_tensors(tensors)

    async def push_file(self, path: Path) -> None:
        """Add a file, which is moved away."""
        await self._pushes().push_file(path)

    async def push_path(self, path: Path) -> None:
        """Add a file, or the files of a directory, which stay in place."""
        await self._pushes().push_path(path)

    async def stage_update(self) -> None:
        """Check the complete open update."""
        await self._pushes().stage()

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """See `Engine`. KEEP is refused where the server does not report which weights sampled which tokens."""
        return await self._pushes().commit(mode)

    async def abort_update(self) -> None:
        if self._updates is not None:
            await self._updates.abort()

    def _pushes(self) -> Updates:
        if self._updates is None:
            raise missing_capability("weight_update")
        return self._updates

    # Adapters --------------------------------------------------------------------------------------------------------

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Put an adapter, or a newer version of one, in force."""
        if not self._has_adapters(self._found()):
            raise missing_capability("adapters")
        adapter = self._adapters.prepare(source)
        try:
            await self._server.add_adapter(adapter)
            older = self._adapters.in_force(source.name)
            # No other request waits: the adapter is one namespace's, the engine everyone's.
            with self._admission.holding(source.name):
                if mode is PauseMode.ABORT:
                    self._calls.abort(lambda request: request.adapter == source.name)
                if mode is not PauseMode.KEEP and older is not None:
                    await self._server.unused(older)
                older = self._adapters.put(adapter)
        except BaseException:
            # The server may have it, under a name that no later load has.
            self._adapters.give_up(adapter)
            self._server.drop_if_unused(adapter)
            raise
        if older is not None:
            self._server.drop_if_unused(older)
        return adapter.info

    async def unload_adapter(self, name: str) -> None:
        if (adapter := self._adapters.remove(name)) is not None:
            self._server.drop_if_unused(adapter)
            self._admission.look()

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters in force, by name."""
        return tuple(adapter.info for adapter in self._adapters)

    def _check_adapter(self, name: str, facts: Facts) -> None:
        if name and not self._has_adapters(facts):
            raise missing_capability("adapters")
        if name:
            self._adapters.get(name)

    def _has_adapters(self, facts: Facts) -> bool:
        return self._chosen.control and facts.adapters

    def _borrow(self, name: str) -> LoadedAdapter | None:
        if not name:
            return None
        adapter = self._adapters.get(name)
        adapter.users += 1
        return adapter

    def _give_back(self, adapter: LoadedAdapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1
            if not adapter.users:
                self._admission.wake_idle()
            self._server.drop_if_unused(adapter)

    # The server ------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End everything in flight and all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._lookout.aclose()
        self._admission.fail(closed)
        if self._updates is not None:
            await self._updates.aclose()
        await self.abort(everything=True)
        await self._work.wait()
        await self._server.aclose()
        await self._endpoint.aclose()
        await asyncio.to_thread(self._directory.cleanup)

    async def _probe(self) -> Facts:
        """Probe the server, and give it what is in force here."""
        wanted = Wanted(self._vocab_size, self._model.tokenizer, self._chosen.stated_mode)
        if self._chosen.control:
            await self._server.take_over(lambda: identify(self._endpoint))
        facts = await probe(self._endpoint, wanted)
        check_context(self._context(facts))
        if self._chosen.control:
            self._adapters.max_rank = facts.max_adapter_rank or MAX_ADAPTER_RANK
            await self._server.settle()
        return facts

    def _found(self) -> Facts:
        """The facts about the server. If there are none, raises the reason."""
        if self._closed:
            raise closed()
        return self._lookout.facts()

    def _has_spans(self) -> bool:
        return self._found().version_spans

    def _context(self, facts: Facts) -> int:
        """The smallest limit of the server, the operator and the model's configuration; 0 if there is none."""
        limits = (facts.max_context_tokens or self._model.max_context, self._options.max_context_tokens)
        return min((value for value in limits if value), default=0)

    @property
    def _version(self) -> int | None:
        return self._server.version

    def _salt(self) -> str:
        """Separates the cached prefixes of different weights."""
        return f"v{self._version}" if self._chosen.control else ""
