"""The domain's values as bytes for the journal, and back.

JSON for what is small; tokens and messages are in the graph's own records.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import TypeAdapter

from penstock_codec.chat import Sampling, Usage
from penstock_interception.calls import Arrival, Dialect, ModelFacts, Opening, Totals
from penstock_interception.completions import Completion, Failure, Timings, Tokens
from penstock_interception.graph.model import Sampled

_OPENING = TypeAdapter(Opening)
_FACTS = TypeAdapter(ModelFacts)
_TOTALS = TypeAdapter(Totals)
_SAMPLING = TypeAdapter(Sampling)
_USAGE = TypeAdapter(Usage)
_TIMINGS = TypeAdapter(Timings)


def dump_opening(opening: Opening) -> bytes:
    """For `load_opening`."""
    return _OPENING.dump_json(opening, exclude_defaults=False)


def load_opening(data: bytes) -> Opening:
    """Of `dump_opening`."""
    return _OPENING.validate_json(data)


def dump_arrival(arrival: Arrival) -> bytes:
    """All but the body and the keys, which have columns of their own."""
    return orjson.dumps(
        {
            "dialect": arrival.dialect,
            "stream": arrival.stream,
            "sampling": _SAMPLING.dump_python(arrival.sampling, exclude_none=True),
            "model": arrival.model_requested,
            "tools": arrival.tools_sha256.hex(),
            "normalisations": arrival.normalisations,
            "session": arrival.agent_session,
            "bytes": arrival.body_bytes,
            **({"bounded": arrival.bounded_by} if arrival.bounded_by else {}),
        }
    )


def load_arrival(data: bytes, *, body: bytes, body_sha256: bytes, retry_key: str) -> Arrival:
    """Of `dump_arrival`."""
    meta = orjson.loads(data)
    return Arrival(
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
    """For `load_failure`."""
    return orjson.dumps([failure.reason, failure.message, failure.retriable])


def load_failure(data: bytes) -> Failure:
    """Of `dump_failure`."""
    reason, message, retriable = orjson.loads(data)
    return Failure(reason, message, retriable)


def dump_extras(completion: Completion) -> bytes:
    """What the graph's record of a completion does not hold."""
    return orjson.dumps(
        {
            "stop_id": completion.stop_token_id,
            "stop_text": completion.stop_text,
            "given": completion.message is not None,
            "model": completion.model,
            "timings": _maybe(_TIMINGS, completion.timings),
            "usage": _maybe(_USAGE, completion.usage),
        }
    )


def completion_of(sampled: Sampled, extras: bytes) -> Completion:
    """The completion of a graph's record and what `dump_extras` kept beside it."""
    meta = orjson.loads(extras)
    tokens = None
    if sampled.token_ids is not None:
        tokens = Tokens(sampled.token_ids, sampled.logprobs, sampled.logprobs_mode, sampled.versions)
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
    )


def dump_facts(facts: ModelFacts) -> bytes:
    """For `load_facts`."""
    return _FACTS.dump_json(facts)


def load_facts(data: bytes) -> ModelFacts:
    """Of `dump_facts`."""
    return _FACTS.validate_json(data)


def dump_totals(totals: Totals) -> bytes:
    """For `load_totals`."""
    return _TOTALS.dump_json(totals)


def load_totals(data: bytes) -> Totals:
    """Of `dump_totals`."""
    return _TOTALS.validate_json(data)


def dump_sampling(sampling: Sampling) -> bytes:
    """For `load_sampling`."""
    return _SAMPLING.dump_json(sampling, exclude_none=True)


def load_sampling(data: bytes) -> Sampling:
    """Of `dump_sampling`."""
    return _SAMPLING.validate_json(data)


def _maybe(adapter: TypeAdapter[Any], value: object) -> Any:
    return None if value is None else adapter.dump_python(value, exclude_none=True)
