"""Verifies samples against their calls: the gate's rules, applied again (docs/trajectories.md#samples).

A span of a sample is one call's completion, or, where the branch shares only its beginning, that much of it (PARTIAL,
never trained). Everything in a row about its tokens follows from its calls and from which spans are trained.
"""

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from penstock.tables.columns import Row
from penstock.tables.rows import tensor_row
from penstock.values.token_tensors import Part, TokenTensor, joined

Found = tuple[str, str]
"""The id of a call, empty where it concerns the whole sample, and the problem."""
_ELSEWHERE: Final = ("SHARED", "OTHER_POLICY")
"""Why a turn is not trained in a sample although another one trains it."""
_CONTEXT: Final = ("MODEL_UNTRAINED", "PARENT")
"""Why a call is trained nowhere in its rollout: of a span that has a part of it, too."""
_TRUNCATED: Final = ("length", "abort")
"""Finish reasons of a turn that was cut off."""


def check_samples(rows: Sequence[Row], calls: Mapping[str, Row]) -> Iterator[Found]:
    """Yields the problems of one rollout's rows of `sequences`; `calls` are its rows of `turns` by id."""
    trained: dict[str, str] = {}
    whole: Counter[str | None] = Counter()
    for row in rows:
        whole[row.get("policy_id")] += sum(row["loss_mask"])
    for row in rows:
        for call_id, message in _check(row, calls, trained, whole[row.get("policy_id")]):
            yield call_id, f"sample {row['sample_id']}: {message}"
    for row in rows:
        for span in row["turn_spans"]:
            call_id, why = span["call_id"], span.get("untrained_reason")
            if why in _ELSEWHERE and call_id not in trained:
                yield call_id, f"sample {row['sample_id']}: {why} has it that another sample trains it, but none does"
                trained[call_id] = ""  # one problem for each


def check_policies(turns: Sequence[Row], samples: Sequence[Row]) -> Iterator[str]:
    """Yields where the stated policies of a rollout are not those of its calls, and of its samples if it has any."""
    stated = turns[0].get("policies") or []
    named = {row["policy_id"] for row in turns if row.get("policy_id")}
    if "policies" in turns[0] and named != {one["policy_id"] for one in stated}:
        yield "its policies are not those of its calls"
        return
    for one in stated:
        policy_id = one["policy_id"]
        own = [row for row in turns if row.get("policy_id") == policy_id]
        trained = [row["trained"] for row in own if row.get("trained") is not None]
        if one.get("trained") != (any(trained) if trained else None):
            yield f"whether policy {policy_id} is trained differs from its calls"
        counts = [("calls", len(own))]
        if samples:
            counts.append(("samples", sum(row.get("policy_id") == policy_id for row in samples)))
        for name, count in counts:
            if one[name] != count:
                yield f"{count} {name} of policy {policy_id} are in the file, but the export had {one[name]}"


def _check(row: Row, calls: Mapping[str, Row], trained: dict[str, str], whole: int) -> Iterator[Found]:
    ids, mask, position = row["input_ids"], row["loss_mask"], 0
    for span in row["turn_spans"]:
        call_id, start, end = span["call_id"], span["start"], span["end"]
        if not position <= start < end <= len(ids):
            yield call_id, "its span overlaps another, or is outside of the tokens"
            return
        if any(mask[position:start]):
            yield "", "trains tokens that no call sampled"
        call = calls.get(call_id)
        if call is None or call["completion_token_ids"] is None or call["prompt_token_ids"] is None:
            yield call_id, "the call is not in turns"
            return
        yield from ((call_id, what) for what in _check_span(row, span, call))
        if any(mask[start:end]) and trained.setdefault(call_id, row["sample_id"]) != row["sample_id"]:
            yield call_id, f"trained in sample {trained[call_id]} too"
        position = end
    if any(mask[position:]):
        yield "", "trains tokens that no call sampled"
    if row["logprobs"] is not None and any(p != 0 for p, m in zip(row["logprobs"], mask, strict=True) if not m):
        yield "", "has logprobs where nothing is trained"
    yield from (("", what) for what in _check_whole(row, calls, whole))


