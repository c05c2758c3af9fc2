"""Verifies replayed calls against the calls that they name as their origin (docs/trajectories.md#proof).

A replayed call has the prompt, ids, logprobs and policy versions of the call that it was sampled for. The chain of its
own rollout covers what the call has, but not that its origin has the same: for that the origin's export is needed.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from penstock.tables.columns import Row

_COMPARED: Final = (
    ("prompt_token_ids", "prompt differs"),
    ("completion_token_ids", "sampled ids differ"),
    ("completion_logprobs", "logprobs differ"),
    ("logprobs_mode", "mode of logprobs differs"),
    ("completion_top_sha256", "alternatives differ"),
    ("policy_id", "policy differs"),
    ("policy_spans", "policy versions differ"),
    ("completion_tensors", "tensors differ"),
)
"""Columns that are the same in both calls, and what a problem says of them."""

Key = tuple[str, str]
"""The ids of a rollout and of one of its calls."""


def key_of(row: Row) -> Key:
    """Returns the key of a row of `turns`."""
    return row["rollout_id"], row["call_id"]


def origin_of(row: Row) -> Key | None:
    """Returns the key of the call that a row names as its origin; None = it was not replayed."""
    named = row.get("replayed_from")
    return None if named is None else key_of(named)


def check_replay(row: Row, origin: Row | None) -> list[str] | None:
    """Returns the problems of a replayed call.

    Args:
        row: of `turns`, whose form was checked; its `replayed_from` is set.
        origin: the call that is named there; None = it is not given.

    Returns:
        None if the origin is not given, or has no token ids to compare.
    """
    if origin is None or origin["prompt_token_ids"] is None:
        return None
    return list(_problems(row, row["replayed_from"], origin))


def _problems(row: Row, named: Row, origin: Row) -> Iterator[str]:
    where = f"call {named['call_id']} of rollout {named['rollout_id']}, which it names as its origin"
    if named.get("attempt") and origin.get("attempt") and named["attempt"] != origin["attempt"]:
        yield f"it names attempt {named['attempt']} of its origin, but {where}, is of attempt {origin['attempt']}"
    for name, words in _COMPARED:
        if name in row and name in origin and not _same(name, row[name], origin[name]):
            yield f"its {words} from {where}"


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "completion_logprobs" and one is not None and other is not None:
        # JSON has the shortest digits of a float32, Parquet the float32.
        return bool(np.array_equal(np.asarray(one, "<f4"), np.asarray(other, "<f4"), equal_nan=True))
    if name == "completion_tensors":  # which may have been exported without their rows
        one, other = ([{**tensor, "data": None} for tensor in given or ()] for given in (one, other))
    return bool(one == other)
