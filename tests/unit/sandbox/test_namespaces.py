"""The namespace of what outlives a service: sandboxes, snapshots, toolboxes. What has none is of the default one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.scripted_domain import opened

from penstock_chassis.journal import Journal
from penstock_sandbox.domain.model import ForkKind, SandboxSpec, Snapshot, State, Toolbox, ToolboxFile, ToolboxSpec
from penstock_sandbox.store.records import MIGRATIONS, Records, SnapshotRecord, SnapshotRecords
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes

pytestmark = pytest.mark.requirement("R107")


async def test_sandbox_of_an_earlier_instance_keeps_its_namespace(tmp_path: Path) -> None:
    async with opened(tmp_path) as domain:
        world, made = domain.world, await domain.sandboxes.create("", SandboxSpec(), "team-a")
    async with opened(tmp_path, world) as domain:
        (left,) = domain.sandboxes.table.matching({}, "team-a")
        assert (left.id, left.state, left.namespace) == (made.id, State.LOST, "team-a")
        assert domain.sandboxes.table.matching({}, "team-b") == []


async def test_rows_of_earlier_versions_are_of_the_default_namespace(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path / "journal.sqlite", MIGRATIONS[:3]) as journal:
        await journal.execute("INSERT INTO sandbox (id, backend, labels, created_at) VALUES ('sb-1', 'x', '{}', 1.0)")
    async with await Journal.open(tmp_path / "journal.sqlite", MIGRATIONS) as journal:
        (found,) = await Records(journal).all()
    assert found.namespace == "default"


@pytest.mark.parametrize(("written", "expected"), [("team-a", "team-a"), (None, "default")])
async def test_a_snapshots_row_has_its_namespace(tmp_path: Path, written: str | None, expected: str) -> None:
    snapshot = Snapshot("ss-1", "key", "x", 1.0, 5, ForkKind.FILESYSTEM, written or "default")
    async with await Journal.open(tmp_path / "journal.sqlite", MIGRATIONS) as journal:
        records = SnapshotRecords(journal)
        await records.write(SnapshotRecord(snapshot, SandboxSpec(), ""))
        if written is None:
            (row,) = await journal.query("SELECT content FROM snapshot")
            content: dict[str, Any] = json.loads(row["content"])
            del content["snapshot"]["namespace"]
            await journal.execute("UPDATE snapshot SET content = ?", (json.dumps(content).encode(),))
        (found,) = await records.of("x")
    assert found.snapshot.namespace == expected


async def _prepared(toolboxes: Toolboxes, namespace: str) -> Toolbox:
    spec = ToolboxSpec("tool", files=(ToolboxFile("bin/tool", b"echo"),))
    (made,) = [event async for event in toolboxes.prepare(spec, namespace) if isinstance(event, Toolbox)]
    return made


def _opened(folder: Path) -> Toolboxes:
    toolboxes = Toolboxes(folder, Installer(None))
    toolboxes.open()
    return toolboxes


async def test_a_toolbox_keeps_its_namespaces_after_a_restart(tmp_path: Path) -> None:
    first = _opened(tmp_path / "toolboxes")
    made = [await _prepared(first, name) for name in ("team-a", "team-b", "team-c")]
    await first.delete(made[0].id, "team-a")
    again = _opened(tmp_path / "toolboxes")
    assert [len(again.all(name)) for name in ("team-a", "team-b", "team-c", "default")] == [0, 1, 1, 0]
    await again.delete(made[0].id, None)
    assert again.all() == [] and list((tmp_path / "toolboxes").iterdir()) == []


async def test_a_toolbox_of_an_earlier_version_is_of_the_default_namespace(tmp_path: Path) -> None:
    made = await _prepared(_opened(tmp_path / "toolboxes"), "team-a")
    record = tmp_path / "toolboxes" / made.id / "toolbox.json"
    content = json.loads(record.read_text())
    del content["namespaces"]
    record.write_text(json.dumps(content))
    assert [one.namespace for one in _opened(tmp_path / "toolboxes").all("default")] == ["default"]