def _check_span(row: Row, span: Mapping[str, Any], call: Row) -> Iterator[str]:
    """Yields the differences between a call and one span with everything before it."""
    start, end = span["start"], span["end"]
    sampled, mask = call["completion_token_ids"], row["loss_mask"][start:end]
    if row["input_ids"][start:end] != sampled[: end - start] or row["input_ids"][:start] != call["prompt_token_ids"]:
        yield "its tokens differ from the call's"
        return
    partial, why = end - start < len(sampled), span.get("untrained_reason")
    if any(mask) and (partial or not all(mask)):
        yield "trains only a part of the call's sampled tokens"
    if why is not None and (any(mask) == bool(why) or (why not in _CONTEXT and (why == "PARTIAL") != partial)):
        yield f"its mask is not that of a turn with untrained_reason {why!r}"
    is_own = row.get("policy_id") == call.get("policy_id")
    if any(mask) and not is_own:
        yield "is trained, but is of another policy than the sample"
    if why == "OTHER_POLICY" and is_own:
        yield "is of the sample's policy, but its untrained_reason is 'OTHER_POLICY'"
    if why is not None and call.get("trained") is not None and (why == "MODEL_UNTRAINED") == call["trained"]:
        yield f"its model is {'' if call['trained'] else 'not '}trained, but its untrained_reason is {why!r}"
    if any(mask) and call["completion_logprobs"] is not None:
        given = None if row["logprobs"] is None else row["logprobs"][start:end]
        if given != call["completion_logprobs"]:
            yield "its logprobs differ from the call's"


def _check_whole(row: Row, calls: Mapping[str, Row], whole: int) -> Iterator[str]:
    """Yields the row's own fields that its calls contradict. Columns that an older version lacks are not compared."""
    turns = row["turn_spans"]
    own = [calls[span["call_id"]] for span in turns]
    versions = list(_versions(turns, own))
    numbers = [span["policy_version"] for span in _versions(*_own(row, turns, own))]
    samplings = [call["sampling_used"] for call in own]
    expected = {
        "prompt_len": turns[0]["start"] if turns else len(row["input_ids"]),
        "policy_spans": versions,
        "policy_version_min": min(numbers, default=None),
        "policy_version_max": max(numbers, default=None),
        "samplings": samplings,
        "temperatures": [(sampling or {}).get("temperature") for sampling in samplings],
        "weight": sum(row["loss_mask"]) / whole if whole else 0.0,
        "turn_policies": [call.get("policy_id") or "" for call in own] if row.get("policy_id") else None,
    }
    last = row["sample_id"].removeprefix(f"{row['rollout_id']}-")
    leaf = calls.get(last) or calls.get(last.removesuffix(f"-{row.get('policy_id')}"))
    if leaf is None or leaf["completion_token_ids"] is None or leaf["prompt_token_ids"] is None:
        yield "the call that it ends with is not in turns"
    else:
        expected["input_ids"] = leaf["prompt_token_ids"] + leaf["completion_token_ids"]
        expected["truncated"] = leaf.get("finish_reason") in _TRUNCATED
        expected |= {name: leaf[name] for name in ("branch_id", "role", "tokenizer_sha256") if name in leaf}
    modes = {call["logprobs_mode"] for call in own if call["completion_logprobs"] is not None}
    if len(modes) == 1:  # turns of several modes have none in common
        expected["logprobs_mode"] = modes.pop()
    if row.get("top_token_ids") is not None:
        expected |= _top(row, own)
    line, is_endless = _line(row, calls)
    if is_endless:
        yield "its last call is among its own parents"
    if row.get("tensors") is not None:
        expected |= _tensors(row, line)
    elif "tensors" in row and any(
        call.get("completion_tensors") and span.get("untrained_reason") != "PARTIAL"
        for span, call in zip(*_own(row, turns, own), strict=True)
    ):
        yield "tensors are left out, which its calls have"
    if "images" in row:
        expected["images"] = _images(row, line)
    for name, value in expected.items():
        if name in row and not _same(row[name], value):
            yield f"{name} does not match its calls"


