"""Tensors of tokens (`penstock.chat.v1.TokenTensor`) as values: read, written, cut for messages, and joined along a
conversation. For services and clients.

Positions are among the tokens of a call's prompt and completion, or of a sample. A row is of the pass with its token as
input, so that a sequence's last token has none.
"""

import hashlib
import itertools
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from penstock.chat.v1 import completion_pb2

ROUTED_EXPERTS: Final = "routed_experts"
"""The experts that computed each token: rows of shape (layers, experts per token)."""

NAMES: Final = (ROUTED_EXPERTS,)
"""The names that services serve."""

MOST_BYTES: Final = 32 << 20
"""The most data that the tensors of one completion may have: more would not fit a message with the rest of it."""

MOST_TENSORS: Final = 64
"""The most tensors that a completion may have once those whose rows follow each other are one."""

MOST_PIECES: Final = 4096
"""The most messages that the tensors of one completion may come in."""

PIECE_BYTES: Final = 2 << 20
"""Data of one message, where a tensor is sent in several; at least one row."""

_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "int32": "i"}
)
_SIZES: Final[Mapping[str, int]] = MappingProxyType({"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4})

DTYPES: Final = tuple(_SIZES)
"""The types of experts' ids."""


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """Rows of consecutive tokens from position `start` on.

    Attributes:
        name: `routed_experts`.
        dtype: numpy's name.
        start: the first row's position.
        shape: the number of rows, then the shape of one row.
        data: little-endian, row after row; empty where it was left out.
        sha256: of the data; empty = not computed.
    """

    name: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    data: bytes = field(default=b"", repr=False)
    sha256: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return _SIZES[self.dtype] * math.prod(self.shape[1:])

    def digested(self) -> "TokenTensor":
        """Returns it with the digest of its data."""
        return replace(self, sha256=hashlib.sha256(self.data).digest())

    def bare(self) -> "TokenTensor":
        """Returns it without its data."""
        return replace(self, data=b"")

    def cut(self, start: int, end: int) -> "TokenTensor | None":
        """Returns its rows at positions [start, end), without a digest; None if it has none there."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        if (first, last) == (self.start, self.end):
            return self
        size = self.row_bytes
        data = self.data[(first - self.start) * size : (last - self.start) * size]
        return TokenTensor(self.name, self.dtype, first, (last - first, *self.shape[1:]), data)


@dataclass(frozen=True, slots=True)
class Part:
    """One call on the way from a conversation's root to a leaf: its tensors, how many tokens it shares with the call
    before it, and the policy that answered it ("" = the rollout has one).
    """

    shared_count: int
    tensors: Sequence[TokenTensor]
    policy_id: str = ""


def read(message: completion_pb2.TokenTensor) -> TokenTensor:
    """Returns the message as a value, unchecked."""
    return TokenTensor(message.name, message.dtype, message.start, tuple(message.shape), message.data, message.sha256)


def write(tensor: TokenTensor, *, with_data: bool) -> completion_pb2.TokenTensor:
    """Returns the value as a message."""
    message = completion_pb2.TokenTensor(
        name=tensor.name, dtype=tensor.dtype, start=tensor.start, shape=tensor.shape, sha256=tensor.sha256
    )
    if with_data:
        message.data = tensor.data
    return message


def problems_of(messages: Sequence[completion_pb2.TokenTensor]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the tensors of one completion, by themselves: the field, and why.

    Whether their positions are those of its tokens, and their ids those of experts, is not looked at.
    """
    if len(messages) > MOST_PIECES:
        yield "", f"{len(messages)} tensors, more than {MOST_PIECES}: send consecutive rows as one"
        return
    found = False
    for index, message in enumerate(messages):
        problem = _problem_of(message)
        if problem is not None:
            found = True
            yield f"[{index}].{problem[0]}", problem[1]
    if found:
        return
    size = sum(len(message.data) for message in messages)
    if size > MOST_BYTES:
        yield "", f"{size} bytes together, more than {MOST_BYTES}: leave out rows that earlier calls have"
    order = sorted(range(len(messages)), key=lambda index: (messages[index].name, messages[index].start))
    count = min(1, len(order))
    for before, after in itertools.pairwise(order):
        one, other = messages[before], messages[after]
        end = one.start + one.shape[0]
        count += one.name != other.name or end != other.start
        if one.name != other.name:
            continue
        if end > other.start:
            yield f"[{after}].start", f"position {other.start} has a row in tensors[{before}] too"
        if one.dtype != other.dtype:
            yield f"[{after}].dtype", f"{other.dtype}, where tensors[{before}] has {one.dtype}: send one type"
        if one.shape[1:] != other.shape[1:]:
            yield f"[{after}].shape", f"rows of {other.shape[1:]}, where tensors[{before}] has {one.shape[1:]}"
    if count > MOST_TENSORS:
        yield "", f"{count} tensors with gaps between them, more than {MOST_TENSORS}: leave the last ones out"


def _problem_of(message: completion_pb2.TokenTensor) -> tuple[str, str] | None:
    shape, size = message.shape, _SIZES.get(message.dtype)
    if message.name not in NAMES:
        return "name", f"{message.name!r} is not one of {', '.join(NAMES)}"
    if size is None:
        return "dtype", f"{message.dtype!r} is not one of {', '.join(DTYPES)}"
    if len(shape) != 3 or not all(shape):
        return "shape", f"must be rows, layers and experts per token, each at least 1, not {list(shape)}"
    if message.row_lengths:
        return "row_lengths", "must be empty: all rows of routed_experts have one shape"
    if len(message.data) != size * math.prod(shape):
        return "data", f"{len(message.data)} bytes for {list(shape)} {message.dtype}"
    return None


def pieces(tensor: TokenTensor, most_bytes: int = PIECE_BYTES) -> Iterator[TokenTensor]:
    """Yields a tensor's rows in order, each piece with at most so many bytes or a single row."""
    rows = max(1, most_bytes // tensor.row_bytes)
    for start in range(tensor.start, tensor.end, rows):
        piece = tensor.cut(start, start + rows)
        assert piece is not None
        yield piece


def merged(tensors: Iterable[TokenTensor]) -> tuple[TokenTensor, ...]:
    """Joins tensors of one name and row shape whose rows follow each other; in the order of name and position.

    All of one name have the narrowest type that holds the values of each. Rows must not overlap.
    """
    by_name: dict[str, list[TokenTensor]] = {}
    for tensor in sorted(tensors, key=lambda one: (one.name, one.start)):
        by_name.setdefault(tensor.name, []).append(tensor)
    found: list[TokenTensor] = []
    for some in by_name.values():
        dtype = _widest({one.dtype for one in some})
        runs: list[list[TokenTensor]] = []
        for one in (_widened(one, dtype) for one in some):
            last = runs[-1][-1] if runs else None
            if last is not None and last.end == one.start and last.shape[1:] == one.shape[1:]:
                runs[-1].append(one)
            else:
                runs.append([one])
        found += [_run(run) for run in runs]
    return tuple(found)


def joined(parts: Iterable[Part], policy_id: str = "") -> tuple[TokenTensor, ...]:
    """Returns one policy's tensors of a path through a conversation, from those of its calls, root first; without
    digests.

    A token's row is of the call that sampled it or had it in the new part of its prompt. The row of the last token that
    a call shares is its own too: it chose the next one. A later call's rows fill the gaps that earlier ones left. Rows
    of another policy's calls are of other weights: they leave such a gap.
    """
    known: dict[str, list[TokenTensor]] = {}
    for part in parts:
        border = max(0, part.shared_count - 1)
        for rows in known.values():
            _cut_tail(rows, part.shared_count)
        if part.policy_id != policy_id:
            continue
        for one in sorted(part.tensors, key=lambda one: one.start):
            rows = known.setdefault(one.name, [])
            if (own := one.cut(border, sys.maxsize)) is not None:
                _cut_tail(rows, own.start)
                _append(rows, own)
        early = _cut_all(part.tensors, 0, border)
        for name in {one.name for one in early}:
            rows, known[name] = known[name], []
            fill = _without([one for one in early if one.name == name], rows)
            for one in sorted([*rows, *fill], key=lambda one: one.start):
                _append(known[name], one)
    return merged(one for rows in known.values() for one in rows)


def first_gap(tensors: Iterable[TokenTensor], name: str) -> int:
    """Returns the first position for which none of the tensors has a row of this name."""
    at = 0
    for tensor in sorted((one for one in tensors if one.name == name), key=lambda one: one.start):
        if tensor.start > at:
            break
        at = max(at, tensor.end)
    return at


def _run(run: Sequence[TokenTensor]) -> TokenTensor:
    if len(run) == 1:
        return run[0]
    first, rows = run[0], run[-1].end - run[0].start
    return TokenTensor(
        first.name, first.dtype, first.start, (rows, *first.shape[1:]), b"".join(one.data for one in run)
    )


def _cut_tail(rows: list[TokenTensor], end: int) -> None:
    """Takes away the rows from position `end` on; `rows` are in order, of one name."""
    while rows and rows[-1].end > end:
        if (left := rows.pop().cut(0, end)) is not None:
            rows.append(left)
            return


def _append(rows: list[TokenTensor], one: TokenTensor) -> None:
    """Appends rows that follow those before. Without data they are joined at once, so that long lines cost little."""
    last = rows[-1] if rows else None
    if (
        last is None
        or last.data
        or one.data
        or (last.end, last.dtype, last.shape[1:])
        != (
            one.start,
            one.dtype,
            one.shape[1:],
        )
    ):
        rows.append(one)
    else:
        rows[-1] = replace(last, shape=(one.end - last.start, *last.shape[1:]), sha256=b"")


def _cut_all(tensors: Iterable[TokenTensor], start: int, end: int) -> list[TokenTensor]:
    return [piece for one in tensors if (piece := one.cut(start, end)) is not None]


def _without(tensors: Iterable[TokenTensor], others: Iterable[TokenTensor]) -> list[TokenTensor]:
    """The rows of `tensors` at positions where `others` have none of the same name."""
    taken: dict[str, list[TokenTensor]] = {}
    for other in sorted(others, key=lambda one: one.start):
        taken.setdefault(other.name, []).append(other)
    nexts = dict.fromkeys(taken, 0)
    left: list[TokenTensor] = []
    # One pass over both in order: comparing each with each takes seconds for thousands of short ones.
    for one in sorted(tensors, key=lambda one: one.start):
        own, at = taken.get(one.name, []), one.start
        index = nexts.get(one.name, 0)
        while index < len(own) and own[index].end <= at:
            index += 1
        nexts[one.name] = index
        while index < len(own) and own[index].start < one.end:
            left += _cut_all([one], at, own[index].start)
            at = max(at, own[index].end)
            index += 1
        left += _cut_all([one], at, one.end)
    return left


def _widest(dtypes: set[str]) -> str:
    if all(one.startswith("u") for one in dtypes):
        return max(dtypes, key=_SIZES.__getitem__)
    # A signed type holds the values of an unsigned one that is half as wide.
    size = max(_SIZES[one] * (2 if one.startswith("u") else 1) for one in dtypes)
    return f"int{8 * size}"


def _widened(tensor: TokenTensor, dtype: str) -> TokenTensor:
    if tensor.dtype == dtype:
        return tensor
    values = array(_CODES[tensor.dtype], tensor.data)
    if sys.byteorder != "little":
        values.byteswap()
    wide = array(_CODES[dtype], values)
    if sys.byteorder != "little":
        wide.byteswap()
    return TokenTensor(tensor.name, dtype, tensor.start, tensor.shape, wide.tobytes())
