"""The results of an assay as one HTML file, and as JSON.

Invariants: the file is self-contained and fetches nothing; all text of tasks and sandboxes is escaped, and no script
runs in the page, which its content security policy enforces as well.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from penstock.analysis.readable_calls import counted
from penstock.assay.model import Assay, Finding, Kind
from penstock.client.rollouts.assays import AssayLine
from penstock.client.transport.atomic_files import write_whole

_STYLE: Final = """
:root { --ink: #1f2328; --pale: #59636e; --ground: #fff; --box: #f6f8fa; --line: #d1d9e0; --good: #1a7f37;
  --bad: #cf222e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --pale: #9aa4af; --ground: #0d1117; --box: #161b22;
  --line: #3d444d; --good: #3fb950; --bad: #f85149; --warn: #d29922; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); color-scheme: light dark;
  margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
.note { color: var(--pale); }
.passed { color: var(--good); } .defect { color: var(--bad); } .warning { color: var(--warn); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--pale); font-weight: 500; } .n { text-align: right; white-space: nowrap; }
details { border-bottom: 1px solid var(--line); padding: .35rem 0; } summary { cursor: pointer; }
pre { background: var(--box); border-radius: 6px; padding: .6rem .8rem; white-space: pre-wrap; font-size: 12.5px; }
"""


def shape(assay: Assay) -> dict[str, Any]:
    """Returns a result as JSON values: the line of `penstock tasks assay --json`, and an entry of the JSON report."""
    return {
        "task_id": assay.task_id,
        "passed": assay.passed,
        "findings": [asdict(finding) for finding in assay.findings],
        "trials": [
            {
                "kind": trial.kind,
                "name": trial.name,
                "reward": trial.reward,
                "failure": trial.failure,
                "seconds": round(trial.seconds, 3),
            }
            for trial in assay.trials
        ],
        "setup_seconds": round(assay.setup_seconds, 3),
        "seconds": round(assay.seconds, 3),
        "files": assay.files,
        "size_bytes": assay.size_bytes,
        "digest": assay.digest,
    }


def line_of(assay: Assay) -> AssayLine:
    """Returns the line to sign."""
    return AssayLine(
        task_id=assay.task_id,
        digest=assay.digest,
        passed=assay.passed,
        failed=tuple(dict.fromkeys(str(finding.code) for finding in assay.defects)),
        accepted=tuple(dict.fromkeys(str(item.code) for item in assay.findings if item not in assay.defects)),
        backend=assay.backend,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def rewards(assay: Assay, kind: Kind) -> str:
    """Returns the rewards of the trials of a kind in short: `1 (5)`, `0 (2)`; the count is left out for one."""
    found = Counter("none" if item.reward is None else f"{item.reward:g}" for item in assay.trials if item.kind is kind)
    return ", ".join(f"{reward} ({count})" if count > 1 else reward for reward, count in found.most_common())


def size_text(size_bytes: int | None) -> str:
    """Returns a size for people."""
    if size_bytes is None:
        return ""
    amount, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def write_html(file: Path, title: str, assays: Sequence[Assay]) -> None:
    """Writes the report. Raises ConfigurationError `FILE_NOT_WRITTEN`."""
    write_whole(file, "".join(_page(title, assays)).encode())


def _page(title: str, assays: Sequence[Assay]) -> Iterable[str]:
    passed = sum(assay.passed for assay in assays)
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Assay of {_text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Assay of {_text(title)}</h1>"
        f'<p class="note">{counted(len(assays), "task")}, '
        f"{counted(sum(len(assay.trials) for assay in assays), 'trial')}</p>"
    )
    tiles = [("passed", passed, "passed"), ("with defects", len(assays) - passed, "defect")]
    yield '<div class="tiles">' + "".join(
        f'<div class="tile"><small>{name}</small><b class="{kind}">{count}</b></div>' for name, count, kind in tiles
    )
    yield "</div>"
    yield from _codes(assays)
    yield "<h2>Tasks</h2>" + _wide("Tasks", "".join(_rows(assays)))
    yield "<h2>Findings and trials</h2>"
    for assay in sorted(assays, key=lambda item: (item.passed, item.task_id)):
        yield from _task(assay)
    yield "</body></html>\n"


def _codes(assays: Sequence[Assay]) -> Iterable[str]:
    counts = Counter(
        (item.code, item.severity) for assay in assays for item in {f.code: f for f in assay.findings}.values()
    )
    if not counts:
        return
    rows = "".join(
        f'<tr><td class="{severity}">{code}</td><td>{severity}</td><td class="n">{count}</td></tr>'
        for (code, severity), count in counts.most_common()
    )
    head = '<tr><th>finding</th><th></th><th class="n">tasks</th></tr>'
    yield "<h2>What was found</h2>" + _wide("What was found", f"<table>{head}{rows}</table>")


def _rows(assays: Sequence[Assay]) -> Iterable[str]:
    yield (
        "<table><tr><th>task</th><th>verdict</th><th>solution</th><th>nothing</th><th>findings</th>"
        '<th class="n">set-up, s</th><th class="n">size</th></tr>'
    )
    for assay in assays:
        verdict = '<span class="passed">passed</span>' if assay.passed else '<span class="defect">defects</span>'
        codes = ", ".join(
            f'<span class="{item.severity}">{item.code}</span>' for item in {f.code: f for f in assay.findings}.values()
        )
        yield (
            f"<tr><td>{_text(assay.task_id)}</td><td>{verdict}</td><td>{rewards(assay, Kind.SOLUTION)}</td>"
            f"<td>{rewards(assay, Kind.NOTHING)}</td><td>{codes}</td>"
            f'<td class="n">{assay.setup_seconds:.1f}</td><td class="n">{size_text(assay.size_bytes)}</td></tr>'
        )
    yield "</table>"


def _task(assay: Assay) -> Iterable[str]:
    kind = "passed" if assay.passed else "defect"
    what = "passed" if assay.passed else counted(len(assay.defects), "defect")
    yield f'<details><summary><b>{_text(assay.task_id)}</b> <span class="{kind}">{what}</span></summary>'
    for finding in assay.findings:
        yield from _finding(finding)
    rows = "".join(
        f"<tr><td>{trial.kind}</td><td>{_text(trial.name)}</td>"
        f'<td class="n">{"none" if trial.reward is None else f"{trial.reward:g}"}</td>'
        f'<td>{_text(trial.failure[:300])}</td><td class="n">{trial.seconds:.1f}</td></tr>'
        for trial in assay.trials
    )
    head = '<tr><th>trial</th><th></th><th class="n">reward</th><th>failure</th><th class="n">s</th></tr>'
    yield _wide("Trials", f"<table>{head}{rows}</table>")
    yield f'<p class="note">digest {_text(assay.digest)}</p></details>'


def _finding(finding: Finding) -> Iterable[str]:
    yield f'<p><b class="{finding.severity}">{finding.code}</b> {_text(finding.message)}</p>'
    if finding.evidence.strip():
        yield f"<pre>{_text(finding.evidence)}</pre>"


def _wide(name: str, content: str) -> str:
    """Wraps content that scrolls by itself on a narrow screen, with the keyboard too."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{_text(name)}">{content}</div>'


def _text(value: object) -> str:
    """Escapes text for the page; invisible characters are made visible."""
    shown = (
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(value)
    )
    return escape("".join(shown), quote=True)
