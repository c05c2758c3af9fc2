"""docs/exports.md against the tables."""

from __future__ import annotations

import re

from tests.unit.docs.pages import ROOT

from penstock.tables.columns import COLUMNS, SCHEMA_VERSION, Table

PAGE = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")


def listed(heading: str) -> list[tuple[str, str]]:
    """Columns with their types, in the order of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", section, re.MULTILINE)
    return [(name, kind.strip()) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]


def test_the_page_lists_each_table_s_columns_with_their_types() -> None:
    """Who reads an export finds every column of it, and none that is not there."""
    common = listed("In every table")
    for table in Table:
        documented = dict(common + listed(table))
        assert documented == {name: str(kind) for name, kind in COLUMNS[table].items()}
        assert len(documented) == len(common) + len(listed(table))


def test_the_page_states_the_version_in_force() -> None:
    """A reader knows which version he reads about."""
    assert f"`schema_version` is {SCHEMA_VERSION}." in PAGE
