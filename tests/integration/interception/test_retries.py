"""R34: an SDK's retry of a call in flight or finished joins or replays it: one generation, one turn."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

BODY = {"model": "m", "messages": [{"role": "user", "content": "list the files"}]}


class Agent:
    """Posts bodies as an SDK does."""

    def __init__(self, http: aiohttp.ClientSession, rollout: Any) -> None:
        self._http = http
        self._url = rollout.base_url + "/chat/completions"
        self._headers = {"authorization": f"Bearer {rollout.token}"}

    async def ask(self, body: dict[str, Any] = BODY, **headers: str) -> tuple[int, dict[str, Any]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(self._url, json=body, headers={**self._headers, **named}) as answer:
            return answer.status, await answer.json()

    def asking(self, body: dict[str, Any] = BODY, **headers: str) -> asyncio.Task[tuple[int, dict[str, Any]]]:
        return asyncio.create_task(self.ask(body, **headers))


async def calls_of(service: Any, rollout: Any) -> list[Any]:
    from penstock.interception.v1 import intercept_service_pb2 as pb

    answer = await service.intercept.ListCalls(pb.ListCallsRequest(rollout_id=rollout.rollout_id))
    return list(answer.calls)


@pytest.mark.requirement("R34")
async def test_a_retry_joins_the_call_whose_connection_broke(service: Any, http: aiohttp.ClientSession) -> None:
    """The connection goes, the same body comes again: one call, one generation."""
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    first = agent.asking()
    call = await trainer.call()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = agent.asking(x_stainless_retry_count="1")
    await trainer.deliver(trainer.result(call, "hello"))
    status, answer = await second
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
    assert [(c.http_attempts, c.index) for c in await calls_of(service, rollout)] == [(2, 0)]


@pytest.mark.requirement("R34")
async def test_a_retry_of_a_finished_call_gets_the_same_answer(service: Any, http: aiohttp.ClientSession) -> None:
    """A finished call is replayed to a retry, byte for byte."""
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    first = agent.asking()
    await trainer.answer("hello")
    again = await agent.ask(x_stainless_retry_count="1")
    assert again == await first
    assert len(await calls_of(service, rollout)) == 1


@pytest.mark.requirement("R34")
async def test_equal_idempotency_key_joins_its_call_and_another_body_is_refused(
    service: Any, http: aiohttp.ClientSession
) -> None:
    """The key decides; a key with another body is a client's mistake."""
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    both = [agent.asking(idempotency_key="k1") for _ in range(2)]
    await trainer.answer("hello")
    assert (await both[0])[1] == (await both[1])[1]
    status, answer = await agent.ask({**BODY, "temperature": 0.5}, idempotency_key="k1")
    assert (status, answer["error"]["code"]) == (400, "idempotency_key_reused")


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}], ids=["once", "says that it retries"])
async def test_a_body_sent_to_another_model_is_no_retry(
    service: Any, http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    """generateContent names the model in its path: who falls back to another one asks anew."""
    rollout, trainer = await service.open(), await service.trainer()
    root = str(rollout.base_url).removesuffix("/v1")

    async def ask(model: str) -> str:
        url, key = f"{root}/v1beta/models/{model}:generateContent", {"x-goog-api-key": rollout.token}
        async with http.post(url, json={"contents": [{"parts": [{"text": "hi"}]}]}, headers={**key, **headers}) as sent:
            return str((await sent.json())["candidates"][0]["content"]["parts"][0]["text"])

    first = asyncio.create_task(ask("a"))
    call = await trainer.call()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(ask("b"))
    other = await trainer.call()
    assert other.call_id != call.call_id
    await trainer.deliver(trainer.result(other, "of b"))
    assert await second == "of b"
    again = asyncio.create_task(ask("a"))
    await trainer.deliver(trainer.result(call, "of a"))
    assert await again == "of a"
    assert len(await calls_of(service, rollout)) == 2


@pytest.mark.requirement("R34")
async def test_an_idempotency_key_with_another_model_is_refused(service: Any, http: aiohttp.ClientSession) -> None:
    """As with another body, after the answer too; the same model gets it again."""
    rollout, trainer = await service.open(), await service.trainer()
    root = str(rollout.base_url).removesuffix("/v1")

    async def ask(model: str) -> tuple[int, Any]:
        url = f"{root}/v1beta/models/{model}:generateContent"
        headers = {"x-goog-api-key": rollout.token, "idempotency-key": "k1"}
        async with http.post(url, json={"contents": [{"parts": [{"text": "hi"}]}]}, headers=headers) as sent:
            return sent.status, await sent.json()

    first = asyncio.create_task(ask("a"))
    await trainer.answer("hello")
    assert (await first)[0] == 200
    status, answer = await ask("b")
    assert (status, answer["error"]["details"][0]["reason"]) == (400, "IDEMPOTENCY_KEY_REUSED")
    assert await ask("a") == await first


@pytest.mark.requirement("R34")
async def test_the_same_body_asked_twice_without_a_retry_is_two_calls(
    service: Any, http: aiohttp.ClientSession
) -> None:
    """An agent may ask the same twice; both are generated, the second as a sibling."""
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    for text in ("one", "two"):
        asked = agent.asking()
        await trainer.answer(text)
        assert (await asked)[1]["choices"][0]["message"]["content"] == text
    assert len(await calls_of(service, rollout)) == 2


async def new_call(trainer: Any, asked: asyncio.Task[Any]) -> Any:
    """The call that a request became; fails if the request got an answer instead."""
    coming = asyncio.create_task(trainer.call())
    await asyncio.wait([coming, asked], return_when=asyncio.FIRST_COMPLETED)
    assert not asked.done(), asked.result()
    return await coming


@pytest.mark.requirement("R34", "R26")
@pytest.mark.parametrize("why", ["CALL_LIMIT", "DRAINING"])
async def test_a_retry_of_a_refused_request_is_a_new_call(start: Any, http: aiohttp.ClientSession, why: str) -> None:
    """It repeats what was refused, not the call before it that had the same body: that one's answer is another one."""
    service = await start(max_open_calls=1)
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    first = agent.asking()
    await trainer.answer("one")
    await first
    if why == "CALL_LIMIT":
        other = agent.asking({**BODY, "temperature": 0.5})
        open_call = await trainer.call()
        status, _ = await agent.ask()
        await trainer.deliver(trainer.result(open_call, "other"))
        await other
    else:
        service.interceptor.gate.drain()
        status, _ = await agent.ask()
        service.interceptor.registry.draining = False
    assert status == {"CALL_LIMIT": 429, "DRAINING": 503}[why]
    again = agent.asking(x_stainless_retry_count="1")
    call = await new_call(trainer, again)
    await trainer.deliver(trainer.result(call, "two"))
    assert (await again)[1]["choices"][0]["message"]["content"] == "two"


@pytest.mark.requirement("R34", "R26")
async def test_a_refused_one_of_equal_parallel_requests_joins_none_of_them(
    start: Any, http: aiohttp.ClientSession
) -> None:
    """Each is a sample of its own; the retry of one that found no room is too."""
    service = await start(max_open_calls=2)
    rollout, trainer = await service.open(), await service.trainer()
    agent = Agent(http, rollout)
    both = [agent.asking() for _ in range(2)]
    calls = [await trainer.call() for _ in both]
    assert (await agent.ask())[0] == 429
    await trainer.deliver(trainer.result(calls[0], "one"))
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    again = agent.asking(x_stainless_retry_count="1")
    call = await new_call(trainer, again)
    await trainer.deliver(trainer.result(calls[1], "two"), trainer.result(call, "three"))
    answers = [(await asked)[1]["choices"][0]["message"]["content"] for asked in (*both, again)]
    assert sorted(answers[:2]) == ["one", "two"] and answers[2] == "three"


@pytest.mark.requirement("R23", "R32")
async def test_departed_agent_cancels_its_call_and_notifies_the_trainer(
    start: Any, http: aiohttp.ClientSession
) -> None:
    """After the grace the call is CANCELLED, its credit is free, a late answer is rejected by type."""
    from penstock.interception.v1 import intercept_service_pb2 as pb

    service = await start(rejoin_grace_s=0.0)
    rollout, trainer = await service.open(), await service.trainer()
    asked = Agent(http, rollout).asking()
    call = await trainer.call()
    asked.cancel()
    cancelled = await trainer.frame("cancelled")
    assert (list(cancelled.call_ids), cancelled.reason) == ([call.call_id], "AGENT_GONE")
    late = await trainer.deliver(trainer.result(call, "too late"))
    assert [r.reason for r in late.rejected] == [pb.ResultRejected.REASON_CALL_ENDED]
