"""The report: one file, nothing fetched, nothing executed, whatever agents and tasks have written."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.analysis.prices import Cost
from penstock.client import ConfigurationError
from penstock.evaluation import Attempt, Ran, Summary, plots, summarise
from penstock.evaluation.report import check_plots, write_report

HOSTILE = (
    "</pre></details><script>alert('x')</script>",
    '"><img src=x onerror=alert(1)>',
    "<svg onload=alert(1)>",
    "]]><!-- --><style>*{display:none}</style>",
    "\x1b[31mred\x07\u202egnp.exe",
    "$\\frac{1}{0}$",
)


class Seen(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_attempts() -> list[Attempt]:
    """Attempts in which everything that somebody else wrote is an attack."""
    return [
        Attempt(
            task_id="a", index=number, again=0, rollout_id="r", reward=[0.0, 0.4, 1.0][number % 3], said=text,
            message=text, cause="agent", reason=text, components={text: 1.0}, agent_exit=text, calls=1,
            completion_tokens=10 * number, seconds=float(number),
            ran=[Ran(phase="verifying", command=text, end=text, seconds=0.0, output=text)],
        )
        for number, text in enumerate(HOSTILE)
    ]  # fmt: skip


def page(tmp_path: Path, attempts: list[Attempt], config: dict[str, Any]) -> tuple[str, Seen]:
    """A report and what a browser would see in it."""
    wanted = max(item.index for item in attempts) + 1
    write_report(
        tmp_path / "r.html", config, attempts, summarise(attempts, {item.task_id for item in attempts}, wanted)
    )
    text = (tmp_path / "r.html").read_text()
    seen = Seen()
    seen.feed(text)
    return text, seen


@pytest.mark.requirement("R8")
def test_text_of_agents_tasks_and_verifiers_never_becomes_markup(tmp_path: Path) -> None:
    """And issue 6, point 6: script tags, event handlers and style sheets of others are text."""
    config = {"name": HOSTILE[0], "agent": HOSTILE[1], "model": HOSTILE[2], "options": {"prompt": HOSTILE[3]}}
    _, seen = page(tmp_path, hostile_attempts(), config)
    tags = {tag for tag, _ in seen.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "a", "form", "base"}
    assert sum(tag == "style" for tag, _ in seen.elements) == 1 + sum(tag == "svg" for tag, _ in seen.elements)
    assert not [name for _, attributes in seen.elements for name in attributes if name.startswith("on")]
    for text in HOSTILE[:4]:
        assert text in seen.text
    assert "\x1b" not in seen.text
    assert "\u202e" not in seen.text


def test_the_file_needs_no_other_and_its_content_policy_says_so(tmp_path: Path) -> None:
    """Issue 6, point 6: one self-contained file."""
    text, seen = page(tmp_path, hostile_attempts(), {"name": "n"})
    assert "default-src 'none'" in text
    for tag, attributes in seen.elements:
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)


def test_the_plots_are_whole_svg_drawings_without_text_of_anybody(tmp_path: Path) -> None:
    """Issue 6, point 6: outlines instead of text, and the same bytes for the same attempts."""
    text, _ = page(tmp_path, hostile_attempts(), {"name": "n"})
    drawings = [part.partition("</svg>")[0] + "</svg>" for part in text.split("<figcaption>")[1:]]
    assert len(drawings) >= 4
    for drawing in drawings:
        root = ElementTree.fromstring(drawing[drawing.index("<svg") :])
        assert not [item for item in root.iter() if item.tag.endswith("}text")]
    assert page(tmp_path, hostile_attempts(), {"name": "n"})[0] == text


def test_the_report_names_what_the_attempts_cost_and_what_has_no_price(tmp_path: Path) -> None:
    attempts = hostile_attempts()
    summary = summarise(attempts, {item.task_id for item in attempts}, 1)
    write_report(tmp_path / "r.html", {"name": "n"}, attempts, summary, Cost(1234.5, "USD", ("<m>",)))
    text = (tmp_path / "r.html").read_text()
    assert "1,234.50 USD" in text and "without &lt;m&gt;" in text


@pytest.mark.requirement("R74")
def test_report_of_a_single_ungraded_attempt_is_written(tmp_path: Path) -> None:
    """Nothing was graded, so there is no rate, and it says what went wrong."""
    lost = Attempt(
        task_id="a", index=0, again=0, rollout_id="r", cause="infrastructure", reason="SANDBOX_LOST", message="gone"
    )
    _, seen = page(tmp_path, [lost], {"name": "n"})
    assert "infrastructure: SANDBOX_LOST" in seen.text
    assert "gone" in seen.text
    assert "pass@1100" not in seen.text


@pytest.mark.requirement("R48")
def test_a_report_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing optional package is a named error."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"penstock\[report\]") as caught:
        check_plots()
    assert caught.value.reason == "MATPLOTLIB_MISSING"


def test_a_legend_stands_above_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the axes it covers a bar wherever bars happen to be."""
    figures: list[Any] = []

    def keep(figure: Any) -> str:
        figures.append(figure)
        return "<svg></svg>"

    monkeypatch.setattr(plots, "_svg", keep)
    attempts = hostile_attempts()
    plots.plots(attempts, summarise(attempts, {"a"}, len(attempts)))
    with_legend = [axes for figure in figures for axes in figure.axes if axes.get_legend() is not None]
    assert len(with_legend) >= 3
    for axes in with_legend:
        axes.figure.draw_without_rendering()
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1


def test_a_report_of_a_part_of_the_tasks_has_their_attempts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory may have more tasks than the summary: neither plots nor the list of attempts are over those."""
    drawn: list[str] = []

    def histogram(graded: Sequence[Attempt], summary: Summary, name: str, unit: str) -> str:
        drawn.extend(item.task_id for item in graded)
        return "<svg></svg>"

    monkeypatch.setattr(plots, "_histogram", histogram)
    attempts = [
        Attempt(task_id=name, index=0, again=0, rollout_id=f"rollout-of-{name}", reward=1.0) for name in ("a", "other")
    ]
    write_report(tmp_path / "r.html", {"name": "n"}, attempts, summarise(attempts, ["a"], 1))
    text = (tmp_path / "r.html").read_text()
    assert set(drawn) == {"a"}
    assert "rollout-of-a" in text and "rollout-of-other" not in text


def test_report_follows_a_dark_scheme_and_fits_a_narrow_screen(tmp_path: Path) -> None:
    """At 390 px every number of a task says what it is of; nothing has a least width beyond that."""
    text, seen = page(tmp_path, hostile_attempts(), {"name": "n"})
    assert "@media (prefers-color-scheme: dark)" in text and "min-width: 36rem" not in text
    cells = [found["data-of"] for tag, found in seen.elements if tag == "td" and "data-of" in found]
    assert cells == ["graded", "passed", "pass@1", "reward", "seconds", "left out"]
    assert ".tasks td.n::before" in text
    assert "0.467" in seen.text and "±" not in seen.text


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5))
@example([0.1, 0.7])
@example([0.0, 5e-324])
def test_histogram_has_every_value_in_one_of_its_bins(values: list[float]) -> None:
    """The largest and the least too: rounding puts no edge between them and the bins."""
    counts, _ = np.histogram(values, bins=plots._edges(min(values), max(values)))
    assert counts.sum() == len(values)
