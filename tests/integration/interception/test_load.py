"""Many calls at once, many calls in a row: nothing is held that is not needed."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from typing import Any

import pytest

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import rollout_gate_service_pb2 as gate

HELD = 2048
ROLLOUTS = 64


async def post(rollout: Any, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection of its own, by hand: an HTTP client would hide what comes when."""
    host, _, port = rollout.base_url.removeprefix("http://").partition("/")[0].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = (
        f"POST /rollout/{rollout.rollout_id}/v1/chat/completions HTTP/1.1\r\nhost: gate\r\nconnection: close\r\n"
        f"x-api-key: {rollout.token}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.requirement("R31")
async def test_2048_streams_are_held_without_a_thread_each_and_kept_alive(start: Any) -> None:
    """R31, decision 8: each agent sees comments while it waits, and its whole answer in the end."""
    service = await start(first_byte_s=0.0, keep_alive_s=5.0)
    trainer = await service.trainer(credits=pb.Credits(calls=HELD))
    rollouts = [await service.open() for _ in range(ROLLOUTS)]
    threads = threading.active_count()
    connections = []
    for number in range(HELD):
        body = {"stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
        connections.append(await post(rollouts[number % ROLLOUTS], body))
    calls = [await trainer.call() for _ in range(HELD)]
    assert threading.active_count() <= threads
    for reader, _ in connections:
        await reader.readuntil(b": keep-alive\n\n")
    await trainer.deliver(*(trainer.result(call, f"answer to {call.call_id}") for call in calls))
    told = set()
    for reader, writer in connections:
        text = (await reader.read()).decode()
        assert text.count("data: [DONE]") == 1 and '"finish_reason":"stop"' in text
        told.add(text.partition("answer to ")[2].partition('"')[0])
        writer.close()
    assert told == {call.call_id for call in calls}


@pytest.mark.requirement("R23")
async def test_after_many_calls_and_deleted_rollouts_nothing_is_left(start: Any) -> None:
    """The gate's own tables are empty again: calls, leases, deadlines, retry keys, queues' queues."""
    service = await start()
    trainer = await service.trainer(credits=pb.Credits(calls=64))

    async def answer_all() -> None:
        while True:
            call = await trainer.call()
            await trainer.send(results=pb.Results(results=[trainer.result(call, "ok")]))

    answering = asyncio.create_task(answer_all())
    before = _sizes(service)
    for _ in range(10):
        rollouts = [await service.open() for _ in range(10)]
        for _ in range(4):
            pending = [await post(rollout, {"messages": [{"role": "user", "content": "hi"}]}) for rollout in rollouts]
            for reader, writer in pending:
                assert b" 200 OK" in await reader.read()
                writer.close()
        for rollout in rollouts:
            await service.close(rollout.rollout_id)
            await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id=rollout.rollout_id))
    assert _sizes(service) == before
    answering.cancel()


@pytest.mark.requirement("R23", "R87")
async def test_closed_rollouts_leave_memory_and_come_back_from_disk(start: Any) -> None:
    """What was captured is on disk; a capture of a rollout that is not in memory is the same."""
    service = await start(closed_kept=1)
    trainer = await service.trainer()
    captured, call = [], None
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    for number in range(3):
        rollout = await service.open(f"r{number}")
        reader, _ = await post(rollout, {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]})
        call = await trainer.answer(f"answer {number}")
        await reader.read()
        await service.close(rollout.rollout_id)
        captured.append(await service.capture(rollout.rollout_id))
    assert [r.evicted for r in service.interceptor.registry.rollouts()] == [True, True, False]
    for number in range(3):
        assert await service.capture(f"r{number}") == captured[number]
    assert call is not None
    late = await trainer.deliver(trainer.result(call, "answer 2"))
    assert list(late.accepted_call_ids) == [call.call_id]


def _sizes(service: Any) -> dict[str, int]:
    interceptor = service.interceptor
    registry, gate, conversations = interceptor.registry, interceptor.gate, interceptor.conversations
    leasing = gate.leasing
    return {
        "rollouts": len(registry._rollouts),
        "requests": len(registry._by_request),
        "calls": len(registry._calls),
        "deadlines": len(gate._deadlines),
        "conversations": len(conversations._conversations),
        "closed": len(conversations._closed),
        "linked": len(leasing._rollouts),
        "unary": len(leasing.unary._calls),
        "queues": sum(len(queue) + len(queue.rollouts) for queue in leasing._queues.values()),
        "sessions": sum(len(session.held) for session in registry.sessions()),
    }


@pytest.mark.requirement("R82")
async def test_sampled_token_keeps_its_id_logprob_and_text(service: Any) -> None:
    """Each is stored once: 4 bytes, 4 bytes, and a character here, where every byte is a token."""
    rollout, trainer = await service.open(), await service.trainer()
    client = rollout.client()

    async def answered(index: int, words: int) -> int:
        ask: Any = [{"role": "user", "content": f"question {index}"}]
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=ask))
        await trainer.answer("abc def " * words)
        usage = (await asked).usage
        assert usage is not None
        return int(usage.completion_tokens)

    async def kept(words: int) -> tuple[int, int]:
        """Bytes and tokens of ten answers."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tokens = sum([await answered(1000 * words + index, words) for index in range(10)])
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, tokens

    await kept(1)  # what is made once
    tracemalloc.start()
    try:
        small, few = await kept(50)
        large, many = await kept(1000)
    finally:
        tracemalloc.stop()
    assert many > 15 * few > 0
    assert (large - small) / (many - few) <= 12
