"""The site: complete, made of what is there, and readable from a disk without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs.site import assemble, descriptors, protocol
from tests.unit.docs.pages import ROOT

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