def _top(row: Row, calls: Sequence[Row]) -> dict[str, list[list[Any]]]:
    """Returns the alternatives of the trained tokens, filled up where a call has fewer; nothing if `turns` has none."""
    trained = [
        call
        for span, call in zip(row["turn_spans"], calls, strict=True)
        if any(row["loss_mask"][span["start"] : span["end"]])
    ]
    if any(call.get("completion_top_count") and call.get("completion_top_token_ids") is None for call in trained):
        return {}
    width = max((call.get("completion_top_count") or 0 for call in trained), default=0)
    found: dict[str, list[list[Any]]] = {}
    for name, filler in (("top_token_ids", -1), ("top_logprobs", None)):
        given = [call.get(f"completion_{name}") or [[] for _ in call["completion_token_ids"]] for call in trained]
        found[name] = [line + [filler] * (width - len(line)) for lines in given for line in lines]
    return found


def _line(row: Row, calls: Mapping[str, Row]) -> tuple[list[Row], bool]:
    """Returns the sample's last call and the parents of which it shares tokens, and whether they lead back to one of
    them, where the list ends.
    """
    line: dict[str, Row] = {}
    call_id = row["turn_spans"][-1]["call_id"] if row["turn_spans"] else ""
    while (call := calls.get(call_id)) is not None:
        if call_id in line:
            return list(line.values()), True
        line[call_id] = call
        call_id = (call.get("parent_call_id") or "") if call.get("prompt_shared_count") else ""
    return list(line.values()), False


def _images(row: Row, line: Sequence[Row]) -> list[Row] | None:
    """Returns the images of the sample's prompts: each call has those that its parent's prompt lacks."""
    found: list[Row] = []
    limit = len(row["input_ids"])
    for call in line:
        own = call.get("prompt_images") or []
        found[:0] = [one for one in own if one["token_start"] + one["token_count"] <= limit]
        limit = min(limit, call.get("prompt_shared_count") or 0)
    return found or None


def _tensors(row: Row, line: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the tensors of the sample's calls of its policy, joined; nothing if `turns` has no rows of them."""
    policy_id = row.get("policy_id") or ""
    parts: list[Part] = []
    for call in line:
        of = call.get("policy_id") or ""
        given = call.get("completion_tensors") or [] if of == policy_id else []
        if any(one.get("data") is None for one in given):
            return {}
        parts.append(Part(call.get("prompt_shared_count") or 0, [_tensor(one) for one in given], of))
    with_data = all(one.get("data") is not None for one in row["tensors"])
    found = [tensor_row(one.digested(), with_data=with_data) for one in joined(reversed(parts), policy_id)]
    return {"tensors": found}


def _tensor(row: Row) -> TokenTensor:
    return TokenTensor(row["name"], row["dtype"], row["start"], tuple(row["shape"]), base64.b64decode(row["data"]))


def _own(
    row: Row, turns: Sequence[Mapping[str, Any]], calls: Sequence[Row]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Row]]:
    """Returns the turns of the sample's policy, and their calls."""
    kept = [
        (turn, call) for turn, call in zip(turns, calls, strict=True) if call.get("policy_id") == row.get("policy_id")
    ]
    return [turn for turn, _ in kept], [call for _, call in kept]


def _versions(turns: Sequence[Mapping[str, Any]], calls: Sequence[Row]) -> Iterator[dict[str, int]]:
    """Returns the policy version of each token span of the sample; adjacent spans of one version are merged."""
    last: dict[str, int] | None = None
    for turn, call in zip(turns, calls, strict=True):
        for span in call["policy_spans"]:
            start, end = turn["start"] + span["start"], min(turn["start"] + span["end"], turn["end"])
            if start >= end:
                continue
            if last is not None and (last["policy_version"], last["end"]) == (span["policy_version"], start):
                last["end"] = end
                continue
            if last is not None:
                yield last
            last = {"policy_version": span["policy_version"], "start": start, "end": end}
    if last is not None:
        yield last


def _same(one: Any, other: Any) -> bool:
    """Compares as JSON: rows from a file have lists where rows in memory have tuples or arrays."""
    return one == other or _json(one) == _json(other)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=list, option=orjson.OPT_SORT_KEYS)
