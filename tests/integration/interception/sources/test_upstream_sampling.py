"""Sampling at an upstream: what it is asked where a budget or an override replaces what the agent asks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.integration.interception.test_sources import ASK, PROXY, from_caller, said, upstream

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2

LIMITED = interception_pb2.Budgets(max_tokens_per_call=10)


def answer(_request: Any, _body: dict[str, Any]) -> dict[str, Any]:
    return said("well")


def spelled(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields of these names, in any spelling."""
    return {name: value for name, value in body.items() if name.lower().replace("_", "") in names}


@pytest.mark.requirement("R35")
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {"max_tokens": 10}),
        ({"max_tokens": 50}, {"max_tokens": 10}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 10}),
        ({"max_tokens": 50, "max_completion_tokens": 5000}, {"max_tokens": 10}),
        ({"max_tokens": None, "max_completion_tokens": 5000}, {"max_completion_tokens": 10}),
        ({"max_tokens": 5, "max_completion_tokens": 5000}, {"max_tokens": 5}),
        ({"max_tokens": 50, "MaxTokens": 5000, "Max_Completion_Tokens": 5000}, {"max_tokens": 10}),
        ({"max_output_tokens": 5000}, {"max_tokens": 10}),
    ],
)
async def test_token_limit_reaches_an_upstream_once_however_the_agent_writes_it(
    service: Any, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    """Servers disagree which of two fields counts, and some read names in any spelling."""
    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url), budgets=LIMITED)
        await rollout.client().chat.completions.create(model="m", messages=ASK, extra_body=asked)
    assert spelled(seen[0][1], "maxtokens", "maxcompletiontokens", "maxoutputtokens") == sent


@pytest.mark.requirement("R35")
async def test_an_upstream_is_asked_for_one_completion_however_the_agent_writes_it(service: Any) -> None:
    """Each further one would be sampled beside the limit of tokens."""
    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url), budgets=LIMITED)
        more = {"n": 1, "N": 5, "best_of": 5}
        await rollout.client().chat.completions.create(model="m", messages=ASK, extra_body=more)
    assert not spelled(seen[0][1], "n", "bestof")


OF_THE_API: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.5,
    "seed": 7,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "max_tokens": 8,
    "stop": ["END"],
}
EXTENDED: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.25,
    "min_tokens": 2,
    "stop_token_ids": [3, 4],
    "repetition_penalty": 1.5,
}
AGENTS: dict[str, Any] = {
    "temperature": 1,
    "top_p": 0.9,
    "seed": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "max_tokens": 50,
    "stop": "agents",
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


async def ask(rollout: Any, dialect: str, **fields: Any) -> int:
    """Asks in a dialect, with the agent's own sampling, and returns the status."""
    root = rollout.base_url.removesuffix("/v1")
    if dialect == "chat":
        path, body = "/v1/chat/completions", {"model": "m", "messages": ASK, **AGENTS, **fields}
    elif dialect == "messages":
        path, body = "/v1/messages", {"model": "m", "messages": ASK, "max_tokens": 50, "top_k": 40, **fields}
    else:
        config = {"temperature": 1, "topK": 64, "maxOutputTokens": 50, "thinkingConfig": {"thinkingBudget": 90}}
        contents = [{"role": "user", "parts": [{"text": "list the files"}]}]
        path, body = "/v1beta/models/m:generateContent", {"contents": contents, "generationConfig": config | fields}
    headers = {"x-api-key": rollout.token}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(root + path, json=body) as told:
        await told.read()
        return told.status


async def delegating(trainer: Any, override: chat_pb2.Sampling | None) -> None:
    """Delegates the next call."""
    call = await trainer.call()
    delegation = pb.Delegation(sampling_override=override)
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, delegation=delegation))


async def asked_with(
    service: Any, mode: str, url: str, dialect: str, override: chat_pb2.Sampling, **fields: Any
) -> tuple[int, Any]:
    """Asks once where the rollout, or the trainer that delegates, overrides; returns the status and the call."""
    if mode == "proxy":
        rollout = await service.open(mode=PROXY, source=from_caller(url), sampling_override=override)
        status = await ask(rollout, dialect, **fields)
    else:
        rollout, trainer = await service.open(source=from_caller(url)), await service.trainer()
        asked = asyncio.create_task(ask(rollout, dialect, **fields))
        await delegating(trainer, override)
        status = await asked
    return status, (await service.capture(rollout.rollout_id)).calls[0]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("mode", ["proxy", "delegated"])
