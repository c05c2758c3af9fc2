"""Tensors of tokens: their shape, their pieces, and how those of a conversation's calls are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.values.token_tensors import (
    MOST_BYTES,
    MOST_PIECES,
    MOST_TENSORS,
    Part,
    TokenTensor,
    first_gap,
    joined,
    merged,
    pieces,
    problems_of,
    read,
    write,
)

NAME = "routed_experts"


def tensor(start: int, values: Any, dtype: str = "uint8") -> TokenTensor:
    """One layer with one expert: a number for each token."""
    rows = np.asarray(values, dtype).reshape(-1, 1, 1)
    return TokenTensor(NAME, dtype, start, rows.shape, rows.tobytes())


def numbers(one: TokenTensor) -> list[int]:
    values: NDArray[Any] = np.frombuffer(one.data, np.dtype(one.dtype).newbyteorder("<"))
    return [int(value) for value in values]


@pytest.mark.requirement("R132")
def test_calls_in_a_row_are_one_tensor() -> None:
    """The last token of a call has no row there; the next call, which had it as input, has it."""
    first, second = tensor(0, [1, 2, 3]), tensor(3, [4, 5])
    (found,) = joined([Part(0, [first]), Part(4, [second])])
    assert (found.start, numbers(found)) == (0, [1, 2, 3, 4, 5])


@pytest.mark.requirement("R132")
def test_a_branch_has_the_rows_of_what_it_shares_and_its_own() -> None:
    """Behind the fork the parent's are of other tokens. The token at the fork chose another next one."""
    (found,) = joined([Part(0, [tensor(0, [1, 2, 3, 4, 5])]), Part(3, [tensor(2, [33, 34, 35])])])
    assert numbers(found) == [1, 2, 33, 34, 35]
    (alone,) = joined([Part(0, [tensor(0, [1, 2, 3, 4, 5])]), Part(3, ())])
    assert numbers(alone) == [1, 2, 3]


@pytest.mark.requirement("R132")
def test_rows_that_an_earlier_call_has_are_its_own() -> None:
    """Where it left some out, a later one's are used; where nobody has one, the tensors leave a gap."""
    parts = [Part(0, [tensor(2, [3, 4])]), Part(5, [tensor(1, [91, 92, 93, 94, 95, 96])])]
    (found,) = joined(parts)
    assert (found.start, numbers(found)) == (1, [91, 3, 4, 94, 95, 96])
    apart = joined([Part(0, [tensor(0, [1])]), Part(4, [tensor(3, [5, 6])])])
    assert [(one.start, numbers(one)) for one in apart] == [(0, [1]), (3, [5, 6])]
    assert (first_gap(apart, NAME), first_gap(apart, "other"), first_gap([found], NAME)) == (1, 0, 0)


@pytest.mark.requirement("R132")
@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [
        (("uint8", "uint16"), "uint16"),
        (("uint8", "int8"), "int16"),
        (("uint8", "int16"), "int16"),
        (("uint16", "int16"), "int32"),
        (("int8", "int32"), "int32"),
    ],
)
def test_types_that_differ_become_one_that_holds_both(dtypes: tuple[str, str], widest: str) -> None:
    """No expert's id changes."""
    values = [np.iinfo(dtype).max for dtype in dtypes]
    (found,) = merged([tensor(0, [values[0]], dtypes[0]), tensor(1, [values[1]], dtypes[1])])
    assert (found.dtype, numbers(found)) == (widest, values)


@pytest.mark.requirement("R132")
def test_pieces_of_a_tensor_join_to_the_same() -> None:
    """Each has at most so many bytes, or one row."""
    whole = tensor(7, range(10), "uint16")
    parts = [*pieces(whole, 7)]
    assert [(one.start, one.shape[0]) for one in parts] == [(7, 3), (10, 3), (13, 3), (16, 1)]
    assert merged(parts) == (whole,) and len([*pieces(whole, 1)]) == 10


@pytest.mark.requirement("R29", "R132")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "sampling_mask"}, "[0].name"),
        ({"dtype": "float32"}, "[0].dtype"),
        ({"shape": [3, 1]}, "[0].shape"),
        ({"shape": [3, 0, 1]}, "[0].shape"),
        ({"data": b"12"}, "[0].data"),
        ({"row_lengths": b"1234"}, "[0].row_lengths"),
        ({"shape": [MOST_BYTES + 1, 1, 1], "data": bytes(MOST_BYTES + 1)}, ""),
    ],
)
def test_a_malformed_tensor_is_named_by_its_field(changes: dict[str, Any], field: str) -> None:
    """So that its sender finds it, before anything is kept."""
    message = write(tensor(0, [1, 2, 3]), with_data=True)
    assert not [*problems_of([message])] and read(message) == tensor(0, [1, 2, 3])
    for name in changes:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(type(message)(**changes))
    assert [name for name, _ in problems_of([message])] == [field]


@pytest.mark.requirement("R29", "R132")
@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ([tensor(0, [1]), tensor(1, [2], "int32")], "[1].dtype"),
        ([tensor(4, [1], "int32"), tensor(0, [2])], "[0].dtype"),
        ([tensor(0, [1]), TokenTensor(NAME, "uint8", 1, (1, 2, 1), b"12")], "[1].shape"),
        ([tensor(2 * index, [1]) for index in range(MOST_TENSORS + 1)], ""),
        ([tensor(index, [1]) for index in range(MOST_PIECES + 1)], ""),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(tensors: list[TokenTensor], field: str) -> None:
    """One wide row would multiply the bytes of all others; many short ones cost time with each later call."""
    messages = [write(one, with_data=True) for one in tensors]
    found = [*problems_of(messages)]
    assert [name for name, _ in found][-1:] == [field]
    assert all(name == field for name, _ in found)


@pytest.mark.requirement("R132")
def test_as_many_tensors_as_a_completion_may_have_are_taken() -> None:
    """Rows that follow each other count once, in any order."""
    parts = [tensor(2 * index, [1]) for index in range(MOST_TENSORS)]
    assert not [*problems_of([write(one, with_data=True) for one in parts])]
    rows = [tensor(index, [1]) for index in reversed(range(MOST_PIECES))]
    assert not [*problems_of([write(one, with_data=True) for one in rows])]


@pytest.mark.requirement("R132")
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_many_short_tensors_are_those_of_each_position(seed: int) -> None:
    """Compared with a dictionary from position to row. Each policy's are those of its own calls."""
    random = np.random.default_rng(seed)
    parts: list[Part] = []
    expected: dict[str, dict[int, int]] = {"student": {}, "teacher": {}}
    for call in range(6):
        shared = int(random.integers(0, 40)) if call else 0
        own = {int(at): int(random.integers(0, 250)) for at in random.choice(60, 30, replace=False)}
        policy_id = ("student", "student", "teacher")[int(random.integers(0, 3))]
        parts.append(Part(shared, [tensor(at, [value]) for at, value in own.items()], policy_id))
        expected = {name: {at: rows[at] for at in rows if at < shared} for name, rows in expected.items()}
        later = {at: value for at, value in own.items() if at >= shared - 1}
        expected[policy_id] = own | expected[policy_id] | later
    bare = [Part(part.shared_count, [one.bare() for one in part.tensors], part.policy_id) for part in parts]
    for policy_id, rows in expected.items():
        found = joined(parts, policy_id)
        assert {one.start + at: value for one in found for at, value in enumerate(numbers(one))} == rows
        assert joined(bare, policy_id) == tuple(one.bare() for one in found)
    assert joined(parts) == ()
