"""An HTTP server that answers chat completions with canned replies: what the gate and the rollouts are compared with.

Run as a program it prints its port. The reply is chosen by the number of tool results in the request, so that the same
agent takes the same course; `--constant` answers with the first one and does not look at the request.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import orjson
import uvloop
from aiohttp import web

REPLIES: Final = (
    {"command": "cat note.txt"},
    {"command": "cat note.txt > out.txt"},
    None,
)


def reply(index: int) -> bytes:
    """The body of the answer to the call after `index` tool results."""
    arguments = REPLIES[min(index, len(REPLIES) - 1)]
    message: dict[str, object] = {"role": "assistant", "content": "done" if arguments is None else None}
    if arguments is not None:
        function = {"name": "bash", "arguments": orjson.dumps(arguments).decode()}
        message["tool_calls"] = [{"id": f"call_{index}", "type": "function", "function": function}]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop" if arguments is None else "tool_calls",
        "logprobs": None,
    }
    usage = {"prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy"}
    return orjson.dumps({**answer, "choices": [choice], "usage": usage})


BODIES: Final = tuple(map(reply, range(len(REPLIES))))


async def canned(request: web.Request) -> web.Response:
    """The answer that the conversation calls for."""
    messages = orjson.loads(await request.read())["messages"]
    index = sum(message["role"] == "tool" for message in messages)
    return web.Response(body=BODIES[min(index, len(BODIES) - 1)], content_type="application/json")


async def constant(request: web.Request) -> web.Response:
    """The same answer to everything."""
    await request.read()
    return web.Response(body=BODIES[0], content_type="application/json")


async def serve() -> None:
    """Serves on a free port of the loopback interface, which is printed, until the process is told to stop."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", constant if "--constant" in sys.argv else canned)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(serve())
