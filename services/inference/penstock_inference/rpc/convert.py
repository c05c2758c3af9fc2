"""Converts between protos and the domain's plain data. No decisions: the engine checks ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.values import numbers, reader, to_proto, token_tensors, writer
from penstock_chassis import times
from penstock_chassis.errors import FailedPrecondition, Violation
from penstock_chassis.validation import invalid, invalid_field
from penstock_inference.domain.engine_info import EngineInfo, EngineStats, ReplicaStats
from penstock_inference.domain.generation import (
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Logprobs,
    LogprobsMode,
    Media,
    Sampling,
    Scores,
    Started,
    TokenIds,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.domain.logprob_diff import Gap
from penstock_inference.domain.namespaces import scoped
from penstock_inference.domain.response_format import ResponseFormat
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.optional_features import ChatAnswer, ChatRequest, missing_capability
from penstock_inference.rpc import messages
from penstock_inference.weights.model_files import TokenizerDirectory

_LOGPROBS_MODES = numbers(LogprobsMode, completion_pb2.LogprobsMode, unspecified=LogprobsMode.NONE)
_FINISH_REASONS = numbers(FinishReason, chat_pb2.FinishReason)
_PAUSE_MODES: dict[int, PauseMode] = {number: mode for mode, number in numbers(PauseMode, pb.PauseMode).items()}
# Fields with the same name in chat.v1.Sampling, each a single number.
_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_logprobs",
)
_PROTO_ONLY = ("thinking", "thinking_budget_tokens")
_FORMAT: Final = "response_format_json"


def token_ids(data: bytes, field: str) -> TokenIds:
    """Little-endian int32."""
    if len(data) % 4:
        raise invalid_field(field, f"has {len(data)} bytes, not a multiple of 4: token ids are little-endian int32")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def generate_request(
    message: pb.GenerateRequest,
    prompt: TokenIds,
    info: EngineInfo,
    namespace: str,
    media: tuple[Media, ...] = (),
) -> GenerateRequest:
    """A generation of a caller in a namespace.

    Raises InvalidArgument or Unsupported for errors that the message alone shows.
    """
    if message.adapter and not info.capabilities.adapters:
        raise missing_capability("adapters")
    if message.tensor_start > prompt.size:
        raise invalid_field("tensor_start", f"must be in [0, {prompt.size}], the length of the prompt")
    version = message.version
    return GenerateRequest(
        request_id=scoped(namespace, message.request_id),
        prompt_token_ids=prompt,
        sampling=sampling(message.sampling, info, prompt.size),
        session_id=scoped(namespace, message.session_id),
        stream=message.stream,
        min_policy_version=version.min_version if version.HasField("min_version") else None,
        exact_policy_version=version.exact_version if version.HasField("exact_version") else None,
        adapter=scoped(namespace, message.adapter),
        tensor_start=message.tensor_start,
        media=media,
    )


def sampling(message: chat_pb2.Sampling, info: EngineInfo, prompt_tokens: int) -> Sampling:
    """Sampling with the engine's defaults filled in: no limit but the context, temperature 1, no filters.

    Raises InvalidArgument naming every option that is set and that the engine does not honour (R63), Unsupported for a
    response format if the engine has no structured output.
    """
    if message.HasField(_FORMAT) and not info.capabilities.structured_output:
        raise missing_capability("structured_output")
    violations = [
        Violation(f"sampling.{name}", f"is not supported by the {info.engine} engine; leave it unset")
        for name in (*_NUMBERS, *_PROTO_ONLY)
        if message.HasField(name) and name not in info.sampling_fields  # type: ignore[arg-type]
    ]
    if message.stop_token_ids and "stop_token_ids" not in info.sampling_fields:
        violations.append(
            Violation("sampling.stop_token_ids", f"is not supported by the {info.engine} engine; use stop")
        )
    if message.stop and "stop" not in info.sampling_fields:
        violations.append(
            Violation("sampling.stop", f"is not supported by the {info.engine} engine; use stop_token_ids")
        )
    violations += [
        Violation(
            "sampling.token_tensors",
            f"{name!r} is not supported by the {info.engine} engine with this model",
        )
        for name in message.token_tensors
        if name not in info.capabilities.token_tensors
    ]
    if message.HasField("n") and message.n != 1:
        violations.append(Violation("sampling.n", "must be 1: one request is one completion"))
    if message.HasField("top_k") and message.top_k < 1:
        violations.append(Violation("sampling.top_k", "must be at least 1; leave it unset for off"))
    if violations:
        raise invalid(violations)
    # A prompt that fills the context leaves no token; the engine reports that error.
    given: dict[str, Any] = {"max_tokens": max(1, info.max_context_tokens - prompt_tokens)}
    given |= {name: getattr(message, name) for name in _NUMBERS if message.HasField(name)}  # type: ignore[arg-type]
    if message.HasField(_FORMAT):
        given["response_format"] = ResponseFormat.parse(message.response_format_json)
    return Sampling(
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        token_tensors=tuple(dict.fromkeys(message.token_tensors)),
        **given,
    )


def chat_request(message: pb.GenerateRequest, info: EngineInfo, options: dict[str, Any], namespace: str) -> ChatRequest:
    """A conversation for an engine without token ids; raises the errors of `generate_request`."""
    if message.adapter:
        raise missing_capability("adapters")
    if message.version.HasField("min_version") or message.version.HasField("exact_version"):
        raise FailedPrecondition("policy versions are unknown without token ids", reason="POLICY_VERSION_UNAVAILABLE")
    return ChatRequest(
        request_id=scoped(namespace, message.request_id),
        messages=tuple(messages.messages_from(message.chat.messages)),
        tools=tuple(messages.tools_from(message.chat.tools)),
        sampling=sampling(message.sampling, info, 0),
        limited=message.sampling.HasField("max_tokens"),
        template_options=options,
        session_id=scoped(namespace, message.session_id),
    )


def chat_done(answer: ChatAnswer, info: EngineInfo) -> pb.GenerateResponse:
    """The end of a generation without token ids."""
    completion = completion_pb2.Completion(
        message=None if answer.message is None else messages.assistant_message(answer.message),
        finish_reason=messages.finish_reason(answer.finish_reason),
        engine=info.engine,
        engine_version=info.engine_version,
        model=info.model,
        timings=completion_pb2.Timings(
            queued=times.duration(answer.timings.queue_s), decode=times.duration(answer.timings.decode_s)
        ),
        usage=chat_pb2.Usage(
            prompt_tokens=answer.usage.prompt_tokens, completion_tokens=answer.usage.completion_tokens
        ),
    )
    return pb.GenerateResponse(done=pb.GenerateDone(completion=completion))


def generate_event(
    event: GenerateEvent, request: GenerateRequest, info: EngineInfo, *, show_prompt: bool
) -> pb.GenerateResponse:
    """One event of a generation; `show_prompt` for a prompt that was rendered here."""
    if isinstance(event, Started):
        return pb.GenerateResponse(
            started=pb.GenerateStarted(
                policy_version=event.policy_version or 0,
                cached_tokens=event.cached_tokens,
                prompt_tokens=request.prompt_token_ids.size,
            )
        )
    if isinstance(event, Delta):
        version = event.policy_version
        span = () if version is None else (VersionSpan(version, 0, event.token_ids.size),)
        return pb.GenerateResponse(
            delta=pb.GenerateDelta(span=_token_span(event.token_ids, event.logprobs, span, event.top, info))
        )
    done = pb.GenerateDone(completion=_completion(event, request, info))
    if not _are_apart(event):
        done.completion.tensors.extend(token_tensors.write(tensor, with_data=True) for tensor in event.tensors)
    if show_prompt:
        done.prompt_token_ids = request.prompt_token_ids.astype("<i4", copy=False).tobytes()
    return pb.GenerateResponse(done=done)


def tensors_apart(done: Done) -> Iterator[pb.GenerateResponse]:
    """Messages to send before the end of a generation: its tensors, if they are too large for the end itself."""
    if _are_apart(done):
        for tensor in done.tensors:
            for piece in token_tensors.pieces(tensor, token_tensors.PIECE_BYTES):
                yield pb.GenerateResponse(delta=pb.GenerateDelta(tensors=[token_tensors.write(piece, with_data=True)]))


def _are_apart(done: Done) -> bool:
    return sum(len(tensor.data) for tensor in done.tensors) > token_tensors.PIECE_BYTES


def _completion(done: Done, request: GenerateRequest, info: EngineInfo) -> completion_pb2.Completion:
    count = done.token_ids.size
    completion = completion_pb2.Completion(
        span=_token_span(done.token_ids, done.logprobs, done.version_spans, done.top, info),
        finish_reason=_FINISH_REASONS[done.finish_reason],
        sampling_used=_sampling_used(request.sampling, done.seed),
        engine=info.engine,
        engine_version=info.engine_version,
        model=info.model,
        timings=completion_pb2.Timings(
            queued=times.duration(done.timings.queue_s),
            prefill=times.duration(done.timings.prefill_s),
            decode=times.duration(done.timings.decode_s),
        ),
        usage=chat_pb2.Usage(
            prompt_tokens=done.prompt_tokens, completion_tokens=count, cached_tokens=done.cached_tokens
        ),
    )
    if done.stop_token_id is not None:
        completion.stop_token_id = done.stop_token_id
    elif done.stop_text is not None:
        completion.stop_text = done.stop_text
    return completion


def _token_span(
    ids: TokenIds, values: Logprobs, versions: Iterable[VersionSpan], top: TopLogprobs | None, info: EngineInfo
) -> completion_pb2.TokenSpan:
    return completion_pb2.TokenSpan(
        token_ids=ids.astype("<i4", copy=False).tobytes(),
        count=ids.size,
        logprobs=b"" if info.logprobs_mode is LogprobsMode.NONE else values.astype("<f4", copy=False).tobytes(),
        logprobs_mode=_LOGPROBS_MODES[info.logprobs_mode],
        versions=[
            completion_pb2.PolicyVersionSpan(policy_version=v.policy_version, start=v.start, end=v.end)
            for v in versions
        ],
        **_top(top),
    )


def score_response(scores: Scores, start: int) -> pb.ScoreResponse:
    """The logprobs of the tokens from `start` on, and their alternatives."""
    rows, top = slice(start - 1, None), scores.top
    return pb.ScoreResponse(
        logprobs=scores.logprobs[rows].astype("<f4", copy=False).tobytes(),
        policy_version=scores.policy_version,
        **_top(None if top is None else TopLogprobs(top.token_ids[rows], top.logprobs[rows])),
    )


def _top(top: TopLogprobs | None) -> dict[str, Any]:
    """The fields of alternatives."""
    if top is None:
        return {}
    return {
        "top_token_ids": top.token_ids.astype("<i4", copy=False).tobytes(),
        "top_logprobs": top.logprobs.astype("<f4", copy=False).tobytes(),
        "top_count": top.token_ids.shape[1],
    }


def _sampling_used(used: Sampling, seed: int | None) -> chat_pb2.Sampling:
    message = chat_pb2.Sampling(
        temperature=used.temperature,
        top_p=used.top_p,
        min_p=used.min_p,
        max_tokens=used.max_tokens,
        min_tokens=used.min_tokens,
        stop=used.stop,
        stop_token_ids=used.stop_token_ids,
        seed=seed,
        presence_penalty=used.presence_penalty,
        frequency_penalty=used.frequency_penalty,
        repetition_penalty=used.repetition_penalty,
        n=1,
        top_logprobs=used.top_logprobs,
        token_tensors=used.token_tensors,
    )
    if used.top_k:
        message.top_k = used.top_k
    if used.response_format is not None:
        message.response_format_json = used.response_format.json_text
    return message


def info_response(info: EngineInfo, files: TokenizerDirectory, parser: str) -> pb.GetInfoResponse:
    """The served model and engine; `parser` is the codec's, for both tool calls and reasoning."""
    can = info.capabilities
    return pb.GetInfoResponse(
        engine=info.engine,
        engine_version=info.engine_version,
        model=info.model,
        capabilities=pb.EngineCapabilities(
            token_ids=can.token_ids,
            logprobs=can.logprobs,
            version_spans=can.version_spans,
            in_flight_update=can.in_flight_update,
            adapters=can.adapters,
            score=can.score,
            # The proto promises a reproducible seed whatever else is in the batch.
            seed=can.seed and can.batch_invariant,
            abort=can.abort,
            structured_output=can.structured_output,
            sleep=can.sleep,
            sampling_fields=[*info.sampling_fields, *([_FORMAT] if can.structured_output else []), "n"],
            transfer_backends=can.transfer_backends,
            token_tensors=can.token_tensors,
            modalities=can.modalities,
        ),
        max_context_tokens=info.max_context_tokens,
        vocabulary_size=info.vocab_size,
        stop_token_ids=info.stop_token_ids,
        tokenizer_sha256=files.tokenizer_sha256,
        chat_template_sha256=files.chat_template_sha256,
        logprobs_mode=_LOGPROBS_MODES[info.logprobs_mode],
        policy_version=info.policy_version,
        paused=info.paused,
        dtype=info.dtype,
        parameter_count=info.parameter_count,
        tool_call_parser=parser,
        processor_sha256=files.processor_sha256,
        reasoning_parser="" if parser == "none" else parser,
    )


