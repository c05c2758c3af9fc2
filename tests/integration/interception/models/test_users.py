"""A model that plays the user of an agent: asked while the rollout is open, once for each question, never trained."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import grpc
import pytest
from aiohttp import web
from tests.integration.interception.conftest import Service
from tests.support.endpoints.upstream import Vendor, vendor
from tests.support.waiting import eventually

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import error_from_rpc

pytestmark = pytest.mark.requirement("R133")
PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
PERSON = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="person", model="m"))
Serving = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
async def person() -> AsyncIterator[Vendor]:
    """The endpoint of the user's model."""
    async with vendor() as here:
        yield here


@pytest.fixture
def served(serving: Serving, person: Vendor) -> Serving:
    """Services on one state directory, which know the user's model."""
    upstreams = {"person": {"base_url": person.base_url, "api_key": "sk-person"}}
    return lambda **changes: serving(upstreams=upstreams, **changes)


async def opened(service: Service, **options: Any) -> None:
    await service.open("r.user", mode=PROXY, source=PERSON, user_of="r", **options)


async def ask(service: Service, text: str, **more: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    request = pb.AskUserRequest(rollout_id="r.user", body=json.dumps(body).encode())
    return str((await service.gate.AskUser(request)).text)


def asked(person: Vendor) -> Counter[str]:
    """How often each question reached the model."""
    return Counter(json.loads(seen.body)["messages"][0]["content"] for seen in person.completions)


async def refused(work: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await work
    return error_from_rpc(error.value).reason


async def test_a_user_is_there_while_the_agents_rollout_is_open(served: Any) -> None:
    """It is closed with it, once there; nothing else is asked as a user."""
    async with served() as service:
        assert await refused(opened(service)) == "ROLLOUT_UNKNOWN"
        await service.open("r")
        assert await refused(service.open("r.user", source=PERSON, user_of="r")) == "FIELD_INVALID"
        await opened(service)
        assert await refused(service.open("second", mode=PROXY, source=PERSON, user_of="r")) == "ROLLOUT_EXISTS"
        assert await refused(service.gate.AskUser(pb.AskUserRequest(rollout_id="r", body=b"{}"))) == "NOT_A_USER"
        for more in ({"stream": True}, {"messages": 3}):
            assert await refused(ask(service, "x", **more)) == "FIELD_INVALID"
        await service.close("r")
        assert await refused(ask(service, "x")) == "ROLLOUT_CLOSED"
        await service.open("late")
        await service.close("late")
        assert await refused(service.open("l", mode=PROXY, source=PERSON, user_of="late")) == "USER_TOO_LATE"


@pytest.mark.requirement("R72")
async def test_a_question_is_refused_where_it_is_the_cause(served: Any, person: Vendor) -> None:
    """Its largest part is the agent's message, which could be made so that the model fails."""

    def says(body: bytes) -> str:
        if b"glitch" in body:
            raise RuntimeError
        if b"long" in body:
            raise web.HTTPBadRequest
        if b"key" in body:
            raise web.HTTPUnauthorized
        return "on"

    person.says = says
    async with served() as service:
        await service.open("r")
        await opened(service)
        assert await refused(ask(service, "glitch")) == "USER_REFUSED"
        assert await refused(ask(service, "long")) == "USER_REFUSED"
        assert await refused(ask(service, "key")) == "USER_UNANSWERED"
        assert await ask(service, "well") == "on"


@pytest.mark.requirement("R63", "R72")
async def test_override_that_a_users_model_does_not_take_is_not_the_questions_doing(
    served: Any, person: Vendor
) -> None:
    """No question would be answered, whatever the agent wrote."""
    async with served() as service:
        await service.open("r")
        await opened(service, sampling_override=chat_pb2.Sampling(top_k=5))
        assert await refused(ask(service, "well")) == "USER_UNANSWERED"
    assert not asked(person)


@pytest.mark.requirement("R34")
async def test_a_repeated_question_has_its_answer_again_after_a_restart(served: Any, person: Vendor) -> None:
    """The calls are apart from the agent's, with their class."""
    person.says = lambda body: "Go on."
    budgets = interception_pb2.Budgets(max_calls=2)
    async with served() as service:
        await service.open("r")
        await opened(service, budgets=budgets)
        assert await ask(service, "one") == "Go on."
    async with served() as service:
        await opened(service, budgets=budgets)
        assert await ask(service, "one") == "Go on."
        assert [*await asyncio.gather(ask(service, "two"), ask(service, "two"))] == ["Go on."] * 2
        assert await refused(ask(service, "three")) == "BUDGET_EXHAUSTED"
        assert asked(person) == {"one": 1, "two": 1}
        await service.close("r")
        captured = await service.capture("r", include_bodies=True)
    assert [json.loads(call.request_body)["messages"][0]["content"] for call in captured.user_calls] == ["one", "two"]
    assert {call.call_class for call in captured.user_calls} == {trajectory_pb2.CALL_CLASS_USER}
    assert not captured.calls and not captured.samples and not captured.judge_calls


@pytest.mark.requirement("R34")
async def test_a_question_whose_asker_is_gone_is_answered_to_the_next_one(served: Any, person: Vendor) -> None:
    release = person.hold = asyncio.Event()
    async with served(rejoin_grace_s=0.1) as service:
        await service.open("r")
        await opened(service)
        lost = asyncio.create_task(ask(service, "one"))
        await person.reached.wait()
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await lost
        (call,) = service.interceptor.registry.rollout("r.user").calls
        await eventually(lambda: call.attached == 0, "its asker is gone")
        await service.interceptor.tick()
        again = asyncio.create_task(ask(service, "one"))
        await eventually(lambda: call.attached == 1, "the next one waits for it")
        release.set()
        assert await again and asked(person) == {"one": 1}
