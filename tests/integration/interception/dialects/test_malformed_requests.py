"""Requests in which any one value is what an attacker likes: the answer is one of the dialect's, and it is on record.

Each value of a body that has everything a dialect offers is replaced in turn, as JSON text, so that what Python cannot
hold is there too: huge numbers, half of a surrogate pair, a key that is there twice, and nesting up to each limit.

The suite takes a sample. PENSTOCK_EVERY_MALFORMED_VALUE=1 replaces each value by each, in a few minutes:

    PENSTOCK_EVERY_MALFORMED_VALUE=1 python -m pytest tests/integration/interception/dialects/test_malformed_requests.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import aiohttp
import pytest
from tests.support.endpoints.upstream import vendor

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_interception.ingress.dialects.base import Ask, BadRequest, DialectCodec, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.wire import convert

OF_THE_REQUEST: Final = frozenset(
    {
        "CALL_TOO_LARGE",
        "CONTEXT_EXCEEDED",
        "FIELD_INVALID",
        "IMAGE_UNSUPPORTED",
        "MESSAGES_EMPTY",
        "TEMPLATE_REFUSED",
        "TEMPLATE_WITHOUT_TOOLS",
        "TEXT_NOT_UNICODE",
        "TOOL_INVALID",
        "UPSTREAM_ANSWER_TOO_LARGE",
        "UPSTREAM_REFUSED",
    }
)
"""The reasons for which the driver grades a rollout whose agent then crashed (docs/errors.md)."""
AT_ONCE: Final = 8
SAMPLE: Final = 500
EVERY: Final = os.environ.get("PENSTOCK_EVERY_MALFORMED_VALUE") == "1"
PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CHAT: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "name": "u", "content": [{"type": "text", "text": "list"}]},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "user", "content": "and?"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "seed": 1,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {"1": 1},
    "stream": False,
    "stream_options": {"include_usage": True},
    "metadata": {"k": "v"},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "user": "u",
    "other": {"k": [1]},
}
RESPONSES: Final[dict[str, Any]] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "and?"},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "description": "d", "format": {"type": "text"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "max_output_tokens": 20,
    "stop": ["x"],
    "seed": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "top_logprobs": 1,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "stream": False,
    "metadata": {"k": "v"},
    "prompt_cache_key": "k",
    "truncation": "auto",
    "other": {"k": [1]},
}
MESSAGES: Final[dict[str, Any]] = {
    "model": "m",
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "list"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["x"],
    "stream": False,
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "other": {"k": [1]},
}
GENERATE: Final[dict[str, Any]] = {
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "list"}]},
        {
            "role": "model",
            "parts": [
                {"text": "so", "thought": True, "thoughtSignature": "cw=="},
                {"functionCall": {"id": "c1", "name": "f", "args": {"a": "b"}}},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "f", "response": {"output": "done"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 5,
        "maxOutputTokens": 20,
        "stopSequences": ["x"],
        "seed": 1,
        "presencePenalty": 0,
        "frequencyPenalty": 0,
        "logprobs": 1,
        "candidateCount": 1,
        "responseMimeType": "application/json",
        "responseJsonSchema": SCHEMA,
        "thinkingConfig": {"thinkingBudget": 10, "includeThoughts": True},
    },
    "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "OFF"}],
    "labels": {"k": "v"},
    "other": {"k": [1]},
}
DIALECTS: Final = {
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", MESSAGES),
    "generateContent": ("/v1beta/models/m:generateContent", GENERATE),
}
PARSERS: Final[dict[str, DialectCodec]] = {
    "chat": ChatCompletions(),
    "responses": Responses(),
    "messages": Messages(),
    "generateContent": GenerateContent(),
}


def nested(depth: int, inner: str = "1") -> str:
    return "[" * depth + inner + "]" * depth


NUMBERS: Final = (
    *("0", "-1", "1.5", "9" * 400, "1e400", "-1e-400", "NaN", "Infinity", "1e15", "2147483648.0"),
    *("2147483648", "-2147483649", "4294967296", "9223372036854775807", "-9223372036854775808"),
    *("9223372036854775808", "18446744073709551616"),
)
HALVES: Final = (r'"\ud800"', r'"\udc00 x"', r'{"\ud800": 1}', '"penstock.1.7aCA"')
"""Halves of surrogate pairs: spelt in JSON, and sealed as a Responses client returns its reasoning."""
VALUES: Final = (
    *NUMBERS,
    *HALVES,
    *("null", "true", '""', '"x"', "[]", "{}", "[null]", "[{}]", '{"a": null}', '[["x"]]'),
    *(r'"a\u0000b"', '"\x00"', '"\x7f\u2028"', r'{"\u0000": "a"}'),
    *('{"a": 1, "a": 2}', '{"type": "text", "type": "x"}', '"' + "a" * 70_000 + '"', "[" + "0," * 5000 + "0]"),
    *(nested(depth) for depth in (120, 240, 245, 248, *range(250, 257), 1000, 100_000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (120, 240, 245, 248, *range(250, 257), 1000)),
)


def places(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Paths to all values of a body."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def bodies(body: dict[str, Any], values: Sequence[str] = VALUES) -> Iterator[bytes]:
    """The body with each of its values replaced by each of `values`, and without it."""
    for path in places(body):
        changed = json.loads(json.dumps(body))
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = "REPLACED"
        for value in values:
            yield json.dumps(changed).replace('"REPLACED"', value).encode()
        del holder[path[-1]]
        yield json.dumps(changed).encode()


def chosen(seed: str, every: list[bytes]) -> list[bytes]:
    """A sample, always the same; all where that is asked for."""
    return every if EVERY else random.Random(seed).sample(every, SAMPLE)


def shape(path: str, answer: dict[str, Any]) -> None:
    """An error answer of the path's dialect."""
    error = answer["error"]
    assert error["message"] and isinstance(error["message"], str)
    if "/messages" in path:
        assert answer["type"] == "error" and error["type"] and error["details"]["error_code"]
    elif "generateContent" in path:
        assert isinstance(error["code"], int) and error["status"]
    else:
        assert error["type"] and error["code"]


