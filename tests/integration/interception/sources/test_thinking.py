"""Whether a model thinks: the agent's wish and the rollout's, in the prompt of an engine and at endpoints of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.integration.interception.sources.test_upstream_sampling import delegating
from tests.integration.interception.test_sources import DEFAULT_INFERENCE, PROXY, from_caller, said, upstream
from tests.integration.interception.test_top_logprobs import numpy_engine

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import open_inference

CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
OPEN = "<|im_start|>assistant\n"
UNLIMITED = "thinking_budget_tokens asks for 90 at most; reasoning was not limited"
SAID: list[Any] = [{"role": "user", "content": "list the files"}]


@pytest.fixture
async def engine(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[str]:
    """The address of the numpy engine; the tiny template closes the thoughts of a model that is not to think."""
    async with numpy_engine(tmp_path, TokenizerFiles.from_directory(tokenizer_dir)) as opened:
        yield opened.address


def request(dialect: str, **wish: Any) -> tuple[str, dict[str, Any]]:
    """The path and the body of a call in a dialect, with its fields on thinking."""
    if dialect == "chat":
        return "/v1/chat/completions", {"model": "m", "messages": SAID, "max_tokens": 4, **wish}
    if dialect == "messages":
        return "/v1/messages", {"model": "m", "messages": SAID, "max_tokens": 4, **wish}
    if dialect == "responses":
        return "/v1/responses", {"model": "m", "input": SAID, "max_output_tokens": 16, **wish}
    contents = [{"role": "user", "parts": [{"text": "list the files"}]}]
    config = {"maxOutputTokens": 4, **({"thinkingConfig": wish} if wish else {})}
    return "/v1beta/models/m:generateContent", {"contents": contents, "generationConfig": config}


async def ask(rollout: Any, dialect: str, **wish: Any) -> tuple[int, bytes]:
    """Asks once; returns status and answer."""
    path, body = request(dialect, **wish)
    url = rollout.base_url.removesuffix("/v1") + path
    headers = {"x-api-key": rollout.token}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as answer:
        return answer.status, await answer.read()


async def prompt_of(service: Any, call_id: str) -> str:
    """The text of a call's prompt."""
    found = await service.intercept.GetCall(pb.GetCallRequest(call_id=call_id))
    text: str = service.codec.decode(np.frombuffer(found.prompt_token_ids, "<i4").astype(np.int32))
    return text


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("dialect", "wish", "ending"),
    [
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, CLOSED),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, OPEN),
        ("chat", {"reasoning_effort": "none"}, CLOSED),
        ("chat", {"thinking": {"type": "enabled"}}, OPEN),
        ("messages", {"thinking": {"type": "disabled"}}, CLOSED),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 90}}, OPEN),
        ("responses", {"reasoning": {"effort": "none"}}, CLOSED),
        ("responses", {"reasoning": {"effort": "high"}}, OPEN),
        ("generateContent", {"thinkingBudget": 0}, CLOSED),
        ("generateContent", {"thinkingBudget": 90}, OPEN),
    ],
)
async def test_agents_wish_to_think_or_not_is_in_the_prompt_of_an_engine(
    start: Any, engine: str, dialect: str, wish: dict[str, Any], ending: str
) -> None:
    """An engine has no option of it; that it does not limit the tokens of thoughts is noted."""
    service = await start(inference_address=engine)
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    status, answer = await ask(rollout, dialect, **wish)
    assert status == 200, answer
    [call] = (await service.capture(rollout.rollout_id)).calls
    assert (await prompt_of(service, call.call_id)).endswith("<|im_end|>\n" + ending)
    assert call.sampling_requested.thinking is (ending == OPEN)
    assert (UNLIMITED in call.normalisations) is (90 in [*wish.values(), *wish.get("thinking", {}).values()])


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("form", ["id", "text"])
async def test_delegated_call_thinks_as_its_trainer_says_or_is_refused_by_name(
    start: Any, engine: str, tokenizer_dir: Path, tmp_path: Path, form: str
) -> None:
    """A prompt of token ids is made when the call is delegated; the engine behind an endpoint of text makes its own."""
    async with AsyncExitStack() as stack:
        url, seen = await stack.enter_async_context(upstream(lambda _request, _body: said("well")))
        address = engine
        if form == "text":
            options = {"base_url": url, "model": "m"}
            opening = open_inference(tokenizer_dir, tmp_path / "text", engine="openai", engine_options=options)
            address = (await stack.enter_async_context(opening)).address
        service = await start(inference_address=address)
        rollout, trainer = await service.open(source=DEFAULT_INFERENCE), await service.trainer()
        waiting = asyncio.create_task(ask(rollout, "responses", reasoning={"effort": "high"}))
        await delegating(trainer, chat_pb2.Sampling(thinking=False))
        status, _ = await waiting
        [call] = (await service.capture(rollout.rollout_id)).calls
    if form == "text":
        assert status == 200 and seen[-1][1]["chat_template_kwargs"] == {"enable_thinking": False}
    else:
        assert (status, call.end_reason) == (400, "FIELD_INVALID")


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("owner", ["vllm", "provider"])
async def test_text_endpoint_behind_an_inference_service_hears_the_agents_wish(
    start: Any, tokenizer_dir: Path, tmp_path: Path, owner: str
) -> None:
    """Its prompt is rendered there, with the options that ours would be; a provider without templates is not asked."""
    options = {"base_url": "", "model": "m"}
    async with AsyncExitStack() as stack:
        opened = upstream(lambda _request, _body: said("well"), owner)
        options["base_url"], seen = await stack.enter_async_context(opened)
        opening = open_inference(tokenizer_dir, tmp_path / "text", engine="openai", engine_options=options)
        service = await start(inference_address=(await stack.enter_async_context(opening)).address)
        rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
        assert (await ask(rollout, "responses", reasoning={"effort": "high"}))[0] == 200
        assert (await ask(rollout, "chat"))[0] == 200
        notes = [call.normalisations for call in (await service.capture(rollout.rollout_id)).calls]
    sent = [body.get("chat_template_kwargs") for _, body in seen[-2:]]
    assert sent == [{"enable_thinking": True, "reasoning_effort": "high"} if owner == "vllm" else None, None]
    left_out = "thinking was left out: the upstream's API has no field for it"
    assert [left_out in each for each in notes] == [owner != "vllm", False]


