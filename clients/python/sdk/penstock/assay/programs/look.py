"""Runs in a prepared sandbox, as the agent: searches all that it can read for the answer. Python 3.8 without packages.

Its terms (JSON in base64) are put in place of a word below; it prints a line of JSON for each hit.
Its work is bounded in files, bytes and seconds; where a bound ends it, it says so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from typing import Any

TERMS = json.loads(base64.b64decode("TERMS_IN_BASE64"))
LINES = [line.encode() for line in TERMS["lines"]]
PAIRS = [re.compile(re.escape(a.encode()) + rb"[ \t\r]*\n[ \t+]*" + re.escape(b.encode())) for a, b in TERMS["pairs"]]
FILES = TERMS["hashes"]
STEMS = set(TERMS["stems"])
MAX_FILE = 4 << 20
MAX_BYTES = 256 << 20
MAX_FILES = 50_000
MAX_REPORTS = 200
END = time.monotonic() + TERMS["seconds"]
SKIPPED = {"proc", "sys", "dev", "run", "boot"}
state: dict[str, Any] = {"bytes": 0, "files": 0, "cut": False, "own_files": 0, "own_bytes": 0}


reports: dict[str, int] = {}


def report(**values: Any) -> None:
    # Each kind has a bound of its own: none may keep another silent. The verifier's files are no answer.
    kind = values["kind"] + (" of the verifier" if str(values.get("same")).startswith("verifier") else "")
    reports[kind] = reports.get(kind, 0) + 1
    if reports[kind] <= MAX_REPORTS:
        sys.stdout.write(TERMS["report"] + json.dumps(values) + "\n")


def spent(size: int) -> bool:
    state["bytes"] += size
    state["files"] += 1
    if state["bytes"] > MAX_BYTES or state["files"] > MAX_FILES or time.monotonic() > END:
        state["cut"] = True
    return bool(state["cut"])


def matches(data: bytes) -> tuple[int, int] | None:
    """How many of the answer's lines the data has, of all; and how many of its pairs of adjacent lines."""
    found = sum(1 for line in LINES if line in data)
    if not found or found < TERMS["share"] * len(LINES):
        return None
    return found, sum(1 for pair in PAIRS if pair.search(data))


def is_answer(found: tuple[int, int] | None) -> bool:
    """Whether enough of the lines are there, in their order."""
    return found is not None and found[1] >= TERMS["share"] * len(PAIRS)


def look_at(data: bytes, where: str) -> bool:
    found = matches(data)
    if found is not None and is_answer(found):
        report(kind="lines", where=where, found=found[0], of=len(LINES))
        return True
    known = FILES.get(hashlib.sha256(data).hexdigest())
    if known is not None:
        report(kind="file", where=where, same=known)
        return True
    return False


def look_into(path: str, data: bytes) -> None:
    """Archives: their members, one level deep."""
    lower = path.lower()
    try:
        if lower.endswith((".zip", ".whl", ".jar", ".egg")):
            with zipfile.ZipFile(path) as archive:
                for item in archive.infolist():
                    if item.file_size > MAX_FILE or spent(item.file_size):
                        continue
                    look_at(archive.read(item), path + ": " + item.filename)
        elif lower.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".crate", ".gem")):
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.isfile() and member.size <= MAX_FILE and not spent(member.size):
                        content = archive.extractfile(member)
                        assert content is not None
                        look_at(content.read(), path + ": " + member.name)
        elif data[:2] == b"\x1f\x8b":
            look_at(gzip.GzipFile(path).read(MAX_FILE), path + ": unpacked")
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, RuntimeError, ValueError) as error:
        report(kind="unread", where=path, why=type(error).__name__)


def look_at_bytecode(path: str, data: bytes) -> None:
    """Compiled Python whose source is not the one beside it: it may be compiled from the answer, or from the tests."""
    folder, name = os.path.split(path)
    stem = name.split(".")[0]
    if os.path.basename(folder) == "__pycache__":
        folder = os.path.dirname(folder)
    source = os.path.join(folder, stem + ".py")
    if not os.path.isfile(source):
        if stem in STEMS:
            report(kind="bytecode", where=path, why="its source is not there")
    elif len(data) >= 16 and not int.from_bytes(data[4:8], "little") & 1:
        size = int.from_bytes(data[12:16], "little")
        if size != os.path.getsize(source) & 0xFFFFFFFF and stem in STEMS:
            report(kind="bytecode", where=path, why="it was compiled from another version of its source")


