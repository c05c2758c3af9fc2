"""What all sandboxes use: those that tell are told with it, those that do not keep nobody waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.sandbox.scripted_backend import ScriptedHandle
from tests.unit.sandbox.scripted_domain import opened

from penstock_sandbox.domain.model import Stats
from penstock_sandbox.rpc import convert, usage


@pytest.mark.requirement("R32")
async def test_watchers_see_all_sandboxes_in_time_despite_silent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a limit for all, as by one for each: a daemon that hangs is no silence of the service."""

    async def stats(handle: ScriptedHandle) -> Stats:
        if handle.id != well.id:
            await asyncio.Event().wait()
        return Stats(memory_bytes=7, memory_peak_bytes=9, pids=1, cpu_s=0.5, disk_bytes=3)

    monkeypatch.setattr(ScriptedHandle, "stats", stats)
    async with opened(tmp_path) as domain:
        well = await domain.create()
        for _ in range(3 * usage.AT_ONCE):
            await domain.create()
        for limit, other in (("ALL_S", "PATIENCE_S"), ("PATIENCE_S", "ALL_S")):
            monkeypatch.setattr(usage, limit, 0.05)
            monkeypatch.setattr(usage, other, 3600.0)
            found = await usage.usages(
                domain.sandboxes.table,
                sorted(domain.sandboxes.table.matching({}), key=lambda s: s != well),
                convert.sandbox_to,
            )
            assert len(found) == 1 + 3 * usage.AT_ONCE
            assert [each.sandbox.sandbox_id for each in found if each.HasField("stats")] == [well.id]
            assert found[0].stats.memory_bytes == 7
