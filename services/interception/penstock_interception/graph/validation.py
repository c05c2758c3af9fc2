"""Validates a completion before it enters the graph (R83)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.values.token_tensors import TokenTensor
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_codec.chat import Role
from penstock_interception.graph.values import LogprobsMode, Sampled, TopLogprobs

# numpy's ufunc reductions: `min` and `max` cost several times as much for a turn's few tokens.
_LEAST = np.minimum.reduce
_MOST = np.maximum.reduce
# Float32 bits as int32: the values below minus infinity's are exactly the negative finite numbers and -0.0.
_MINUS_INFINITY = int(np.float32(-np.inf).view(np.int32))


def check_sampled(sampled: Sampled, vocab_size: int | None, prompt_count: int = 0) -> None:
    """Raises InvalidArgument COMPLETION_INVALID with every violation; `vocab_size` None: the vocabulary is unknown."""
    violations = _violations(sampled, vocab_size)
    violations += _tensor_violations(sampled.tensors, prompt_count + sampled.count)
    if violations:
        raise InvalidArgument(
            "the completion is invalid: " + "; ".join(item.description for item in violations),
            reason="COMPLETION_INVALID",
            violations=violations,
        )


def _violations(sampled: Sampled, vocab_size: int | None) -> list[Violation]:
    found: list[Violation] = []
    ids, logprobs = sampled.token_ids, sampled.logprobs
    if sampled.message.role is not Role.ASSISTANT:
        found.append(Violation("message.role", "the role of a completion must be the assistant"))
    if ids is None:
        if logprobs is not None:
            found.append(Violation("span.logprobs", "logprobs without token ids"))
        if sampled.versions:
            found.append(Violation("span.versions", "policy versions without token ids"))
        if sampled.top is not None:
            found.append(Violation("span.top_token_ids", "alternatives without token ids"))
        return found
    if ids.dtype != np.int32 or ids.ndim != 1:
        found.append(Violation("span.token_ids", "token ids must be a flat int32 array"))
    elif ids.size and vocab_size is not None and _MOST(ids.view(np.uint32)) >= vocab_size:  # a negative id is huge
        found.append(Violation("span.token_ids", f"token ids must be from 0 to {vocab_size - 1}"))
    if logprobs is not None:
        if logprobs.dtype != np.float32 or logprobs.ndim != 1:
            found.append(Violation("span.logprobs", "logprobs must be a flat float32 array"))
        elif logprobs.size != ids.size:
            found.append(Violation("span.logprobs", f"{logprobs.size} logprobs for {ids.size} token ids"))
        elif logprobs.size and _MOST(logprobs.view(np.int32)) >= _MINUS_INFINITY:
            least, most = _LEAST(logprobs), _MOST(logprobs)  # both are NaN if any logprob is
            if not (math.isfinite(least) and math.isfinite(most)):
                found.append(Violation("span.logprobs", "every logprob must be finite"))
            elif most > 0:
                found.append(Violation("span.logprobs", "every logprob must be at most 0"))
    if (logprobs is not None or sampled.top is not None) and sampled.logprobs_mode is None:
        found.append(Violation("span.logprobs_mode", "logprobs need a logprobs_mode that this version knows"))
    if sampled.top is not None:
        found += _top_violations(sampled.top, ids.size, vocab_size, sampled.logprobs_mode)
    at = 0
    for index, span in enumerate(sampled.versions):
        if span.start != at or span.end <= span.start:
            found.append(Violation(f"span.versions[{index}]", f"a version span must start at {at} and not be empty"))
            break
        at = span.end
    else:
        if sampled.versions and at != ids.size:
            found.append(Violation("span.versions", f"the versions cover {at} of {ids.size} tokens"))
    return found


def _tensor_violations(tensors: Sequence[TokenTensor], tokens: int) -> list[Violation]:
    found = []
    for index, one in enumerate(tensors):
        if one.end > tokens - 1:
            what = f"rows [{one.start}, {one.end}) for {tokens} tokens, of which the last has none"
            found.append(Violation(f"tensors[{index}].start", what))
        elif (
            not one.dtype.startswith("u") and _LEAST(np.frombuffer(one.data, np.dtype(one.dtype).newbyteorder("<"))) < 0
        ):
            found.append(Violation(f"tensors[{index}].data", "an expert's id must be at least 0"))
    return found


def _top_violations(
    top: TopLogprobs, tokens: int, vocab_size: int | None, mode: LogprobsMode | None
) -> list[Violation]:
    ids, values = top.token_ids, top.logprobs
    if ids.shape != (tokens, top.count) or values.shape != ids.shape:
        return [Violation("span.top_token_ids", f"rows {ids.shape} and {values.shape} for {tokens} token ids")]
    if ids.min(initial=-1) < -1 or (vocab_size is not None and ids.max(initial=-1) >= vocab_size):
        known = "" if vocab_size is None else f" to {vocab_size - 1}"
        return [Violation("span.top_token_ids", f"alternatives must be from 0{known}, or -1 for none")]
    excluded = np.isneginf(values)
    if not (excluded | (np.isfinite(values) & (values <= 0))).all():
        return [Violation("span.top_logprobs", "every logprob must be at most 0, and a number")]
    if not excluded[ids < 0].all():
        return [Violation("span.top_logprobs", "the logprob of an alternative with id -1 must be -infinity")]
    if mode is LogprobsMode.RAW and excluded[ids >= 0].any():
        return [Violation("span.top_logprobs", "every raw logprob must be finite")]
    if (values[:, 1:] > values[:, :-1]).any():
        return [Violation("span.top_logprobs", "the alternatives of a token must be in order, the likeliest first")]
    return []
