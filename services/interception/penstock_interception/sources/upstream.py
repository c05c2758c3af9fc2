"""An OpenAI-compatible endpoint as a model source.

The agent's own body is sent with its model replaced and without streaming, rewritten if its dialect is another one. The
answer is captured as text and returned in the agent's dialect, streamed if requested. A key goes only to the address
that it was configured for (R11): redirects are not followed, and a caller's endpoint gets the caller's key or none.
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
from penstock_chassis.membership import session_header
from penstock_codec.chat import FinishReason, Sampling
from penstock_codec.openai_chat import read_finish_reason, read_message, read_usage
from penstock_interception.domain.calls import Answerer, Dialect, ModelFacts
from penstock_interception.domain.completions import Completion, Failure, Tokens
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.graph.values import MAX_TOP, IntArray, LogprobsMode, TopLogprobs
from penstock_interception.sources.base import EXTENDED_SERVERS, ModelSource, Resolved, SourceError
from penstock_interception.sources.upstream_body import chat_body, limit_tokens, passed_on, replace_sampling

_log = structlog.get_logger(__name__)

CHECK_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
MAX_LISTING_BYTES = 1 << 20
# `owned_by` values of servers that return token ids on request.
_TOKEN_TELLERS = frozenset({"vllm"})
# Too many requests, or too slow. Any other 5xx may be the request's own.
_OVERLOADED = frozenset({503, 504})
# A softmax rounds the logprob of a certain token to slightly above 0; a larger value is invalid and is refused.
_ROUNDED = 1e-3
_MOST_ID = np.iinfo(np.int32).max
_MOST_LOGPROB = float(np.finfo(np.float32).max)


class UpstreamSource(ModelSource):
    """One endpoint; `shown` is its name for users. The HTTP session is shared and owned by the caller."""

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
        session_header: str = "",
    ) -> None:
        """`model` is requested from the endpoint, "" means the agent's; `models` are patterns of allowed models.

        `session_header` carries the session's id; "" sends none.
        """
        self._session_header = session_header
        self._http = http
        self._parse = parse
        self._shown = shown
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._headers = self.credentials()
        self.model = model
        self._models = tuple(models)

    def allows(self, model: str) -> bool:
        """Returns whether the operator allows this model; "" is the endpoint's own choice."""
        return any(fnmatchcase(model, pattern) for pattern in self._models)

    def credentials(self, header: str = "authorization") -> dict[str, str]:
        """Returns the header with the endpoint's key, as a bearer token or bare; for this endpoint only (R11)."""
        if not self._api_key:
            return {}
        return {header: f"Bearer {self._api_key}" if header == "authorization" else self._api_key}

    def session(self, session_id: str) -> dict[str, str]:
        """Returns the header that a router in front of the endpoint knows the session by, if it has one."""
        return session_header.headers(self._session_header, session_id)

    async def resolve(self, asked_model: str) -> Resolved:
        """Checks reachability: any HTTP answer counts."""
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
                f"The upstream {self._shown} refuses its key (HTTP {status}): check the key, and that it is for "
                "this endpoint.",
                reason="UPSTREAM_KEY_REFUSED",
            )
        owners = _owners(listed)
        facts = ModelFacts(
            model=self.model or asked_model,
            returns_tokens=bool(owners & _TOKEN_TELLERS),
            extended_sampling=bool(owners & EXTENDED_SERVERS),
        )
        return Resolved(facts, None)

    async def complete(self, call: Call) -> Completion:
        """Sends the agent's body and returns one completion."""
        body, agents = await self._body(call)
        if self.model:
            body["model"] = self.model
        if not self.allows(str(body.get("model") or "")):
            raise SourceError("MODEL_NOT_ALLOWED", retriable=False)
        limit_tokens(body, call.sampling.max_tokens)
        replace_sampling(body, call, agents)
        if call.facts.returns_tokens:
            body.update({"logprobs": True, "return_token_ids": True})
            if call.sampling.top_logprobs:
                body.update({"top_logprobs": call.sampling.top_logprobs, "return_tokens_as_token_ids": True})
        try:
            written = orjson.dumps(body)
        except TypeError as error:  # a field that is only passed on: orjson parses deeper nesting than it writes
            raise SourceError("FIELD_INVALID", "nested too deeply", retriable=False) from error
        return await self._ask(written, call, _stop_texts(body))

    async def answers_others(self, call: Call) -> bool:
        """See ModelSource. One token of a fixed text, of the model that the call asks for."""
        model = self.model or call.request.model_requested
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        try:
            await self._ask(orjson.dumps(body), call)
        except SourceError:
            return False
        return True

    async def _ask(self, written: bytes, call: Call, stop_texts: Sequence[str] = ()) -> Completion:
        try:
            async with self._http.post(
                f"{self.base_url}/chat/completions",
                data=written,
                headers={
                    **self._headers,
                    **self.session(call.rollout.spec.session_id),
                    "content-type": "application/json",
                },
                allow_redirects=False,
            ) as answer:
                data = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(data) <= MAX_ANSWER_BYTES and not answer.content.at_eof():
                    data += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(data))
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SourceError("UPSTREAM_UNREACHABLE", type(error).__name__) from error
        if status != 200:
            _log.warning("upstream refused a call", base_url=self.base_url, status=status)
            refused = refusal(status)
            broke = status >= 500 and status not in _OVERLOADED
            raise SourceError(refused.reason, refused.message, retriable=refused.retriable, may_be_the_request=broke)
        if len(data) > MAX_ANSWER_BYTES:
            raise SourceError("UPSTREAM_ANSWER_TOO_LARGE", retriable=False)
        return _completion(data, stop_texts)

    async def _body(self, call: Call) -> tuple[dict[str, Any], Sampling]:
        """Returns the agent's request in Chat Completions, and of its sampling what the body may lack."""
        request = call.request
        if request.dialect is Dialect.CHAT_COMPLETIONS:
            return passed_on(request.body), Sampling()

        def rewritten() -> tuple[dict[str, Any], Sampling]:
            parsed = self._parse(request.dialect, request.body)
            body = chat_body(parsed, extended=call.facts.extended_sampling)
            return {"model": request.model_requested, **body}, parsed.sampling

        return await asyncio.to_thread(rewritten)


