"""Lays out the site's pages in a directory, from which MkDocs builds it.

    python -m docs.site.assemble DIRECTORY

In it are the pages of docs/ under their own paths (README.md as the first page), the references of the protocol and of
the Python client, and whatever else of the repository they link to, below source/: so every link of a page leads
somewhere on the site itself, and nothing needs a network or a forge. The pages are written for forges; what MkDocs'
Markdown wants otherwise (empty lines around lists, tables and fences, one word behind a fence) is put right here.

Invariants: the directory is made anew each time; a link that leads nowhere in the repository is an error.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath

import grpc
from docs.site import pictures, protocol, python_api
from docs.site.descriptors import ROOT
from docs.site.drawings import DRAWINGS

from tools.names import names

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_CODE = re.compile(r"(`+[^`\n]*`+)")
_TARGET = re.compile(r"(\]\(\s*<?)([^)\s>]+)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
_REASON = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".proto": "protobuf"}
_CODES = {code.name for code in grpc.StatusCode}
_DRAWING = re.compile(r"^!\[([^\]\n]*)\]\(\S*?([\w-]+)\.svg\)$", re.MULTILINE)
_BUTTON = re.compile(r"\*\*(\[[^\]\n]+\]\([^)\s]+\))\*\*")
_FIRST = "docs/README.md"
_CLIENT = python_api.SDK / "penstock/client"
_BOOSTS = {
    "index.md": 0.5,  # it names every page
    "concepts.md": 4,
    "install.md": 3,
    "glossary.md": 2,
    "faq.md": 1.5,
    "troubleshooting.md": 1.5,
    "errors.md": 3,
    "guides/first-rollout.md": 4,
    "guides/": 2,
    "decisions/": 0.05,
    "reference/": 0.3,
    "source/": 0.1,
    "requirements.md": 0.2,
    "benchmarks.md": 0.5,
}
"""How much more than others the search finds pages, by the beginning of their path: first those for a newcomer."""
_REPOSITORY = f"{names()['repository']}/blob/main/"
_ASSETS = {".css", ".js", ".png", ".svg", ".yaml", ".json"}
"""What stands in docs/ beside its pages and goes to the site as it is."""


def assemble(target: Path) -> None:
    """Writes all pages into `target`, which is made empty before.

    Raises:
        SystemExit: a page links to what is not there; all such links are named.
    """
    shutil.rmtree(target, ignore_errors=True)
    pages = _Pages(target)
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix == ".md" or (path.suffix in _ASSETS and path.name != "mkdocs.yml"):
            pages.want(path)
    pages.write_all()
    for name, text in protocol.pages(reasons()).items():
        _write(target / "reference" / name, _head(PurePosixPath("reference", name)) + text)
    for name, text in python_api.pages().items():
        _write(target / "reference" / "python" / name, _head(PurePosixPath("reference", name)) + text)
    _write(target / "site" / "pictures.css", pictures.css())
    if pages.broken:
        sys.exit("links that lead nowhere:\n  " + "\n  ".join(pages.broken))


def reasons() -> list[str]:
    """Every reason that a table of errors.md explains, in order."""
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(reason for line in text.splitlines() for reason in _reasons_of(line)))


def prepared(text: str, retarget: Callable[[str], str]) -> str:
    """A page as MkDocs' Markdown wants it, its links' targets replaced by what `retarget` makes of each."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if fence:
            lines.append(line)
            if found and found[2].startswith(fence) and not found[3].strip():
                fence = ""
                lines.append("")
        elif found:
            fence = found[2]
            language = found[3].split()
            lines += ["", f"{found[1]}{fence}{language[0] if language else 'text'}"]
        else:
            if lines and lines[-1] and _begins(line, lines[-1]):
                lines.append("")
            parts = _CODE.split(line)
            for index in range(0, len(parts), 2):
                part = _TARGET.sub(lambda match: match[1] + retarget(match[2]), parts[index])
                parts[index] = part.replace("[][]", r"\[\]\[\]")  # a type, no reference to a heading
            lines.append("".join(parts))
    return "\n".join(lines) + "\n"


def _begins(line: str, before: str) -> bool:
    """Whether a list or a table begins at a line, which MkDocs sees after an empty one only."""
    if line.startswith("|"):
        return not before.startswith("|")
    return bool(_ITEM.match(line)) and not _ITEM.match(before) and not before.startswith(" ")


