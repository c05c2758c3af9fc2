"""A vendor's endpoint at the wire: answers every chat completion alike and remembers what reached it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from tests.support.endpoints.loopback import serving

_DELTA = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,%s}]}'
_STREAM = "".join(
    f"data: {_DELTA % part}\n\n"
    for part in (
        '"delta":{"role":"assistant","content":"nothing to do"},"finish_reason":null',
        '"delta":{},"finish_reason":"stop"',
    )
)
_WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    raw_path: str
    authorization: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Vendor:
    """The endpoint. `during` runs while a completion is being asked for, so while an agent waits; `reached` is set, and
    `hold` waited for. `says` makes the text of a whole answer from its request's body.
    """

    base_url: str
    during: Callable[[], None] | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event | None = None
    says: Callable[[bytes], str] = lambda body: "nothing to do"
    seen: list[Seen] = field(default_factory=list)

    @property
    def completions(self) -> list[Seen]:
        """Requests for completions, in order."""
        return [item for item in self.seen if item.method == "POST"]


@asynccontextmanager
async def vendor() -> AsyncIterator[Vendor]:
    """A server on a free port of the loopback."""
    here = Vendor("")

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        authorization = request.headers.get("authorization", "")
        here.seen.append(Seen(request.method, request.raw_path, authorization, body, request.headers))
        if request.method != "POST":
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
        if here.during is not None:
            here.during()
        here.reached.set()
        if here.hold is not None:
            await here.hold.wait()
        if b'"stream":true' in body.replace(b" ", b""):
            return web.Response(text=_STREAM + "data: [DONE]\n\n", content_type="text/event-stream")
        said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": here.says(body)}}
        return web.json_response({**_WHOLE, "choices": [said]})

    app = web.Application(client_max_size=32 << 20)
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as url:
        here.base_url = f"{url}/v1"
        yield here
