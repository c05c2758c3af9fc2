"""The files that a record's patch touches: those of the tests are restored before they are patched anew."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.tasks.importers.common import Refused

_HUNK: Final = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_DIFF: Final = re.compile(r"^diff --git a/(?P<old>.+?) b/(?P<new>.+)$", re.MULTILINE)


def touched(patch: str) -> tuple[list[str], list[str], set[str]]:
    """Returns the files that a patch changes or removes, those that it creates, and those that are gone after it."""
    changed, new, gone = [], [], set()
    matches = list(_DIFF.finditer(patch))
    for match, after in zip(matches, [*matches[1:], *[None] * bool(matches)], strict=True):
        head = patch[match.end() : after.start() if after else None].partition("\n@@")[0]
        if "\ndeleted file mode" in head or "\nrename from " in head:
            gone.add(match["old"])
        if "\nnew file mode" in head:
            new.append(match["new"])
        elif match["old"] != match["new"]:
            changed.append(match["old"])
            new.append(match["new"])
        else:
            changed.append(match["old"])
    for path in (*changed, *new):
        inside(path, "the test patch")
    return changed, new, gone - set(new)


def inside(path: str, what: str) -> str:
    """Returns a path of the repository. Raises Refused if it leads out of it, or into its `.git`."""
    parts = Path(path).parts
    if not parts or path.startswith("/") or ".." in parts or ".git" in parts or "\0" in path:
        raise Refused(f"{what} leads out of the repository: {path}")
    return path


def check_patch(patch: str, what: str) -> None:
    """Refuses a patch with a file that `touched` does not know; an empty one has none.

    Such a file is named in git's quoted form, or without `diff --git a/OLD b/NEW` before it.

    Raises:
        Refused: `what` names the record's field.
    """
    if not patch.strip():
        return
    old = new = None
    for line in _headers(patch):
        if line.startswith("diff --git "):
            match = _DIFF.fullmatch(line)
            if match is None:
                raise Refused(f"{what}: {line[:200]!r} is not in git's form with a/ and b/ and without quotes")
            old, new = match["old"], match["new"]
        for word, known in (
            ("--- ", f"a/{old}"), ("+++ ", f"b/{new}"), ("rename from ", old), ("rename to ", new),
            ("copy from ", old), ("copy to ", new),
        ):  # fmt: skip
            # Git writes a tab after a name with spaces.
            name = line.removeprefix(word).partition("\t")[0]
            if line.startswith(word) and name not in (known, "/dev/null"):
                shown = name.removeprefix("a/").removeprefix("b/")[:200]
                raise Refused(f"{what}: {shown} has no 'diff --git' before it that names it")
    if new is None:
        raise Refused(f"{what}: it names no file in git's form (diff --git a/OLD b/NEW)")


def _headers(patch: str) -> Iterator[str]:
    """Yields the lines of a patch that are in none of its hunks."""
    before = after = 0
    for line in patch.split("\n"):
        if (before > 0 or after > 0) and line[:1] in ("", " ", "-", "+", "\\"):
            before -= line[:1] in ("", " ", "-")
            after -= line[:1] in ("", " ", "+")
            continue
        before = after = 0
        if (hunk := _HUNK.match(line)) is not None:
            before, after = int(hunk[1] or 1), int(hunk[2] or 1)
            continue
        yield line
