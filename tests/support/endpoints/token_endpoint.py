"""A server of token ids at the wire, as vLLM speaks it: samples from a fixed distribution, and fails as it is told.

For faults that a real server does not show when asked; what a real one does is tested with vLLM itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from tests.support.endpoints.loopback import event_stream, send_event, serving

VOCAB = 40
STOP = 2
PLAIN = [-0.5 * ((7 * token) % VOCAB) for token in range(VOCAB)]
"""Logits; the likeliest token is 0."""
CONTEXT = 256
Fault = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class TokenEndpoint:
    """What it gives, and what it does instead."""

    mode: Literal["raw", "processed", "warmed", "none"] = "processed"
    """What its logprobs are of; `warmed` knows the temperature and no filter."""
    ids: bool = True
    completions: bool = True
    models: tuple[str, ...] = ("served",)
    key: str = ""
    context: int | None = CONTEXT
    prompt_of_text: Callable[[str], list[int]] | None = None
    fault: Fault | None = None
    """Answers requests for streams instead."""
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of all requests for streams."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of the same, their names in lower case."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closes its connection before the answer has ended."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/models":
            cards = [{"id": name, "owned_by": "test", "max_model_len": self.context} for name in self.models]
            return web.json_response({"object": "list", "data": cards})
        if request.path == "/version":
            return web.json_response({"version": "1.2"})
        if request.path != "/v1/completions" or not self.completions:
            return web.json_response({"error": {"message": "Not Found"}}, status=404)
        body = await request.json()
        if body.get("model") not in self.models:
            return problem(404, f"The model `{body.get('model')}` does not exist.", "model")
        if not body.get("stream"):
            return web.json_response({"choices": [self.choice(body, 0) | {"finish_reason": "length"}]})
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.fault is not None:
            return await self.fault(request, body)
        return await self.stream(request, body)

    async def stream(self, request: web.Request, body: dict[str, Any], events: int | None = None) -> web.StreamResponse:
        """An event for each token; with `events` it breaks off behind so many."""
        response = await event_stream(request)
        for n in range(body["max_tokens"] if events is None else events):
            choice = self.choice(body, n)
            if n == body["max_tokens"] - 1:
                choice["finish_reason"] = "length"
            await send_event(response, {"choices": [choice]})
        if events is None:
            await send_event(response, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
            await response.write(b"data: [DONE]\n\n")
        return response

    def choice(self, body: dict[str, Any], n: int) -> dict[str, Any]:
        """The token number `n`: the likeliest one."""
        table = self.table(body)
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.prompt_of_text(prompt) if self.prompt_of_text else None
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": None, "logprobs": None}
        if self.ids:
            choice |= {"token_ids": [0], "prompt_token_ids": prompt if n == 0 else None}
        if body.get("logprobs") is not None and self.mode != "none":
            count = max(1, body["logprobs"])
            choice["logprobs"] = {
                "tokens": ["token_id:0"],
                "token_logprobs": [table[0]],
                "top_logprobs": [{f"token_id:{t}": table[t] for t in sorted(table, key=lambda t: -table[t])[:count]}],
            }
        if body.get("prompt_logprobs") is not None and isinstance(prompt, list):
            plain = self.table({})
            likeliest = sorted(plain, key=lambda t: -plain[t])[: body["prompt_logprobs"]]
            rows = ({str(t): {"logprob": plain[t]} for t in dict.fromkeys((own, *likeliest))} for own in prompt[1:])
            choice["prompt_logprobs"] = [None, *rows]
        return choice

    def table(self, body: dict[str, Any]) -> dict[int, float]:
        """Logprobs by token, of what `mode` says."""
        warmth = 1.0 if self.mode == "raw" else body.get("temperature", 1.0)
        logits = [value / warmth for value in PLAIN]
        if self.mode == "processed" and body.get("top_k") == 1:
            logits = [0.0 if token == 0 else -math.inf for token in range(VOCAB)]
        whole = math.log(sum(math.exp(value) for value in logits))
        return {token: max(value - whole, -9999.0) for token, value in enumerate(logits)}


def problem(status: int, message: str, param: str | None = None, **headers: str) -> web.Response:
    """An error as vLLM writes it."""
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


@asynccontextmanager
async def token_endpoint(port: int = 0, **options: Any) -> AsyncIterator[TokenEndpoint]:
    """The server on the loopback."""
    here = TokenEndpoint(**options)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await here.serve(request)
        except (ConnectionError, asyncio.CancelledError):
            here.left.set()
            raise

    app = web.Application(client_max_size=32 << 20)
    app.router.add_route("*", "/{path:.*}", handle)
    async with serving(app, port, cancels=True) as url:
        here.base_url = f"{url}/v1"
        yield here
