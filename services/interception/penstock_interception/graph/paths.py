"""Paths through the graph as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from penstock.values.token_tensors import NAMES, Part, TokenTensor, first_gap, joined
from penstock_interception.graph.values import CallNode, IntArray, Media

NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_TOKENS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """One call's part of a path: its first `context` suffix tokens and its first `sampled` completion tokens."""

    node: CallNode
    context: int
    sampled: int


def segments(node: CallNode) -> Iterator[Segment]:
    """Yields the segments of a call's path, leaf first."""
    limit = node.total
    step: CallNode | None = node
    while step is not None and limit > 0:
        here = max(0, limit - step.keep)
        context = min(here, int(step.suffix.size))
        yield Segment(step, context, here - context)
        limit = min(limit, step.keep)
        step = step.parent


def path_ids(node: CallNode, upto: int | None = None) -> IntArray:
    """Returns the first `upto` tokens (default: all) of a call's prompt and completion."""
    pieces: list[IntArray] = []
    limit = node.total if upto is None else upto
    step: CallNode | None = node
    while step is not None and limit > 0:  # as `segments`, but without an object each: this runs for every call
        if limit > step.keep:
            sampled = step.sampled.token_ids
            if limit > step.prompt_count and sampled is not None:
                pieces.append(sampled if limit >= step.total else sampled[: limit - step.prompt_count])
            pieces.append(step.suffix if limit >= step.prompt_count else step.suffix[: limit - step.keep])
            limit = step.keep
        step = step.parent
    pieces.reverse()
    return np.concatenate(pieces) if pieces else NO_TOKENS


def common_prefix(first: IntArray, second: IntArray) -> int:
    """Returns the number of leading tokens that two paths share."""
    length = min(first.size, second.size)
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if differ.size else int(length)


def path_media(node: CallNode, upto: int | None = None) -> tuple[Media, ...]:
    """Returns the images of the first `upto` tokens (default: all) of a call's prompt and completion."""
    found: list[Media] = []
    limit = node.total if upto is None else upto
    step: CallNode | None = node
    while step is not None and limit > 0:
        if step.media:
            found += [one for one in reversed(step.media) if one.token_end <= limit]
        limit, step = min(limit, step.keep), step.parent
    found.reverse()
    return tuple(found)


def shared_with_media(first: Sequence[Media], second: Sequence[Media], keep: int) -> int:
    """Returns how many of `keep` tokens that two paths share are of the same images too."""
    for one, other in zip_longest(first, second):
        if one == other and one is not None and one.token_end <= keep:
            continue
        return min(keep, *(each.token_start for each in (one, other) if each is not None))
    return keep


def path_tensors(node: CallNode, policy_id: str) -> tuple[TokenTensor, ...]:
    """Returns a policy's tensors of a call's prompt and completion, with digests."""
    if not node.has_tensors:
        return ()
    parts = (Part(step.keep, step.sampled.tensors, step.sampled.policy_id) for step in _line(node))
    return tuple(one.digested() for one in joined(parts, policy_id))


def tensor_starts(parent: CallNode | None, keep: int) -> Mapping[str, int]:
    """Returns the first position whose rows a call lacks that shares `keep` tokens with its parent, by the policy that
    may answer it; 0 for those that are not there.
    """
    if parent is None or not parent.has_tensors:
        return {}
    parts = [
        Part(step.keep, [one.bare() for one in step.sampled.tensors], step.sampled.policy_id) for step in _line(parent)
    ]
    parts.append(Part(keep, ()))
    return {
        policy_id: _start(parts, policy_id, keep) for policy_id in {part.policy_id for part in parts if part.tensors}
    }


def _start(parts: Sequence[Part], policy_id: str, keep: int) -> int:
    known = joined(parts, policy_id)
    # The last shared token chose nothing before: its row is the new call's.
    return max(0, min(keep - 1, *(first_gap(known, name) for name in NAMES)))


def _line(node: CallNode) -> list[CallNode]:
    """The calls of a path, root first."""
    line = [node]
    while (parent := line[-1].parent) is not None and line[-1].keep:
        line.append(parent)
    line.reverse()
    return line
