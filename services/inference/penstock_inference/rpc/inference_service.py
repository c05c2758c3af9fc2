"""`penstock.inference.v1.InferenceService`: translates protos to calls of the engine and back, nothing else."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, Final

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_chassis.auth import DEFAULT_NAMESPACE, caller
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Violation
from penstock_chassis.telemetry.gen_ai import note_generation_here
from penstock_chassis.telemetry.tracing import note_here
from penstock_chassis.validation import check_request_id, invalid_field
from penstock_codec.codec import Codec, Prompt
from penstock_codec.errors import CodecError
from penstock_inference.domain.engine_info import EngineInfo
from penstock_inference.domain.generation import Done
from penstock_inference.domain.logprob_diff import GapReports
from penstock_inference.domain.namespaces import Served, scoped
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.base import Engine
from penstock_inference.engines.optional_features import Chats, Sleeper, missing_capability
from penstock_inference.rpc import convert, messages, weight_updates
from penstock_inference.rpc.media import media_from, media_of
from penstock_inference.rpc.messages import template_options
from penstock_inference.rpc.score_batches import scored
from penstock_inference.status import Health
from penstock_inference.weights.adapters import AdapterUploads
from penstock_inference.weights.manager import WeightUpdates
from penstock_inference.weights.model_files import TokenizerDirectory
from penstock_inference.weights.transfers import Transfers

SERVICE = "penstock.inference.v1.InferenceService"

FEATURES: Final = ("media", "score.batch", "score.top_logprobs", "token_tensors")
REGISTER = rpc.add_InferenceServiceServicer_to_server

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0
Context = Any


class InferenceServicer(rpc.InferenceServiceServicer):
    def __init__(
        self,
        engine: Engine,
        files: TokenizerDirectory,
        codec: Codec | None,
        updates: WeightUpdates,
        adapters: AdapterUploads,
        transfers: Transfers,
        weights_namespace: str = DEFAULT_NAMESPACE,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """`weights_namespace`: whose callers may change the engine for all. `quotas`: most requests by namespace."""
        self._engine = engine
        self._codec = codec
        self._files = files
        self._updates = updates
        self._adapters = adapters
        self._transfers = transfers
        self._weights_namespace = weights_namespace
        self.served = Served(quotas or {})
        self._gaps: defaultdict[str, GapReports] = defaultdict(GapReports)
        self.health = Health(engine, self._gaps[weights_namespace])

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:  # noqa: N802
        parser = "" if self._codec is None else self._codec.parser
        return convert.info_response(self._engine.info(), self._files, parser)

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        for chunk in self._files.chunks():
            yield pb.GetTokenizerResponse(file_name=chunk.file_name, chunk=chunk.data, sha256=chunk.sha256)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        check_request_id(request.request_id)
        info, namespace = self._engine.info(), caller().home
        rendered = request.WhichOneof("prompt") == "chat"
        if not info.capabilities.token_ids:
            with self.served.serving(namespace, scoped(namespace, request.request_id)):
                answer = await self._chat(request, info, namespace)
            yield answer
            return
        if rendered:
            if request.media:
                raise invalid_field("media", "is for token_ids; a conversation has its images in its messages")
            made = await self._render(request.chat)
            prompt, media = made.ids, media_of(made.images, self._codec, info)
        else:
            prompt = convert.token_ids(request.token_ids, "token_ids")
            media = await asyncio.to_thread(media_from, request.media, prompt, info) if request.media else ()
        wanted = convert.generate_request(request, prompt, info, namespace, media)
        with self.served.serving(namespace, wanted.request_id), self.health.generating(wanted):
            async with aclosing(self._engine.generate(wanted)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        note_here(sampled_tokens=event.token_ids.size, prompt_tokens=event.prompt_tokens)
                        note_generation_here(
                            provider=info.engine,
                            model=info.model,
                            finish_reason=event.finish_reason.value,
                            input_tokens=event.prompt_tokens,
                            output_tokens=event.token_ids.size,
                            cached_tokens=event.cached_tokens,
                        )
                        for piece in convert.tensors_apart(event):
                            yield piece
                    yield convert.generate_event(event, wanted, info, show_prompt=rendered)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:  # noqa: N802
        namespace = caller().home
        with self.served.serving(namespace):
            return await self._score(request, namespace)

    async def ScoreBatch(  # noqa: N802
        self, request: pb.ScoreBatchRequest, context: Context
    ) -> AsyncIterator[pb.ScoreBatchResponse]:
        self._check_scores()
        namespace = caller().home

        def score(one: pb.ScoreRequest) -> Awaitable[pb.ScoreResponse]:
            return self._score(one, namespace)

        async with aclosing(scored(request, score, lambda: self.served.serving(namespace))) as answers:
            async for answer in answers:
                yield answer

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        target, namespace = request.WhichOneof("target"), caller().home
        scope = caller().scope(request.all_namespaces)
        if (
            target is None
            or (target == "all" and not request.all)
            or (target == "session_id" and not request.session_id)
        ):
            raise invalid_field("target", "must name requests, a session, or all = true")
        for index, request_id in enumerate(request.requests.request_ids):
            if not request_id:
                raise invalid_field(f"requests.request_ids[{index}]", "must not be empty: no request has that id")
        ids = [scoped(namespace, request_id) for request_id in request.requests.request_ids]
        count = await self._engine.abort(
            request_ids=self.served.ids(scope) if target == "all" and scope is not None else ids,
            session_id=scoped(namespace, request.session_id) if target == "session_id" else None,
            everything=target == "all" and scope is None,
        )
        return pb.AbortResponse(aborted_count=count)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:  # noqa: N802
        self._check_weights()
        await self._engine.pause(convert.pause_mode(request.mode))
        self.health.look()
        stats = self._engine.stats()
        return pb.PauseResponse(in_flight_count=stats.running + stats.waiting)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        self._check_weights()
        await self._engine.resume()
        self.health.look()
        return pb.ResumeResponse()

    async def UpdateWeights(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], context: Context
    ) -> pb.UpdateWeightsResponse:
        self._check_weights()
        try:
            return weight_updates.update_response(
                await self._updates.receive(weight_updates.update_frames(request_iterator))
            )
        finally:
            self.health.look()

    async def ReportGap(self, request: pb.ReportGapRequest, context: Context) -> pb.ReportGapResponse:  # noqa: N802
        self._gaps[caller().namespace or self._weights_namespace].take(
            convert.gap(request.gap), self._engine.info().policy_version
        )
        return pb.ReportGapResponse()

    async def WatchStats(  # noqa: N802
        self, request: pb.WatchStatsRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatsResponse]:
        interval = request.interval.ToTimedelta().total_seconds() if request.HasField("interval") else 1.0
        if not _MIN_INTERVAL_S <= interval <= _MAX_INTERVAL_S:
            raise invalid_field("interval", f"must be in [{_MIN_INTERVAL_S:g} s, {_MAX_INTERVAL_S:g} s]")
        namespace = caller().namespace or self._weights_namespace
        while True:
            reports = self._gaps.get(namespace)
            yield convert.stats_response(self._engine.stats(), reports.all() if reports else ())
            await asyncio.sleep(interval)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:  # noqa: N802
        self._check_weights()
        await self._sleeper().sleep(request.level)
        self.health.look()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:  # noqa: N802
        self._check_weights()
        await self._sleeper().wake()
        self.health.look()
        return pb.WakeResponse()

    async def InitTransfer(  # noqa: N802
        self, request: pb.InitTransferRequest, context: Context
    ) -> pb.InitTransferResponse:
        self._check_weights()
        await self._transfers.init(request.backend, request.options_json)
        return pb.InitTransferResponse()

    async def StartTransfer(  # noqa: N802
        self, request: pb.StartTransferRequest, context: Context
    ) -> pb.StartTransferResponse:
        self._check_weights()
        idle = request.idle_timeout.ToTimedelta().total_seconds() if request.HasField("idle_timeout") else None
        mode = convert.pause_mode(request.mode, PauseMode.KEEP)
        transfer = await self._transfers.start(request.request_id, request.policy_version, mode, idle)
        return pb.StartTransferResponse(transfer_id=transfer)

    async def TransferTensors(  # noqa: N802
        self, request: pb.TransferTensorsRequest, context: Context
    ) -> pb.TransferTensorsResponse:
        self._check_weights()
        await self._transfers.transfer(request.transfer_id, request.descriptor_json)
        return pb.TransferTensorsResponse()

    async def FinishTransfer(  # noqa: N802
        self, request: pb.FinishTransferRequest, context: Context
    ) -> pb.FinishTransferResponse:
        self._check_weights()
        try:
            return weight_updates.transfer_response(await self._transfers.finish(request.transfer_id, request.commit))
        finally:
            self.health.look()

    async def LoadAdapter(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.LoadAdapterRequest], context: Context
    ) -> pb.LoadAdapterResponse:
        try:
            loaded = await self._adapters.load(
                weight_updates.adapter_frames(request_iterator), caller().home, paths=self._may_change_weights()
            )
        finally:
            self.health.look()
        return pb.LoadAdapterResponse(adapter=weight_updates.adapter(loaded))

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        await self._adapters.unload(request.name, caller().home)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        found, scope = self._adapters.in_force(), caller().scope(request.all_namespaces)
        unloaded = self._adapters.unloaded()
        return weight_updates.adapters_page(found, unloaded, scope, request.page_size, request.page_token)

    async def Render(self, request: pb.RenderRequest, context: Context) -> pb.RenderResponse:  # noqa: N802
        add = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        return pb.RenderResponse(token_ids=(await self._render(request.prompt, add)).ids.astype("<i4").tobytes())

    async def Parse(self, request: pb.ParseRequest, context: Context) -> pb.ParseResponse:  # noqa: N802
        if self._codec is None:
            raise missing_capability("parse")
        token_ids, tools = convert.token_ids(request.token_ids, "token_ids"), messages.tools_from(request.tools)
        parsed = await asyncio.to_thread(self._codec.parse, token_ids, tools=tools)
        return pb.ParseResponse(
            message=messages.assistant_message(parsed.message),
            finish_reason=messages.finish_reason(parsed.finish_reason),
            malformed_tool_calls=len(parsed.malformed),
        )

    async def _chat(self, request: pb.GenerateRequest, info: EngineInfo, namespace: str) -> pb.GenerateResponse:
        """Sends a conversation to an engine that knows no token ids."""
        if request.WhichOneof("prompt") != "chat" or not isinstance(self._engine, Chats):
            raise missing_capability("token_ids")
        chat = request.chat
        options = template_options(chat.thinking if chat.HasField("thinking") else None, chat.template_options_json)
        asked = convert.chat_request(request, info, options, namespace)
        answer = await self._engine.chat(asked)
        note_generation_here(
            provider=info.engine,
            model=info.model,
            finish_reason=answer.finish_reason.value,
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
        )
        return convert.chat_done(answer, info)

    def _check_scores(self) -> None:
        if not self._engine.info().capabilities.score:
            raise missing_capability("score")

    async def _score(self, request: pb.ScoreRequest, namespace: str) -> pb.ScoreResponse:
        if request.adapter:
            self._adapters.engine()
        self._check_scores()
        ids = convert.token_ids(request.token_ids, "token_ids")
        if not 1 <= request.start < max(ids.size, 2):
            raise invalid_field("start", f"must be in [1, {ids.size}): the first token has no logprob")
        temperature = request.temperature if request.HasField("temperature") else 1.0
        adapter = scoped(namespace, request.adapter)
        scores = await self._engine.score(ids, temperature, adapter, request.top_logprobs)
        if request.HasField("exact_version") and scores.policy_version != request.exact_version:
            raise FailedPrecondition(
                f"policy version {scores.policy_version} is in force, not {request.exact_version}",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(scores.policy_version)},
            )
        return convert.score_response(scores, request.start)

    def _may_change_weights(self) -> bool:
        return caller().may_reach(self._weights_namespace)

    def _check_weights(self) -> None:
        """Raises PermissionDenied (NAMESPACE_NOT_ALLOWED) for a caller who may not change the engine for all."""
        if not self._may_change_weights():
            raise PermissionDenied(
                "This would change the engine for every namespace. It is for operators and for callers of one "
                "namespace, which the operator set as weights_namespace.",
                reason="NAMESPACE_NOT_ALLOWED",
            )

    def _sleeper(self) -> Sleeper:
        if not self._engine.info().capabilities.sleep or not isinstance(self._engine, Sleeper):
            raise missing_capability("sleep")
        return self._engine

    async def _render(self, prompt: pb.ChatPrompt, add_generation_prompt: bool = True) -> Prompt:
        if self._codec is None:
            raise missing_capability("render")
        options = template_options(
            prompt.thinking if prompt.HasField("thinking") else None, prompt.template_options_json
        )
        try:
            return await asyncio.to_thread(
                self._codec.prompt,
                messages.messages_from(prompt.messages),
                messages.tools_from(prompt.tools),
                add_generation_prompt=add_generation_prompt,
                template_kwargs=options,
            )
        except CodecError as error:
            raise InvalidArgument(
                str(error), reason=error.reason, violations=[Violation("chat", str(error))]
            ) from error
