"""An answered call as bytes for a journal, and the hash chain over a rollout's calls.

A record holds everything needed to rebuild the call's node; replaying a rollout's records in order rebuilds the same
graph. The layout is a magic number, a length-prefixed JSON header, then the arrays as little-endian int32 and float32.
The chain's head after a call is sha256 over the previous head and the call: prompt ids, sampled ids, logprobs,
alternatives, tensors, policy and versions, the sampling that was used, and the digests and places of new images.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from dataclasses import dataclass, fields, replace
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
import orjson

from penstock.values.token_tensors import TokenTensor
from penstock_chassis.errors import DataLoss
from penstock_codec.chat import (
    FinishReason,
    Message,
    Part,
    ReasoningPart,
    Role,
    Sampling,
    TextPart,
    ToolCallPart,
)
from penstock_codec.fast_dataclass import quick
from penstock_interception.graph.values import (
    CallClass,
    IntArray,
    LogprobsMode,
    Media,
    PromptKey,
    Sampled,
    TopLogprobs,
    VersionSpan,
    little_endian,
)

MAGIC = b"PTG1"
_HEAD = struct.Struct("<4sI")
# These have only plain fields: `asdict`, which deep-copies, would cost more than the rest of a record.
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_CHAIN = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@quick
@dataclass(frozen=True, slots=True, eq=False)
class GraphRecord:
    """One answered call as the journal keeps it. `chain` is the head with it; the other fields are CallNode's."""

    call_id: str
    branch_id: str
    parent_call_id: str | None
    keep: int
    suffix: IntArray
    sampled: Sampled
    key: PromptKey
    call_class: CallClass
    hinted: bool
    session: str
    reason: str
    chain: bytes
    media: tuple[Media, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialises the record for a journal."""
        sampled, key = self.sampled, self.key
        header = {
            "call_id": self.call_id,
            "branch_id": self.branch_id,
            "parent_call_id": self.parent_call_id,
            "keep": self.keep,
            "suffix": int(self.suffix.size),
            "tokens": None if sampled.token_ids is None else int(sampled.token_ids.size),
            "logprobs": sampled.logprobs is not None,
            "logprobs_mode": sampled.logprobs_mode,
            "versions": [[span.policy_version, span.start, span.end] for span in sampled.versions],
            "message": [_part_to_json(part) for part in sampled.message.parts],
            "finish_reason": sampled.finish_reason,
            "sampling_used": _sampling_to_json(sampled.sampling_used),
            "engine": sampled.engine,
            "engine_version": sampled.engine_version,
            "injected": sampled.injected,
            "usable": sampled.usable,
            "key": {
                "state": key.state.hex(),
                "bare": key.bare.hex(),
                "tools": key.tools.hex(),
                "kwargs": key.kwargs.hex(),
                "system": key.system.hex(),
                "first_user": key.first_user.hex(),
                "messages": key.messages,
                "has_tools": key.has_tools,
            },
            "call_class": self.call_class,
            "hinted": self.hinted,
            "session": self.session,
            "reason": self.reason,
            "chain": self.chain.hex(),
        }
        arrays = [self.suffix, sampled.token_ids, sampled.logprobs]
        if sampled.top is not None:
            header["top"] = sampled.top.count
            arrays += [sampled.top.token_ids, sampled.top.logprobs]
        if sampled.tensors:
            header["tensors"] = [_tensor_to_json(tensor) for tensor in sampled.tensors]
        if sampled.policy_id:
            header["policy_id"] = sampled.policy_id
        if self.media:
            header["media"] = [_media_to_json(one) for one in self.media]
        text = _header(header, sampled.sampling_used)
        return b"".join(
            [
                *(_HEAD.pack(MAGIC, len(text)), text),
                *(little_endian(array) for array in arrays if array is not None),
                *(tensor.data for tensor in sampled.tensors),
            ]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> GraphRecord:
        """Parses a record. Raises DataLoss GRAPH_RECORD_DAMAGED for anything that `to_bytes` did not write."""
        try:
            return cls._read(data)
        except (KeyError, TypeError, ValueError, struct.error, AttributeError) as error:
            raise DataLoss("a journalled call cannot be read", reason="GRAPH_RECORD_DAMAGED") from error

    @classmethod
    def _read(cls, data: bytes) -> GraphRecord:
        magic, length = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("not a graph record")
        header: dict[str, Any] = json.loads(data[_HEAD.size : _HEAD.size + length])
        at = _HEAD.size + length
        count = header["suffix"]
        suffix = np.frombuffer(data, "<i4", count, at).astype(np.int32)
        at += 4 * count
        tokens = logprobs = top = None
        if header["tokens"] is not None:
            tokens = np.frombuffer(data, "<i4", header["tokens"], at).astype(np.int32)
            at += 4 * header["tokens"]
        if header["logprobs"]:
            logprobs = np.frombuffer(data, "<f4", header["tokens"], at).astype(np.float32)
            at += 4 * header["tokens"]
        if count := header.get("top"):  # absent from records without alternatives
            size, shape = header["tokens"] * count, (header["tokens"], count)
            ids = np.frombuffer(data, "<i4", size, at).astype(np.int32).reshape(shape)
            top = TopLogprobs(ids, np.frombuffer(data, "<f4", size, at + 4 * size).astype(np.float32).reshape(shape))
            at += 8 * size
        tensors = []
        for name, dtype, start, shape, sha256 in header.get("tensors", ()):  # absent from records without tensors
            tensor = TokenTensor(name, dtype, start, tuple(shape), b"", bytes.fromhex(sha256))
            size = tensor.row_bytes * shape[0]
            tensors.append(replace(tensor, data=data[at : at + size]))
            at += size
        if at != len(data):
            raise ValueError("the record's length differs from its header")
        mode = header["logprobs_mode"]
        sampled = Sampled(
            message=Message(Role.ASSISTANT, tuple(_part_from_json(item) for item in header["message"])),
            finish_reason=FinishReason(header["finish_reason"]),
            token_ids=tokens,
            logprobs=logprobs,
            logprobs_mode=None if mode is None else LogprobsMode(mode),
            versions=tuple(VersionSpan(*item) for item in header["versions"]),
            sampling_used=_sampling_from_json(header["sampling_used"]),
            engine=header["engine"],
            engine_version=header["engine_version"],
            injected=header["injected"],
            usable=header["usable"],
            top=top,
            tensors=tuple(tensors),
            policy_id=header.get("policy_id", ""),  # absent where the rollout has one model
        )
        key: dict[str, Any] = {k: bytes.fromhex(v) if isinstance(v, str) else v for k, v in header["key"].items()}
        return cls(
            call_id=header["call_id"],
            branch_id=header["branch_id"],
            parent_call_id=header["parent_call_id"],
            keep=header["keep"],
            suffix=suffix,
            sampled=sampled,
            key=PromptKey(**key),
            call_class=CallClass(header["call_class"]),
            hinted=header["hinted"],
            session=header["session"],
            reason=header["reason"],
            chain=bytes.fromhex(header["chain"]),
            media=tuple(map(_media_from_json, header.get("media", ()))),  # absent from records without images
        )


def chain_start(rollout_id: str) -> bytes:
    """Returns the head of a rollout's chain before its first call."""
    return hashlib.sha256(b"penstock.trajectory.v1 chain\0" + rollout_id.encode()).digest()


def chain_next(
    head: bytes, call_id: str, prompt_ids: IntArray, sampled: Sampled, media: tuple[Media, ...] = ()
) -> bytes:
    """Returns the head after a call. `media` are the images that its parent's prompt does not have."""
    return chain_step(head, call_id, hashlib.sha256(little_endian(prompt_ids)).digest(), sampled, media)


def chain_step(
    head: bytes, call_id: str, prompt_sha256: bytes, sampled: Sampled, media: tuple[Media, ...] = ()
) -> bytes:
    """As `chain_next`, for a prompt with a known digest."""
    # JSON without spaces and with sorted keys; assembled here, since the keys are few and fixed.
    versions = ",".join([f"[{span.policy_version},{span.start},{span.end}]" for span in sampled.versions])
    mode = "null" if sampled.logprobs_mode is None else f'"{sampled.logprobs_mode.value}"'
    sampling = "null" if sampled.sampling_used is None else _CHAIN.encode(_sampling_to_json(sampled.sampling_used))
    top = "" if sampled.top is None else f'"top_sha256":"{sampled.top.sha256.hex()}",'
    tensors = ""
    if sampled.tensors:
        tensors = f'"tensors":{_CHAIN.encode([_tensor_to_json(tensor) for tensor in sampled.tensors])},'
    images = ""
    if media:
        images = f'"media":{_CHAIN.encode([[one.sha256.hex(), one.token_start, one.token_count] for one in media])},'
    policy = f'"policy_id":{encode_basestring_ascii(sampled.policy_id)},' if sampled.policy_id else ""
    facts = (
        f'{{"call_id":{encode_basestring_ascii(call_id)},"logprobs_mode":{mode},'
        f'{images}{policy}"sampling_used":{sampling},{tensors}{top}"versions":[{versions}]}}'
    )
    state = hashlib.sha256(head + prompt_sha256)
    for array in (sampled.token_ids, sampled.logprobs):
        state.update(hashlib.sha256(b"" if array is None else little_endian(array)).digest())
    state.update(facts.encode())
    return state.digest()


def _header(header: dict[str, Any], sampling: Sampling | None) -> bytes:
    numbers = () if sampling is None else [getattr(sampling, name) for name in _SAMPLING_FIELDS]
    if all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        try:
            return orjson.dumps(header)
        except TypeError:  # a lone surrogate, or a number beyond 64 bits
            pass
    return json.dumps(header, separators=(",", ":")).encode()


def _media_to_json(media: Media) -> list[Any]:
    place = (media.token_start, media.token_count, media.placeholder_token_id, list(media.grid))
    return [media.sha256.hex(), media.media_type, *place, media.processor_sha256.hex()]


def _media_from_json(item: list[Any]) -> Media:
    sha256, media_type, start, count, placeholder, grid, processor = item
    return Media(bytes.fromhex(sha256), media_type, start, count, placeholder, tuple(grid), bytes.fromhex(processor))


def _tensor_to_json(tensor: TokenTensor) -> list[Any]:
    return [tensor.name, tensor.dtype, tensor.start, list(tensor.shape), tensor.sha256.hex()]


def _part_to_json(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"text": text}
        case ReasoningPart(text, signature):
            return {"reasoning": text, "signature": base64.b64encode(signature).decode()}
        case ToolCallPart(identity, name, arguments):
            return {"call": identity, "name": name, "arguments": arguments}
    raise TypeError(f"an assistant's message cannot have a {type(part).__name__}")


def _part_from_json(item: dict[str, Any]) -> Part:
    if "text" in item:
        return TextPart(item["text"])
    if "reasoning" in item:
        return ReasoningPart(item["reasoning"], base64.b64decode(item["signature"]))
    return ToolCallPart(item["call"], item["name"], item["arguments"])


def _sampling_to_json(sampling: Sampling | None) -> dict[str, Any] | None:
    if sampling is None:
        return None
    return {name: value for name in _SAMPLING_FIELDS if (value := getattr(sampling, name)) is not None}


def _sampling_from_json(item: dict[str, Any] | None) -> Sampling | None:
    if item is None:
        return None
    for name in ("stop", "stop_token_ids", "token_tensors"):
        if name in item:
            item[name] = tuple(item[name])
    return Sampling(**item)
