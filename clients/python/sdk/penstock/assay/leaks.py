"""What an agent can read before it begins: a program in the prepared sandbox searches it for the answer.

The answer is what the solution adds to the working directory: its lines, in their order, and whole files; and the files
of the verifier. Lines are looked for in files, archives, variables, and every object of git repositories. Compiled
Python is compared with its source.
"""

import base64
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Final

import orjson

from penstock.assay.model import Code, Finding, Severity
from penstock.assay.mutations import Block, answer_blocks
from penstock.client.tasks.task import Task
from penstock.tasks.solutions import PLACE, REPORT

_MIN_CHARACTERS: Final = 30
"""An answer with less text than this may stand anywhere by chance."""
_MAX_LINES: Final = 40
_MAX_LINE: Final = 500
_MAX_HASHES: Final = 2000
_SHARE: Final = 0.6
"""Share of the answer's lines that a place must have."""
_SECONDS: Final = 60
_ALL: Final = "the sandbox"
"""What was not read where the search cannot run."""
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix")
"""Directories of the operating system, which no task fills."""
_LEFT_OUT: Final = ("/opt/penstock", "/usr/lib", "/usr/share", "/usr/include", "/usr/bin", "/usr/sbin", "/usr/libexec")
_CODE: Final = frozenset(
    [
        ".c",
        ".cc",
        ".cpp",
        ".cs",
        ".ex",
        ".go",
        ".h",
        ".hpp",
        ".hs",
        ".java",
        ".js",
        ".jsx",
        ".kt",
        ".lua",
        ".mjs",
        ".ml",
        ".php",
        ".pl",
        ".py",
        ".rb",
        ".rs",
        ".scala",
        ".sh",
        ".sql",
        ".swift",
        ".ts",
        ".tsx",
        ".zig",
        ".bash",
    ]
)


def script(task: Task, diff: str) -> str:
    """Returns the shell script that searches the sandbox; without Python it reports that it read nothing."""
    terms = base64.b64encode(orjson.dumps(_terms(task, diff))).decode()
    program = resources.files("penstock.assay").joinpath("programs", "look.py").read_text("utf-8")
    unread = orjson.dumps({"kind": "unread", "where": _ALL, "why": "it has no python3"}).decode()
    return (
        f"command -v python3 >/dev/null || {{ echo '{REPORT}{unread}'; exit 0; }}\n"
        f"exec python3 -I - <<'PENSTOCK_END'\n{program.replace('TERMS_IN_BASE64', terms)}\nPENSTOCK_END\n"
    )


def findings(reports: Sequence[str]) -> Iterator[Finding]:
    """Yields what the program's reports show."""
    seen: set[tuple[str, str]] = set()
    ended = False
    for item in map(_parsed, reports):
        kind, where = str(item.get("kind")), str(item.get("where", ""))
        ended |= kind == "end" or (kind == "unread" and where == _ALL)
        if kind == "end" and item.get("cut"):
            yield _warning(
                Code.VIEW_NOT_READ, "the sandbox has more files than are searched", f"{item.get('read')} read"
            )
        found = _finding(kind, where, item)
        if found is not None and (found.code, where) not in seen:
            seen.add((found.code, where))
            yield found
    if not ended:
        yield _warning(Code.VIEW_NOT_READ, "the search of the sandbox did not end")


def size(reports: Sequence[str]) -> tuple[int, int] | None:
    """Returns the files and bytes of the prepared working directory; None = it was not read."""
    for item in map(_parsed, reports):
        if item.get("kind") == "end":
            return int(item["files"]), int(item["size_bytes"])
    return None


