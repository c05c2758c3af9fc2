"""The blocks of code of the repository's pages, and the commands in them.

Every block is run, or checked by its own parser, or named in `left_out.py` with its reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.unit.docs.pages import ROOT
from tests.unit.docs.test_commands import PAGES

KINDS: Final = {
    "python": "a program: run, all of a page's in one namespace, in order",
    "sh": "commands, as one types them; `penstock` is run",
    "console": "commands behind `$ ` with what they print, which is compared in shape",
    "yaml task": "read as a task",
    "yaml verifier": "read as a verifier in a file of its own",
    "yaml agent": "read as an agent's spec",
    "yaml rules": "read as rules of `penstock scan`",
    "yaml prices": "read as a table of prices",
    "yaml script": "read as a script of the scripted engine",
    "yaml compose": "an override of docker-compose.yml",
    "yaml values": "values of the chart in deploy/helm, rendered by Helm",
    "yaml kubernetes": "manifests, read by Kubernetes' schemas",
    "toml": "read as TOML",
    "json": "read as JSON",
    "go": "a program of the Go client: tests/integration/go builds and runs it",
    "ts": "a program of the TypeScript client: tests/integration/typescript checks its types and runs it",
    "text": "no code: a drawing, or what something prints",
}
"""What a fence may be followed by, and what that means."""

_FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n)[ \t]*\n {4}(?! *[-*] )\S")
_SEPARATORS = {"|", "||", "&&", ";", "&", "<", ">", ">>", "(", ")"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page below the repository, the line of its fence, what stands behind that, its content."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a shell, with what is said to be printed behind it."""

    block: Block
    line: str
    printed: tuple[str, ...]

    def calls(self) -> Iterator[list[str]]:
        """The simple commands in it, each as its words; assignments before a program are left out.

        Raises:
            ValueError: it is no line of a shell.
        """
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for token in [*lexer, ";"]:
            if token in _SEPARATORS:
                if words and not skip:
                    yield words
                words, skip = [], token in {"<", ">", ">>"}
            elif words or not re.match(r"[A-Z_][A-Z0-9_]*=", token):
                words.append(token)


def blocks(page: Path) -> list[Block]:
    """A page's blocks, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    found = []
    for match in _FENCE.finditer(text):
        content = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Block(name, text.count("\n", 0, match.start()) + 1, match[3].strip(), content))
    return found


def unfenced(page: Path) -> list[int]:
    """The lines at which a block begins that is only indented, and so says nothing of what it is."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    return [text.count("\n", 0, match.end()) + 1 for match in _INDENTED.finditer(text)]


def commands(block: Block) -> list[Command]:
    """The commands of a block `sh` or `console`; a backslash at its end goes on with the next line."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.kind == "sh":
        return [Command(block, bare, ()) for line in lines if (bare := _uncommented(line))]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(block, _uncommented(line[2:]), ()))
        elif found:
            found[-1] = Command(block, found[-1].line, (*found[-1].printed, line))
        else:
            raise AssertionError(f"{block}: a block `console` begins with a command behind `$ `")
    return found


def _uncommented(line: str) -> str:
    return re.sub(r"(?:^|\s+)#\s.*$", "", line).strip()


ALL: Final = [block for page in PAGES for block in blocks(page)]
