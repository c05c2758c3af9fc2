"""Pages of lists: bounded in rows and bytes, with a cursor that stays valid while new things come."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson

from penstock.assistant.answers import FACT_BYTES, plain
from penstock.assistant.errors import ToolError
from penstock.assistant.redaction import Redactor

CURSOR_CHARACTERS: Final = 400

T = TypeVar("T")
Key = tuple[float, str]

_NOTHING: Final = Redactor()


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the rows; `total` counts all, `cursor` leads to the next ones, None at the end."""

    rows: list[Mapping[str, Any]]
    total: int
    cursor: str | None

    def facts(self, name: str) -> dict[str, Any]:
        """Returns the page as facts, its rows under `name`."""
        return {"total": self.total, name: self.rows, "next_cursor": self.cursor}


def page(
    items: Iterable[T], key: Callable[[T], Key], row: Callable[[T], Mapping[str, Any]], cursor: str, limit: int
) -> Page:
    """Returns the items after the cursor, in the order of their keys: a number, and an id that makes it unique.

    Raises:
        ToolError: `CURSOR_INVALID`.
    """
    after = _read(cursor)
    ordered = sorted(((key(item), item) for item in items), key=lambda pair: pair[0])
    rows: list[Mapping[str, Any]] = []
    size, last = 0, after
    for place, item in ordered:
        if after is not None and place <= after:
            continue
        made = row(item)
        size += len(orjson.dumps(plain(made, _NOTHING)))
        if len(rows) >= limit or (rows and size > FACT_BYTES):
            return Page(rows, len(ordered), None if last is None else f"{last[0]!r}~{last[1]}")
        rows.append(made)
        last = place
    return Page(rows, len(ordered), None)


def _read(cursor: str) -> Key | None:
    if not cursor:
        return None
    number, mark, identifier = cursor.partition("~")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not mark or math.isnan(value):
        raise ToolError(
            "cursor: it is not a `next_cursor` of this tool",
            reason="CURSOR_INVALID",
            advice="leave it out to begin with the first page",
        )
    return value, identifier
