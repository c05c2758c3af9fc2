"""Checks the form of exported rows before verification: their columns, their digests, and completeness per rollout;
keeps them on disk until all rows of a rollout are there.
"""

import base64
import contextlib
import hashlib
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from penstock.client.errors import InvalidArgument
from penstock.client.transport.atomic_files import writing
from penstock.tables.columns import COLUMNS, Kind, Row, Table, row_digest
from penstock.values.token_tensors import DTYPES

_SEALED_SINCE: Final = 3
"""The first schema version whose rows have a digest."""
_NEEDED: Final = MappingProxyType(
    {
        Table.TURNS: (
            *("rollout_id", "call_id", "chain_index", "chain_sha256", "capture_level", "prompt_token_ids"),
            *("completion_token_ids", "completion_logprobs", "logprobs_mode", "policy_spans", "sampling_used"),
        ),
        Table.SEQUENCES: ("rollout_id", "sample_id", "input_ids", "loss_mask", "logprobs", "turn_spans"),
        Table.TOOL_CALLS: ("rollout_id", "tool_call_id", "result_json", "result_sha256"),
    }
)
"""The columns that a check reads, for each schema version."""
_NEVER_NULL: Final = frozenset(
    ("rollout_id", "call_id", "capture_level", "policy_spans", "sample_id", "input_ids", "loss_mask", "turn_spans")
)
_OF_ROLLOUT: Final = (
    *("run_id", "group_id", "group_index", "task_id", "agent", "labels", "tokenizer_sha256", "error", "error_cause"),
    *("error_caused_by", "rollout_chain_sha256", "reward", "reward_components", "grade", "findings", "policies"),
)
"""Columns in which all rows of a rollout agree."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A failed check. `call_id` is empty where it concerns the whole rollout."""

    rollout_id: str
    call_id: str
    message: str


@dataclass(slots=True)
class Proof:
    """The result of a verification. It holds when `problems` is empty and `calls` is not 0.

    Attributes:
        rollouts: with at least one call.
        calls: whose chain hash was computed and was right, or has a problem.
        tokens: sampled tokens among them.
        unproven: delivered calls without exact tokens (text only): their hashes are taken as stated.
        samples: rows of `sequences` that were compared with the calls.
        tool_calls: rows of `tool_calls` that were checked.
        undigested: rows written before digests existed: fields that no chain covers are unchecked.
        replayed: replayed calls that were compared with the calls that they name as their origin.
        unproven_replays: replayed calls whose origin was not given, or has no token ids; 0 if none were compared.
    """

    rollouts: int = 0
    calls: int = 0
    tokens: int = 0
    unproven: int = 0
    samples: int = 0
    tool_calls: int = 0
    undigested: int = 0
    replayed: int = 0
    unproven_replays: int = 0
    problems: list[Problem] = field(default_factory=list)


K = TypeVar("K", str, tuple[str, str])


class KeptRows(Generic[K]):
    """Rows of a table by a key, in a temporary file without a name.

    Memory holds some 300 bytes for each key, and 8 for each row. The file is in the directory for temporary files
    (`TMPDIR`) and has about the size of the rows as JSON Lines. A row is read back as it was, but that its token ids
    are arrays of 4 bytes for each id: as a list of Python's integers they have 36. Rows are added before any is read.
    Iterating yields the keys, in the order in which each came first.

    Raises:
        ConfigurationError: `FILE_NOT_WRITTEN`, also from all methods that read or write.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._ids = [name for name, kind in COLUMNS[table].items() if kind is Kind.IDS]
        self._places: dict[K, array[int]] = {}
        with writing(Path("a temporary file")):
            self._folder = Path(tempfile.gettempdir())
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.total = 0
        """The number of rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it was written
            self._file.close()

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._places)

    def __iter__(self) -> Iterator[K]:
        return iter(self._places)

    def add(self, key: K, row: Row) -> None:
        """Adds a row, whose form was checked.

        Raises:
            InvalidArgument: `ROW_INVALID`, it is nested too deeply: beyond what an export can have.
        """
        ids = {name: array("i", row[name]) for name in self._ids if row.get(name) is not None}
        try:
            content = pickle.dumps(row | ids, pickle.HIGHEST_PROTOCOL)
        except RecursionError:
            _refuse(f"A row of {self._table} is nested too deeply")
        with writing(self._folder):
            self._places.setdefault(key, array("q")).append(self._file.tell())
            self._file.write(content)
        self.total += 1

    def rows(self, key: K) -> list[Row]:
        """Returns the rows of a key in the order in which they came; none if there is no such key."""
        return [self._read(place) for place in self._places.get(key, ())]

    def last(self, key: K) -> Row | None:
        """Returns the row of a key that came last."""
        places = self._places.get(key)
        return None if places is None else self._read(places[-1])

    def _read(self, place: int) -> Row:
        with writing(self._folder):  # what is still in a buffer is written first
            self._file.seek(place)
            row: Row = pickle.load(self._file)  # noqa: S301 - written above; no other process has the file
        return row


