"""One client pushes weights to all engines of a gate's list, and learns which one has what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.interception.conftest import OPERATOR, TRAINER
from tests.support.services import engines
from tests.support.services.engines import RunningEngine, listed
from tests.support.waiting import eventually_async

from penstock.client.connection import Penstock
from penstock.client.errors import ConfigurationError, EnginesFailed, FailedPrecondition
from penstock.client.transport.endpoints import Endpoints
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.auth import Role
from penstock_chassis.membership import peers
from penstock_interception.clients.engines import pool

TENSORS = {"w": np.zeros(2, np.float32)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and questions follow each other closely."""
    monkeypatch.setattr(peers, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(pool, "ASK_EVERY_S", 0.05)


@pytest.fixture
async def launch(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Any]:
    """Starts engines that end with the test."""
    async with engines.launching(tmp_path, tokenizer_dir, {Role.OPERATOR: OPERATOR, Role.TRAINER: TRAINER}) as started:
        yield started


def client(service: Any, engine: RunningEngine) -> Penstock:
    """Knows a gate and one engine."""
    return Penstock(
        Endpoints(sandbox="", driver="", interception=service.address, inference=engine.address, token=TRAINER)
    )


async def version(engine: RunningEngine) -> int:
    info: pb.GetInfoResponse = await engine.stub.GetInfo(pb.GetInfoRequest())
    return info.policy_version


@pytest.mark.requirement("R117")
async def test_a_push_reaches_all_engines_and_names_the_lost(start: Any, launch: Any) -> None:
    """The client has the address of one engine; the gate names the others."""
    e0, e1, e2 = [await launch(f"e{n}") for n in range(3)]
    service = await start(inference_token=OPERATOR, inference_members=listed(e0=e0, e1=e1, e2=e2))
    async with client(service, e1) as ps:
        first = await ps.inference.update_weights(1, TENSORS)
        assert (first.policy_version, first.away) == (1, ())
        assert [await version(engine) for engine in (e0, e1, e2)] == [1, 1, 1]
        await e2.stop()

        async def knows_the_loss() -> bool:
            return any(item.is_lost for item in await ps._cluster.engines())

        await eventually_async(knows_the_loss, "the loss is known")
        second = await ps.inference.update_weights(2, TENSORS)
        assert second.away == ("e2",)
        assert [await version(engine) for engine in (e0, e1)] == [2, 2]
        assert (await ps.inference.update_weights(2, TENSORS)).policy_version == 2


@pytest.mark.requirement("R117")
async def test_a_push_that_fails_at_some_says_what_is_in_force(start: Any, launch: Any) -> None:
    """Repeated, it does nothing where it succeeded, and what all refuse is the error of one."""
    e0, e1 = await launch("e0"), await launch("e1")
    await e1.push(5)
    service = await start(inference_token=OPERATOR, inference_members=listed(e0=e0, e1=e1))
    async with client(service, e0) as ps:
        for _ in range(2):
            with pytest.raises(EnginesFailed) as failed:
                await ps.inference.update_weights(4, TENSORS)
            assert {name: error.reason for name, error in failed.value.failures.items()} == {
                "e1": "POLICY_VERSION_NOT_NEWER"
            }
            assert failed.value.in_force == {"e0": 4, "e1": 5}
            assert "e1: POLICY_VERSION_NOT_NEWER" in str(failed.value)
        assert (await ps.inference.update_weights(6, TENSORS)).policy_version == 6
        with pytest.raises(FailedPrecondition, match="newer"):
            await ps.inference.update_weights(3, TENSORS)


@pytest.mark.requirement("R117")
async def test_a_partial_push_is_refused_where_its_base_is_not(start: Any, launch: Any) -> None:
    """Tensors that belong to other weights would be wrong under a right version; all tensors repair it."""
    e0, e1 = await launch("e0"), await launch("e1")
    await e0.push(1)
    service = await start(inference_token=OPERATOR, inference_members=listed(e0=e0, e1=e1))
    async with client(service, e0) as ps:
        for _ in range(2):
            with pytest.raises(EnginesFailed) as failed:
                await ps.inference.update_weights(2, TENSORS, partial=True)
            assert [(name, one.reason) for name, one in failed.value.failures.items()] == [
                ("e1", "BASE_VERSION_DIFFERS")
            ]
            assert failed.value.in_force == {"e0": 2, "e1": 0}
    async with client(service, e0) as another:  # which does not know for which version it was made
        with pytest.raises(EnginesFailed):
            await another.inference.update_weights(2, TENSORS, partial=True)
        await another.inference.update_weights(3, TENSORS)
        await another.inference.update_weights(4, TENSORS, partial=True)
    assert [await version(engine) for engine in (e0, e1)] == [4, 4]


@pytest.mark.requirement("R117")
async def test_pauses_hold_all_engines_and_transfers_are_of_one(start: Any, launch: Any) -> None:
    """What would leave the others behind is refused."""
    e0, e1 = await launch("e0"), await launch("e1")
    service = await start(inference_token=OPERATOR, inference_members=listed(e0=e0, e1=e1))

    async def paused() -> list[bool]:
        return [(await engine.stub.GetInfo(pb.GetInfoRequest())).paused for engine in (e0, e1)]

    async with client(service, e0) as ps:
        await ps.inference.pause()
        assert await paused() == [True, True]
        await ps.inference.resume()
        assert await paused() == [False, False]
        with pytest.raises(ConfigurationError, match="list of engines"):
            await ps.inference.start_transfer(9)
