"""The site: complete, made of what is there, and readable from a disk without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs.site import assemble, descriptors, protocol, python_api
from tests.unit.docs.pages import ROOT

from clients import nodejs
from penstock import client

BUILT = ROOT / "build/site/html"
MKDOCS = ROOT / ".venv-docs/bin/mkdocs"


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as `make site` builds it; built here where it is not."""
    if not (BUILT / "index.html").exists():
        assert MKDOCS.exists(), "run `make site` once: it installs MkDocs into .venv-docs"
        subprocess.run([sys.executable, "-m", "docs.site.assemble", "build/site/pages"], cwd=ROOT, check=True)
        subprocess.run([MKDOCS, "build", "--config-file", "docs/site/mkdocs.yml"], cwd=ROOT, check=True)
    return BUILT


def test_protocol_reference_has_every_rpc_with_its_roles_and_every_message() -> None:
    """A second client can be written from it; nothing that a proto declares is left out."""
    pages = protocol.pages(assemble.reasons())
    for package, service, method in descriptors.rpcs():
        page = pages[protocol.page_of(package)]
        assert f"{{ #{service}.{method} }}".lower() in page.lower()
        assert f"[{service}.{method}]" in pages["index.md"]
    assert "Roles: ." not in "".join(pages.values())
    for file in descriptors.descriptors().file:
        for name in [item.name for item in file.message_type] + [item.name for item in file.enum_type]:
            assert f"### {name} " in pages[protocol.page_of(file.package)]


@pytest.mark.requirement("R27")
def test_a_reason_in_the_reference_leads_to_its_row_of_the_errors() -> None:
    """From the promise of an RPC to what to do about it."""
    reasons = assemble.reasons()
    assert len(reasons) == len(set(reasons)) > 200
    assert "[SANDBOX_LOST](../errors.md#SANDBOX_LOST)" in protocol.pages(reasons)["sandbox.md"]


def test_a_page_for_forges_becomes_one_for_mkdocs() -> None:
    """Empty lines around lists and tables, one word behind a fence; nothing inside of code is touched."""
    page = "Words:\n- [one](a.md#x) and `[two](b.md)`\n- three\n```yaml task\n- [four](c.md)\n```\nEnd\n| a |\n|---|\n"
    made = assemble.prepared(page, lambda link: f"to/{link}")
    assert made == (
        "Words:\n\n- [one](to/a.md#x) and `[two](b.md)`\n- three\n\n```yaml\n- [four](c.md)\n```\n"
        "\nEnd\n\n| a |\n|---|\n"
    )


class _Fetched(HTMLParser):
    """What a browser fetches by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source"} and given.get("src"):
            self.addresses.append(given["src"] or "")
        if tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "preconnect", "modulepreload"}:
            self.addresses.append(given.get("href") or "")


def test_a_page_fetches_nothing_from_anywhere_but_its_own_disk(site: Path) -> None:
    """No script, style, font or picture of somebody else's; and what it does fetch is there."""
    for page in site.rglob("*.html"):
        parser = _Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        for address in parser.addresses:
            parts = urlsplit(address)
            assert not parts.scheme and not parts.netloc, f"{page.relative_to(site)}: {address}"
            base = site if page.name == "404.html" else page.parent
            assert (base / unquote(parts.path).lstrip("/")).exists(), f"{page.relative_to(site)}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?https?:", style.read_text(encoding="utf-8")), style


def test_the_search_needs_no_server(site: Path) -> None:
    """The index is a script that a page from a disk may load, and browsers' missing workers are made up for."""
    assert (site / "search/search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


FOUND = {
    "branch": "guides/branches.html",
    "what is a branch": "guides/branches.html",
    "pip install": "install.html",
    "uvx": "install.html#try-it",
    "pytest": "guides/pytest.html",
    "policy version": "concepts.html#policy-version",
    "CAPABILITY_MISSING": "errors.html#sandbox-service",
}
"""What readers look for, and a page that is among the first two that the search finds."""


def test_the_search_finds_first_where_a_word_is_explained(site: Path) -> None:
    """The site's own search, run in Node.js on its own index."""
    argv = ["node", "docs/site/query.mjs", str(site), *FOUND]
    done = subprocess.run(
        argv, cwd=ROOT, env=nodejs.environment(), capture_output=True, text=True, timeout=120, check=True
    )
    answers = [[found["page"] for found in json.loads(line)] for line in done.stdout.splitlines()]
    for (query, page), pages in zip(FOUND.items(), answers, strict=True):
        assert page in pages[:2], (query, pages[:5])


@pytest.mark.requirement("R27")
def test_python_reference_has_every_name_of_the_client_once() -> None:
    """With the classes that `connect()` gives, which are not imported by their names."""
    pages = python_api.pages()
    listed = [
        line.removeprefix("::: ") for text in pages.values() for line in text.splitlines() if line.startswith(":::")
    ]
    assert len(listed) == len(set(listed))
    names = [full.rsplit(".", 1)[1] for full in listed]
    assert set(client.__all__) <= set(names)
    assert {"RolloutsClient", "GroupsClient", "SandboxesClient", "GateClient", "InferenceClient"} <= set(names)
    assert set(pages) - {"index.md"} == set(python_api.PAGES)


def test_a_built_page_of_the_reference_has_signatures_and_texts(site: Path) -> None:
    """mkdocstrings read the sources, by which a reader sees arguments and errors."""
    page = (site / "reference/python/rollouts.html").read_text(encoding="utf-8")
    assert 'id="penstock.client.rollouts.client.GroupsClient.create"' in page
    assert "straggler_grace" in page


def test_drawings_stand_inside_of_pages_and_their_words_are_not_searched(site: Path) -> None:
    """So that they follow the page's theme, and not that of the system."""
    page = (site / "concepts.html").read_text(encoding="utf-8")
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg" class="picture"') == 9
    assert ".picture{" in (site / "site/pictures.css").read_text(encoding="utf-8")
    assert "sandboxes, as many as you want" not in (site / "search/search_index.json").read_text(encoding="utf-8")
