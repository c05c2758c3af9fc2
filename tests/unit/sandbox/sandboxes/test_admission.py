"""Places are taken in turn: never too many, nobody waits in vain, and no owner's queue is in another's way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.unit.sandbox.scripted_backend import ScriptedBackend
from tests.unit.sandbox.scripted_domain import NoToolboxes, opened, pass_turns

from penstock_chassis.errors import Aborted, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.domain.backend import MountedToolbox
from penstock_sandbox.domain.model import SandboxSpec


async def refusal(work: object) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        await work  # type: ignore[misc]
    return caught.value


@pytest.mark.requirement("R51")
async def test_create_without_a_place_waits_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path, most=1) as domain:
        first = await domain.create()
        waiting = [domain.begin() for _ in range(2)]
        await pass_turns()
        assert len(domain.sandboxes.table.matching({})) == 1, "those that wait are not there yet"
        await domain.sandboxes.delete(first.id)
        second = await waiting[0]
        assert not waiting[1].done()
        await domain.sandboxes.delete(second.id)
        await waiting[1]


@pytest.mark.requirement("R55", "R151")
async def test_debian_packages_need_a_backend_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a sandbox that lacks them."""
    box = MountedToolbox("task", tmp_path, "/opt/task", (), {}, root_layer=tmp_path / "debian")
    monkeypatch.setattr(NoToolboxes, "mounted", lambda *_, **__: box)
    monkeypatch.setattr(NoToolboxes, "hold", lambda *_: None)
    monkeypatch.setattr(NoToolboxes, "release", lambda *_: None)
    async with opened(tmp_path) as domain:
        can = domain.backend.capabilities = replace(domain.backend.capabilities, toolboxes=True)
        error = await refusal(domain.sandboxes.create("", SandboxSpec(toolbox_ids=("box",))))
        assert (error.reason, error.metadata["capabilities"]) == ("CAPABILITY_MISSING", "debian_packages")
        assert not domain.sandboxes.table.matching({})
        domain.backend.capabilities = replace(can, debian_packages=True)
        await domain.sandboxes.create("", SandboxSpec(toolbox_ids=("box",)))


