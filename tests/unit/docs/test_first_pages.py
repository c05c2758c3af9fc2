"""What a newcomer reads first: the same everywhere, nothing foreign to install, no name of what is not there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from docs.site.drawings import DRAWINGS, IMAGES
from tests.unit.docs.pages import ROOT, tables
from tests.unit.docs.test_commands import PAGES, code_of

from tools import install_check

CONCEPTS = ("Rollout", "Group", "Call", "Turn", "Branch", "Sample", "Grade", "Gate", "Policy version")
BRINGS_OURS = {"local", "services"}
"""Extras of the client that add distributions of ours, which no index has."""

_INSTALLS = re.compile(r"(?:pip install|uvx|pipx run|uv tool install)\b([^\n#|;&]*)")
_OURS = re.compile(r"""^['"]?penstock(?:\[([\w,-]+)\])?(?:==\S+)?['"]?$""")
_REASON = re.compile(r"\b(?!PENSTOCK_)[A-Z]{2,}(?:_[A-Z]+)+\b")


def text_of(page: str) -> str:
    """A page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.requirement("R143")
def test_both_first_pages_say_in_the_same_five_sentences_what_it_is() -> None:
    """The one of the repository, and the one of the documentation and its site."""
    first, second = (text_of(page).split("\n\n")[1] for page in ("README.md", "docs/README.md"))
    assert first == second
    assert len(re.findall(r"\.(?:\s|$)", first)) == 5
    for page in ("README.md", "docs/README.md"):
        assert "images/overview.svg)" in text_of(page)


@pytest.mark.requirement("R143")
def test_each_concept_has_a_few_sentences_a_picture_and_a_way_on() -> None:
    """Of what a reader has to know before anything else."""
    parts = text_of("docs/concepts.md").split("\n## ")[1:]
    assert tuple(part.partition("\n")[0] for part in parts) == CONCEPTS
    for part in parts:
        prose = part.partition("\n")[2].partition("![")[0]
        assert 2 <= len(re.findall(r"[.!](?:\s|$)", prose)) <= 6, part
        assert re.search(r"\]\((?!images/)[^)]+\)", prose), part
        assert re.search(r"!\[[^\]]+\]\(images/concept-[a-z-]+\.svg\)", part), part


def test_the_drawings_in_the_repository_are_those_of_the_program() -> None:
    """`python -m docs.site.drawings` changes nothing; each is on some page."""
    assert {path.stem for path in IMAGES.glob("*.svg")} == set(DRAWINGS)
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, draw in DRAWINGS.items():
        text = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
        assert text == draw().file(), f"run python -m docs.site.drawings: {name}"
        assert "prefers-color-scheme:dark" in text and "<title>" in text
        assert f"images/{name}.svg)" in pages


@pytest.mark.requirement("R116")
def test_no_page_installs_from_an_index_what_another_project_has_there() -> None:
    """The name on PyPI is foreign: a reader names a file, or adds an extra of others' packages to what is installed."""
    for page in PAGES:
        if page.name == "CHANGELOG.md" or page.parent.name == "decisions":
            continue
        for code in code_of(page):
            for match in _INSTALLS.finditer(code):
                if "-py3-none-any.whl" in match[0] or _is_quoted(page, code):
                    continue
                ours = [found for found in map(_OURS.match, match[1].split()) if found]
                extras = [set(found[1].split(",")) if found[1] else BRINGS_OURS for found in ours]
                assert not any(found & BRINGS_OURS for found in extras), f"{page.relative_to(ROOT)}: {match[0]}"


def _is_quoted(page: Path, code: str) -> bool:
    """Whether it is what a reader saw, on a page that advises against it."""
    return page.name in {"install.md", "faq.md", "troubleshooting.md"} and "\n" not in code


@pytest.mark.requirement("R116")
def test_wheels_on_the_pages_have_the_version_that_is_built() -> None:
    """And docs/install.md has the sections whose commands `make dist-check` runs."""
    project = tomllib.loads((ROOT / "clients/python/sdk/pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {
        version
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for version in re.findall(r"\bpenstock-(\d[\d.]*)-py3-none-any\.whl", page.read_text(encoding="utf-8"))
    }
    assert found == {project["version"]}
    commands = install_check.sections(install_check.PAGE.read_text(encoding="utf-8"))
    for title in install_check.RUN:
        assert any("dist" in line for line in commands[title])


@pytest.mark.requirement("R143")
def test_both_pages_bring_the_containers_up_by_the_same_commands() -> None:
    """A reader of the first is not stopped by what only the second says."""
    first, second = (
        [line.partition("#")[0].strip() for line in text_of(page).partition(title)[2].split("```")[1].splitlines()[1:]]
        for page, title in (("docs/install.md", "\n## Containers\n"), ("docs/guides/compose.md", "\n## Up\n"))
    )
    assert first == second
    assert len(first) == 3


@pytest.mark.requirement("R27")
def test_every_reason_of_the_symptoms_is_one_that_the_reference_explains() -> None:
    """A reader who searches for it finds its row."""
    page = text_of("docs/troubleshooting.md")
    explained = text_of("docs/errors.md") + text_of("docs/guides/operate.md")
    rows = [row for part in tables("docs/troubleshooting.md").values() for row in part]
    assert len(rows) > 30
    assert all(row["symptom"] and row["cause"] and row["what to do"] for row in rows)
    named = set(_REASON.findall(page))
    assert len(named) > 25
    known = set(re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)+\b", explained))
    assert not named - known
    assert Path(ROOT / "docs/faq.md").read_text(encoding="utf-8").count("\n## ") >= 10


def test_the_size_of_what_is_installed_counts_each_file_once(tmp_path: Path) -> None:
    """uv links files of its cache into an environment."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "module").write_bytes(bytes(2_000_000))
    (tmp_path / "linked").hardlink_to(tmp_path / "cache" / "module")
    (tmp_path / "pointer").symlink_to(tmp_path / "cache" / "module")
    assert install_check.megabytes(tmp_path) == 2
