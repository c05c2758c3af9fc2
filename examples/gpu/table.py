"""The table that a run is for: each agent's share of passed attempts before and after training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.evaluation import Summary
from penstock.evaluation.compare import compare


def rows(before: Mapping[str, Summary], after: Mapping[str, Summary], trained: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each agent: pass@1 with its 95 % interval before and after, their difference, and its p.

    An agent without a graded attempt has None there. `trained` are the agents that were trained with.
    """
    found = []
    for agent, first in before.items():
        second = after.get(agent)
        both = None if second is None else compare(first, second)
        found.append(
            {
                "agent": agent,
                "trained": agent in trained,
                "before": _part(first),
                "after": None if second is None else _part(second),
                "difference": None if both is None else both.difference,
                "p": None if both is None else both.p,
            }
        )
    return found


def markdown(found: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """The rows as a table, with notes below it."""
    lines = ["| agent | in training | before | after | difference | p |", "|---|---|---|---|---|---|"]
    for row in found:
        difference = "" if row["difference"] is None else f"{row['difference']:+.2f}"
        p = "" if row["p"] is None else f"{row['p']:.3f}"
        seen = "yes" if row["trained"] else "no"
        lines.append(
            f"| {row['agent']} | {seen} | {_text(row['before'])} | {_text(row['after'])} | {difference} | {p} |"
        )
    return "\n".join([*lines, "", *notes, ""])


def write(folder: Path, found: Sequence[Mapping[str, Any]], about: Mapping[str, Any], notes: Sequence[str]) -> Path:
    """Writes `table.md` and `table.json`; returns the first."""
    (folder / "table.json").write_text(json.dumps({**about, "rows": list(found)}, indent=1) + "\n", "utf-8")
    file = folder / "table.md"
    file.write_text(markdown(found, notes), "utf-8")
    return file


def _part(summary: Summary) -> dict[str, Any]:
    share = summary.pass_at.get(1)
    return {
        "passed": sum(task.passed for task in summary.tasks),
        "graded": sum(task.attempts for task in summary.tasks),
        "excluded": dict(summary.excluded),
        "share": None if share is None else share.value,
        "low": None if share is None else share.low,
        "high": None if share is None else share.high,
    }


def _text(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "not run"
    if part["share"] is None:
        return "not graded"
    left_out = sum(part["excluded"].values())
    more = f", {left_out} not graded" if left_out else ""
    return f"{part['share']:.2f} ({part['low']:.2f} to {part['high']:.2f}), {part['passed']}/{part['graded']}{more}"
