"""What an agent's work left, as a diff and as files: true, bounded, and never a reason for a rollout to fail."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.driver.conftest import Driver
from tests.unit.driver.rollouts.test_attempt import with_task
from tests.unit.driver.world import bash, say

from penstock_chassis.errors import PenstockError, PermissionDenied, ResourceExhausted
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.rollouts.workdir.diff import MAX_DIFF_BYTES, unified
from penstock_driver.rollouts.workdir.files import MAX_BYTES, MAX_FILE_BYTES, MAX_FILES, small_files


def tar(files: dict[str, bytes], links: dict[str, str] | None = None) -> io.BytesIO:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return sink


def test_added_changed_and_removed_files_are_listed_and_equal_ones_not() -> None:
    """Point 1 of the dashboard: files that changed. What is no text is named; a path stays on its line."""
    before = tar({"same": b"s\n", "gone": b"g\n", "was": b"1\n2\n", "bin": b"\0a"}, {"link": "a"})
    after = tar(
        {"same": b"s\n", "was": b"1\n3", "new\n+++ b/x": b"n\n", "bin": b"\0b", "latin": b"\xff"}, {"link": "b"}
    )
    assert unified(before, after).text.decode() == (
        "diff --git a/bin b/bin\nBinary files a/bin and b/bin differ\n"
        "diff --git a/gone b/gone\n--- a/gone\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-g\n"
        "diff --git a/latin b/latin\nBinary files /dev/null and b/latin differ\n"
        "diff --git a/link b/link\n--- a/link\n+++ b/link\n@@ -1,1 +1,1 @@\n-link to 'a'\n+link to 'b'\n"
        "diff --git a/new\\n+++ b/x b/new\\n+++ b/x\n--- /dev/null\n+++ b/new\\n+++ b/x\n@@ -0,0 +1,1 @@\n+n\n"
        "diff --git a/was b/was\n--- a/was\n+++ b/was\n@@ -1,2 +1,2 @@\n 1\n-2\n+3\n\\ No newline at end of file\n"
    )


@pytest.mark.requirement("R26")
def test_bounded_diff_states_its_full_length() -> None:
    """What is left out is told."""
    made = unified(tar({}), tar({f"f{number}": b"line\n" * 40_000 for number in range(4)}))
    assert len(made.text) <= MAX_DIFF_BYTES < made.size_bytes
    assert made.text.endswith(b"\n")


async def test_agents_diff_is_kept_as_an_artifact_before_the_verifier_runs(driver: Driver) -> None:
    """Point 1 of the dashboard: files that changed, whatever backend there is."""
    work = bash("echo more >> notes; echo new > made")
    driver.gate.script = lambda messages: say("done") if messages[-1]["role"] == "tool" else work
    spec = driver.spec()
    files = (FileToWrite("notes", b"first\n", 0o644),)
    spec = replace(spec, task=replace(spec.task, files=files, keep_diff=True))
    record = await driver.start(spec)
    await driver.outcome(record)
    events = await driver.events(record.rollout_id)
    told = [event.WhichOneof("event") for event in events]
    artifact = next(event.artifact for event in events if event.HasField("artifact"))
    assert artifact.name == "changes.diff"
    assert b"+++ b/made" in artifact.content
    assert b" first\n+more\n" in artifact.content
    assert told.index("artifact") < told.index("command_finished", told.index("agent_exited"))


@pytest.mark.requirement("R26", "R59")
async def test_impossible_diff_is_noted_and_fails_nothing(driver: Driver) -> None:
    """A record for people is no condition of a reward."""
    spec = driver.spec()
    spec = replace(spec, task=replace(spec.task, keep_diff=True))
    failures: list[list[PenstockError | None]] = [
        [ResourceExhausted("too large", reason="TREE_TOO_LARGE")],
        [None, PermissionDenied("locked", reason="FILE_PERMISSION")],
    ]
    for errors in failures:
        driver.sandboxes.fail["read_tree"] = [*errors]
        record = await driver.start(spec)
        outcome = await driver.outcome(record)
        assert not outcome.HasField("failure")
        events = await driver.events(record.rollout_id)
        assert any("is not kept, though the task asks for it" in event.progress.message for event in events)
        assert not any(event.HasField("artifact") for event in events)


@pytest.mark.requirement("R26")
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", ".git", "c d", "\n"]), min_size=1, max_size=3).map("/".join),
        st.binary(max_size=40).map(lambda content: content * 3000),
        max_size=40,
    )
)
def test_small_files_are_kept_within_bounds_and_the_rest_is_counted(files: dict[str, bytes]) -> None:
    """Whatever an agent leaves, what is kept of it is bounded and in order, and what is left out is told."""
    found = small_files(tar(files))
    shown = {path: content for path, content in files.items() if not any(part[0] == "." for part in path.split("/"))}
    assert dict(found.files).items() <= shown.items()
    assert [path for path, _ in found.files] == sorted(path for path, _ in found.files)
    assert len(found.files) <= MAX_FILES and sum(len(content) for _, content in found.files) <= MAX_BYTES
    assert all(len(content) <= MAX_FILE_BYTES and path.count("/") < 2 for path, content in found.files)
    assert found.more == len(shown) - len(found.files)


@pytest.mark.requirement("R145")
async def test_a_file_whose_name_is_no_text_fails_nothing(driver: Driver) -> None:
    """An agent's name in bytes that are no UTF-8, of which no event can be made."""
    lay = r"printf x > $(printf 'a\377'); printf y > $(printf 'b\\nc'); cp note.txt out.txt"
    driver.gate.script = lambda messages: say("done") if messages[-1]["role"] == "tool" else bash(lay)
    record = await driver.start(with_task(driver, keep_files=True, keep_diff=True))
    outcome = await driver.outcome(record)
    assert (outcome.HasField("failure"), outcome.reward.value) == (False, 1.0)
    names = [item.artifact.name for item in await driver.events(record.rollout_id) if item.HasField("artifact")]
    assert "files/out.txt" in names


@pytest.mark.requirement("R76")
def test_a_link_is_no_file_to_keep() -> None:
    """Where a link leads is not looked at."""
    assert small_files(tar({"a": b"1"}, {"b": "/etc/passwd"})).files == (("a", b"1"),)


async def test_small_files_of_a_working_directory_are_kept_on_request(driver: Driver) -> None:
    """What OpenEnv's `run_rollout` tells as `files`: as the agent left them, before anything is verified."""
    work = bash("mkdir -p src/deep; echo one > src/main; echo two > src/deep/no; echo three > .hidden")
    driver.gate.script = lambda messages: say("done") if messages[-1]["role"] == "tool" else work
    spec = driver.spec()
    spec = replace(spec, task=replace(spec.task, keep_files=True))
    record = await driver.start(spec)
    await driver.outcome(record)
    events = await driver.events(record.rollout_id)
    artifacts = {event.artifact.name: event.artifact.content for event in events if event.HasField("artifact")}
    assert artifacts["files/src/main"] == b"one\n"
    assert not {"files/src/deep/no", "files/.hidden", "changes.diff"} & artifacts.keys()
    assert any("more files of the working directory" in event.progress.message for event in events)
