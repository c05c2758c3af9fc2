"""An evaluation as one HTML file: rates, plots, a table of tasks, and the output of each attempt and its verifier.

Invariants: the file is self-contained and fetches nothing; everything that comes from a task, an agent, a model or a
command is escaped, and no script of any origin runs in the page, which its content security policy enforces as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from penstock.analysis.plot_style import EXCLUDED, FAILED, PASSED
from penstock.analysis.prices import Cost
from penstock.analysis.readable_calls import counted
from penstock.client.transport.atomic_files import write_whole
from penstock.evaluation.attempts import Attempt
from penstock.evaluation.plots import check_plots, plots
from penstock.evaluation.statistics import Estimate
from penstock.evaluation.summary import Summary

__all__ = ["check_plots", "write_report"]

_MOST_SHOWN: Final = 2000
_STYLE: Final = f"""
:root {{
  --ink: #1f2328; --pale: #59636e; --ground: #fff; --box: #f6f8fa; --line: #d1d9e0; --faint: #e6eaef;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ink: #e6edf3; --pale: #9aa4af; --ground: #0d1117; --box: #161b22; --line: #3d444d; --faint: #262c34;
  }}
  figure svg {{ background: #fff; border-radius: 6px; }}
}}
body {{
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); color-scheme: light dark;
  margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem;
}}
h1 {{ font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.5rem 0 .75rem; }}
.of {{ color: var(--pale); margin: .25rem 0 1.5rem; overflow-wrap: anywhere; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .75rem; }}
.tile {{
  border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem;
  min-width: 9rem; box-sizing: border-box;
}}
.tile b {{ display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }}
.tile small {{ color: var(--pale); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.75rem 1.5rem; }}
.plots figure:first-child {{ grid-column: 1 / -1; }}
figure {{ margin: 0; min-width: 0; }}
figure svg {{ max-width: 100%; height: auto; display: block; }}
.wide {{ overflow-x: auto; }}
.wide td:first-child {{ min-width: 9rem; }}
figcaption {{ font-weight: 600; margin-bottom: .25rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{
  text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--faint);
  vertical-align: top; overflow-wrap: anywhere;
}}
th {{ color: var(--pale); font-weight: 500; }}
th.n, td.n {{ text-align: right; white-space: nowrap; }}
details {{ border-bottom: 1px solid var(--faint); padding: .35rem 0; }}
summary {{ cursor: pointer; overflow-wrap: anywhere; }}
pre {{
  background: var(--box); border-radius: 6px; padding: .6rem .8rem; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px;
}}
.mark {{ display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .5rem; }}
.passed {{ background: {PASSED}; }}
.failed {{ background: {FAILED}; }}
.excluded {{ background: {EXCLUDED}; }}
.note {{ color: var(--pale); font-size: .9rem; }}
@media (max-width: 32rem) {{
  body {{ padding: 1.25rem 1rem 3rem; }}
  .tile {{ flex: 1 1 9rem; }}
  th, td {{ padding: .3rem .4rem; }}
  .tasks thead {{ display: none; }}
  .tasks tr {{ display: block; padding: .4rem 0; border-bottom: 1px solid var(--faint); }}
  .tasks td {{ display: block; border: 0; padding: .05rem .4rem; }}
  .tasks td:first-child {{ font-weight: 600; }}
  .tasks td.n {{ display: inline-block; text-align: left; }}
  .tasks td.n::before {{ content: attr(data-of) " "; color: var(--pale); }}
  .tasks td.n:empty {{ display: none; }}
}}
"""


def write_report(
    file: Path, config: Mapping[str, Any], attempts: Sequence[Attempt], summary: Summary, cost: Cost | None = None
) -> None:
    """Writes the report on the summary's tasks; `cost` is what all attempts cost.

    Raises:
        ConfigurationError: `MATPLOTLIB_MISSING`; `FILE_NOT_WRITTEN`.
    """
    text = "".join(_page(config, attempts, summary, plots(attempts, summary), cost))
    write_whole(file, text.encode())


def _page(
    config: Mapping[str, Any],
    attempts: Sequence[Attempt],
    summary: Summary,
    drawings: Iterable[tuple[str, str]],
    cost: Cost | None,
) -> Iterable[str]:
    name, agent, model = (_text(config.get(key, "")) for key in ("name", "agent", "model"))
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: {agent}, {model}</title><style>{_STYLE}</style></head><body>"
    )
    yield f'<h1>{name}</h1><p class="of">{_about(config, summary)}</p>'
    yield f'<div class="tiles">{"".join(_tiles(summary, cost))}</div>'
    yield '<h2>At a glance</h2><div class="plots">'
    for caption, drawing in drawings:
        yield f"<figure><figcaption>{_text(caption)}</figcaption>{_wide(caption, drawing)}</figure>"
    yield "</div>"
    yield from _left_out(summary)
    yield from _tasks(summary)
    yield from _attempts(attempts, summary)
    yield (
        '<p class="note">pass@k is the unbiased estimate of Chen et al. (arXiv:2107.03374), averaged over tasks.'
        " Intervals are Wilson's, of 95 %, with tasks as the unit that varies; that of the mean reward stays within the"
        " range of rewards. Attempts that were not graded are not counted.</p>"
        "</body></html>\n"
    )


def _about(config: Mapping[str, Any], summary: Summary) -> str:
    parts = [f"agent {config.get('agent')}", f"model {config.get('model')}", str(config.get("mode")).replace("_", " ")]
    parts += [
        f"{key.replace('_', ' ')} {config[key]}"
        for key in ("temperature", "seed", "timeout")
        if config.get(key) is not None
    ]
    parts += [f"{key} {value}" for key, value in dict(config.get("options") or {}).items()]
    parts.append(f"{counted(len(summary.tasks), 'task')}, {counted(summary.wanted, 'attempt')} each")
    parts.append(str(config.get("eval_id")))
    return " · ".join(_text(part) for part in parts)


def _tiles(summary: Summary, cost: Cost | None) -> Iterable[str]:
    for k, found in summary.pass_at.items():
        if k in (1, summary.wanted):
            yield _tile(f"pass@{k}", f"{found.value:.1%}", _interval(found))
    if summary.reward is not None:
        found = summary.reward
        yield _tile("mean reward", f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}")
    graded = sum(task.attempts for task in summary.tasks)
    left = sum(task.excluded for task in summary.tasks)
    yield _tile(
        "attempts graded", f"{graded:,}", f"{left:,} left out, {sum(task.missing for task in summary.tasks):,} missing"
    )
    if summary.completion_tokens:
        yield _tile("tokens sampled", f"{summary.completion_tokens:,}", f"{summary.prompt_tokens:,} read")
    if cost is not None:
        more = f"without {', '.join(cost.unpriced)}" if cost.unpriced else "all attempts"
        yield _tile("cost", f"{cost.amount:,.2f} {cost.currency}", more)


def _tile(name: str, value: str, more: str) -> str:
    return f'<div class="tile"><small>{_text(name)}</small><b>{_text(value)}</b><small>{_text(more)}</small></div>'


def _interval(found: Estimate) -> str:
    return f"{found.low:.1%} to {found.high:.1%}"


def _left_out(summary: Summary) -> Iterable[str]:
    rows = [("not graded, not counted", name, count) for name, count in summary.excluded.items()]
    rows += [("graded although cut short", name, count) for name, count in summary.ended.items()]
    if not rows:
        return
    omitted = [
        f'<tr><td>{_text(kind)}</td><td>{_text(name)}</td><td class="n">{count}</td></tr>' for kind, name, count in rows
    ]
    head = '<tr><th></th><th>cause</th><th class="n">attempts</th></tr>'
    yield "<h2>Attempts with problems</h2>"
    yield _wide("Attempts with problems", f"<table>{head}{''.join(omitted)}</table>")


def _tasks(summary: Summary) -> Iterable[str]:
    head = (
        '<thead><tr><th>task</th><th class="n">graded</th><th class="n">passed</th><th class="n">pass@1</th>'
        '<th class="n">reward</th><th class="n">seconds</th><th class="n">left out</th></tr></thead>'
    )
    rows = []
    for task in summary.tasks:
        cells = {
            "graded": f"{task.attempts}/{summary.wanted}",
            "passed": str(task.passed),
            "pass@1": f"{task.pass_at[1]:.2f}" if task.attempts else "",
            "reward": "" if task.reward is None else f"{task.reward:.3f}",
            "seconds": "" if task.seconds is None else f"{task.seconds:.1f}",
            "left out": str(task.excluded or ""),
        }
        # On a narrow screen a row is a block, in which each number has its label.
        numbers = "".join(f'<td class="n" data-of="{name}">{cell}</td>' for name, cell in cells.items())
        rows.append(f"<tr><td>{_text(task.task_id)}</td>{numbers}</tr>")
    yield "<h2>Tasks</h2>"
    yield _wide("Tasks", f'<table class="tasks">{head}<tbody>{"".join(rows)}</tbody></table>')


def _wide(name: str, content: str) -> str:
    """Wraps content that scrolls by itself on a narrow screen, with the keyboard too."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{_text(name)}">{content}</div>'


