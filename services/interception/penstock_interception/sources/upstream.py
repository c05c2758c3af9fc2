"""An OpenAI-compatible endpoint as a model source.

The agent's own body goes out with its model replaced and without streaming, written anew where its dialect is another;
what comes back is captured as text and answered to the agent in its dialect, streamed if it asked so. A key travels
only to the address that it was configured for (R11): redirects are not followed, and a caller's endpoint gets the
caller's key or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import aiohttp
import numpy as np
import orjson
import structlog

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_codec.openai_chat import read_finish_reason, read_message, read_usage
from penstock_interception.calls import Answerer, Call, Dialect, ModelFacts
from penstock_interception.completions import Completion, Tokens
from penstock_interception.graph.model import IntArray, LogprobsMode
from penstock_interception.requests import ChatRequest, is_hosted_field
from penstock_interception.sources.base import ModelSource, Resolved, SourceError
from penstock_interception.sources.chat_writer import chat_body

_log = structlog.get_logger(__name__)

CHECK_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
MAX_LISTING_BYTES = 1 << 20
# Servers that return token ids on request, by what their list of models says.
_TOKEN_TELLERS = frozenset({"vllm"})
_DROPPED = ("stream", "stream_options", "n", "models")
# A softmax rounds the logprob of a sure token to a little above 0; more than this is no logprob, and is refused.
_ROUNDED = 1e-3


class UpstreamSource(ModelSource):
    """One endpoint; `shown` is what its user calls it. The session is shared and owned by whoever made it."""

    answerer = Answerer.UPSTREAM

    def __init__(
        self,
        http: aiohttp.ClientSession,
        parse: Callable[[Dialect, bytes], ChatRequest],
        base_url: str,
        api_key: str | None,
        model: str,
        *,
        shown: str,
        models: Sequence[str] = ("*",),
    ) -> None:
        """`model` is what is asked for, "" as the agent asks; `models` are patterns of those that may be."""
        self._http = http
        self._parse = parse
        self._shown = shown
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._headers = self.credentials()
        self.model = model
        self._models = tuple(models)

    def allows(self, model: str) -> bool:
        """Whether the operator lets this model be asked for; "" is the endpoint's own choice."""
        return any(fnmatchcase(model, pattern) for pattern in self._models)

    def credentials(self, header: str = "authorization") -> dict[str, str]:
        """The header that carries the endpoint's key, a bearer token or the bare key; for this endpoint only (R11)."""
        if not self._api_key:
            return {}
        return {header: f"Bearer {self._api_key}" if header == "authorization" else self._api_key}

    async def resolve(self, asked_model: str) -> Resolved:
        """Any answer of the endpoint at all means that it can be reached."""
        try:
            async with self._http.get(
                f"{self.base_url}/models",
                headers=self._headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S),
            ) as answer:
                status = answer.status
                listed = await answer.content.read(MAX_LISTING_BYTES) if status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.warning("upstream unreachable", base_url=self.base_url, error=type(error).__name__)
            raise Unavailable(
                f"The upstream {self._shown} cannot be reached from the interception service:"
                " check the address and that its server runs.",
                reason="UPSTREAM_UNREACHABLE",
                retry_after_s=5.0,
            ) from error
        if status in (401, 403):
            raise FailedPrecondition(
                f"The upstream {self._shown} refuses its key (HTTP {status}): check the key and whom it is for.",
                reason="UPSTREAM_KEY_REFUSED",
            )
        return Resolved(ModelFacts(model=self.model or asked_model, tells_tokens=_tells_tokens(listed)), None)

    async def complete(self, call: Call) -> Completion:
        """One completion of the agent's body."""
        body = await self._body(call)
        if self.model:
            body["model"] = self.model
        if not self.allows(str(body.get("model") or "")):
            raise SourceError("MODEL_NOT_ALLOWED", retriable=False)
        body.update(_asked(call, body))
        if call.rollout.facts.tells_tokens:
            body.update({"logprobs": True, "return_token_ids": True})
        try:
            async with self._http.post(
                f"{self.base_url}/chat/completions",
                data=orjson.dumps(body),
                headers={**self._headers, "content-type": "application/json"},
                allow_redirects=False,
            ) as answer:
                data = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(data) <= MAX_ANSWER_BYTES and not answer.content.at_eof():
                    data += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(data))
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SourceError("UPSTREAM_UNREACHABLE", type(error).__name__) from error
        if status != 200:
            _log.warning("upstream refused a call", call_id=call.id, status=status)
            retriable = status in (408, 409, 425, 429) or status >= 500
            raise SourceError("UPSTREAM_REFUSED", f"HTTP {status}", retriable=retriable)
        if len(data) > MAX_ANSWER_BYTES:
            raise SourceError("UPSTREAM_ANSWER_TOO_LARGE", retriable=False)
        return _completion(data)

    async def _body(self, call: Call) -> dict[str, Any]:
        arrival = call.arrival
        if arrival.dialect is not Dialect.CHAT_COMPLETIONS:
            written = await asyncio.to_thread(lambda: chat_body(self._parse(arrival.dialect, arrival.body)))
            return {"model": arrival.model_requested, **written}
        body: dict[str, Any] = orjson.loads(arrival.body)
        return {name: value for name, value in body.items() if name not in _DROPPED and not is_hosted_field(name)}