@pytest.fixture(params=["trainer", "endpoint"])
async def rollout(service: Any, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A rollout whose calls a trainer answers, or an endpoint of others."""
    if request.param == "endpoint":
        async with vendor() as upstream:
            endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=upstream.base_url)
            source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint, model="m"))
            yield await service.open(mode=PROXY, source=source)
        return
    override = chat_pb2.Sampling(max_tokens=50)  # room for the answer, whatever the agent asks for
    opened, trainer = await service.open(sampling_override=override), await service.trainer()

    async def answer() -> None:
        while True:
            await trainer.send(results=pb.Results(results=[trainer.result(await trainer.call(), "the answer")]))

    answering = asyncio.create_task(answer())
    yield opened
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


@pytest.mark.requirement("R33", "R59")
@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_a_dialect_accepts_can_be_written_to_the_messages_of_its_call(name: str) -> None:
    """A number beyond a field's range, or half a character, made the call unreadable for everybody."""
    accepted, wrong = 0, []
    for given in bodies(DIALECTS[name][1], (*NUMBERS, *HALVES)):
        try:
            request = PARSERS[name].parse(given, Route(Ask.COMPLETION, "m"))
        except BadRequest:
            continue
        accepted += 1
        try:
            convert.sampling_to(request.sampling)
            convert.choice_to(request.tool_choice)
            _ = [*map(convert.message_to, request.messages)], [*map(convert.tool_to, request.tools)]
            trajectory_pb2.Call(model_requested=request.model, normalisations=request.normalisations)
        except (ValueError, TypeError) as error:
            wrong.append((repr(error), given[:50], given[-200:]))
    assert not wrong, (len(wrong), wrong[:5])
    assert accepted > 100


@pytest.mark.requirement("R33", "R59", "R72")
@pytest.mark.parametrize("name", DIALECTS)
async def test_malformed_value_never_fails_the_service_or_excuses_a_crash(
    service: Any, rollout: Any, name: str
) -> None:
    """No 5xx; each answer has its call; no call fails so that its rollout would be retried instead of graded."""
    path, body = DIALECTS[name]
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}"
    queue, wrong, answered = iter(chosen(name, [*bodies(body)])), [], 0

    async def ask(http: aiohttp.ClientSession) -> None:
        nonlocal answered
        for given in queue:
            async with http.post(url, data=given, headers={"x-api-key": rollout.token}) as answer:
                told = await answer.read()
            if answer.status == 200:
                answered += 1
                continue
            try:
                assert 400 <= answer.status < 500, answer.status
                shape(path, json.loads(told))
            except Exception as error:  # noqa: BLE001 - reported with its request
                wrong.append((repr(error), given[:50], given[-200:], told[:200]))

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
    await service.close(rollout.rollout_id)
    calls = (await service.capture(rollout.rollout_id)).calls
    failed = [call for call in calls if call.state != trajectory_pb2.CALL_STATE_DELIVERED]
    excused = {call.end_reason for call in failed} - OF_THE_REQUEST
    assert not wrong, (len(wrong), wrong[:5])
    assert not excused
    assert len(calls) - len(failed) == answered > 50