@pytest.mark.parametrize(("owner", "sent"), [("nobody", None), ("vllm", -1), ("sglang", -1)])
async def test_override_turns_an_agents_top_k_off_at_an_upstream(
    service: Any, mode: str, owner: str, sent: int | None
) -> None:
    async with upstream(answer, owner) as (url, seen):
        status, call = await asked_with(service, mode, url, "chat", chat_pb2.Sampling(top_k=0), top_k=64)
    assert status == 200 and not call.sampling_requested.HasField("top_k")
    assert seen[0][1].get("top_k") == sent


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("mode", ["proxy", "delegated"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "generateContent"])
@pytest.mark.parametrize("owner", ["nobody", "vllm", "sglang"])
async def test_override_reaches_an_upstream_in_the_place_of_what_the_agent_asks(
    service: Any, mode: str, dialect: str, owner: str
) -> None:
    """Of a rollout, or of a trainer that delegates; fields beyond the API go to servers that have them."""
    fields = OF_THE_API if owner == "nobody" else OF_THE_API | EXTENDED
    override = chat_pb2.Sampling(**fields, thinking=False, response_format_json=json.dumps(FORMAT))
    async with upstream(answer, owner) as (url, seen):
        status, call = await asked_with(service, mode, url, dialect, override)
    assert status == 200
    sent = seen[0][1]
    assert {name: sent.get(name) for name in fields} == fields
    assert (sent["response_format"], sent["chat_template_kwargs"]) == (FORMAT, {"enable_thinking": False})
    assert (call.sampling_requested.temperature, list(call.sampling_requested.stop)) == (0.0, ["END"])


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("mode", ["proxy", "delegated"])
@pytest.mark.parametrize("dialect", ["chat", "generateContent"])
@pytest.mark.parametrize(
    ("field", "value", "owner"),
    [
        *((field, value, "nobody") for field, value in EXTENDED.items()),
        ("thinking_budget_tokens", 20, "vllm"),
        ("n", 2, "vllm"),
        ("response_format_json", '{"type": "regex", "regex": "a+"}', "vllm"),
        ("response_format_json", "no JSON", "vllm"),
    ],
)
async def test_override_that_an_upstreams_api_has_no_field_for_fails_the_call_by_its_name(
    service: Any, mode: str, dialect: str, field: str, value: Any, owner: str
) -> None:
    """The upstream is not asked. The failure is not the request's: the agent has not caused it."""
    async with upstream(answer, owner) as (url, seen):
        status, call = await asked_with(service, mode, url, dialect, chat_pb2.Sampling(**{field: value}))
    assert (status, seen) == (400, [])
    assert call.end_reason == "UPSTREAM_SAMPLING_UNSUPPORTED"
    assert call.normalisations[-1].startswith(field.removesuffix("_json") + " overrides the agent's sampling")
    assert "OpenAI Chat Completions" in call.normalisations[-1]


@pytest.mark.requirement("R63")
async def test_agents_own_sampling_passes_an_upstream_as_it_was_sent(service: Any) -> None:
    """Nothing is replaced, nothing is refused: the upstream judges what its API does not have."""
    own = EXTENDED | {"chat_template_kwargs": {"enable_thinking": False, "x": 1}, "response_format": FORMAT}
    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        assert await ask(rollout, "chat", **own) == 200
        # Those of other dialects are left out where Chat Completions lacks them.
        assert await ask(rollout, "generateContent") == 200
    sent = [{name: value for name, value in body.items() if name not in ("model", "messages")} for _, body in seen]
    assert sent == [AGENTS | own, {"temperature": 1.0, "max_tokens": 50}]


@pytest.mark.requirement("R63")
async def test_override_of_the_agents_own_value_is_not_left_out(service: Any) -> None:
    """A dialect's topK is not written for the upstream, so that one that equals it is an override all the same."""
    async with upstream(answer) as (url, _):
        status, call = await asked_with(service, "proxy", url, "generateContent", chat_pb2.Sampling(top_k=64))
    assert (status, call.end_reason) == (400, "UPSTREAM_SAMPLING_UNSUPPORTED")


@pytest.mark.requirement("R63")
async def test_template_options_of_the_agent_stay_beside_an_override_of_thinking(service: Any) -> None:
    """Only the one option is replaced."""
    own = {"chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    async with upstream(answer) as (url, seen):
        await asked_with(service, "delegated", url, "chat", chat_pb2.Sampling(thinking=True), **own)
    assert seen[0][1]["chat_template_kwargs"] == {"enable_thinking": True, "x": 1}


EFFORT = {"reasoning_effort": "high", "thinking": {"type": "enabled"}}


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("override", "sent"),
    [
        (None, EFFORT),
        (True, EFFORT | {"chat_template_kwargs": {"enable_thinking": True}}),
        (False, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
async def test_agents_own_fields_on_thinking_pass_unless_an_override_says_the_opposite(
    service: Any, override: bool | None, sent: dict[str, Any]
) -> None:
    """Nothing is added to what the agent says itself: a provider would refuse it."""
    async with upstream(answer) as (url, seen):
        await asked_with(service, "proxy", url, "chat", chat_pb2.Sampling(thinking=override), **EFFORT)
    fields = ("reasoning_effort", "thinking", "chat_template_kwargs")
    assert {name: seen[0][1][name] for name in fields if name in seen[0][1]} == sent