gap = reader(Gap, pb.LogprobGap)
"""A trainer's report."""

_replica = writer(ReplicaStats, pb.ReplicaStats, renamed={"cached_tokens": "cached_prompt_tokens"})


def stats_response(stats: EngineStats, gaps: Iterable[Gap] = ()) -> pb.WatchStatsResponse:
    """The engine's load, and the trainers' reports."""
    return pb.WatchStatsResponse(
        running=stats.running,
        waiting=stats.waiting,
        prompt_tokens=stats.prompt_tokens + stats.cached_tokens,
        cached_prompt_tokens=stats.cached_tokens,
        sampled_tokens=stats.sampled_tokens,
        aborted=stats.aborted,
        policy_version=stats.policy_version,
        cache_use=stats.cache_use,
        gaps=(to_proto(item, pb.LogprobGap) for item in gaps),
        replicas=map(_replica, stats.replicas),
    )


def pause_mode(mode: int, default: PauseMode | None = None) -> PauseMode:
    """Raises InvalidArgument for an unspecified mode without a default."""
    found = _PAUSE_MODES.get(mode) or default
    if found is None:
        raise invalid_field("mode", "must be PAUSE_MODE_ABORT, PAUSE_MODE_WAIT or PAUSE_MODE_KEEP")
    return found
