"""`penstock doctor --attack`: runs attacks by hostile agents against this deployment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.markup import escape

from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, columns, emit, err, out
from penstock.redteam import Attack, Report, Result, Verdict, run

_SHOWN: Final = {
    Verdict.HELD: "[green]held[/]",
    Verdict.BROKEN: "[red]BROKEN[/]",
    Verdict.NOT_APPLICABLE: "[dim]not applicable[/]",
    Verdict.UNCLEAR: "[yellow]unclear[/]",
}


def list_attacks(attacks: Sequence[Attack], as_json: bool) -> int:
    """Lists the attacks; returns the exit code."""
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
    """Runs attacks on the running services, or on services of this command's own; returns exit code 1 when one is
    broken or none could be tried.
    """

    def show(result: Result) -> None:
        if as_json:
            emit(_shape(result))
        else:
            err.print(f"{_SHOWN[result.verdict]} {escape(result.name)} [dim]{result.seconds:.1f} s[/]")

    async with services(state_dir=state_dir) as ps:
        report = await run(ps, attacks, backend=backend, on_result=show)
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
    table = columns("", "attack", "graded", "attack and result")
    for result in report.results:
        why = "" if result.verdict is Verdict.HELD else f"\n→ {escape(clean('; '.join(result.reasons)))}"
        grading = result.grading.value.replace("_", " ")
        table.add_row(_SHOWN[result.verdict], result.attack.name, grading, escape(result.attack.tries) + why)
    out.print(table)
    counts = ", ".join(f"{report.count(verdict)} {verdict.value.replace('_', ' ')}" for verdict in Verdict)
    out.print(f"{counts} on {escape(report.backend)}")
