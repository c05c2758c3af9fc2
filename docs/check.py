"""Checks that every relative link of the repository's Markdown leads to a file, every anchor to a heading, and to every
page of docs/ some link of another page.

python docs/check.py        exit 1 and a line per broken link or page that nobody finds
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {
    ".git",
    ".venv",
    ".venv-vllm",
    ".venv-gpu",
    ".venv-openenv",
    ".venv-docs",
    "build",
    "node_modules",
    ".toolchain",
    "runs",
}

# Of a page that is published without the rest of the repository.
REPOSITORY = tomllib.loads((ROOT / "tools" / "names.toml").read_text(encoding="utf-8"))["repository"] + "/blob/main/"

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def pages() -> list[Path]:
    """The repository's pages: what was installed, built or cloned below it is none of them."""
    found = list[Path]()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """The links of a page: as written, the file, the anchor. On the web, only the repository's own are followed."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in _LINK.findall(text):
        base, inside = (ROOT, link.removeprefix(REPOSITORY)) if link.startswith(REPOSITORY) else (page.parent, link)
        if re.match(r"[a-z][a-z0-9+.-]*:", inside):
            continue
        path, _, anchor = inside.partition("#")
        yield link, (base / path).resolve() if path else page, anchor


def broken(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link, target, anchor in links(page):
        # A page that links out of the repository would break for everyone who only has the repository.
        reachable = target.exists() and target.is_relative_to(ROOT)
        if reachable and anchor and target.suffix == ".md":
            reachable = anchor in anchors(target)
        if not reachable:
            yield link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in _HEADING.findall(text)}


def lost(ours: list[Path]) -> Iterator[Path]:
    """The pages of docs/ to which no other page links; a link to a page's directory leads to it too."""
    found = {target for page in ours for _, target, _ in links(page) if target != page}
    for page in ours:
        if page.is_relative_to(ROOT / "docs") and not found.intersection((page, page.parent)):
            yield page


def main() -> None:
    """Checks all pages; see the module's text."""
    ours = pages()
    found = [f"{page.relative_to(ROOT)}: {link}" for page in ours for link in broken(page)]
    if found:
        sys.exit("links that lead nowhere:\n  " + "\n  ".join(found))
    if unseen := [str(page.relative_to(ROOT)) for page in lost(ours)]:
        sys.exit("pages that no other page links:\n  " + "\n  ".join(unseen))
    print(f"{len(ours)} pages, every link leads somewhere and somewhere a link to every page")


if __name__ == "__main__":
    main()
