"""A service at its limit: who waits is served, who cannot wait is told when to come again."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import claimed, failure
from tests.conformance.sandbox.needs import narrowest
from tests.conformance.sandbox.services import LIFETIME_S, Running, start
from tests.support.waiting import limits

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import DeadlineExceeded, PenstockError, ResourceExhausted

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(service: Running) -> AsyncIterator[Running]:
    """The same kind of service with room for three, two of one owner."""
    places = {"max_sandboxes": "3", "max_sandboxes_per_owner": "2", "owner_label": "team"}
    async with start(service.name, queue_timeout_s="180", max_queued="1", **places) as running:
        yield running


async def create(service: Running, team: str, timeout_s: float = 180.0) -> str:
    spec = sb.SandboxSpec(labels={"team": team}, network=narrowest(await claimed(service)))
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
    return (await service.sandboxes.CreateSandbox(request, timeout=timeout_s)).sandbox.sandbox_id


async def refusal(service: Running, team: str) -> PenstockError:
    """The error of a creation that waits as long as it can: before its deadline, not by it."""
    for limit in limits(2.0):
        error = await failure(create(service, team, timeout_s=limit))
        if not isinstance(error, DeadlineExceeded):  # else the answer took longer than what was left for it
            return error
    raise AssertionError("no limit was long enough")


async def default_backend(service: Running) -> sb.Backend:
    answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
    (backend,) = [backend for backend in answer.backends if backend.is_default]
    return backend


async def delete(service: Running, *sandbox_ids: str) -> None:
    for sandbox_id in sandbox_ids:
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=sandbox_id), timeout=60)


@pytest.mark.requirement("R26", "R41", "R51")
async def test_a_create_waits_for_a_place_until_its_deadline_is_near(small: Running) -> None:
    """Refused in time to hear of it, with a delay."""
    assert (await default_backend(small)).max_sandboxes_per_owner == 2
    held = [await create(small, "a"), await create(small, "a")]
    error = await refusal(small, "a")
    assert isinstance(error, ResourceExhausted) and error.reason == "OWNER_LIMIT" and error.retry_after_s
    # One may wait; the queue is full then, and the other is told at once, though there would be time.
    both = [asyncio.ensure_future(create(small, "a")) for _ in range(2)]
    (refused,), (waiting,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert (await failure(refused)).reason == "OWNER_LIMIT"
    other = await create(small, "b")
    assert (await refusal(small, "c")).reason == "SANDBOX_LIMIT"
    assert not waiting.done()
    await delete(small, held[0])
    await delete(small, held[1], await waiting, other)


@pytest.mark.requirement("R50", "R61")
async def test_a_lease_ends_with_the_sandboxs_life_and_the_answer_says_so(service: Running) -> None:
    assert (await default_backend(service)).max_lifetime.seconds == LIFETIME_S
    sandbox_id = await create(service, "a")
    sandbox = (await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=sandbox_id), timeout=30)).sandbox
    request = ss.RenewLeaseRequest(sandbox_id=sandbox_id, lease=Duration(seconds=LIFETIME_S + 3600))
    granted = (await service.sandboxes.RenewLease(request, timeout=30)).expire_time
    assert sandbox.expire_time.seconds < granted.seconds < time.time() + LIFETIME_S
    again = (await service.sandboxes.RenewLease(request, timeout=30)).expire_time
    assert again.ToNanoseconds() == granted.ToNanoseconds()
    await delete(service, sandbox_id)