def _attempts(attempts: Sequence[Attempt], summary: Summary) -> Iterable[str]:
    names = {task.task_id for task in summary.tasks}
    shown = (item for item in attempts if item.task_id in names)
    order = sorted(shown, key=lambda item: (item.task_id, item.index, item.again))
    yield "<h2>Attempts</h2>"
    if len(order) > _MOST_SHOWN:
        yield f'<p class="note">The first {_MOST_SHOWN:,} of {len(order):,}; attempts.jsonl has all.</p>'
    for item in order[:_MOST_SHOWN]:
        kind = "excluded" if not item.graded else "passed" if item.passed(summary.threshold) else "failed"
        head = f"{item.task_id} {item.index}" + (f", rollout {item.again + 1}" if item.again else "")
        facts = "not graded" if item.reward is None else f"reward {item.reward:g}"
        facts += f", {item.cause}: {item.reason}" if item.reason else ""
        facts += f", {item.seconds:.1f} s, {counted(item.calls, 'call')}"
        mark = f'<span class="mark {kind}" title="{kind}"></span>'
        which = item.rollout_id + (f", agent: {item.agent_exit}" if item.agent_exit else "")
        yield f"<details><summary>{mark}<b>{_text(head)}</b> {_text(facts)}</summary>"
        yield f'<p class="note">{_text(which)}</p>'
        if item.components:
            yield _pre("components", "\n".join(f"{name} {value:g}" for name, value in item.components.items()))
        yield _pre("failure", item.message)
        yield _pre("the end of the agent's output", item.said)
        for ran in item.ran:
            yield _pre(
                f"{ran.phase.replace('_', ' ')}: {ran.command} [{ran.end}, {ran.seconds:.1f} s]",
                ran.output,
                always=True,
            )
        yield "</details>"


def _pre(title: str, text: str, *, always: bool = False) -> str:
    if not text.strip() and not always:
        return ""
    body = f"<pre>{_text(text)}</pre>" if text.strip() else ""
    return f'<div class="note">{_text(title)}</div>{body}'


def _text(value: object) -> str:
    """Escapes text for the page; invisible characters are made visible."""
    shown = (
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(value)
    )
    return escape("".join(shown), quote=True)
