"""Serialises domain values for the journal, and back.

JSON for small values; tokens and messages are in the graph's own records.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import TypeAdapter

from penstock_codec.chat import Sampling, Usage
from penstock_interception.domain.calls import CallRequest, Dialect, ModelFacts, RolloutSpec, Totals
from penstock_interception.domain.completions import Completion, Failure, Timings, Tokens
from penstock_interception.domain.recordings import Origin
from penstock_interception.graph.values import Sampled

_OPENING = TypeAdapter(RolloutSpec)
_FACTS = TypeAdapter(ModelFacts)
_TOTALS = TypeAdapter(Totals)
_SAMPLING = TypeAdapter(Sampling)
_USAGE = TypeAdapter(Usage)
_TIMINGS = TypeAdapter(Timings)
_ORIGIN = TypeAdapter(Origin)


def dump_spec(spec: RolloutSpec) -> bytes:
    """Serialises for `load_spec`."""
    return _OPENING.dump_json(spec, exclude_defaults=False)


def load_spec(data: bytes) -> RolloutSpec:
    """Reads what `dump_spec` wrote."""
    return _OPENING.validate_json(data)


def dump_request(request: CallRequest) -> bytes:
    """Serialises all but the body and the keys, which have their own columns."""
    return orjson.dumps(
        {
            "dialect": request.dialect,
            "stream": request.stream,
            "sampling": _SAMPLING.dump_python(request.sampling, exclude_none=True),
            "model": request.model_requested,
            "tools": request.tools_sha256.hex(),
            "normalisations": request.normalisations,
            "session": request.agent_session,
            "bytes": request.body_bytes,
            **({"bounded": request.bounded_by} if request.bounded_by else {}),
        }
    )


def load_request(data: bytes, *, body: bytes, body_sha256: bytes, retry_key: str) -> CallRequest:
    """Reads what `dump_request` wrote."""
    meta = orjson.loads(data)
    return CallRequest(
        dialect=Dialect(meta["dialect"]),
        body=body,
        body_sha256=body_sha256,
        retry_key=retry_key,
        stream=meta["stream"],
        sampling=_SAMPLING.validate_python(meta["sampling"]),
        model_requested=meta["model"],
        tools_sha256=bytes.fromhex(meta["tools"]),
        normalisations=tuple(meta["normalisations"]),
        agent_session=tuple((name, value) for name, value in meta["session"]),
        body_bytes=meta.get("bytes", 0),
        bounded_by=meta.get("bounded", ""),
    )


def dump_failure(failure: Failure) -> bytes:
    """Serialises for `load_failure`."""
    return orjson.dumps([failure.reason, failure.message, failure.retriable])


def load_failure(data: bytes) -> Failure:
    """Reads what `dump_failure` wrote."""
    reason, message, retriable = orjson.loads(data)
    return Failure(reason, message, retriable)


def dump_extras(completion: Completion) -> bytes:
    """Serialises the part of a completion that the graph's record lacks."""
    return orjson.dumps(
        {
            "stop_id": completion.stop_token_id,
            "stop_text": completion.stop_text,
            "given": completion.message is not None,
            "model": completion.model,
            "timings": _maybe(_TIMINGS, completion.timings),
            "usage": _maybe(_USAGE, completion.usage),
            **({"origin": _ORIGIN.dump_python(completion.origin)} if completion.origin is not None else {}),
        }
    )


def completion_of(sampled: Sampled, extras: bytes) -> Completion:
    """Combines a graph's record with the extras that `dump_extras` wrote."""
    meta = orjson.loads(extras)
    tokens = None
    if sampled.token_ids is not None:
        tokens = Tokens(
            sampled.token_ids,
            sampled.logprobs,
            sampled.logprobs_mode,
            sampled.versions,
            sampled.top,
            sampled.tensors,
        )
    return Completion(
        tokens=tokens,
        message=sampled.message if meta["given"] else None,
        finish_reason=sampled.finish_reason,
        stop_token_id=meta["stop_id"],
        stop_text=meta["stop_text"],
        sampling_used=sampled.sampling_used,
        engine=sampled.engine,
        engine_version=sampled.engine_version,
        model=meta["model"],
        timings=_TIMINGS.validate_python(meta["timings"]) if meta["timings"] is not None else None,
        usage=_USAGE.validate_python(meta["usage"]) if meta["usage"] is not None else None,
        origin=_ORIGIN.validate_python(meta["origin"]) if "origin" in meta else None,
    )


def dump_facts(facts: ModelFacts) -> bytes:
    """Serialises for `load_facts`."""
    return _FACTS.dump_json(facts)


def load_facts(data: bytes) -> ModelFacts:
    """Reads what `dump_facts` wrote."""
    return _FACTS.validate_json(data)


def dump_totals(totals: Totals) -> bytes:
    """Serialises for `load_totals`."""
    return _TOTALS.dump_json(totals)


def load_totals(data: bytes) -> Totals:
    """Reads what `dump_totals` wrote."""
    return _TOTALS.validate_json(data)


def dump_sampling(sampling: Sampling) -> bytes:
    """Serialises for `load_sampling`."""
    return _SAMPLING.dump_json(sampling, exclude_none=True)


def load_sampling(data: bytes) -> Sampling:
    """Reads what `dump_sampling` wrote."""
    return _SAMPLING.validate_json(data)


def _maybe(adapter: TypeAdapter[Any], value: object) -> Any:
    return None if value is None else adapter.dump_python(value, exclude_none=True)
