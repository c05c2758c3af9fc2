"""Trainers' view of the graph: branches, and one sample per leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from penstock_codec.chat import FinishReason
from penstock_interception.graph.paths import path_ids, path_media, path_tensors, segments
from penstock_interception.graph.values import (
    Branch,
    CallClass,
    CallNode,
    LogprobsMode,
    Sample,
    SamplePolicy,
    TopLogprobs,
    TurnSpan,
    VersionSpan,
)

_ORDER = list(CallClass)  # the main line first, retries last


def branches(nodes: Sequence[CallNode], classes: Mapping[str, CallClass]) -> tuple[Branch, ...]:
    """Returns all branches in order of opening; a branch has the class of its last call."""
    lines: dict[str, list[CallNode]] = {}
    for node in nodes:
        lines.setdefault(node.branch_id, []).append(node)
    return tuple(
        Branch(
            branch_id=branch_id,
            call_class=classes[line[-1].call_id],
            fork_call_id=None if line[0].parent is None else line[0].parent.call_id,
            shared_count=line[0].keep,
            call_ids=tuple(node.call_id for node in line),
            reason=line[0].reason,
        )
        for branch_id, line in lines.items()
    )


def build(
    rollout_id: str,
    nodes: Sequence[CallNode],
    classes: Mapping[str, CallClass],
    policy: SamplePolicy,
    *,
    include_top: bool = False,
    context: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Sample, ...]:
    """Returns one sample per leaf that has tokens, ordered by class, then by time; with alternatives if requested.

    A leaf is the last call of a line, and the last trained one where untrained ones follow it.
    A leaf has one for each policy that may be trained in its line, or one if there is none. `context`: the calls that
    are not trained whatever they are, and why.
    """
    inner: set[str] = set()  # calls whose turns a later one's sample has
    acting: set[str] = set()  # those of them whose sample is of a class that is trained
    leaves: list[CallNode] = []
    for node in reversed(nodes):
        is_trained = node.call_id in acting
        if node.call_id not in inner:
            if node.sampled.token_ids is None:
                continue
            leaves.append(node)
            is_trained = classes[node.call_id] in policy.classes
        parent = node.parent if node.continues_parent else None
        if parent is None:
            continue
        if is_trained:
            acting.add(parent.call_id)
        # A last call that is not trained, a title say, must not mask the line before it: that has a sample too.
        if is_trained or classes[parent.call_id] not in policy.classes:
            inner.add(parent.call_id)
    leaves.sort(key=lambda node: (_ORDER.index(classes[node.call_id]), node.index))
    owned: set[str] = set()
    made = [
        _sample(rollout_id, leaf, policy_id, alone, classes[leaf.call_id], policy, owned, include_top, context)
        for leaf in leaves
        for policy_id, alone in _policies(leaf, classes[leaf.call_id], policy, context)
    ]
    trained = [int(sample.loss_mask.sum()) for sample in made]
    whole: Counter[str] = Counter()
    for sample, count in zip(made, trained, strict=True):
        whole[sample.policy_id] += count
    weights = (
        count / whole[sample.policy_id] if whole[sample.policy_id] else 0.0
        for sample, count in zip(made, trained, strict=True)
    )
    return tuple(replace(sample, weight=weight) for sample, weight in zip(made, weights, strict=True))


def _policies(
    leaf: CallNode, call_class: CallClass, policy: SamplePolicy, context: Mapping[str, str]
) -> list[tuple[str, bool]]:
    """Returns the policies that a line has samples of, the first to speak first, and whether it is the only one."""
    found = dict.fromkeys(
        segment.node.sampled.policy_id
        for segment in reversed(list(segments(leaf)))
        if segment.sampled and segment.node.call_id not in context and not _untrained(segment.node, call_class, policy)
    )
    return [(policy_id, len(found) == 1) for policy_id in found] or [(leaf.sampled.policy_id, True)]


def _sample(
    rollout_id: str,
    leaf: CallNode,
    policy_id: str,
    alone: bool,
    call_class: CallClass,
    policy: SamplePolicy,
    owned: set[str],
    include_top: bool,
    context: Mapping[str, str],
) -> Sample:
    ids = path_ids(leaf)
    mask = np.zeros(ids.size, dtype=np.uint8)
    logprobs = np.zeros(ids.size, dtype=np.float32)
    versions: list[VersionSpan] = []
    turns: list[TurnSpan] = []
    modes: set[LogprobsMode | None] = set()
    trained: list[CallNode] = []
    for segment in reversed(list(segments(leaf))):
        node, count = segment.node, segment.sampled
        if not count:
            continue
        start = node.prompt_count
        whole = count == node.sampled.count
        why = "PARTIAL" if not whole else "SHARED" if node.call_id in owned else _untrained(node, call_class, policy)
        why = context.get(node.call_id, why)
        if node.sampled.policy_id != policy_id and why in ("", "SHARED"):
            why = "OTHER_POLICY"
        if not why and node.sampled.logprobs is not None:
            owned.add(node.call_id)
            trained.append(node)
            mask[start : start + count] = 1
            logprobs[start : start + count] = node.sampled.logprobs
            modes.add(node.sampled.logprobs_mode)
        turns.append(TurnSpan(node.call_id, start, start + count, why, node.sampled.policy_id))
        _extend(versions, node.sampled.versions, start, start + count)
    return Sample(
        sample_id=f"{rollout_id}-{leaf.call_id}" if alone else f"{rollout_id}-{leaf.call_id}-{policy_id}",
        branch_id=leaf.branch_id,
        call_class=call_class,
        input_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        # The mode of the trained turns, None if mixed; the leaf's if no turn is trained.
        logprobs_mode=None if len(modes) > 1 else next(iter(modes), leaf.sampled.logprobs_mode),
        modes_mixed=len(modes) > 1,
        versions=tuple(versions),
        turns=tuple(turns),
        prompt_count=turns[0].start if turns else int(ids.size),
        weight=0.0,
        truncated=leaf.sampled.finish_reason.truncated,
        top=_top(trained) if include_top else None,
        tensors=path_tensors(leaf, policy_id),
        media=path_media(leaf),
        policy_id=policy_id,
    )


def _top(trained: Sequence[CallNode]) -> TopLogprobs | None:
    """Returns a row for each token of these calls, filled up where one has fewer alternatives; None if none has any."""
    width = max((node.sampled.top.count for node in trained if node.sampled.top is not None), default=0)
    if not width:
        return None
    rows = sum(node.sampled.count for node in trained)
    ids, logprobs = np.full((rows, width), -1, np.int32), np.full((rows, width), -np.inf, np.float32)
    at = 0
    for node in trained:
        top, end = node.sampled.top, at + node.sampled.count
        if top is not None:
            ids[at:end, : top.count], logprobs[at:end, : top.count] = top.token_ids, top.logprobs
        at = end
    return TopLogprobs(ids, logprobs)


def _untrained(node: CallNode, call_class: CallClass, policy: SamplePolicy) -> str:
    """Returns why `node`'s sampled tokens are only context in a sample of this class; "" if they are trained."""
    sampled = node.sampled
    if call_class not in policy.classes:
        return f"CLASS_{call_class.upper()}"
    if sampled.logprobs is None:
        return "NO_LOGPROBS"
    if sampled.injected:
        return "INJECTED"
    if not sampled.usable or sampled.finish_reason is FinishReason.CONTENT_FILTER:
        return "UNUSABLE"
    if sampled.finish_reason.truncated and not policy.train_truncated:
        return "TRUNCATED"
    return ""


def _extend(versions: list[VersionSpan], added: Sequence[VersionSpan], start: int, end: int) -> None:
    for span in added:
        left, right = start + span.start, min(start + span.end, end)
        if left >= right:
            continue
        last = versions[-1] if versions else None
        if last is not None and last.policy_version == span.policy_version and last.end == left:
            versions[-1] = VersionSpan(last.policy_version, last.start, right)
        else:
            versions.append(VersionSpan(span.policy_version, left, right))
