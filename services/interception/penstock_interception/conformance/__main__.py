"""`penstock conformance`, also `python -m penstock_interception.conformance`.

Exit codes: 0 the seven cases are exact and nothing is misread; 1 otherwise; 2 wrong usage; 4 the directory is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import orjson

from penstock_codec import CodecError
from penstock_interception.conformance.report import WIRES, Report, examine, load

EXACT, DEVIATES, REFUSED = 0, 1, 4


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite on a directory and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock conformance",
        description="Check whether conversations with your model continue from exactly the sampled tokens.",
    )
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        metavar="DIR",
        help="tokenizer.json, tokenizer_config.json and the chat template (there or in chat_template.jinja)",
    )
    parser.add_argument("--parser", metavar="NAME", help="parser of tool calls; unset = the template decides")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        report = examine(load(options.model, options.parser))
    except CodecError as error:
        if options.json:
            sys.stdout.write(orjson.dumps({"error": error.reason, "message": str(error)}).decode() + "\n")
        sys.stderr.write(f"error: {error} ({error.reason})\n")
        return REFUSED
    sys.stdout.write(_as_json(report) if options.json else _as_text(report, options.model, options.parser))
    return EXACT if report.exact else DEVIATES


def _as_json(report: Report) -> str:
    cases = [
        {
            "case": line.case.name,
            "title": line.case.title,
            "main": line.case.main,
            "dialect": line.dialect,
            "verdict": line.result.verdict.value,
            "reason": line.result.reason,
            "advice": line.advice,
        }
        for line in report.lines
    ]
    content = {
        "exact": report.exact,
        "parser": report.parser,
        "vocab_size": report.vocab_size,
        "tokenizer_sha256": report.tokenizer_sha256,
        "template_sha256": report.template_sha256,
        "cases": cases,
    }
    return orjson.dumps(content).decode() + "\n"


def _as_text(report: Report, directory: Path, parser: str | None) -> str:
    chosen = "as asked" if parser else "as its template shows"
    rows = [("case", *WIRES)]
    found = {(line.case.name, line.dialect): line for line in report.lines}
    for case in dict.fromkeys(line.case for line in report.lines):
        verdicts = (found[case.name, name].result.verdict.value for name in WIRES)
        rows.append((f"{'* ' if case.main else '  '}{case.title}", *verdicts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        f"model     {directory}",
        f"parser    {report.parser}, {chosen}",
        f"tokens    {report.vocab_size}",
        f"template  {report.template_sha256}",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
    ]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for line in report.lines:
        if line.result.reason:
            key = (line.result.verdict.value, line.result.reason, line.advice)
            titles = reasons.setdefault(key, [])
            if line.case.title not in titles:
                titles.append(line.case.title)
    for (verdict, reason, advice), titles in reasons.items():
        text += [f"{verdict}: {'; '.join(titles)}", f"    {reason}", *([f"    {advice}"] if advice else []), ""]
    text.append(
        "The cases with a star are exact."
        if report.exact
        else "Not all of the cases with a star are exact, or something was misread: see above."
    )
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
