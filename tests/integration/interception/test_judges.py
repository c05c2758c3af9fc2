"""A verifier's questions to its judge: after the agent's end, each answered once, apart from what is trained."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import grpc
import pytest
from tests.integration.interception.conftest import OPERATOR, Rollout, Service
from tests.support.endpoints.upstream import Vendor, vendor
from tests.support.waiting import eventually

from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect, error_from_rpc
from penstock_interception.domain.kept_captures import Discarded, Why

PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
JUDGE = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="judge", model="m"))
Serving = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
async def judge() -> AsyncIterator[Vendor]:
    """The judge model's endpoint."""
    async with vendor() as here:
        yield here


@pytest.fixture
def judged(serving: Serving, judge: Vendor) -> Serving:
    """Services on one state directory, which know the judge."""
    upstreams = {"judge": {"base_url": judge.base_url, "api_key": "sk-judge"}}
    return lambda **changes: serving(upstreams=upstreams, **changes)


def question(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


async def ask(rollout: Rollout, text: str) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{rollout.base_url}/chat/completions",
            json=question(text),
            headers={"authorization": f"Bearer {rollout.token}"},
        ) as response,
    ):
        return response.status, await response.json()


async def opened(service: Service, **options: Any) -> Rollout:
    return await service.open("r.judge", mode=PROXY, source=JUDGE, judge_of="r", **options)


def asked(judge: Vendor) -> Counter[str]:
    """How often each question reached the judge."""
    return Counter(json.loads(seen.body)["messages"][0]["content"] for seen in judge.completions)


@pytest.mark.requirement("R134")
async def test_a_judge_is_asked_after_the_agent_alone(judged: Any) -> None:
    async with judged() as service:
        await service.open("r")
        with pytest.raises(grpc.aio.AioRpcError) as early:
            await opened(service)
        assert error_from_rpc(early.value).reason == "JUDGE_TOO_EARLY"
        await service.close("r")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await service.open("other.judge", mode=PROXY, source=JUDGE, judge_of="other")
        assert error_from_rpc(unknown.value).reason == "ROLLOUT_UNKNOWN"
        with pytest.raises(grpc.aio.AioRpcError) as mode:
            await service.open("r.judge", source=JUDGE, judge_of="r")
        assert [one.field for one in error_from_rpc(mode.value).violations] == ["mode"]
        rollout = await opened(service)
        assert (await ask(rollout, "good?"))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await service.open("second", mode=PROXY, source=JUDGE, judge_of="r")
        assert error_from_rpc(second.value).reason == "ROLLOUT_EXISTS"


@pytest.mark.requirement("R134", "R34")
async def test_a_repeated_question_has_its_answer_again_after_restarts(judged: Any, judge: Vendor) -> None:
    """A verifier that is started again asks everything again, and nothing is sampled or counted twice."""
    async with judged() as service:
        await service.open("r")
        await service.close("r")
        rollout = await opened(service, budgets=interception_pb2.Budgets(max_calls=2))
        first = await ask(rollout, "one")
    async with judged() as service:
        again = await opened(service, budgets=interception_pb2.Budgets(max_calls=2))
        assert again.token == rollout.token
        assert await ask(again, "one") == first
        both = await asyncio.gather(ask(again, "two"), ask(again, "two"))
        assert both[0] == both[1] and both[0][0] == 200
        assert (await ask(again, "three"))[0] != 200  # the budget
        assert await ask(again, "one") == first
        assert asked(judge) == {"one": 1, "two": 1}
        await service.close("r")
        captured = await service.capture("r", include_bodies=True)
        assert (await ask(again, "one"))[0] == 401
    assert [json.loads(call.request_body)["messages"][0]["content"] for call in captured.judge_calls] == ["one", "two"]
    assert {call.call_class for call in captured.judge_calls} == {trajectory_pb2.CALL_CLASS_JUDGE}
    assert {call.state for call in captured.judge_calls} == {trajectory_pb2.CALL_STATE_DELIVERED}
    assert not captured.calls and not captured.samples


@pytest.mark.requirement("R134", "R34")
async def test_a_question_whose_verifier_died_is_answered_to_the_next_one(judged: Any, judge: Vendor) -> None:
    """It stays open, however long the next verifier takes: an agent's call without its agent is cancelled."""
    release = judge.hold = asyncio.Event()
    async with judged(rejoin_grace_s=0.1) as service:
        await service.open("r")
        await service.close("r")
        rollout = await opened(service)
        lost = asyncio.create_task(ask(rollout, "one"))
        await judge.reached.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        (call,) = service.interceptor.registry.rollout("r.judge").calls
        await eventually(lambda: call.attached == 0, "its connection is gone")
        await service.interceptor.tick()
        again = asyncio.create_task(ask(rollout, "one"))
        await eventually(lambda: call.attached == 1, "the next verifier waits for it")
        release.set()
        assert (await again)[0] == 200 and asked(judge) == {"one": 1}


@pytest.mark.requirement("R134")
async def test_what_becomes_of_a_rollout_becomes_of_its_judge(judged: Any) -> None:
    async with judged() as service:
        await service.open("r")
        await service.close("r")
        rollout = await opened(service)
        await ask(rollout, "one")
        service.interceptor.gate.lifecycle.delete_in("r", 0.0)
        await service.interceptor.tick()  # its time is over, but not its verifier's
        closed = await service.close("r")
        assert closed.rollout_id == "r"
        found = service.interceptor.registry.rollout("r.judge")
        assert found.closed is not None
    async with judged() as service:
        assert len((await service.capture("r")).judge_calls) == 1
        await service.gate.DeleteRollout(rollout_gate_service_pb2.DeleteRolloutRequest(rollout_id="r"))
        assert service.interceptor.registry.find("r.judge") is None
        assert service.interceptor.registry.judge_of("r") is None


@pytest.mark.requirement("R134", "R124")
async def test_a_discarded_capture_takes_its_judges_along(judged: Any) -> None:
    async with judged() as service, connect(service.address, OPERATOR) as channel:
        service.gate = gate_grpc.RolloutGateServiceStub(channel)
        await service.open("r", keep_capture=True)
        await service.close("r")
        await opened(service, keep_capture=True)
        await service.close("r")
        lost = Discarded("r", "default", None, "", 1.0, 2.0, 4096, Why.AGE)
        await service.interceptor.rollouts.discard([lost])
        registry = service.interceptor.registry
        assert not registry.kept_captures and registry.find("r.judge") is None
