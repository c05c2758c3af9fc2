"""`penstock doctor --attack`: what a hostile agent gets out of this deployment, by trying it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.markup import escape

from penstock.cli.console import FAILED, OK, clean, columns, emit, err, out
from penstock.cli.services import services
from penstock.redteam import Attack, Report, Result, Verdict, run

_SHOWN: Final = {
    Verdict.HELD: "[green]held[/]",
    Verdict.BROKEN: "[red]BROKEN[/]",
    Verdict.NOT_APPLICABLE: "[dim]not applicable[/]",
    Verdict.UNCLEAR: "[yellow]unclear[/]",
}


def list_attacks(attacks: Sequence[Attack], as_json: bool) -> int:
    """Writes what there is to try; the exit code."""
    table = columns("class", "attack", "tries")
    for attack in attacks:
        if as_json:
            emit({"attack": attack.name, "class": attack.attack_class, "tries": attack.tries})
        else:
            table.add_row(attack.attack_class, attack.name, escape(attack.tries))
    if not as_json:
        out.print(table)
    return OK


async def attack(attacks: Sequence[Attack], backend: str, as_json: bool, state_dir: Path | None) -> int:
    """Tries attacks on the services that run, or on some of this command's own; the exit code is 1 when one is broken
    or none could be tried.
    """

    def tell(result: Result) -> None:
        if as_json:
            emit(_shape(result))
        else:
            err.print(f"{_SHOWN[result.verdict]} {escape(result.name)} [dim]{result.seconds:.1f} s[/]")

    async with services(state_dir=state_dir) as ps:
        report = await run(ps, attacks, backend=backend, on_result=tell)
    if as_json:
        emit({"backend": report.backend, **{verdict.value: report.count(verdict) for verdict in Verdict}})
    else:
        _show(report)
    return OK if report.held and report.count(Verdict.HELD) else FAILED


def _shape(result: Result) -> dict[str, Any]:
    return {
        "attack": result.attack.name,
        "class": result.attack.attack_class,
        "grading": result.grading,
        "tries": result.attack.tries,
        "verdict": result.verdict,
        "reasons": list(result.reasons),
        "reward": result.reward,
        "failure": result.failure,
        "rollout_id": result.rollout_id,
        "seconds": round(result.seconds, 3),
    }


def _show(report: Report) -> None:
    table = columns("", "attack", "graded", "what it tries, and what came of it")
    for result in report.results:
        why = "" if result.verdict is Verdict.HELD else f"\n→ {escape(clean('; '.join(result.reasons)))}"
        grading = result.grading.value.replace("_", " ")
        table.add_row(_SHOWN[result.verdict], result.attack.name, grading, escape(result.attack.tries) + why)
    out.print(table)
    counts = ", ".join(f"{report.count(verdict)} {verdict.value.replace('_', ' ')}" for verdict in Verdict)
    out.print(f"{counts} on {escape(report.backend)}")
