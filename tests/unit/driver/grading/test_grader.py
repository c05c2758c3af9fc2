"""What goes from the agent's sandbox to a fresh fork: only from where a diff sees it, and what it lacks as well."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.unit.driver.world import Directories

from penstock_chassis.errors import PermissionDenied, ResourceExhausted
from penstock_driver.domain.ports import Command, PathKind, SandboxTerms
from penstock_driver.domain.rollout import CopiedPath, RolloutFailed, Verifier
from penstock_driver.grading import grader
from penstock_driver.grading.carried import Work
from penstock_driver.grading.grader import Grader

VERIFIER = Verifier(commands=(Command(shell="true"),), fresh_fork=True)


async def refusal(sandboxes: Directories, below: tuple[str, ...], workdir: str) -> tuple[str, str]:
    """Why directories are refused before the agent starts: cause and reason, empty where they are not."""
    facts = replace(await sandboxes.create(SandboxTerms(), 1.0, {}), workdir=workdir)
    given = Grader(sandboxes, replace(VERIFIER, changes_below=below), spool=None, max_bytes=1 << 20)
    try:
        await given.save_baseline(facts, set())
    except RolloutFailed as failed:
        assert "verifier.changes_below" in failed.failure.message
        return failed.failure.cause, failed.failure.reason
    return "", ""


@pytest.mark.requirement("R27", "R76")
@pytest.mark.parametrize("workdir", ["/tmp", "/tmp/work", "/dev/shm"])
async def test_working_directory_in_memory_is_refused(tmp_path: Path, workdir: str) -> None:
    """Also by a path that is relative to it."""
    sandboxes = Directories(tmp_path)
    assert await refusal(sandboxes, (), workdir) == ("TASK", "CHANGES_BELOW_INVALID")
    assert await refusal(sandboxes, ("out",), workdir) == ("TASK", "CHANGES_BELOW_INVALID")


@pytest.mark.requirement("R27", "R76")
@pytest.mark.parametrize(
    ("below", "refused"),
    [
        (("real/in", "file", "absent/in"), False),
        (("linked",), True),
        (("real", "linked/in"), True),
        (("real/up/real",), True),
    ],
)
async def test_directory_is_refused_if_its_path_has_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: tuple[str, ...], refused: bool
) -> None:
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    workdir = tmp_path / "work"
    (workdir / "real/in").mkdir(parents=True)
    (workdir / "file").touch()
    (workdir / "linked").symlink_to("real")
    (workdir / "real/up").symlink_to("..")
    found = await refusal(Directories(tmp_path), below, str(workdir))
    assert found == (("TASK", "CHANGES_BELOW_INVALID") if refused else ("", ""))


@pytest.mark.requirement("R76")
async def test_directory_that_the_agent_cannot_enter_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can its link be seen."""
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    sandboxes = Directories(tmp_path)
    sandboxes.fail["kind"] = [PermissionDenied("locked", reason="FILE_PERMISSION")]
    assert await refusal(sandboxes, (), str(tmp_path)) == ("", "")


