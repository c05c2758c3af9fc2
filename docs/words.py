"""Words that documentation, docstrings, comments and messages do not use: each with what to write instead.

    python -m docs.words        a line for each use; exit code 1 when there are any

Code in Markdown (blocks and `names`) is not looked at, nor are decisions, which keep the words of their day. Of Go and
TypeScript, comments, texts and a page's own words are read; of YAML, everything but keys at a line's beginning. In the
Python of services, libraries and the SDK, names in code are checked too.
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
    r"told|tell|tells|telling": "returns, reports, shows, states, distinguishes; of a person: is asked, gets, learns",
    r"of passing kind": "transient",
    r"who asks again": "name the subject: another caller",
    r"give up|gives up|gave up|given up|giving up": "stops waiting, stops retrying, cancels, abandons",
    r"whoever|whomever": "name the subject: the caller, the waiter; or: no matter who",
    r"patience|patient|patiently": "time limit, deadline, retry, for how long it waits",
    r"condemn|condemns|condemned": "marks for removal, expects the kill",
    r"he|his|him|himself": "name the person's part: the caller, the user; or: they",
    r"Conductor": "RolloutRunner",
    r"Fleet": "RolloutManager",
    r"ToolDesk": "HostToolBroker",
    r"Preparations": "Environments",
    r"hear|hears|heard|hearing": "receives, gets, learns; received, known",
    r"nursery": "forkserver",
    r"keeper|keepers": "supervisor",
}
BANNED_NAMES = {
    r"_*(un)?told(_\w+)?|\w+_told|(\w+_)?tells_\w+": "what it holds: sent, recorded, reported, known",
    r"_*heard(_\w+)?|\w+_heard": "received, known",
    r"\w*(keeper|nursery)s?": "supervisor, forkserver",
}
_READ = (".go", ".md", ".proto", ".py", ".ts", ".tsx", ".yaml", ".yml")
_NAMED = ("services/", "libs/", "clients/python/sdk/")
_LEFT = (
    "CHANGELOG.md",
    "benchmarks/",
    "clients/go/internal/",
    "clients/python/stubs/",
    "clients/typescript/bench/",
    "clients/typescript/src/test/",
    "docs/decisions/",
    "docs/words.py",
    "tests/",
)
# What is generated from the protos, which are read themselves, and tests.
_LEFT_ANYWHERE = re.compile(r"/gen/|_test\.go$|\.test\.tsx?$")
# Also the keys of YAML and of arguments in docstrings: they are names.
_CODE = re.compile(r"```.*?```|``[^`\n]*``|`[^`\n]*`|^[ -]+\w+:(?!\S)", re.DOTALL | re.MULTILINE)
# Comments and texts of Go and TypeScript. Texts are here so that a comment's beginning inside of one is none.
_SCRIPT = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)""",
    re.DOTALL,
)
_INSERTED = re.compile(r"\$\{[^}]*\}")
# What a page shows between its tags.
_SHOWN = re.compile(r"(?<![=\s])>([^<>{}=;]+)(?=[<{])")
# Texts of several words, but not SQL: columns keep their names.
_PROSE = re.compile(r"^(?!\s*(?:CREATE|DELETE|INSERT|SELECT|UPDATE)\b).*\S \S", re.DOTALL)


def _pattern(words: str) -> re.Pattern[str]:
    """Matches each of the words, also at a sentence's beginning."""
    return re.compile(rf"\b(?:{'|'.join(f'[{word[0].upper()}{word[0]}]{word[1:]}' for word in words.split('|'))})\b")


_WORDS = {_pattern(words): instead for words, instead in BANNED.items()}
_NAMES = {re.compile(words, re.IGNORECASE): instead for words, instead in BANNED_NAMES.items()}


def texts(path: Path) -> Iterator[str]:
    """The prose of a file: the text of Markdown and YAML, comments of a proto, comments and texts of a program."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".md", ".yaml", ".yml"):
        yield source
        return
    if path.suffix in (".go", ".ts", ".tsx"):
        yield from _script(source, shows=path.suffix == ".tsx")
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


def _script(source: str, *, shows: bool) -> Iterator[str]:
    """The comments and texts of Go or TypeScript, and of a page the words between its tags."""
    for item in _SCRIPT.finditer(source):
        if item["comment"]:
            yield item["comment"]
        elif _PROSE.search(text := _INSERTED.sub("", item["text"][1:-1])):
            yield text
    if shows:
        yield from (text for text in _SHOWN.findall(source) if _PROSE.search(text))


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
    for name in checkout.files(*(f"*{suffix}" for suffix in _READ), root=ROOT):
        if name.startswith(_LEFT) or _LEFT_ANYWHERE.search(name):
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
