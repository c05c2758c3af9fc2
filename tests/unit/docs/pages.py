"""The tables of a Markdown page, by the heading they stand under."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

Row = dict[str, str]


def tables(page: str) -> dict[str, list[Row]]:
    """Each heading's tables as rows of column name to cell; several tables under one heading follow each other."""
    found: dict[str, list[Row]] = {}
    heading, columns = "", list[str]()
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading, columns = line.lstrip("# ").strip(), []
        elif not line.startswith("|"):
            columns = []
        else:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not columns:
                columns = cells
            elif set("".join(cells)) - {"-"}:
                assert len(cells) == len(columns), f"{page}: {line}"
                found.setdefault(heading, []).append(dict(zip(columns, cells, strict=True)))
    return found


def words(cell: str) -> set[str]:
    """The comma-separated words of a cell."""
    return {word.strip() for word in cell.split(",")}
