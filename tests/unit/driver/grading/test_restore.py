"""Paths that are put back before grading: whatever was done to a tree, what matches is as it was."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.driver.world import Directories

from penstock_chassis.errors import PermissionDenied
from penstock_driver.domain.ports import SandboxTerms
from penstock_driver.domain.rollout import RolloutFailed
from penstock_driver.domain.validation import restore_problem
from penstock_driver.grading import restore
from penstock_driver.grading.restore import Baseline, expanded

Tree = dict[str, str]
"""Relative path -> content of a file; of a link "-> TARGET"; a directory is there when something is in it."""

NAMES = ("tests", "conftest.py", "src", "a.py", "deep")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
contents = st.one_of(st.sampled_from(["1", "2", ""]), st.sampled_from(["-> src", "-> /proc/version", "-> nowhere"]))
trees = st.dictionaries(paths, contents, max_size=8)
PATTERNS = (
    "tests/**",
    "tests",
    "**/conftest.py",
    "src/*.py",
    "conf*",
    "src/tests/[ab].py",
    "deep/**/a.py",
    "**/tests/*",
)


def written(root: Path, tree: Tree) -> None:
    """Make the tree; what would need another's file as its directory is left out."""
    for name, content in sorted(tree.items()):
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if content.startswith("-> "):
                path.symlink_to(content[3:])
            else:
                path.touch(exist_ok=False)
                path.write_text(content)
        except OSError:  # another's file or link stands where its directory would be
            continue


def matching(root: Path, patterns: tuple[str, ...]) -> Tree:
    """Everything that matches, by walking all of it and comparing whole paths."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*files, *folders]:
            path = Path(folder, name)
            names = path.relative_to(root).parts
            if any(
                _matches(names[:end], pattern.split("/")) for pattern in patterns for end in range(1, len(names) + 1)
            ):
                if path.is_symlink():
                    target = str(path.readlink())
                    # A link of the prepared state leads where it led, if not by the same text.
                    found["/".join(names)] = f"-> {'/proc/version' if 'proc' in target else target}"
                elif path.is_file():
                    found["/".join(names)] = path.read_text()
    return found


def _matches(names: tuple[str, ...], pattern: list[str]) -> bool:
    while pattern[-1] == "**":
        pattern = pattern[:-1]
    if not names or not pattern:
        return not names and not pattern
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return (
        fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
        if len(pattern) > 1
        else (len(names) == 1 and fnmatchcase(names[0], pattern[0]))
    )


async def _restored(base: Path, before: Tree, after: Tree, patterns: tuple[str, ...]) -> tuple[Tree, Tree]:
    sandboxes = Directories(base)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, before)
    wanted = matching(root, patterns)
    kept = await Baseline.keep(
        sandboxes, facts.sandbox_id, expanded(patterns, facts.home, facts.workdir), None, 1 << 20
    )
    try:
        shutil.rmtree(root)
        root.mkdir()
        written(root, after)
        await kept.put_back(sandboxes, facts.sandbox_id, None)
        return wanted, matching(root, patterns)
    finally:
        kept.close()


@pytest.mark.requirement("R76")
@settings(max_examples=40)
@given(trees, trees, st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True))
def test_matching_paths_are_restored_whatever_was_done_to_them(before: Tree, after: Tree, patterns: list[str]) -> None:
    """Changed, deleted, added, replaced by links and directories, and so their directories."""
    with tempfile.TemporaryDirectory() as base:
        wanted, found = asyncio.run(_restored(Path(base), before, after, tuple(patterns)))
    assert found == wanted


@pytest.mark.requirement("R76")
async def test_unmatched_paths_keep_their_changes(tmp_path: Path) -> None:
    """The agent's work beside the tests stays."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, {"tests/a.py": "1", "src/a.py": "1"})
    kept = await Baseline.keep(
        sandboxes, facts.sandbox_id, expanded(["tests"], facts.home, facts.workdir), None, 1 << 20
    )
    shutil.rmtree(root)
    written(root, {"tests/a.py": "2", "tests/conftest.py": "2", "src/a.py": "2", "src/new.py": "2"})
    await kept.put_back(sandboxes, facts.sandbox_id, None)
    kept.close()
    everything = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    assert everything == {"tests/a.py": "1", "src/a.py": "2", "src/new.py": "2"}