@pytest.mark.requirement("R63")
async def test_rollouts_limit_of_thoughts_is_refused_by_name_at_an_engine_without_it(start: Any, engine: str) -> None:
    """Only an agent's own goes without effect."""
    service = await start(inference_address=engine)
    override = chat_pb2.Sampling(thinking_budget_tokens=20)
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE, sampling_override=override)
    assert (await ask(rollout, "chat"))[0] == 400
    assert [call.end_reason for call in (await service.capture(rollout.rollout_id)).calls] == ["FIELD_INVALID"]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("wish", "override", "ending"),
    [
        ({"type": "enabled", "budget_tokens": 90}, False, CLOSED),
        ({"type": "disabled"}, True, OPEN),
        ({}, False, CLOSED),
    ],
)
async def test_rollouts_thinking_is_in_the_prompt_in_the_place_of_the_agents(
    service: Any, http: aiohttp.ClientSession, wish: dict[str, Any], override: bool, ending: str
) -> None:
    """As counted too; the answer is parsed and the next prompt continues it, token for token."""
    rollout = await service.open(sampling_override=chat_pb2.Sampling(thinking=override))
    trainer = await service.trainer()
    fields = {"thinking": wish} if wish else {}
    waiting = asyncio.create_task(ask(rollout, "messages", **fields))
    call = await trainer.answer("well")
    assert (await waiting)[0] == 200
    assert (await prompt_of(service, call.call_id)).endswith("<|im_end|>\n" + ending)
    url = rollout.base_url.removesuffix("/v1") + "/v1/messages/count_tokens"
    body = {"model": "m", "messages": SAID, **fields}
    async with http.post(url, json=body, headers={"x-api-key": rollout.token}) as counted:
        assert (await counted.json())["input_tokens"] == call.prompt_count


THINKS = {"enable_thinking": True}


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("owner", ["nobody", "vllm"])
@pytest.mark.parametrize(
    ("dialect", "wish", "sent"),
    [
        ("responses", {"reasoning": {"effort": "high"}}, THINKS | {"reasoning_effort": "high"}),
        ("messages", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ("generateContent", {"thinkingBudget": 90}, THINKS),
        ("generateContent", {}, None),
    ],
)
async def test_agents_wish_reaches_an_upstream_with_templates_and_is_noted_at_others(
    service: Any, owner: str, dialect: str, wish: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    """A provider would refuse the field."""
    async with upstream(lambda _request, _body: said("well"), owner) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        assert (await ask(rollout, dialect, **wish))[0] == 200
    [call] = (await service.capture(rollout.rollout_id)).calls
    assert seen[0][1].get("chat_template_kwargs") == (sent if owner == "vllm" else None)
    noted = "thinking was left out: the upstream's API has no field for it" in call.normalisations
    assert noted is (owner == "nobody" and sent is not None)


@pytest.mark.requirement("R63")
async def test_override_that_turns_thinking_off_leaves_no_effort_for_an_upstreams_template(service: Any) -> None:
    async with upstream(lambda _request, _body: said("well"), "vllm") as (url, seen):
        override = chat_pb2.Sampling(thinking=False)
        rollout = await service.open(mode=PROXY, source=from_caller(url), sampling_override=override)
        assert (await ask(rollout, "responses", reasoning={"effort": "high"}))[0] == 200
    assert seen[0][1]["chat_template_kwargs"] == {"enable_thinking": False}