@pytest.mark.requirement("R72", "R76")
async def test_broken_file_is_gone_from_the_fork_if_nothing_else_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of removals alone is a layer."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    prepared = Path(facts.workdir, "prepared")
    prepared.touch()

    async def diff(sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        with tarfile.open(fileobj=sink, mode="w") as archive:
            pipe = tarfile.TarInfo(str(prepared)[1:])
            pipe.type = tarfile.FIFOTYPE
            archive.addfile(pipe)
        return []

    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    monkeypatch.setattr(sandboxes, "diff", diff)
    given = Grader(sandboxes, VERIFIER, spool=None, max_bytes=1 << 20)
    await given.take(facts)
    await given.put(facts)
    given.close()
    assert not prepared.exists()
    assert given.grading.changes is not None
    assert given.grading.changes.left_out_paths == (str(prepared),)


@pytest.mark.requirement("R27", "R76")
async def test_checked_directory_of_one_state_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another directory of that state is."""
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are
    sandboxes = Directories(tmp_path)
    workdir = tmp_path / "work"
    (workdir / "real").mkdir(parents=True)
    (workdir / "linked").symlink_to("real")
    facts = replace(await sandboxes.create(SandboxTerms(), 1.0, {}), workdir=str(workdir))
    asked = list[str]()
    kind = sandboxes.kind

    async def counted(sandbox_id: str, path: str) -> PathKind | None:
        asked.append(path)
        return await kind(sandbox_id, path)

    monkeypatch.setattr(sandboxes, "kind", counted)
    plain = set[str]()

    def grader_of(below: tuple[str, ...]) -> Grader:
        return Grader(sandboxes, replace(VERIFIER, changes_below=below), spool=None, max_bytes=1 << 20)

    await grader_of(("real",)).save_baseline(facts, plain)
    assert asked
    asked.clear()
    await grader_of(("real",)).save_baseline(facts, plain)
    assert not asked
    with pytest.raises(RolloutFailed):
        await grader_of(("real", "linked")).save_baseline(facts, plain)


def copying(*paths: str, collect: tuple[Command, ...] = ()) -> Verifier:
    copies = tuple(CopiedPath(path, exclude=("*.log",)) for path in paths)
    return replace(VERIFIER, copies=copies, collect=collect, command_timeout_s=30.0)


@pytest.mark.requirement("R76")
async def test_a_fork_gets_whole_copies_of_what_was_collected_in_place_of_its_own(tmp_path: Path) -> None:
    """Of nothing else: no change is read. What the agent lacks goes from the fork, and so does its link."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    out, answer, gone, linked = (Path(facts.workdir, name) for name in ("out", "answer", "gone", "linked"))
    out.mkdir()
    (out / "old").touch()
    linked.symlink_to("out")
    reported = list[str]()
    lines = ("echo 42 > answer; touch out/new out/x.log", "echo why >&2; exit 3", "mkfifo held; read word < held")
    hung = Command(shell=lines[2], timeout_s=0.1)
    verifier = copying(*map(str, (out, answer, gone, linked)), collect=(*map(_shell, lines[:2]), hung))
    given = Grader(sandboxes, verifier, spool=None, max_bytes=1 << 20)
    await given.collect(facts, 60.0, reported.append)
    await given.take(facts)
    work, _ = given.taken(())
    assert len(reported) == 2 and "command 1" in reported[0] and "why" in reported[0] and "command 2" in reported[1]
    assert "diff" not in sandboxes.calls

    # The same paths in the fork, which has other things there.
    for path in (out / "old", out / "new", out / "x.log", answer, linked):
        path.unlink()
    (out / "forks").mkdir()
    (out / "forks/own").touch()
    answer.mkdir()
    gone.touch()
    linked.mkdir()
    again = Grader(sandboxes, verifier, spool=None, max_bytes=1 << 20)
    again.give(Work(work.changes, (), work.layer))
    await again.put(facts)
    assert sorted(path.name for path in out.iterdir()) == ["new", "old"]
    assert answer.read_text() == "42\n"
    assert not gone.exists() and not linked.exists()
    assert again.grading.changes is not None
    assert (again.grading.changes.entries, again.grading.changes.left_out_paths) == (4, (str(linked),))
    again.close()
    given.close()


async def test_collect_commands_without_time_are_not_run(tmp_path: Path) -> None:
    """Which is reported once, and no failure."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    verifier = copying(facts.home, collect=(_shell("touch late"), _shell("touch later")))
    given = Grader(sandboxes, verifier, spool=None, max_bytes=1 << 20)
    reported = list[str]()
    await given.collect(facts, 0.0, reported.append)
    assert len(reported) == 1 and "from 0 on were not run" in reported[0]
    assert not sandboxes.boxes[facts.sandbox_id].ran and not Path(facts.workdir, "late").exists()
    given.close()


def _shell(line: str) -> Command:
    return Command(shell=line)


@pytest.mark.requirement("R72", "R76")
async def test_whole_copies_that_are_too_large_are_the_agents_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is that of all that is taken."""
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    paths = [Path(facts.workdir, name) for name in ("one", "two")]
    for path in paths:
        path.write_bytes(bytes(3000))
    rooms = list[int]()
    read_tree = sandboxes.read_tree

    async def bounded(sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        rooms.append(max_bytes)
        if max_bytes < 3000:
            raise ResourceExhausted("too large", reason="TREE_TOO_LARGE")
        await read_tree(sandbox_id, path, sink, max_bytes)

    monkeypatch.setattr(sandboxes, "read_tree", bounded)
    given = Grader(sandboxes, copying(*map(str, paths)), spool=None, max_bytes=5000)
    with pytest.raises(RolloutFailed) as caught:
        await given.take(facts)
    given.close()
    assert (caught.value.failure.cause, caught.value.failure.reason) == ("AGENT", "CHANGES_TOO_LARGE")
    assert rooms[0] == 5000 and rooms[1] < 3000


@pytest.mark.requirement("R27", "R76")
async def test_a_copied_path_behind_a_link_is_refused_before_the_agent_starts(tmp_path: Path) -> None:
    sandboxes = Directories(tmp_path)
    facts = await sandboxes.create(SandboxTerms(), 1.0, {})
    Path(facts.workdir, "linked").symlink_to("real")
    given = Grader(sandboxes, copying(f"{facts.workdir}/linked/in"), spool=None, max_bytes=1 << 20)
    with pytest.raises(RolloutFailed) as caught:
        await given.save_baseline(facts, set())
    assert (caught.value.failure.cause, caught.value.failure.reason) == ("TASK", "COPIES_INVALID")
    assert f"{facts.workdir}/linked is a link" in caught.value.failure.message