def keep_checked(rows: Iterable[Row], table: Table, proof: Proof, kept: KeptRows[str]) -> None:
    """Keeps the rows by rollout; invalid rows become problems of the proof.

    Raises:
        InvalidArgument: `ROW_INVALID`, a row is not of the table.
        ConfigurationError: `FILE_NOT_WRITTEN`.
    """
    for number, row in enumerate(rows, 1):
        _check_form(row, table, number)
        message = _altered(row)
        if message:
            proof.problems.append(Problem(row["rollout_id"], row.get("call_id") or "", f"a row of {table} {message}"))
        proof.undigested += _version(row) < _SEALED_SINCE
        kept.add(row["rollout_id"], row)


def checked_origins(rows: Iterable[Row], proof: Proof) -> Iterator[Row]:
    """Yields rows of `turns` that others are compared with: they need not be all of their rollouts.

    Raises:
        InvalidArgument: `ROW_INVALID`, a row is not of `turns`.
    """
    for number, row in enumerate(rows, 1):
        _check_form(row, Table.TURNS, number)
        message = _altered(row)
        if message:
            proof.problems.append(Problem(row["rollout_id"], row["call_id"], f"the row of an origin {message}"))
        yield row


def has_its_rows(tensors: list[Row] | None) -> bool:
    """Whether the rows of tensors, where the export has them, are those of their digests."""
    return all(
        hashlib.sha256(base64.b64decode(one["data"])).hexdigest() == one["sha256"]
        for one in tensors or ()
        if one.get("data") is not None
    )


def _are_tensors(value: Any) -> bool:
    """Whether each has the digest of its rows, and rows that can be read."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and all(_is_text(one.get(name)) for name in ("name", "sha256"))
        and one.get("dtype") in DTYPES
        and _list_of(_is_int(32))([one.get("start"), *(one.get("shape") or [None])])
        and (one.get("data") is None or _is_base64(one["data"]))
        for one in value
    )


def _are_images(value: Any) -> bool:
    """Whether each has the digest of its file and a place among the tokens."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and _is_text(one.get("sha256"))
        and _list_of(_is_int(32))([one.get("token_start"), one.get("token_count")])
        for one in value
    )


def _is_base64(value: Any) -> bool:
    try:
        return _is_text(value) and bool(base64.b64decode(value, validate=True))
    except ValueError:
        return False


def unlike(one: Row, other: Row) -> list[str]:
    """Returns the rollout-wide columns in which two rows differ although both have them."""
    return [name for name in _OF_ROLLOUT if name in one and name in other and one[name] != other[name]]


def _version(row: Row) -> int:
    version = row.get("schema_version")
    return version if isinstance(version, int) else 1


def _altered(row: Row) -> str:
    if "row_sha256" not in row and _version(row) < _SEALED_SINCE:
        return ""
    return "" if row.get("row_sha256") == row_digest(row) else "was changed after the export: its digest differs"


def together(rows: list[Row], table: Table) -> list[str]:
    """Returns the problems of a rollout's rows of one table, taken together."""
    found = [f"its rows of {table} differ in {name}" for row in rows for name in unlike(row, rows[0])][:1]
    stated = {row.get("rollout_rows") for row in rows if _version(row) >= _SEALED_SINCE} - {len(rows)}
    if stated:
        found.append(f"{len(rows)} rows of {table} are in the file, but the export had {stated.pop()}")
    return found


