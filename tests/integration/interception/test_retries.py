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
