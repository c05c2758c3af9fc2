"""An engine that needs no time to think, as a program: what the gateways of others ask over HTTP.

It has vLLM's `POST /inference/v1/generate` (ids in, ids and logprobs out) and `POST /v1/chat/completions`, and does not
look at what it is asked. By itself it is what every gateway is compared with: an HTTP server, and nothing more.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import orjson
import uvloop
from aiohttp import web

from benchmarks.gate.answering import Answering, lines, say
from benchmarks.gate.conversations import ARGUMENTS


async def main() -> None:
    """`start` has text and ids by the name of a reply."""
    orders = lines()
    start = await anext(orders)
    replies = start["replies"]
    generated = Answering({name: _generated(reply["ids"]) for name, reply in replies.items()})
    completed = {name: _completed(reply) for name, reply in replies.items()}
    numbers = count()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await generated.turn()
        return _json(generated.replies[generated.reply])

    async def chat(request: web.Request) -> web.Response:
        streamed = b'"stream":true' in await request.read()
        await generated.turn()
        answer = completed[generated.reply].replace(b"call_id", b"call_%d" % next(numbers))
        return web.Response(body=_events(answer), content_type="text/event-stream") if streamed else _json(answer)

    async def models(request: web.Request) -> web.Response:
        card = {"id": "policy", "object": "model", "created": 0, "owned_by": "bench", "max_model_len": 1 << 20}
        return _json(orjson.dumps({"object": "list", "data": [card]}))

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    say({"port": runner.addresses[0][1]})
    await generated.obey(orders)
    await runner.cleanup()


def _generated(ids: list[int]) -> bytes:
    content: list[dict[str, object]] = [
        {"token": f"token_id:{index}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for index in ids
    ]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
    return orjson.dumps({"request_id": "bench", "choices": [choice]})


def _completed(reply: dict[str, Any]) -> bytes:
    call = {"id": "call_id", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": reply["text"], "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": 300, "completion_tokens": len(reply["ids"]), "total_tokens": 300 + len(reply["ids"])}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy"}
    return orjson.dumps({**answer, "choices": [choice], "usage": usage})


def _events(answer: bytes) -> bytes:
    """The same as a stream, whole in one event."""
    value = orjson.loads(answer)
    message = value["choices"][0].pop("message")
    calls = [{**call, "index": index} for index, call in enumerate(message["tool_calls"])]
    value["choices"][0]["delta"] = {**message, "tool_calls": calls}
    return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({**value, "object": "chat.completion.chunk"})


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


if __name__ == "__main__":
    uvloop.run(main())
