"""Mutated solutions: which changes of a diff are taken back, and that the shell lines really do it."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path

import pytest

from penstock.assay.mutations import answer_blocks, blocks_of, mutants

BEFORE = "def area(a, b):\n    return a\n\n\ndef name():\n    return 'x'\n\n\ndef last():\n    return 1\n"
AFTER = (
    "import math\n\n\ndef area(a, b):\n    # both sides\n"
    "    if a < 0:\n        raise ValueError(\n            a\n        )\n"
    "    return a * b\n\n\ndef name():\n    return 'y'\n\n\ndef last():\n    return 1\n"
)


def diff_of(path: str, before: str | None, after: str | None) -> str:
    """A unified diff as a rollout keeps it."""
    one, other = (f"{side}/{path}" if text is not None else "/dev/null" for side, text in (("a", before), ("b", after)))
    lines = difflib.unified_diff((before or "").splitlines(), (after or "").splitlines(), one, other, lineterm="")
    return f"diff --git a/{path} b/{path}\n" + "".join(f"{line}\n" for line in lines)


def applied(folder: Path, script: str) -> None:
    """Runs a mutant's shell lines."""
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True)


@pytest.mark.requirement("R138")
def test_each_block_of_a_diff_is_taken_back_exactly(tmp_path: Path) -> None:
    """All blocks together give the file as it was, whatever the order of lines."""
    blocks = blocks_of(diff_of("src/a.py", BEFORE, AFTER))
    (tmp_path / "src").mkdir()
    file = tmp_path / "src/a.py"
    file.write_text(AFTER)
    assert len(blocks) > 1
    for block in reversed(blocks):
        lines = AFTER.splitlines()[block.first - 1 : block.first - 1 + len(block.added)]
        assert tuple(lines) == block.added
    found = [mutant for mutant in mutants(diff_of("src/a.py", BEFORE, AFTER), 100) if mutant.is_block]
    for mutant in reversed(found):
        applied(tmp_path, mutant.script)
    # The block with nothing but an import is no mutant.
    assert file.read_text() == "import math\n\n\n" + BEFORE


def test_a_statement_is_left_out_with_what_belongs_to_it(tmp_path: Path) -> None:
    """In Python a body stays valid: what is missing is missed by a test, and not by the compiler."""
    for number, mutant in enumerate(mutants(diff_of("a.py", BEFORE, AFTER), 100)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.py").write_text(AFTER)
        applied(folder, mutant.script)
        text = (folder / "a.py").read_text()
        assert text != AFTER
        compile(text, mutant.name, "exec")
    texts = [(tmp_path / str(number) / "a.py").read_text() for number in range(len(list(tmp_path.iterdir())))]
    assert any("    pass\n    return a * b" in text for text in texts)


def test_documents_tests_and_comments_are_no_mutants() -> None:
    """No verifier could miss them."""
    diff = diff_of("README.md", "a\n", "b\n") + diff_of("tests/test_a.py", "a = 1\n", "a = 2\n")
    diff += diff_of("src/a.py", "a = 1\n", "# why\na = 1\n")
    assert [block.path for block in answer_blocks(diff)] == ["src/a.py"]
    assert mutants(diff, 10) == []


@pytest.mark.requirement("R138")
def test_caches_of_tools_that_the_solution_runs_are_no_mutants() -> None:
    """By the tag that pytest, mypy and Ruff write, at any depth, or by a name."""
    caches = (
        ".pytest_cache/CACHEDIR.TAG",
        ".pytest_cache/v/cache/nodeids",
        "a/.hypothesis/unicode/1",
        "x/CACHEDIR.TAG",
    )
    diff = "".join(diff_of(path, None, "[1]\n[2]\n") for path in caches)
    assert answer_blocks(diff) == [] and mutants(diff, 10) == []
    change = diff_of("src/a.py", "a = 1\n", "a = 2\n") + diff_of("cache.py", "a = 1\n", "a = 2\n")
    assert [block.path for block in answer_blocks(diff + change)] == ["src/a.py", "cache.py"]


@pytest.mark.parametrize(("before", "after", "left"), [(None, "echo 1\necho 2\n", ""), ("a\nb\n", None, "a\nb\n")])
def test_new_and_removed_files_are_taken_back(tmp_path: Path, before: str | None, after: str | None, left: str) -> None:
    """A file that only has to be there is written empty: doing nothing is another trial."""
    diff = diff_of("it.sh", before, after) + diff_of("other.sh", "x\n", "y\n")
    (tmp_path / "other.sh").write_text("y\n")
    if after is not None:
        (tmp_path / "it.sh").write_text(after)
    chosen = next(item for item in mutants(diff, 10) if item.name.startswith("it.sh") and item.is_block)
    applied(tmp_path, chosen.script)
    if before is None:
        assert not (tmp_path / "it.sh").exists()
        (alone,) = [item for item in mutants(diff_of("it.sh", before, after), 10) if item.is_block]
        (tmp_path / "it.sh").write_text("full\n")
        applied(tmp_path, alone.script)
    assert (tmp_path / "it.sh").read_text() == left


def test_mutants_are_bounded_and_come_from_all_parts() -> None:
    """The limit holds, and later files are not forgotten."""
    diff = "".join(diff_of(f"m{number}.py", "a = 1\n", "a = 2\nb = 3\nc = 4\n") for number in range(20))
    found = mutants(diff, 8)
    assert len(found) == 8
    assert {mutant.is_block for mutant in found} == {True, False}
    assert len({mutant.name.partition(":")[0] for mutant in found if mutant.is_block}) == 4


def test_odd_names_and_texts_reach_the_shell_unchanged(tmp_path: Path) -> None:
    """Quotes, dollars, a leading hyphen and a missing last newline."""
    path, before, after = "-o $HOME 'x'.sh", "a\n", "$(touch gone)\n'\"`\nlast"
    (tmp_path / path).write_text(after)
    for mutant in mutants(diff_of(path, before, after), 10):
        applied(tmp_path, mutant.script)
    assert sorted(item.name for item in tmp_path.iterdir()) == [path]