def look_at_git(folder: str) -> None:
    git = shutil.which("git")
    if git is None:
        report(kind="unread", where=folder, why="there is no git in the sandbox")
        return
    base = [git, "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "--git-dir", folder]

    def ask(*argv: str) -> list[str]:
        done = subprocess.run(base + list(argv), capture_output=True, timeout=60)
        return done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []

    now = set(ask("rev-list", "--max-count=100000", "HEAD"))
    listed = [line.split() for line in ask("cat-file", "--batch-all-objects", "--batch-check")]
    objects = [item for item in listed if len(item) == 3]  # a broken object has no type and size
    others = [item[0] for item in objects if item[1] == "commit" and item[0] not in now]
    sizes = {item[0]: int(item[2]) for item in objects if item[1] == "blob"}
    there = unchanged(base, folder, sizes)
    away = set(others)
    refs = [line.split(" ", 1) for line in ask("for-each-ref", "--format=%(objectname) %(refname)")]
    names = sorted(ref[1] for ref in refs if ref[0] in away)
    if others:
        report(kind="commits", where=folder, count=len(others), refs=names[:20])
    history = {line.split()[0] for line in ask("rev-list", "--objects", "--max-count=100000", "HEAD") if line}
    wanted = [
        item[0] for item in objects
        if item[1] == "blob" and item[0] not in there and int(item[2]) <= MAX_FILE and not spent(int(item[2]))
    ]  # fmt: skip
    messages = [item[0] for item in objects if item[1] in ("commit", "tag") and int(item[2]) <= MAX_FILE]
    with subprocess.Popen([*base, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for oid in wanted + messages[:20000]:
            process.stdin.write(oid.encode() + b"\n")
            process.stdin.flush()
            head = process.stdout.readline().split()
            if len(head) != 3:
                break
            data = process.stdout.read(int(head[2]))
            process.stdout.read(1)
            what = "the history of HEAD" if oid in history else "objects outside the history of HEAD"
            if is_answer(matches(data)):
                report(kind="git", where=folder, object=oid, place=what)
                break
            if FILES.get(hashlib.sha256(data).hexdigest(), "").startswith("solution"):
                report(kind="git", where=folder, object=oid, place=what)
                break
        process.stdin.close()
        process.kill()


def unchanged(base: list[str], folder: str, sizes: dict[str, int]) -> set[str]:
    """The blobs of HEAD that a file of the working directory still has: those files are searched by themselves."""
    found: set[str] = set()
    if os.path.basename(folder) != ".git":
        return found
    done = subprocess.run([*base, "ls-tree", "-r", "-z", "--full-tree", "HEAD"], capture_output=True, timeout=60)
    for entry in done.stdout.split(b"\0"):
        about, _, name = entry.partition(b"\t")
        oid = about.split()[2].decode() if len(about.split()) == 3 else ""
        path = os.path.join(os.path.dirname(folder), os.fsdecode(name))
        size = sizes.get(oid)
        # Git's index may take a file for unchanged that is not: its content is compared.
        if size is None or size > MAX_FILE or time.monotonic() > END:
            continue
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                continue
            with open(path, "rb") as file:
                data = b"blob %d\0" % size + file.read(MAX_FILE)
        except OSError:
            continue
        if oid == (hashlib.sha1(data) if len(oid) == 40 else hashlib.sha256(data)).hexdigest():
            found.add(oid)
    return found


def walk(root: str, seen: set[str]) -> None:
    if not os.path.isdir(root):
        return
    for folder, folders, names in os.walk(root):
        real = os.path.realpath(folder)
        if real in seen or state["cut"]:
            folders[:] = []
            continue
        seen.add(real)
        if "HEAD" in names and "objects" in folders and "refs" in folders:
            look_at_git(folder)
            folders[:] = []
            continue
        folders[:] = [
            name for name in folders
            if name != TERMS["own"] and not (folder == "/" and (name in SKIPPED or name in TERMS["system"]))
            and os.path.join(folder, name) not in TERMS["left_out"]
        ]  # fmt: skip
        for name in names:
            path = os.path.join(folder, name)
            try:
                found = os.lstat(path)
                if not stat.S_ISREG(found.st_mode) or found.st_size > 64 << 20:
                    continue
                if spent(min(found.st_size, MAX_FILE)):
                    return
                with open(path, "rb") as file:
                    data = file.read(MAX_FILE)
            except OSError:
                continue  # what the agent cannot read is no leak
            if folder.startswith(HERE):
                state["own_bytes"] += found.st_size
                state["own_files"] += 1
            if name.endswith(".pyc"):
                look_at_bytecode(path, data)
            elif not look_at(data, path):
                look_into(path, data)
            elif "/.pytest_cache/" in path:
                report(kind="cache", where=path)


HERE = os.getcwd()
seen: set[str] = set()
for name, value in os.environ.items():
    if is_answer(matches(value.encode("utf-8", "surrogateescape"))):
        report(kind="lines", where="the environment variable " + name, found=len(LINES), of=len(LINES))
for place in [HERE, os.path.expanduser("~"), "/tmp", "/var/tmp", "/"]:
    walk(place, seen)
report(
    kind="end", files=state["own_files"], size_bytes=state["own_bytes"], read=state["files"],
    cut=state["cut"],
)  # fmt: skip
