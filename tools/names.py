"""Writes the names of `tools/names.toml` wherever they stand, and the licence beside each thing that is published.

python -m tools.names              rewrites files; then run `make protos`
python -m tools.names --check      changes nothing; fails where a file has another name, or no licence
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools import checkout

ROOT: Final = Path(__file__).resolve().parent.parent

PARTS: Final = ("chassis", "codec", "demo", "driver", "inference", "interception", "protos", "sandbox")
"""What follows the prefix in the distributions of this repository, but for the client's, whose name is the prefix."""

PYTHON: Final = (
    "clients/python/stubs",
    "clients/python/sdk",
    "clients/python/demo",
    "libs/chassis",
    "libs/codec",
    "services/driver",
    "services/interception",
    "services/inference",
    "services/sandbox",
)
"""Where the Python distributions are, each after those that it needs."""

LICENSED: Final = (*PYTHON, "clients/typescript", "clients/go")
"""What is published, each with a copy of LICENSE: what packs them looks no further than their own directory."""

_EXTRAS: Final = (
    "local|services|dashboard|credentials|parquet|export|tables|s3|ray|report|openenv|docker|node|e2b|kubernetes|hf|hf-sandbox|"
    "vllm|otel|egress"
)
_GENERATED: Final = ("clients/go/gen/", "clients/python/stubs/penstock/", "clients/typescript/src/gen/")
_BY_HAND: Final = ("clients/python/stubs/penstock/tables/", "clients/python/stubs/penstock/values/")
"""Packages among the generated ones that are not."""


@dataclass(frozen=True, slots=True)
class Name:
    """One of the names: the file that has it first, and how it looks elsewhere."""

    key: str
    file: str
    """The name as it is now is what `first` captures in this file."""
    first: str
    uses: Callable[[str], Sequence[str]]
    """From the escaped name, patterns of its uses, which match the name and nothing around it."""


_PART: Final = f"(?:-(?:{'|'.join(PARTS)}))?"

NAMES: Final = (
    Name(
        "python",
        "clients/python/sdk/pyproject.toml",
        r'^name = "(.+)"$',
        lambda old: (
            rf'(?:(?<=^name = ")|(?<=version\(")){old}(?={_PART}")',
            rf"""(?<=["'`]){old}(?={_PART}(?:\\?\[(?:{_EXTRAS}|\{{)|==\d))""",
            rf"(?:(?<=version\(f\")|(?<=pip install ')|(?<=--upgrade )){old}(?=-\{{)",
            rf'(?<=DISTRIBUTIONS: Final = "){old}',
        ),
    ),
    Name("npm", "clients/typescript/package.json", r'^  "name": "(.+)",$', lambda old: (rf"(?<![\w/-]){old}\b",)),
    Name("go", "clients/go/go.mod", r"^module (\S+)$", lambda old: (rf"(?<![\w/.-]){old}\b",)),
    Name(
        "images",
        "docker-compose.yml",
        r"\$\{PENSTOCK_IMAGES:-([^}]+)\}",
        lambda old: (rf"(?<=PENSTOCK_IMAGES:-){old}(?=\}})",),
    ),
    Name(
        "repository",
        "clients/python/sdk/pyproject.toml",
        r'^Repository = "(.+)"$',
        lambda old: (rf"{old}(?![\w-])",),
    ),
    Name(
        "authors",
        "clients/python/sdk/pyproject.toml",
        r'^authors = \[\{ name = "(.+)" \}\]$',
        lambda old: (rf'(?<="){old}(?=")',),
    ),
)


def names() -> Mapping[str, str]:
    """Returns what `names.toml` says."""
    return tomllib.loads((ROOT / "tools" / "names.toml").read_text(encoding="utf-8"))


def apply() -> list[str]:
    """Rewrites every file that has another name; returns which were changed."""
    changed = []
    wanted = names()
    replacements = [
        (_now(name), re.compile(pattern, re.MULTILINE), wanted[name.key])
        for name in NAMES
        if _now(name) != wanted[name.key]
        for pattern in name.uses(re.escape(_now(name)))
    ]
    for path in _files():
        text = new = path.read_text(encoding="utf-8")
        for old, pattern, value in replacements:
            if old in new:
                new = pattern.sub(value, new)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path.relative_to(ROOT).as_posix())
    licence = (ROOT / "LICENSE").read_bytes()
    for place in LICENSED:
        path = ROOT / place / "LICENSE"
        if not path.is_file() or path.read_bytes() != licence:
            path.write_bytes(licence)
            changed.append(path.relative_to(ROOT).as_posix())
    return changed


def problems() -> list[str]:
    """Returns what differs from `names.toml`, a line each."""
    found = [
        f"{name.file} has {_now(name)!r} where tools/names.toml has {names()[name.key]!r} ({name.key})"
        for name in NAMES
        if _now(name) != names()[name.key]
    ]
    for path in sorted((ROOT / "protos" / "penstock").rglob("*.proto")):
        expected = f'option go_package = "{names()["go"]}/gen/'
        if expected not in path.read_text(encoding="utf-8"):
            found.append(f"{path.relative_to(ROOT)} lacks {expected}")
    for place in PYTHON:
        project = tomllib.loads((ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        distributions = {names()["python"], *(f"{names()['python']}-{part}" for part in PARTS)}
        if project["name"] not in distributions:
            found.append(f"{place}/pyproject.toml names the distribution {project['name']}")
        if any(not url.startswith(names()["repository"]) for url in project["urls"].values()):
            found.append(f"{place}/pyproject.toml has a URL outside of {names()['repository']}")
    label = f'org.opencontainers.image.source="{names()["repository"]}"'
    found += [
        f"{path.relative_to(ROOT)} has no label {label}"
        for path in (*ROOT.glob("services/*/Dockerfile"), ROOT / "clients/python/sdk/Dockerfile")
        if label not in path.read_text(encoding="utf-8")
    ]
    licence = (ROOT / "LICENSE").read_bytes()
    for place in LICENSED:
        path = ROOT / place / "LICENSE"
        if not path.is_file() or path.read_bytes() != licence:
            found.append(f"{place}/LICENSE is not the repository's")
    return found


def _now(name: Name) -> str:
    match = re.search(name.first, (ROOT / name.file).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        sys.exit(f"{name.file} has no line like {name.first}")
    return match[1]


def _files() -> Iterator[Path]:
    """The text files of the repository that are written by hand."""
    for name in checkout.files():
        path = ROOT / name
        is_generated = name.startswith(_GENERATED) and not name.startswith(_BY_HAND)
        if is_generated or name in {"CHANGELOG.md", "tools/names.toml"} or path.is_symlink():
            continue
        if path.is_file() and path.suffix not in {".png", ".bin", ".gz", ".svg"} and _is_text(path):
            yield path


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def main() -> None:
    """Rewrites or checks; see the module's text."""
    match sys.argv[1:]:
        case []:
            print(*apply(), sep="\n")
        case ["--check"]:
            if found := problems():
                sys.exit("\n".join([*found, "run: python -m tools.names && make protos"]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