def refusal(status: int) -> Failure:
    """Classifies an HTTP error status: the key is wrong, the endpoint fails for now, or the request is invalid."""
    if status in (401, 402):
        return Failure("UPSTREAM_KEY_REFUSED", f"HTTP {status}", retriable=False)
    retriable = status in (408, 409, 425, 429) or status >= 500
    return Failure("UPSTREAM_REFUSED", f"HTTP {status}", retriable=retriable)


def _owners(listing: bytes) -> set[Any]:
    try:
        return {item.get("owned_by") for item in orjson.loads(listing)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


def _tokens(answer: dict[str, Any], choice: dict[str, Any]) -> tuple[Tokens | None, IntArray | None]:
    """Returns the sampled tokens and the prompt, if both are given; logprobs only if every token has one.

    Raises ValueError or similar for what are no tokens.
    """
    sampled, prompt = choice.get("token_ids"), answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not sampled or not prompt:
        return None, None
    ids = _ids(sampled)
    content = (choice.get("logprobs") or {}).get("content") or ()
    if len(content) != ids.size:
        return Tokens(ids), _ids(prompt)
    # The server does not state its mode; before temperature and filters is vLLM's default.
    logprobs = np.asarray([_logprob(item) for item in content], dtype=np.float32)
    logprobs[(logprobs > 0) & (logprobs <= _ROUNDED)] = 0
    tokens = Tokens(ids, logprobs, LogprobsMode.RAW, top=_top([item.get("top_logprobs") or () for item in content]))
    return tokens, _ids(prompt)


def _ids(values: Any) -> IntArray:
    """Returns token ids. Raises ValueError for anything but a flat list of integers from 0 to the largest int32."""
    ids = np.asarray(values)
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() > _MOST_ID:
        raise ValueError("these are no token ids")
    return ids.astype(np.int32)


def _logprob(item: dict[str, Any]) -> float:
    """Returns an item's logprob. Raises ValueError for one that a float32 cannot hold."""
    value = float(item["logprob"])
    if not abs(value) <= _MOST_LOGPROB:
        raise ValueError("a logprob is out of range")
    return value


def _top(tables: Sequence[Sequence[dict[str, Any]]]) -> TopLogprobs | None:
    """Returns the alternatives, sorted; None if there are none, or a token is given by its text."""
    count = min(max(map(len, tables), default=0), MAX_TOP)
    if not count:
        return None
    ids = np.full((len(tables), count), -1, np.int32)
    logprobs = np.full((len(tables), count), -np.inf, np.float32)
    for row, table in enumerate(tables):
        ranked = sorted(table, key=lambda item: -item["logprob"])[:count]
        for place, item in enumerate(ranked):
            prefix, _, digits = item["token"].partition(":")
            if prefix != "token_id" or not digits.isdecimal():
                return None
            ids[row, place], logprobs[row, place] = int(digits), _logprob(item)
    logprobs[(logprobs > 0) & (logprobs <= _ROUNDED)] = 0
    return TopLogprobs(ids, logprobs)


def _stop_texts(body: dict[str, Any]) -> Sequence[str]:
    """Returns the texts that end an answer without being a part of it."""
    stop = body.get("stop")
    if not stop or body.get("include_stop_str_in_output"):  # vLLM's field: the answer is to be shown with its stop text
        return ()
    return [stop] if isinstance(stop, str) else [text for text in stop if isinstance(text, str)]


def _completion(data: bytes, stop_texts: Sequence[str]) -> Completion:
    try:
        answer = orjson.loads(data)
        choice = answer["choices"][0]
        tokens, prompt = _tokens(answer, choice)
        message = read_message(choice["message"])
        finish = read_finish_reason(choice.get("finish_reason"))
        usage = read_usage(answer.get("usage"))
        model = str(answer.get("model", ""))
        # Not in the API: vLLM says which stop text ended the answer, or which token.
        stop = choice.get("stop_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise SourceError("UPSTREAM_ANSWER_INVALID", type(error).__name__, may_be_the_request=True) from error
    return Completion(
        tokens=tokens,
        prompt_ids=prompt,
        message=message,
        finish_reason=finish,
        engine="openai",
        model=model,
        usage=usage,
        stop_text=stop if finish is FinishReason.STOP and isinstance(stop, str) and stop in stop_texts else None,
    )