def _check_form(row: Row, table: Table, number: int) -> None:
    columns = COLUMNS[table]
    for name in _NEEDED[table]:
        if name not in row:
            _refuse(f"A row has no {name}: it is not from the table {table}, or an older version wrote it")
        if row[name] is None and name in _NEVER_NULL:
            _refuse(f"Row {number} of {table}: {name} is null")
    for name, value in row.items():
        kind = columns.get(name)
        if kind is not None and value is not None and not _FORMS[kind](value):
            _refuse(f"Row {number} of {table}: {name} is not a {kind}")
    if table is Table.TURNS and not isinstance(row["sampling_used"], dict | None):
        _refuse(f"Row {number} of {table}: sampling_used is not an object")
    if table is Table.TURNS and not _or_null(_is_origin)(row.get("replayed_from")):
        _refuse(f"Row {number} of {table}: replayed_from does not name a call")
    if not _or_null(_are_policies)(row.get("policies")):
        _refuse(f"Row {number} of {table}: policies are not a list of policies")
    for name in ("completion_tensors", "tensors"):
        if not _or_null(_are_tensors)(row.get(name)):
            _refuse(f"Row {number} of {table}: {name} are not tensors")
    for name in ("prompt_images", "images"):
        if not _or_null(_are_images)(row.get(name)):
            _refuse(f"Row {number} of {table}: {name} are not images")
    if table is Table.SEQUENCES:
        lengths = {len(row[name]) for name in ("input_ids", "loss_mask", "logprobs") if row[name] is not None}
        if len(lengths) > 1:
            _refuse(f"Row {number} of {table}: input_ids, loss_mask and logprobs have several lengths")
        trained = sum(row["loss_mask"])
        if any(len(row[name]) != trained for name in ("top_token_ids", "top_logprobs") if row.get(name) is not None):
            _refuse(f"Row {number} of {table}: top_token_ids and top_logprobs are not of the trained tokens")


def _refuse(message: str) -> NoReturn:
    raise InvalidArgument(message, reason="ROW_INVALID")


def _is_int(bits: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _rows_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Checks a list of lists of one length."""
    rows = _list_of(_list_of(test))
    return lambda value: rows(value) and len({len(row) for row in value}) <= 1


def _spans_of(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Checks records for these fields; fields that an older version lacks are not required here."""
    return _list_of(
        lambda item: isinstance(item, dict) and all(name in item and test(item[name]) for name, test in fields.items())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_origin(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(value.get(name)) for name in ("rollout_id", "call_id"))


def _are_policies(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and _is_text(one.get("policy_id"))
        and all(_is_int(32)(one.get(name)) for name in ("calls", "samples"))
        for one in value
    )


def _or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


_FORMS: Final[Mapping[Kind, Callable[[Any], bool]]] = MappingProxyType(
    {
        Kind.TEXT: _is_text,
        Kind.BOOL: lambda value: isinstance(value, bool),
        Kind.INT32: _is_int(32),
        Kind.INT64: _is_int(64),
        Kind.DOUBLE: _is_number,
        Kind.JSON: lambda value: True,
        Kind.TEXTS: _list_of(_is_text),
        Kind.IDS: _list_of(_is_int(32)),
        Kind.FLOATS: _list_of(_or_null(_is_number)),
        Kind.ID_ROWS: _rows_of(_is_int(32)),
        Kind.FLOAT_ROWS: _rows_of(_or_null(_is_number)),
        Kind.DOUBLES: _list_of(_or_null(_is_number)),
        Kind.MASK: _list_of(lambda value: type(value) is int and value in (0, 1)),
        Kind.VERSIONS: _spans_of(policy_version=_is_int(64), start=_is_int(32), end=_is_int(32)),
        Kind.TURN_SPANS: _spans_of(call_id=_is_text, start=_is_int(32), end=_is_int(32)),
        Kind.FINDINGS: _spans_of(severity=_is_text, reason=_is_text, message=_is_text),
    }
)