@pytest.mark.requirement("R72", "R76")
async def test_locked_directory_is_opened_for_the_paths_named_in_it(tmp_path: Path) -> None:
    """As for what is found by a pattern."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, {"src/tests/t.py": "1"})
    patterns = expanded(["src/tests/t.py"], facts.home, facts.workdir)
    kept = await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    (root / "src/tests/t.py").write_text("2")
    sandboxes.fail["kind"] = [*[None] * len(root.parts), PermissionDenied("locked", reason="FILE_PERMISSION")]
    (root / "src").chmod(0)
    await kept.put_back(sandboxes, facts.sandbox_id, None)
    kept.close()
    assert (root / "src").stat().st_mode & 0o777 == 0o755
    assert (root / "src/tests/t.py").read_text() == "1"


@pytest.mark.requirement("R72", "R76")
@pytest.mark.parametrize("left", [b"a\xff/conftest.py", b"tests/test_\xff.py", b"a\xff\xfe/in/conftest.py"])
async def test_names_that_are_no_text_hide_nothing_from_the_restoration(tmp_path: Path, left: bytes) -> None:
    """No request can name them, so they could be neither removed nor restored: an agent's plugin would be run."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, {"tests/test_a.py": "1"})
    patterns = expanded(["**/conftest.py", "**/test_*.py"], facts.home, facts.workdir)
    kept = await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    planted = root / os.fsdecode(left)
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text("forged")
    with pytest.raises(RolloutFailed) as agents:
        await kept.put_back(sandboxes, facts.sandbox_id, None)
    kept.close()
    assert (agents.value.failure.cause, agents.value.failure.reason) == ("AGENT", "GRADING_BLOCKED")
    with pytest.raises(RolloutFailed) as tasks:
        await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    assert (tasks.value.failure.cause, tasks.value.failure.reason) == ("TASK", "RESTORE_NOT_TEXT")


@pytest.mark.requirement("R76")
async def test_replacement_character_is_a_character_like_any_other(tmp_path: Path) -> None:
    """Where names are shown, it also stands for bytes that are not UTF-8."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, {"tests/test_\ufffd.py": "1"})
    patterns = expanded(["tests/test_*.py"], facts.home, facts.workdir)
    kept = await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    written(root, {"tests/test_\ufffd\ufffd.py": "2"})
    (root / "tests/test_\ufffd.py").write_text("2")
    assert await kept.put_back(sandboxes, facts.sandbox_id, None) == 2
    kept.close()
    assert {item.name: item.read_text() for item in (root / "tests").iterdir()} == {"test_\ufffd.py": "1"}


@pytest.mark.requirement("R76")
async def test_names_that_are_no_text_matter_only_where_files_are_restored(tmp_path: Path) -> None:
    """Beside them anything may stand."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    root = Path(facts.workdir)
    written(root, {"tests/test_a.py": "1", "data/b": "2"})
    (root / os.fsdecode(b"data/\xff")).write_text("x")
    (root / os.fsdecode(b"tests/\xff.txt")).write_text("x")
    patterns = expanded(["tests/test_*.py"], facts.home, facts.workdir)
    kept = await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    assert await kept.put_back(sandboxes, facts.sandbox_id, None) == 1
    kept.close()


@pytest.mark.requirement("R76")
async def test_more_than_may_be_kept_is_the_tasks_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the agent has begun."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    written(Path(facts.workdir), {f"tests/{n}.py": "" for n in range(20)})
    monkeypatch.setattr(restore, "MAX_LOOKED_AT", 10)
    with pytest.raises(RolloutFailed) as caught:
        patterns = expanded(["tests/*"], facts.home, facts.workdir)
        await Baseline.keep(sandboxes, facts.sandbox_id, patterns, None, 1 << 20)
    assert (caught.value.failure.cause, caught.value.failure.reason) == ("TASK", "RESTORE_TOO_LARGE")


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("pattern", ["", "/", ".", "**", "**/**", "~", "~/", "a/../b", "..", "a\0b", "a/**b", "***"])
def test_a_pattern_that_cannot_be_meant_is_refused(pattern: str) -> None:
    assert restore_problem(pattern)


@pytest.mark.requirement("R45")
def test_patterns_are_absolute_in_the_end() -> None:
    """Of the home and the working directory that the sandbox has."""
    assert expanded(["tests/**", "./a//b", "~/.bashrc", "/opt/x"], "/h", "/w") == (
        ("w", "tests"),
        ("w", "a", "b"),
        ("h", ".bashrc"),
        ("opt", "x"),
    )
    assert not any(restore_problem(pattern) for pattern in ("tests/**", "~/.local", "/opt/x", "*.py", "**/conftest.py"))