@pytest.mark.requirement("R95")
async def test_no_image_is_fetched_while_the_disk_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the space that other sandboxes are ended for."""
    fetched: list[SandboxSpec] = []

    async def fetch(_: ScriptedBackend, spec: SandboxSpec) -> None:
        fetched.append(spec)

    monkeypatch.setattr(ScriptedBackend, "fetch", fetch)
    async with opened(tmp_path, min_free_bytes=1 << 60) as domain:
        assert (await refusal(domain.create())).reason == "DISK_LOW" and domain.sandboxes.room == 0
    assert not fetched


@pytest.mark.requirement("R26")
async def test_create_without_time_or_queue_room_is_refused_at_once(tmp_path: Path) -> None:
    """With a delay after which to try again."""
    async with opened(tmp_path, most=1, queued=1) as domain:
        first = await domain.create("a")
        error = await refusal(domain.create("b", wait_s=0))
        assert isinstance(error, ResourceExhausted) and error.reason == "SANDBOX_LIMIT" and error.retry_after_s
        waiting = domain.begin("b")
        await pass_turns()
        assert (await refusal(domain.create("b"))).reason == "SANDBOX_LIMIT"
        # Its queue is full; another owner's is not.
        other = domain.begin("c")
        await pass_turns()
        assert not other.done()
        await domain.sandboxes.delete(first.id)
        await domain.sandboxes.delete((await waiting).id)
        await other


@pytest.mark.requirement("R41")
async def test_a_wait_ends_with_the_operators_limit(tmp_path: Path) -> None:
    async with opened(tmp_path, most=1, queue_timeout_s=0.01) as domain:
        await domain.create()
        assert (await refusal(domain.create(wait_s=100))).reason == "SANDBOX_LIMIT"
        assert len(domain.sandboxes.table.matching({})) == 1 and len(await domain.rows()) == 1


@pytest.mark.requirement("R4", "R51")
async def test_an_owner_at_its_limit_waits_alone(tmp_path: Path) -> None:
    """One owner's limit is nobody else's, and preparing for all has none."""
    async with opened(tmp_path, per_owner=1) as domain:
        held = await domain.create("a")
        error = await refusal(domain.create("a", wait_s=0))
        assert isinstance(error, ResourceExhausted) and error.reason == "OWNER_LIMIT" and error.retry_after_s
        waiting = [domain.begin("a") for _ in range(5)]
        await pass_turns()
        await domain.create("b")
        await domain.sandboxes.create("", (await domain.create("c")).spec, shared=True)
        assert not any(task.done() for task in waiting)
        await domain.sandboxes.delete(held.id)
        await waiting[0]


@pytest.mark.requirement("R23", "R49")
async def test_a_create_that_is_given_up_leaves_the_queue(tmp_path: Path) -> None:
    async with opened(tmp_path, most=1) as domain:
        first = await domain.create()
        given_up = domain.begin()
        kept = domain.begin()
        await pass_turns()
        given_up.cancel()
        await pass_turns()
        await domain.sandboxes.delete(first.id)
        assert (await kept).id and given_up.cancelled()
        assert len(await domain.rows()) == 1


@pytest.mark.requirement("R51")
async def test_concurrent_creates_are_bounded_and_owners_take_turns(tmp_path: Path) -> None:
    async with opened(tmp_path) as domain:
        domain.backend.creates_at_once = 2
        domain.backend.gate.clear()
        many = [domain.begin("many") for _ in range(10)]
        await eventually(lambda: domain.backend.in_creation == 2, "two are being made")
        one = domain.begin("one")
        await pass_turns()
        assert len(domain.sandboxes.table.matching({})) == 2
        domain.backend.gate.set()
        await asyncio.gather(*many, one)
        assert domain.backend.most_in_creation == 2
        order = [live.view for live in domain.sandboxes.table]
        assert "one" in [view.spec.labels["owner"] for view in order[:4]], "it did not wait for all of the others"


@pytest.mark.requirement("R49", "R70")
async def test_a_sandbox_that_is_deleted_while_it_is_made_is_never_there(tmp_path: Path) -> None:
    """Who waited for it is told."""
    async with opened(tmp_path) as domain:
        domain.backend.gate.clear()
        making = domain.begin("a")
        await eventually(lambda: domain.backend.in_creation == 1, "one is being made")
        (view,) = domain.sandboxes.table.matching({"owner": "a"})
        assert await domain.sandboxes.delete_labelled({"owner": "a"}) == [view.id]
        error = await refusal(making)
        assert isinstance(error, Aborted) and error.reason == "DELETED_MEANWHILE"
        assert not domain.world.sandboxes and not await domain.rows()


@pytest.mark.requirement("R24")
async def test_stopping_service_notifies_its_waiters(tmp_path: Path) -> None:
    async with opened(tmp_path, most=1) as domain:
        await domain.create()
        waiting = domain.begin()
        await pass_turns()
        await domain.sandboxes.drain()
        error = await refusal(waiting)
        assert isinstance(error, Unavailable) and error.reason == "DRAINING"
        assert (await refusal(domain.create())).reason == "DRAINING"


async def test_a_service_that_drains_makes_sandboxes_of_owners_it_has_alone(tmp_path: Path) -> None:
    """A rollout is graded in a second sandbox, also when its first one is gone."""
    async with opened(tmp_path) as domain:
        first = await domain.create("a", request="r")
        domain.sandboxes.take(False)
        for owner in ("b", ""):
            error = await refusal(domain.create(owner))
            assert isinstance(error, Unavailable) and error.reason == "DRAINING"
        assert (await domain.create("a", request="r")).id == first.id
        await domain.sandboxes.delete(first.id)
        await domain.create("a")
        domain.sandboxes.take(True)
        await domain.create("b")


@pytest.mark.requirement("R49", "R50")
async def test_a_service_that_stops_lets_what_was_given_up_be_cleaned_up(tmp_path: Path) -> None:
    """Whoever gave it up, and however often."""
    async with opened(tmp_path) as domain:
        domain.backend.gate.clear()
        domain.backend.cleared.clear()
        given_up = domain.begin()
        await eventually(lambda: domain.backend.in_creation == 1, "one is being made")
        given_up.cancel()
        await pass_turns()
        stops = [asyncio.create_task(domain.sandboxes.drain()) for _ in range(2)]
        await pass_turns()
        assert not any(stop.done() for stop in stops)
        domain.backend.cleared.set()
        await asyncio.gather(*stops)
        assert domain.backend.cleaned_up == 1 and not domain.world.sandboxes
