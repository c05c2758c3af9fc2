"""Several inference services as one model source of a gate: who answers a call, and who answers when one is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support.endpoints.loopback import unused_port
from tests.support.services import engines
from tests.support.services.engines import listed
from tests.support.waiting import eventually_async

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.ops.v1 import operations_service_pb2 as ops_pb
from penstock.ops.v1 import operations_service_pb2_grpc as ops_grpc
from penstock_chassis.membership import members, peers
from penstock_codec import tiny_tokenizer
from penstock_interception.clients.engines import pool as module

ASK: list[Any] = [{"role": "user", "content": "list the files"}]
PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
POOL = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference())


Launch = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and questions follow each other closely."""
    monkeypatch.setattr(peers, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(members, "READ_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.05)


@pytest.fixture
async def launch(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Launch]:
    """Starts engines that end with the test."""
    async with engines.launching(tmp_path, tokenizer_dir) as started:
        yield started


async def ask(rollout: Any) -> str:
    """The name of the engine that answers."""
    answer = await rollout.client().chat.completions.create(model="m", messages=ASK)
    return str(answer.choices[0].message.content)


async def opened(service: Any, name: str, **options: Any) -> Any:
    return await service.open(name, mode=PROXY, source=POOL, **options)


def at_least(version: int) -> interception_pb2.PolicyVersionConstraint:
    return interception_pb2.PolicyVersionConstraint(min_version=version)


async def status(service: Any) -> ops_pb.GetStatusResponse:
    stub: Any = ops_grpc.OperationsServiceStub(service.channel)
    found: ops_pb.GetStatusResponse = await stub.GetStatus(ops_pb.GetStatusRequest())
    return found


async def reported(service: Any, reason: str) -> ops_pb.Trouble:
    """The diagnostic of this reason, once there is one."""
    found: list[ops_pb.Trouble] = []

    async def is_reported() -> bool:
        found[:] = [trouble for trouble in (await status(service)).troubles if trouble.reason == reason]
        return bool(found)

    await eventually_async(is_reported, f"{reason} is reported")
    return found[0]


async def _shows_loads(service: Any) -> bool:
    """Whether the gate's figures have the twelve calls that are at two paused engines, and their policy versions."""
    gauges = (await status(service)).gauges
    requests = [
        {one.labels["engine"]: one.value for one in gauges if one.name == f"penstock_gate_engine_{name}"}
        for name in ("running_requests", "waiting_requests", "policy_version")
    ]
    sums = {name: requests[0][name] + requests[1].get(name, 0) for name in requests[0]}
    return sums.keys() == requests[2].keys() == {"e0", "e1"} and min(sums.values()) > 0 and sum(sums.values()) == 12


@pytest.mark.requirement("R117")
async def test_a_rollout_stays_with_its_engine_and_load_is_shared(start: Any, launch: Launch) -> None:
    """Twelve calls that are held at once are at both engines; each rollout's next call is where its first was."""
    e0, e1 = await launch("e0"), await launch("e1")
    service = await start(inference_members=listed(e0=e0, e1=e1))
    rollouts = [await opened(service, f"r{n}") for n in range(12)]
    for engine in (e0, e1):
        await engine.pause()
    asked = [asyncio.create_task(ask(rollout)) for rollout in rollouts]
    await e0.waiting(2)
    await e1.waiting(2)
    await eventually_async(lambda: _shows_loads(service), "the load of each engine is shown")
    for engine in (e0, e1):
        await engine.resume()
    first = await asyncio.gather(*asked)
    assert min(Counter(first).values()) >= 3, first
    assert [await ask(rollout) for rollout in rollouts] == first


@pytest.mark.requirement("R117", "R120")
async def test_a_call_whose_engine_is_lost_is_answered_by_another(start: Any, launch: Launch) -> None:
    """The agent gets one answer, and no call has failed."""
    e0, e1 = await launch("e0"), await launch("e1")
    service = await start(inference_members=listed(e0=e0, e1=e1))
    rollout = await opened(service, "r")
    assert await ask(rollout) == "e0"
    await e0.pause()
    asked = asyncio.create_task(ask(rollout))
    await e0.waiting(1)
    await e0.stop()
    assert await asked == "e1"
    assert await ask(rollout) == "e1"
    trouble = await reported(service, "MEMBER_LOST")
    assert list(trouble.subjects) == ["e0"] and "inference" in trouble.message
    closed = await service.close("r")
    assert (closed.totals.delivered, closed.totals.failed) == (3, 0)


@pytest.mark.requirement("R117")
async def test_a_draining_engine_gets_no_calls_of_its_rollouts(start: Any, launch: Launch) -> None:
    """It refuses the next request of a session, and another engine answers it."""
    e0, e1 = await launch("e0"), await launch("e1")
    service = await start(inference_members=listed(e0=e0, e1=e1))
    rollout = await opened(service, "r")
    assert await ask(rollout) == "e0"
    await e0.operations.Drain(ops_pb.DrainRequest())
    assert await ask(rollout) == "e1"
    assert await ask(await opened(service, "other")) == "e1"


@pytest.mark.requirement("R117")
async def test_a_call_goes_to_an_engine_with_its_policy_version(start: Any, launch: Launch) -> None:
    """Also when it waits at another one, which the version has not reached."""
    e0, e1 = await launch("e0"), await launch("e1")
    await e1.push(1)
    service = await start(inference_members=listed(e0=e0, e1=e1))
    assert await ask(await opened(service, "new", policy=at_least(1))) == "e1"
    waits = await opened(service, "waits", policy=at_least(2))
    asked = asyncio.create_task(ask(waits))
    await e0.waiting(1)
    await e1.push(2)
    assert await asked == "e1"
    await e0.push(2)
    captured = await service.capture("waits")
    assert captured.calls[0].completion.span.versions[0].policy_version == 2


@pytest.mark.requirement("R117")
async def test_a_newcomer_with_old_weights_gets_no_calls(start: Any, launch: Launch, tmp_path: Path) -> None:
    """Until it has those of the others; operators learn which one waits for them."""
    e0 = await launch("e0")
    await e0.push(3)
    file = tmp_path / "engines.json"
    file.write_text(json.dumps({"e0": e0.address}))
    service = await start(inference_members=f"file:{file}")
    a0 = await launch("a0")  # first by name
    file.with_suffix(".new").write_text(json.dumps({"e0": e0.address, "a0": a0.address}))
    file.with_suffix(".new").replace(file)
    trouble = await reported(service, "ENGINE_BEHIND")
    assert trouble.reason == "ENGINE_BEHIND"
    assert list(trouble.subjects) == ["a0"] and "3" in trouble.message
    assert await ask(await opened(service, "before")) == "e0"
    await a0.push(3)

    async def caught_up() -> bool:
        return all(trouble.reason != "ENGINE_BEHIND" for trouble in (await status(service)).troubles)

    await eventually_async(caught_up, "it has the weights")
    await e0.stop()
    assert await ask(await opened(service, "after")) == "a0"


@pytest.mark.requirement("R117")
async def test_a_gate_says_that_no_engine_answers_it(
    start: Any, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call fails for the engines' reason, a check too, and WatchGate names the source for drivers."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    e0 = await launch("e0")
    single = await launch("single")
    service = await start(
        inference_members=listed(e0=e0),
        inference={"other": {"address": single.address}, "rest": {"members": "static:x=127.0.0.1:9"}},
    )
    rollout = await opened(service, "r")
    watch = service.gate.WatchGate(gate_pb.WatchGateRequest(interval=Duration(nanos=500_000_000)))
    async for snapshot in watch:
        if list(snapshot.unreachable_inference) == ["rest"]:
            break
    await e0.stop()
    await single.stop()
    async for snapshot in watch:
        if list(snapshot.unreachable_inference) == ["default", "other", "rest"]:
            break
    with pytest.raises(openai.APIStatusError):
        await ask(rollout)
    fresh = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference(adapter="a"))
    with pytest.raises(grpc.aio.AioRpcError, match="No engine of default takes calls"):
        await service.gate.CheckSource(gate_pb.CheckSourceRequest(mode=PROXY, source=fresh))
    closed = await service.close("r")
    failure = closed.totals.failures[0]
    assert (failure.reason, failure.retriable, failure.calls_since_answer) == ("INFERENCE_UNREACHABLE", True, 1)
    stub: Any = ops_grpc.OperationsServiceStub(service.channel)
    shown = await stub.GetServerInfo(ops_pb.GetServerInfoRequest())
    assert {(item.service, item.pool, item.name, item.state) for item in shown.members} == {
        ("inference", "default", "e0", ops_pb.MEMBER_STATE_LOST),
        ("inference", "rest", "x", ops_pb.MEMBER_STATE_LOST),
    }


@pytest.mark.requirement("R120")
async def test_calls_wait_for_an_engine_that_restarts(start: Any, launch: Launch) -> None:
    """With no other engine, the agent only sees a slower answer."""
    port = unused_port()
    e0 = await launch("e0", port=port)
    service = await start(inference_members=listed(e0=e0))
    rollout = await opened(service, "r")
    assert await ask(rollout) == "e0"
    await e0.stop()
    asked = asyncio.create_task(ask(rollout))
    await reported(service, "MEMBER_LOST")
    await launch("e0", port=port)
    assert await asked == "e0"


@pytest.mark.requirement("R117")
async def test_an_engine_with_another_tokenizer_gets_no_calls(
    start: Any, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids of a prompt mean something else there."""
    other = tmp_path / "other"
    other.mkdir()
    tiny_tokenizer.build(["Other words altogether make other tokens."]).write(other)
    a0, b0 = await launch("a0", model=other), await launch("b0")
    service = await start(inference_members=listed(b0=b0))
    rollout = await opened(service, "r")
    assert await ask(rollout) == "b0"
    await service.close("r")
    mixed = await start(inference_members=listed(a0=a0, b0=b0), state_dir=tmp_path / "mixed")
    checked = await opened(mixed, "of-a0")
    assert await ask(checked) == "a0"
    trouble = await reported(mixed, "ENGINES_DIFFER")
    assert trouble.reason == "ENGINES_DIFFER"
    assert list(trouble.subjects) == ["a0", "b0"]
    await a0.stop()
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    with pytest.raises(openai.APIStatusError):
        await ask(checked)


@pytest.mark.requirement("R119")
async def test_attempts_of_one_rollout_are_different_sessions(start: Any, launch: Launch) -> None:
    """The engine begins its script again for each attempt, and goes on in it only for the same one."""
    e0 = await launch("e0", turn={"reply": "once"})
    service = await start(inference_address=e0.address)
    for attempt in (1, 2, 3):
        rollout = await opened(service, "r", request_id=f"open-{attempt}", attempt=attempt)
        assert await ask(rollout) == "once"
        with pytest.raises(openai.APIStatusError):
            await ask(rollout)
        await service.gate.DeleteRollout(gate_pb.DeleteRolloutRequest(rollout_id="r"))
    with pytest.raises(grpc.aio.AioRpcError, match="attempt"):
        await opened(service, "r", attempt=-1)