class _Pages:
    """The pages that are wanted, each written once, with what it links to."""

    def __init__(self, target: Path) -> None:
        self.broken: list[str] = []
        self._target = target
        self._wanted: dict[Path, None] = {}

    def want(self, path: Path) -> None:
        """A file or directory of the repository is to be on the site."""
        self._wanted.setdefault(path)

    def write_all(self) -> None:
        """Writes what is wanted and, with it, whatever that links to."""
        written = 0
        while written < len(self._wanted):
            path = list(self._wanted)[written]
            written += 1
            if not path.is_relative_to(ROOT / "protos") and path != _CLIENT:  # those have references of their own
                self._write(path)

    def _write(self, path: Path) -> None:
        place = self._target / _place(path)
        if path.is_dir():
            head = _head(_place(path), hidden=not path.is_relative_to(ROOT / "docs"))
            _write(place, head + prepared(_listing(path), self._retarget(path / "README.md")))
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            if path == ROOT / "docs/errors.md":
                text = _with_anchors(text)
            if path == ROOT / _FIRST:
                text = _with_buttons(text)
            head = _head(_place(path), hidden=not path.is_relative_to(ROOT / "docs"))
            _write(place, head + _with_drawings(prepared(text, self._retarget(path))))
        elif place.suffix != ".md":
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        elif path.suffix == ".ipynb":
            _write(place, prepared(_notebook(path), self._retarget(path)))
        else:
            _write(place, _head(_place(path), hidden=True) + _source(path))

    def _retarget(self, page: Path) -> Callable[[str], str]:
        """From a link as it stands in `page` to the same on the site."""

        def retarget(link: str) -> str:
            # A page that is published by itself links to the repository on the web, which is here.
            ours = link.startswith(_REPOSITORY)
            base, inside = (ROOT, link.removeprefix(_REPOSITORY)) if ours else (page.parent, link)
            if re.match(r"[a-z][a-z0-9+.-]*:", inside):
                return link
            path, _, anchor = inside.partition("#")
            if not path:
                return link
            found = Path(normpath(base / path))
            if not found.exists() or not found.is_relative_to(ROOT):
                self.broken.append(f"{page.relative_to(ROOT)}: {link}")
                return link
            if found.is_dir() and (found / "README.md").exists():
                found /= "README.md"
            self.want(found)
            here = _place(page) if page.exists() else _place(page.parent)
            return os.path.relpath(_place(found), here.parent) + (f"#{anchor}" if anchor else "")

        return retarget


def _place(path: Path) -> PurePosixPath:
    """Where on the site a file or directory of the repository is."""
    place = PurePosixPath(path.relative_to(ROOT).as_posix())
    if place.parts[:1] == ("protos",):
        return PurePosixPath(
            "reference", protocol.page_of(".".join(place.parts[1:3])) if len(place.parts) > 2 else "index.md"
        )
    if path == _CLIENT:
        return PurePosixPath("reference/python/index.md")
    if place == PurePosixPath(_FIRST):
        return PurePosixPath("index.md")
    if path.is_dir():
        place /= "index.md"
    if place.parts[0] == "docs" and (place.suffix in {".md", *_ASSETS}):
        return place.relative_to("docs")
    if place.suffix == ".md":
        return "source" / place
    return "source" / place.with_name(f"{place.name}.md")


def _listing(folder: Path) -> str:
    """A page for a directory that has none: its files, pages by their titles."""
    lines = [f"# {folder.name.capitalize()}", ""]
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in {".pyc"}:
            title = _TITLE.search(path.read_text(encoding="utf-8")) if path.suffix == ".md" else None
            lines.append(f"- [{title[1] if title else path.name}]({path.name})")
    return "\n".join(lines) + "\n"


def _source(path: Path) -> str:
    """A page that shows a file."""
    text = path.read_text(encoding="utf-8")
    return f"# {path.relative_to(ROOT)}\n\n~~~~{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n~~~~\n"


def _notebook(path: Path) -> str:
    """A page that shows a notebook's cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in texts) + "\n"


def _reasons_of(line: str) -> Iterator[str]:
    """The reasons in the first cell of a table's row."""
    if line.startswith("| "):
        words = _REASON.findall(line.split("|")[1])
        yield from (word for word in words if "_" in word and word not in _CODES)


def _with_anchors(errors: str) -> str:
    """errors.md with a place to link to at the first row of each reason."""
    seen: set[str] = set()
    lines = []
    for line in errors.splitlines():
        fresh = [reason for reason in _reasons_of(line) if reason not in seen]
        seen.update(fresh)
        anchors = "".join(f'<a id="{reason}"></a>' for reason in fresh)
        lines.append(line.replace("| ", f"| {anchors}", 1) if fresh else line)
    return "\n".join(lines) + "\n"


def _head(place: PurePosixPath, *, hidden: bool = False) -> str:
    """What stands before a page's text: whether and how well the search finds it; the first page has no columns."""
    boost = next((boost for start, boost in _BOOSTS.items() if place.as_posix().startswith(start)), 1)
    search = "{exclude: true}" if hidden else f"{{boost: {boost}}}"
    columns = "hide: [navigation, toc]\n" if place.as_posix() == "index.md" else ""
    return f"---\n{columns}search: {search}\n---\n\n"


def _with_drawings(page: str) -> str:
    """A page with our drawings inside of it, where they follow the page's theme; the search leaves out their words."""

    def inside(match: re.Match[str]) -> str:
        draw = DRAWINGS.get(match[2])
        return f"<figure data-search-exclude>{draw().inside()}</figure>" if draw else match[0]

    return _DRAWING.sub(inside, page)


def _with_buttons(page: str) -> str:
    """The first page with each link in bold by itself as a button."""
    return _BUTTON.sub(r"\1{ .md-button .md-button--primary }", page)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
