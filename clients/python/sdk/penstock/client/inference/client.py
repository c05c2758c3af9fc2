"""The inference service: tokens in, tokens and logprobs out; weights and their versions."""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from numpy.typing import ArrayLike, NDArray

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client.errors import DataLoss, Internal, InvalidArgument, PenstockError
from penstock.client.inference import engine_info, scores, weights
from penstock.client.inference.engine_info import EngineInfo, EngineStats
from penstock.client.inference.engines import Engine, Engines
from penstock.client.inference.safetensors import TensorFile
from penstock.client.inference.scores import Score, ToScore
from penstock.client.inference.weights import Adapter, PauseMode, WeightTransfer, WeightUpdate
from penstock.client.transport.cluster import Cluster
from penstock.client.transport.rpc import Service
from penstock.client.types import chat
from penstock.client.types.logprob_diff import GapReport
from penstock.client.wire import chat as wire
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock.values import token_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as messages, rendered by the model's own template."""

    messages: Sequence[chat.Message]
    tools: Sequence[chat.Tool] = ()
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """Sampled tokens as a message; `malformed_tool_calls` could not be parsed and stay as text."""

    message: chat.Message
    finish_reason: chat.FinishReason
    malformed_tool_calls: int


class InferenceClient:
    """`ps.inference`.

    Where the gate has a list of engines, what changes an engine (weights, adapters, pauses, sleep, aborts) is done at
    all of them; questions and generations go to the one at the connection's address.
    """

    def __init__(self, service: Service, cluster: Cluster | None = None) -> None:
        self._service = service
        self._stub = pb_grpc.InferenceServiceStub(service.channel)
        self._engines = Engines(service, cluster)

    async def info(self) -> EngineInfo:
        """Returns the model, its capabilities and the weights in force."""
        return engine_info.info_from(await self._service.call(self._stub.GetInfo, pb.GetInfoRequest(), repeatable=True))

    async def tokenizer(self) -> dict[str, bytes]:
        """Returns the tokenizer's files by name (`tokenizer.json`, `chat_template.jinja`, ...).

        Raises:
            DataLoss: `DIGEST_MISMATCH`, a file was damaged on the way.
        """
        files: dict[str, bytearray] = {}
        for part in await self._service.collect(self._stub.GetTokenizer, pb.GetTokenizerRequest(), timeout=60.0):
            content = files.setdefault(part.file_name, bytearray())
            content += part.chunk
            if part.sha256 and sha256(content).digest() != part.sha256:
                raise DataLoss(f"{part.file_name} arrived damaged: its digest differs", reason="DIGEST_MISMATCH")
        return {name: bytes(content) for name, content in files.items()}

    async def generate(
        self,
        prompt: ArrayLike | Prompt,
        sampling: chat.Sampling | None = None,
        *,
        seed: int | None = None,
        session_id: str = "",
        adapter: str = "",
        min_version: int | None = None,
        exact_version: int | None = None,
        tensor_start: int = 0,
        images: Sequence[chat.PromptImage] = (),
        timeout: float | None = None,
    ) -> chat.Completion:
        """Samples one completion. Cancelling it aborts the generation.

        Args:
            prompt: token ids (any array-like), or messages.
            sampling: None = the engine's defaults. With token ids, `thinking` and `thinking_budget_tokens` are left
                out, so that a call's own sampling can be passed on: its prompt says whether to think, and no engine
                has a limit of thoughts.
            seed: replaces `sampling.seed`.
            session_id: requests of one session reuse its cache.
            adapter: a loaded adapter; empty = the base weights.
            min_version: wait until at least these weights are in force.
            exact_version: refuse unless exactly these are.
            tensor_start: the first token of which `sampling.token_tensors` wants a row: after a call of the same
                conversation, the number of tokens of its prompt and completion, less one.
            images: those of a prompt of token ids, with their bytes, in the order of their tokens.
            timeout: seconds; None = none.

        Raises:
            PenstockError: the service's error.
        """
        request = self._request(prompt, sampling, seed, session_id, adapter, min_version, exact_version)
        request.tensor_start = tensor_start
        request.media.extend(map(wire.prompt_image_to, images))
        done: chat.Completion | None = None
        tensors: list[completion_pb2.TokenTensor] = []
        async with aclosing(self._service.stream(self._stub.Generate, request, timeout=timeout)) as events:
            async for event in events:
                tensors += event.delta.tensors
                if event.HasField("done"):
                    done = _whole(event.done.completion, tensors)
        if done is None:
            raise Internal("The generation ended without its result", reason="STREAM_CUT")
        return done

    async def stream(
        self,
        prompt: ArrayLike | Prompt,
        sampling: chat.Sampling | None = None,
        *,
        seed: int | None = None,
        session_id: str = "",
        adapter: str = "",
        min_version: int | None = None,
        exact_version: int | None = None,
        tensor_start: int = 0,
        images: Sequence[chat.PromptImage] = (),
        timeout: float | None = None,
    ) -> AsyncGenerator[chat.Completion, None]:
        """As `generate`, but streamed: yields partial completions as they come, then the whole one, with its tensors,
        as the last.
        """
        request = self._request(prompt, sampling, seed, session_id, adapter, min_version, exact_version)
        request.stream = True
        request.tensor_start = tensor_start
        request.media.extend(map(wire.prompt_image_to, images))
        tensors: list[completion_pb2.TokenTensor] = []
        async with aclosing(self._service.stream(self._stub.Generate, request, timeout=timeout)) as events:
            async for event in events:
                tensors += event.delta.tensors
                if event.delta.HasField("span"):
                    yield wire.completion_from(completion_pb2.Completion(span=event.delta.span))
                elif event.HasField("done"):
                    yield _whole(event.done.completion, tensors)

    async def render(self, prompt: Prompt, *, add_generation_prompt: bool = True) -> chat.TokenIds:
        """Returns the tokens of messages by the model's template: int32, shape (n,), read-only.

        Args:
            prompt: messages and tools.
            add_generation_prompt: whether the tokens end where the model's answer begins.
        """
        request = pb.RenderRequest(prompt=_chat(prompt), add_generation_prompt=add_generation_prompt)
        answer = await self._service.call(self._stub.Render, request, repeatable=True)
        return wire.token_ids(answer.token_ids)

    async def parse(self, token_ids: ArrayLike, tools: Sequence[chat.Tool] = ()) -> ParsedMessage:
        """Returns the message that sampled tokens are, with its reasoning and tool calls.

        Args:
            token_ids: as sampled (any array-like).
            tools: those that were offered.
        """
        request = pb.ParseRequest(token_ids=wire.token_bytes(token_ids), tools=map(wire.tool_to, tools))
        answer = await self._service.call(self._stub.Parse, request, repeatable=True)
        return ParsedMessage(
            wire.message_from(answer.message),
            chat.FinishReason.of(wire.word(chat_pb2.FinishReason, answer.finish_reason, "FINISH_REASON_")),
            answer.malformed_tool_calls,
        )

    async def score(
        self,
        token_ids: ArrayLike,
        start: int,
        *,
        adapter: str = "",
        temperature: float | None = None,
        exact_version: int | None = None,
    ) -> chat.Logprobs:
        """Returns logprobs, float32 of shape (n - start,), of the tokens from `start` (at least 1) on.

        Args:
            token_ids: the whole sequence (any array-like).
            start: the first token that is scored.
            adapter: a loaded adapter; empty = the base weights.
            temperature: of the distribution; None = 1.
            exact_version: refuse unless exactly these weights score; None = those that are in force.

        Raises:
            FailedPrecondition: `POLICY_VERSION_UNAVAILABLE`.
        """
        sequence = ToScore(token_ids, start, 0, adapter, temperature, exact_version)
        return (await self._score(sequence)).logprobs

    async def score_top(
        self,
        token_ids: ArrayLike,
        start: int,
        top_logprobs: int,
        *,
        adapter: str = "",
        temperature: float | None = None,
        exact_version: int | None = None,
    ) -> Score:
        """As `score`, with the likeliest tokens at each position and their logprobs.

        Args:
            token_ids: the whole sequence (any array-like).
            start: the first token that is scored.
            top_logprobs: how many of the likeliest tokens, 0 to 20.
            adapter: a loaded adapter; empty = the base weights.
            temperature: of the distribution; None = 1.
            exact_version: refuse unless exactly these weights score; None = those that are in force.

        Raises:
            FailedPrecondition: `POLICY_VERSION_UNAVAILABLE`.
        """
        return await self._score(ToScore(token_ids, start, top_logprobs, adapter, temperature, exact_version))

    async def score_batch(self, sequences: Sequence[ToScore], *, timeout: float | None = 600.0) -> list[Score]:
        """Scores several sequences in one call; the engine computes them together as far as it can.

        Args:
            sequences: 1 to 1024, at most 64 MiB together.
            timeout: seconds for all of them.

        Raises:
            PenstockError: the first failure of a sequence, or the service's error. The rest is not scored then.
        """
        return await scores.together(self.score_each(sequences, timeout=timeout), len(sequences))

    async def score_each(
        self, sequences: Sequence[ToScore], *, timeout: float | None = 600.0
    ) -> AsyncGenerator[tuple[int, Score | PenstockError], None]:
        """As `score_batch`, but yields each sequence's position with its score, or its failure, as they are ready."""
        async with aclosing(scores.each(self._service, self._stub, sequences, timeout)) as answers:
            async for answer in answers:
                yield answer

    async def _score(self, sequence: ToScore) -> Score:
        return scores.score_from(
            await self._service.call(self._stub.Score, sequence.to_proto(), timeout=300.0, repeatable=True)
        )

    async def update_weights(
        self,
        version: int,
        tensors: Mapping[str, NDArray[Any]],
        *,
        partial: bool = False,
        mode: PauseMode | str = PauseMode.KEEP,
        timeout: float | None = 600.0,
    ) -> WeightUpdate:
        """Replaces the weights by those of `version`, atomically: a push that fails leaves the old ones in force.

        Args:
            version: greater than the one in force.
            tensors: by name, as in the model's safetensors file; numpy arrays of any order.
            partial: only some tensors are given, the others stay.
            mode: aborts, finishes or keeps generations in flight; kept ones go on under the new weights.
            timeout: seconds for the whole push.

        Raises:
            FailedPrecondition: `POLICY_VERSION_NOT_NEWER`, `TENSOR_UNKNOWN`, `TENSOR_MISSING`, `TENSOR_SHAPE`.
            Aborted: `UPDATE_IN_PROGRESS`.
            EnginesFailed: some of several engines failed; of a partial push also with `BASE_VERSION_DIFFERS`, an
                engine that does not have the version for which the push was made.
        """
        begin, file = await weights.tensors_begin(version, tensors, partial=partial, mode=mode)
        return await self._push(begin, file, partial, timeout)

    async def update_weights_from(
        self,
        version: int,
        path: str,
        *,
        partial: bool = False,
        mode: PauseMode | str = PauseMode.KEEP,
        timeout: float | None = 600.0,
    ) -> WeightUpdate:
        """As `update_weights`, from files that the service reads itself.

        Args:
            version: greater than the one in force.
            path: of a safetensors file, or of a directory of them, under the service's `weights_dir`. The files must
                not change while their weights are in force.
            partial: only some tensors are there, the others stay.
            mode: aborts, finishes or keeps generations in flight.
            timeout: seconds.

        Raises:
            FailedPrecondition: `PATHS_OFF`, the service has no `weights_dir`; and the errors of `update_weights`.
            InvalidArgument: `PATH_REFUSED`.
        """
        return await self._push(weights.path_begin(version, path, partial=partial, mode=mode), None, partial, timeout)

    async def _push(
        self,
        begin: pb.UpdateWeightsRequest.UpdateBegin,
        file: TensorFile | None,
        partial: bool,
        timeout: float | None,
    ) -> WeightUpdate:
        async def push(engine: Engine) -> WeightUpdate:
            if not engine.name:
                return await weights.update(engine.service, engine.stub, begin, file, timeout)
            return await weights.after_others(lambda: weights.update(engine.service, engine.stub, begin, file, timeout))

        version = begin.policy_version
        done = await (self._engines.push_partial(version, push) if partial else self._engines.at_all(push))
        self._engines.pushed(version)
        return weights.together(done)

    async def init_transfer(
        self, backend: str, options: Mapping[str, Any] | None = None, *, timeout: float | None = 600.0
    ) -> None:
        """Sets up transfers in which the trainer moves weights itself; once, before the first `start_transfer`.

        Args:
            backend: one of `EngineInfo.transfer_backends`, such as "nccl".
            options: of the backend, such as a rendezvous address.
            timeout: seconds.

        Raises:
            Unsupported: `CAPABILITY_MISSING`.
            InvalidArgument: `TRANSFER_REFUSED`.
            ConfigurationError: `ENGINE_LIST`, the gate has a list of engines: connect to each of them.
        """
        request = pb.InitTransferRequest(backend=backend, options_json=weights.as_json(dict(options or {}), "options"))
        engine = await self._engines.only()
        await engine.service.call(engine.stub.InitTransfer, request, timeout=timeout)

    async def start_transfer(
        self,
        version: int,
        *,
        mode: PauseMode | str = PauseMode.KEEP,
        idle_timeout: float | None = None,
        timeout: float | None = 600.0,
    ) -> WeightTransfer:
        """Pauses the engine for the weights of `version`, which the trainer moves itself.

        Args:
            version: greater than the one in force.
            mode: aborts, finishes or keeps generations in flight.
            idle_timeout: seconds without tensors after which the transfer is abandoned; None = 5 minutes.
            timeout: seconds for the engine to stop.

        Raises:
            Aborted: `UPDATE_IN_PROGRESS`.
            FailedPrecondition: `POLICY_VERSION_NOT_NEWER`.
        """
        request = pb.StartTransferRequest(
            request_id=secrets.token_hex(16),
            policy_version=version,
            mode=weights.pause_mode(mode),
            idle_timeout=wire.duration(idle_timeout),
        )
        engine = await self._engines.only()
        answer = await engine.service.call(engine.stub.StartTransfer, request, timeout=timeout, repeatable=True)
        return WeightTransfer(engine.service, engine.stub, answer.transfer_id)

    async def load_adapter(
        self,
        name: str,
        version: int,
        tensors: Mapping[str, NDArray[Any]],
        config: Mapping[str, Any],
        *,
        mode: PauseMode | str = PauseMode.KEEP,
        timeout: float | None = 600.0,
    ) -> Adapter:
        """Loads a LoRA adapter, or a newer version of one, beside the base weights, atomically.

        Args:
            name: for `generate(adapter=...)`.
            version: of the adapter; greater than the one of this name in force.
            tensors: by name, as PEFT saves them in `adapter_model.safetensors`.
            config: the content of PEFT's `adapter_config.json`: `r`, `lora_alpha`, `target_modules`, ...
            mode: aborts, finishes or keeps completions by the replaced version; kept ones go on by that version.
            timeout: seconds.

        Raises:
            Unsupported: `CAPABILITY_MISSING`, the engine does not support adapters, or they are not enabled.
            FailedPrecondition: `POLICY_VERSION_NOT_NEWER`.
            InvalidArgument: `ADAPTER_INVALID`.
            ResourceExhausted: `ADAPTER_LIMIT`.
        """
        begin = pb.LoadAdapterRequest.AdapterBegin(
            name=name,
            policy_version=version,
            adapter_config_json=weights.as_json(dict(config), "config"),
            mode=weights.pause_mode(mode),
        )
        file = await weights.file_of(tensors)
        return await self._load(begin, file, timeout)

    async def load_adapter_from(
        self,
        name: str,
        version: int,
        path: str,
        *,
        mode: PauseMode | str = PauseMode.KEEP,
        timeout: float | None = 600.0,
    ) -> Adapter:
        """As `load_adapter`, from a directory as PEFT saves it, under the service's `adapters_dir`.

        Raises:
            FailedPrecondition: `PATHS_OFF`, and the errors of `load_adapter`.
            InvalidArgument: `PATH_REFUSED`.
        """
        begin = pb.LoadAdapterRequest.AdapterBegin(
            name=name, policy_version=version, path=path, mode=weights.pause_mode(mode)
        )
        return await self._load(begin, None, timeout)

    async def _load(
        self, begin: pb.LoadAdapterRequest.AdapterBegin, file: TensorFile | None, timeout: float | None
    ) -> Adapter:
        async def load(engine: Engine) -> Adapter:
            return await weights.load_adapter(engine.service, engine.stub, begin, file, timeout)

        adapter: Adapter = next(iter((await self._engines.at_all(load)).answers.values()))
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; its completions in flight go on. Does nothing if it is not loaded."""
        await self._at_all("UnloadAdapter", pb.UnloadAdapterRequest(name=name), timeout=600.0)

    async def adapters(self) -> list[Adapter]:
        """Returns the loaded adapters, sorted by name.

        Raises:
            Unsupported: `CAPABILITY_MISSING`.
        """
        pages = self._service.pages(self._stub.ListAdapters, pb.ListAdaptersRequest())
        return [weights.adapter_from(item) async for page in pages for item in page.adapters]

    async def report_gap(self, report: GapReport) -> None:
        """Reports the gap of each version in a report to the service, for monitoring.

        Versions that are unknown, or that another version scored, are left out.

        Raises:
            InvalidArgument: `POLICY_NOT_CHOSEN`, the report is of several policies, and the service's weights of one.
            FailedPrecondition: `POLICY_VERSION_UNAVAILABLE`, a version that was never in force here.
        """
        if len(report.policies) > 1:
            policies = ", ".join(policy_id or "without a name" for policy_id in report.policies)
            message = f"The report is of several policies ({policies}): report each to the service that has its weights"
            raise InvalidArgument(message, reason="POLICY_NOT_CHOSEN")
        names = [field.name for field in pb.LogprobGap.DESCRIPTOR.fields]
        for gap in report.versions:
            if gap.policy_version is not None and gap.scored_version is None:
                figures = pb.LogprobGap(**{name: getattr(gap, name) for name in names})
                request = pb.ReportGapRequest(gap=figures)
                await self._service.call(self._stub.ReportGap, request, repeatable=True)

    async def abort(self, *, session_id: str = "", everything: bool = False) -> int:
        """Aborts a session's generations, or all; returns how many."""
        if bool(session_id) == everything:
            raise InvalidArgument("Abort either a session or everything", reason="ABORT_TARGET")
        request = pb.AbortRequest(session_id=session_id) if session_id else pb.AbortRequest(all=True)
        return sum(answer.aborted_count for answer in await self._at_all("Abort", request))

    async def pause(self, mode: PauseMode | str = PauseMode.KEEP) -> int:
        """Stops generating until `resume`; new requests wait.

        Args:
            mode: `keep` freezes generations in flight between two tokens, `wait` lets them finish first, `abort` ends
                them with the tokens so far.

        Returns:
            The number of generations in flight or waiting.
        """
        request = pb.PauseRequest(mode=weights.pause_mode(mode))
        return sum(answer.in_flight_count for answer in await self._at_all("Pause", request, timeout=600.0))

    async def resume(self) -> None:
        """Resumes generating."""
        await self._at_all("Resume", pb.ResumeRequest())

    async def sleep(self, level: int = 1) -> None:
        """Frees the accelerator's memory once running requests have finished; new requests wait for `wake`.

        Args:
            level: 1 = the weights are kept in the host's memory, 2 = they are read again at `wake`.

        Raises:
            Unsupported: `CAPABILITY_MISSING`.
        """
        await self._at_all("Sleep", pb.SleepRequest(level=level), timeout=600.0)

    async def wake(self) -> None:
        """Allocates the memory again and resumes."""
        await self._at_all("Wake", pb.WakeRequest(), timeout=600.0)

    async def watch_stats(self, interval: float = 1.0) -> AsyncGenerator[EngineStats, None]:
        """Yields the engine's load, at once and then every `interval` seconds (0.1 to 60), until cancelled."""
        request = pb.WatchStatsRequest(interval=wire.duration(interval))
        async with aclosing(self._service.stream(self._stub.WatchStats, request)) as messages:
            async for message in messages:
                yield engine_info.stats_from(message)

    async def _at_all(self, method: str, request: Any, *, timeout: float = 30.0) -> Sequence[Any]:
        """The answers of all engines to one request."""

        async def ask(engine: Engine) -> Any:
            return await engine.service.call(getattr(engine.stub, method), request, timeout=timeout, repeatable=True)

        return list((await self._engines.at_all(ask)).answers.values())

    def _request(
        self,
        prompt: ArrayLike | Prompt,
        sampling: chat.Sampling | None,
        seed: int | None,
        session_id: str,
        adapter: str,
        min_version: int | None,
        exact_version: int | None,
    ) -> pb.GenerateRequest:
        request = pb.GenerateRequest(
            request_id=secrets.token_hex(16),
            session_id=session_id,
            sampling=wire.sampling_to(sampling),
            adapter=adapter,
        )
        if isinstance(prompt, Prompt):
            request.chat.CopyFrom(_chat(prompt))
        else:
            request.token_ids = wire.token_bytes(prompt)
            for of_the_prompt in ("thinking", "thinking_budget_tokens"):
                request.sampling.ClearField(of_the_prompt)
        if seed is not None:
            request.sampling.seed = seed
        if min_version is not None:
            request.version.min_version = min_version
        if exact_version is not None:
            request.version.exact_version = exact_version
        return request


def _whole(completion: completion_pb2.Completion, tensors: Sequence[completion_pb2.TokenTensor]) -> chat.Completion:
    """A completion with the tensors that came before it, in pieces."""
    joined = token_tensors.merged(map(token_tensors.read, (*tensors, *completion.tensors)))
    completion.ClearField("tensors")
    completion.tensors.extend(token_tensors.write(one, with_data=True) for one in joined)
    return wire.completion_from(completion)


def _chat(prompt: Prompt) -> pb.ChatPrompt:
    return pb.ChatPrompt(
        messages=map(wire.message_to, prompt.messages),
        tools=map(wire.tool_to, prompt.tools),
        thinking=prompt.thinking,
    )
