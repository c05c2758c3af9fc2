"""Sandboxes that join another one's network: which, and what that costs the other."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.sandbox.scripted_domain import Domain, opened

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock_sandbox.domain.model import Companion, NetworkKind, NetworkPolicy, Sandbox, SandboxSpec

OWNER = {"owner": "a"}
BESIDE = SandboxSpec(companions=(Companion("db", "postgres:16"),), labels=OWNER)


@asynccontextmanager
async def joinable(folder: Path) -> AsyncIterator[tuple[Domain, Sandbox]]:
    """A domain with room for one sandbox, and that one, with companions."""
    async with opened(folder, most=1, queue_timeout_s=0.0) as domain:
        networks = frozenset({NetworkKind.NONE, NetworkKind.OPEN})
        able = dataclasses.replace(domain.backend.capabilities, companions=True, networks=networks)
        domain.backend.capabilities = able
        yield domain, await domain.sandboxes.create("", BESIDE, "team")


@pytest.mark.requirement("R51", "R90")
async def test_one_at_a_time_joins_and_takes_no_place(tmp_path: Path) -> None:
    """Else rollouts that hold one place while they wait for another would wait for ever."""
    async with joinable(tmp_path) as (domain, other):
        spec = SandboxSpec(joins=other.id, labels=OWNER)
        first = await domain.sandboxes.create("", spec, "team")
        with pytest.raises(ResourceExhausted) as refused:
            await domain.sandboxes.create("", spec, "team")
        assert (refused.value.reason, refused.value.retry_after_s) == ("SANDBOX_JOINED", 1.0)
        await domain.sandboxes.delete(first.id)
        await domain.sandboxes.create("", spec, "team")
        with pytest.raises(ResourceExhausted, match="service's limit"):
            await domain.sandboxes.create("", SandboxSpec(), "team")


@pytest.mark.requirement("R54", "R107")
@pytest.mark.parametrize(
    ("namespace", "changes", "reason", "named"),
    [
        ("others", {}, "SANDBOX_UNKNOWN", "no sandbox"),
        ("team", {"joins": "sb-none"}, "SANDBOX_UNKNOWN", "no sandbox"),
        ("team", {"labels": {"owner": "b"}}, "FIELD_INVALID", "same label 'owner'"),
        ("team", {"labels": {}}, "FIELD_INVALID", "same label 'owner'"),
        ("team", {"network": NetworkPolicy(NetworkKind.OPEN)}, "FIELD_INVALID", "spec.network"),
    ],
)
async def test_only_a_sandbox_of_the_same_namespace_and_owner_is_joined(
    tmp_path: Path, namespace: str, changes: dict[str, object], reason: str, named: str
) -> None:
    async with joinable(tmp_path) as (domain, other):
        spec = dataclasses.replace(SandboxSpec(joins=other.id, labels=OWNER), **changes)  # type: ignore[arg-type]
        with pytest.raises((InvalidArgument, NotFound)) as refused:
            await domain.sandboxes.create("", spec, namespace)
        assert refused.value.reason == reason and named in str(refused.value)
        assert domain.world.sandboxes == {other.id}


@pytest.mark.requirement("R54")
@pytest.mark.parametrize("state", ["paused", "lost", "alone"])
async def test_a_sandbox_that_has_no_live_companions_is_not_joined(tmp_path: Path, state: str) -> None:
    async with opened(tmp_path) as domain:
        domain.backend.capabilities = dataclasses.replace(domain.backend.capabilities, companions=True)
        spec = BESIDE if state != "alone" else dataclasses.replace(BESIDE, companions=())
        other = await domain.sandboxes.create("", spec)
        if state == "paused":
            await domain.sandboxes.pause(other.id)
        elif state == "lost":
            domain.lose(other.id)
        with pytest.raises((FailedPrecondition, InvalidArgument)) as refused:
            await domain.sandboxes.create("", SandboxSpec(joins=other.id, labels=OWNER))
        reasons = {"paused": "SANDBOX_PAUSED", "lost": "SANDBOX_LOST", "alone": "FIELD_INVALID"}
        assert refused.value.reason == reasons[state]
