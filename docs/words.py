"""Words that documentation, docstrings, comments and messages do not use: each with what to write instead.

    python -m docs.words        a line for each use; exit code 1 when there are any

Code in Markdown (blocks and `names`) is not looked at, nor are decisions, which keep the words of their day. In the
services, the libraries and the SDK, names in code are checked too.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools import checkout

ROOT = Path(__file__).resolve().parent.parent

BANNED = {
    r"told|tells": "returns, reports, shows, states; of a person: is asked, gets",
    r"of passing kind": "transient",
    r"who gives up|who asks again": "name the subject: the caller, another caller",
    r"Conductor": "RolloutRunner",
    r"Fleet": "RolloutManager",
    r"ToolDesk": "HostToolBroker",
    r"Preparations": "Environments",
    r"heard": "received, known",
    r"nursery": "forkserver",
    r"keeper|keepers": "supervisor",
}
BANNED_NAMES = {
    r"_*(un)?told(_\w+)?|\w+_told|(\w+_)?tells_\w+": "what it holds: sent, recorded, reported, known",
    r"_*heard(_\w+)?|\w+_heard": "received, known",
    r"\w*(keeper|nursery)s?": "supervisor, forkserver",
}
_NAMED = ("services/", "libs/", "clients/python/sdk/")
_LEFT = ("clients/python/stubs/", "docs/decisions/", "docs/words.py", "tests/", "benchmarks/", "CHANGELOG.md")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
# Texts of several words, but not SQL: columns keep their names.
_PROSE = re.compile(r"^(?!\s*(?:CREATE|DELETE|INSERT|SELECT|UPDATE)\b).*\S \S", re.DOTALL)
_WORDS = {re.compile(rf"\b(?:{words})\b"): instead for words, instead in BANNED.items()}
_NAMES = {re.compile(words, re.IGNORECASE): instead for words, instead in BANNED_NAMES.items()}


def texts(path: Path) -> Iterator[str]:
    """The prose of a file: a Markdown file's text, a proto's comments, a module's comments and texts of words."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    if path.suffix == ".proto":
        yield "\n".join(re.findall(r"//.*", source))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _PROSE.search(node.value):
            yield node.value
    # Most of the work is tokenizing, and few files need it.
    if any(words.search(line) for line in re.findall(r"#.*", source) for words in _WORDS):
        yield from _tokens(source, tokenize.COMMENT)


def names(path: Path) -> Iterator[str]:
    """Each name in a module's code that may be one that is not used, once."""
    source = path.read_text(encoding="utf-8")
    if any(words.fullmatch(name) for name in set(re.findall(r"\w+", source)) for words in _NAMES):
        yield from sorted(set(_tokens(source, tokenize.NAME)))


def _tokens(source: str, kind: int) -> Iterator[str]:
    return (item.string for item in tokenize.generate_tokens(io.StringIO(source).readline) if item.type == kind)


def found() -> list[str]:
    """A line for each use of a banned word, and for each banned name of a module."""
    lines = []
    for name in checkout.files("*.md", "*.proto", "*.py", root=ROOT):
        if name.startswith(_LEFT):
            continue
        for text in texts(ROOT / name):
            prose = _CODE.sub("", text)
            for words, instead in _WORDS.items():
                lines += [f"{name}: {match.group()!r}: write {instead}" for match in words.finditer(prose)]
        if name.endswith(".py") and name.startswith(_NAMED):
            lines += [
                f"{name}: the name {used}: write {instead}"
                for used in names(ROOT / name)
                for words, instead in _NAMES.items()
                if words.fullmatch(used)
            ]
    return lines


if __name__ == "__main__":
    uses = found()
    for use in uses:
        print(use)
    sys.exit(bool(uses))