def _asked(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """Sampling that differs from what the agent asked, in the fields that the API has."""
    sampling = call.sampling
    asked: dict[str, Any] = {}
    limit = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    if sampling.max_tokens is not None:
        asked[limit if limit in body else "max_tokens"] = sampling.max_tokens
    override = call.rollout.opening.sampling_override
    for name in ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"):
        if (value := getattr(override, name)) is not None:
            asked[name] = value
    if override.thinking is not None:
        # No field of the API's: servers of open models hand it to the chat template, others refuse it.
        given = body.get("chat_template_kwargs")
        asked["chat_template_kwargs"] = {
            **(given if isinstance(given, dict) else {}),
            "enable_thinking": override.thinking,
        }
    return asked


def _tells_tokens(listing: bytes) -> bool:
    try:
        owners = {item.get("owned_by") for item in orjson.loads(listing)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(owners & _TOKEN_TELLERS)


def _tokens(answer: dict[str, Any], choice: dict[str, Any]) -> tuple[Tokens | None, IntArray | None]:
    """Sampled tokens and the prompt, where both are told; logprobs only if there is one for each token."""
    sampled, prompt = choice.get("token_ids"), answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not sampled or not prompt:
        return None, None
    ids = np.asarray(sampled, dtype=np.int32)
    content = (choice.get("logprobs") or {}).get("content") or ()
    if len(content) != ids.size:
        return Tokens(ids), np.asarray(prompt, dtype=np.int32)
    # What the server's mode is it does not say; before temperature and filters is vLLM's default.
    logprobs = np.asarray([item["logprob"] for item in content], dtype=np.float32)
    logprobs[(logprobs > 0) & (logprobs <= _ROUNDED)] = 0
    return Tokens(ids, logprobs, LogprobsMode.RAW), np.asarray(prompt, dtype=np.int32)


def _completion(data: bytes) -> Completion:
    try:
        answer = orjson.loads(data)
        choice = answer["choices"][0]
        tokens, prompt = _tokens(answer, choice)
        message = read_message(choice["message"])
        finish = read_finish_reason(choice.get("finish_reason"))
        usage = read_usage(answer.get("usage"))
        model = str(answer.get("model", ""))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise SourceError("UPSTREAM_ANSWER_INVALID", type(error).__name__) from error
    return Completion(
        tokens=tokens,
        prompt_ids=prompt,
        message=message,
        finish_reason=finish,
        engine="openai",
        model=model,
        usage=usage,
    )
