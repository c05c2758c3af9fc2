"""Mutated solutions: the solution without one of its changes. A verifier that rewards one of them does not test that.

Mutants come from the unified diff that the solution makes of the working directory: each block of changed lines, and
each statement of a block, taken back. What no test can notice (comments, imports, documentation, the solution's own
tests, caches of tools that it runs) is left alone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath
from typing import Final

from penstock.client.tasks.spec import SeedFile
from penstock.tasks.scripts import quoted_path, replace_lines, write_file

_HUNK: Final = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")
_NO_BEHAVIOUR: Final = re.compile(
    r"\s*(?:$|[^\w\s]*$|(?:#(?!include|define|if|endif|else)|//|/\*|\*(?:\s|/|$)|--\s|;|%).*"
    r"|(?:from\s+\S+\s+)?import\s.*|__all__\b.*|(?:logger|logging|log|_LOG)\.\w+\(.*|pass$|else\s*:?$|[ru]?(?:\"\"\"|''').*"
    r"|@(?:override|overload|final)\b.*)"
)
_DOCUMENTS: Final = frozenset({".md", ".rst", ".adoc"})
_TESTS: Final = re.compile(
    r"(?:^|/)(?:tests?|__tests__|spec|docs?)/|(?:^|/)(?:test_[^/]*|[^/]*[_.](?:test|spec)\.\w+|conftest\.py)$"
)
_CACHES: Final = frozenset({"__pycache__", ".hypothesis", ".venv", "node_modules"})
"""Directories that tools write, beside those that say so."""
_CACHE_TAG: Final = "CACHEDIR.TAG"
"""The file by which a directory says that it is a cache (https://bford.info/cachedir/): pytest's, mypy's, Ruff's."""
_BRANCH: Final = re.compile(r"(?:elif|else|except|finally)\b")
"""What belongs to the statement above it, in the same column."""
_QUOTES: Final = ('"""', "'''")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Adjacent changed lines of a file: `added` are now its lines from `first` (1 or more), instead of `removed`."""

    path: str
    first: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    is_new_file: bool = False
    is_gone: bool = False
    """Whether the solution removes the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of the solved working directory: shell lines, and what they take back."""

    name: str
    script: str
    is_block: bool
    shown: str = field(default="", repr=False)


def blocks_of(diff: str) -> list[Block]:
    """Returns the changes of a unified diff, in order; binary files and links are not among them."""
    found: list[Block] = []
    path, is_new, is_gone = "", False, False
    number = left = 0
    added: list[str] = []
    removed: list[str] = []

    def end() -> None:
        if path and (added or removed):
            begin = max(number - len(added), 1)
            found.append(
                Block(
                    path=path,
                    first=begin,
                    added=tuple(added),
                    removed=tuple(removed),
                    is_new_file=is_new,
                    is_gone=is_gone,
                )
            )
        added.clear()
        removed.clear()

    for line in diff.splitlines():
        if line.startswith("diff --git "):
            end()
            path, left = "", 0
        elif not left and line.startswith("--- "):
            is_new = line[4:] == "/dev/null"
            path = "" if is_new else line[6:]
        elif not left and line.startswith("+++ "):
            is_gone = line[4:] == "/dev/null"
            path = path if is_gone else line[6:]
        elif not left and (hunk := _HUNK.match(line)):
            end()
            number, left = int(hunk[1]), 1
            number += hunk[2] == "0"  # of no lines: they would come after the numbered one
        elif line.startswith("@@ ") and (hunk := _HUNK.match(line)):
            end()
            number = int(hunk[1]) + (hunk[2] == "0")
        elif line.startswith("+") and left:
            added.append(line[1:])
            number += 1
        elif line.startswith("-") and left:
            if added:
                end()
            removed.append(line[1:])
        elif line.startswith(" ") and left:
            end()
            number += 1
    end()
    return found


def answer_blocks(diff: str) -> list[Block]:
    """Returns the changes that make the solution: no caches; neither documentation nor tests, unless that is all."""
    changed = blocks_of(diff)
    tagged = {path.parent for block in changed if (path := PurePosixPath(block.path)).name == _CACHE_TAG}
    found = [
        block
        for block in changed
        if not any(parent.name in _CACHES or parent in tagged for parent in PurePosixPath(block.path).parents)
    ]
    return [block for block in found if not _is_beside(block.path)] or found


def mutants(diff: str, limit: int) -> list[Mutant]:
    """Returns at most `limit` mutants: each block of the diff taken back, then statements, evenly from all of them."""
    blocks = [block for block in answer_blocks(diff) if block.is_gone or any(_behaves(block))]
    whole = [_reverted(block) for block in blocks]
    if len(whole) == 1:
        # All of the solution taken back is what doing nothing is; a file that only has to be there is another thing.
        whole = [_emptied(blocks[0])] if blocks[0].is_new_file else []
    parts = list(chain.from_iterable(map(_statements, blocks)))
    kept = _spread(whole, max(limit - min(len(parts), limit // 2), 1))
    return kept + _spread(parts, limit - len(kept))


def _spread(items: Sequence[Mutant], count: int) -> list[Mutant]:
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def _is_beside(path: str) -> bool:
    name = PurePosixPath(path)
    return (
        name.suffix in _DOCUMENTS
        or name.stem.upper() in ("CHANGELOG", "README", "CHANGES", "NEWS")
        or _TESTS.search(path) is not None
    )


def _behaves(block: Block) -> list[bool]:
    """Returns for each added line whether it does something that a test may notice."""
    if not block.added:
        return [any(not _NO_BEHAVIOUR.fullmatch(line) for line in block.removed)]
    within = False
    found = []
    for line in block.added:
        marks = sum(line.count(mark) for mark in _QUOTES)
        begins = line.strip().lstrip("rRuUbBfF").startswith(_QUOTES)
        found.append(not within and not begins and not _NO_BEHAVIOUR.fullmatch(line))
        if marks % 2 and (within or begins):
            within = not within
    return found


def _reverted(block: Block) -> Mutant:
    shown = "\n".join([f"-{line}" for line in block.removed] + [f"+{line}" for line in block.added])
    if block.is_new_file:
        return Mutant(
            name=f"{block.path}: not written", script=f"rm -f {quoted_path(block.path)}\n", is_block=True, shown=shown
        )
    if block.is_gone:
        text = "".join(f"{line}\n" for line in block.removed)
        script = write_file(SeedFile(block.path, text.encode()))
        return Mutant(name=f"{block.path}: not removed", script=script, is_block=True, shown=shown)
    return Mutant(
        name=f"{block.path}: lines {block.first} to {block.first + max(len(block.added), 1) - 1} not changed",
        script=replace_lines(block.path, block.first, len(block.added), block.removed),
        is_block=True,
        shown=shown,
    )


def _emptied(block: Block) -> Mutant:
    shown = "\n".join(f"+{line}" for line in block.added)
    return Mutant(name=f"{block.path}: empty", script=f": >{quoted_path(block.path)}\n", is_block=True, shown=shown)


def _statements(block: Block) -> Iterator[Mutant]:
    """Yields the block without one statement: a line, and those below it that are part of it."""
    if block.is_gone or not block.added:
        return
    behaves = _behaves(block)
    if sum(behaves) < 2:
        return
    depth = 0
    for index, line in enumerate(block.added):
        within, depth = depth > 0, depth + _depth(line)
        if within or not behaves[index]:
            continue
        end = _end(block.added, index)
        if index == 0 and end == len(block.added) and not block.is_new_file:
            continue
        # Where indentation is syntax, an empty body would be an error, which any test notices.
        is_python = block.path.endswith(".py")
        instead = [line[: len(line) - len(line.lstrip())] + "pass"] if is_python else []
        yield Mutant(
            name=f"{block.path}: line {block.first + index} left out",
            script=replace_lines(block.path, block.first + index, end - index, instead),
            is_block=False,
            shown="\n".join(f"+{item}" for item in block.added[index:end]),
        )


def _end(lines: Sequence[str], index: int) -> int:
    """Returns the index after a statement."""
    indent = _indent(lines[index])
    depth = _depth(lines[index])
    end = index + 1
    while end < len(lines):
        line = lines[end]
        deeper = bool(line.strip()) and _indent(line) > indent
        blank_within = not line.strip() and any(_indent(item) > indent for item in lines[end + 1 :][:1] if item.strip())
        goes_on = _indent(line) == indent and _BRANCH.match(line.strip()) is not None
        if depth <= 0 and not deeper and not blank_within and not goes_on:
            break
        depth += _depth(line)
        end += 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _depth(line: str) -> int:
    return sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