def _finding(kind: str, where: str, item: dict[str, Any]) -> Finding | None:
    match kind:
        case "lines":
            text = f"{item.get('found')} of {item.get('of')} lines of the solution are in {where}"
            return _defect(Code.ANSWER_IN_VIEW, text, where)
        case "file" if str(item.get("same")).startswith(("solution", "data")):
            return _defect(Code.ANSWER_IN_VIEW, f"{where} is the same as {item.get('same')}", where)
        case "file":
            return _warning(Code.VERIFIER_IN_VIEW, f"{where} is the same as {item.get('same')}", where)
        case "git":
            text = f"the solution is in a git repository, in {item.get('place')}"
            return _defect(Code.ANSWER_IN_GIT, text, f"{where}: object {item.get('object')}")
        case "commits":
            refs = ", ".join(map(str, item.get("refs") or ())) or "reachable by no ref"
            text = f"git has {item.get('count')} commits that are not in the history of HEAD ({refs})"
            return _warning(Code.OTHER_COMMITS, text, where)
        case "bytecode":
            return _defect(Code.BYTECODE_DIFFERS, f"compiled Python: {item.get('why')}", where)
        case "unread":
            return _warning(Code.VIEW_NOT_READ, f"{where} was not searched: {item.get('why')}", where)
    return None


def _terms(task: Task, diff: str) -> dict[str, Any]:
    lines, pairs = _answer(task, answer_blocks(diff))
    hashes: dict[str, str] = {}
    given = {sha256(file.content).hexdigest() for file in task.files}
    if task.verifier is not None:
        for file in task.verifier.files:
            kind = "verifier" if PurePosixPath(file.path).suffix in _CODE else "data of the verifier"
            if len(file.content) >= _MIN_CHARACTERS:
                hashes[sha256(file.content).hexdigest()] = f"{kind}'s {file.path}"
    if task.solution is not None:
        for file in task.solution.files:
            if len(file.content) >= _MIN_CHARACTERS:
                hashes[sha256(file.content).hexdigest()] = f"solution's {file.path}"
    hashes = {name: what for name, what in hashes.items() if name not in given or what.startswith("solution")}
    stems = {PurePosixPath(block.path).stem for block in answer_blocks(diff)}
    if task.verifier is not None:
        stems |= {PurePosixPath(file.path).stem for file in task.verifier.files}
    has_image = task.sandbox is not None and bool(task.sandbox.image)
    return {
        "lines": lines,
        "pairs": pairs,
        "share": _SHARE,
        "hashes": dict(list(hashes.items())[:_MAX_HASHES]),
        "stems": sorted(stems - {"__init__"})[:_MAX_HASHES],
        "own": PLACE,
        "report": REPORT,
        "seconds": _SECONDS,
        # An image may bring another version of the repository as an installed package.
        "system": [name for name in _SYSTEM if not (has_image and name == "usr")],
        "left_out": list(_LEFT_OUT),
    }


def _answer(task: Task, blocks: Sequence[Block]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the lines that make the solution, and which of them follow each other; nothing if they are too few."""
    given = {line.strip() for file in task.files for line in file.content.decode("utf-8", "replace").splitlines()}
    found: list[str] = []
    pairs: list[tuple[str, str]] = []
    for block in blocks:
        is_code = PurePosixPath(block.path).suffix in _CODE
        former = ""
        for line in map(str.strip, block.added):
            # What a task gives to its agents may be part of the result: lines of a file that is to be sorted.
            # Nor does a line that is longer than people write.
            if not any(map(str.isalnum, line)) or len(line) > _MAX_LINE or (not is_code and line in given):
                former = ""
                continue
            if former:
                pairs.append((former, line))
            found.append(line)
            former = line
    chosen = sorted(dict.fromkeys(found), key=len, reverse=True)[:_MAX_LINES]
    if sum(map(len, chosen)) < _MIN_CHARACTERS:
        return [], []
    return chosen, [pair for pair in dict.fromkeys(pairs) if set(pair) <= set(chosen)][:_MAX_LINES]


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = orjson.loads(line.removeprefix(REPORT))
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _defect(code: Code, message: str, evidence: str = "") -> Finding:
    return Finding(code=code, severity=Severity.DEFECT, message=message, evidence=evidence)


def _warning(code: Code, message: str, evidence: str = "") -> Finding:
    return Finding(code=code, severity=Severity.WARNING, message=message, evidence=evidence)
