"""The logprobs of sampled tokens, as the OpenAI SDK reads them in the Chat Completions dialect."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
from tests.integration.interception.dialects.test_chat import ASK, CALL, TOOL
from tests.integration.interception.test_sources import DEFAULT_INFERENCE, PROXY, from_caller, inference, said, upstream

__all__ = ["inference"]

TEXTS = {
    "text": "hello \u00e9\U0001f600",
    "reasoning": "<think>\nso\n</think>\n\nfine",
    "call": CALL,
    "long": "x\u20ac" * 2000,
    "nothing": "",
}


async def _asked(client: openai.AsyncOpenAI, *, stream: bool, **options: Any) -> Any:
    """The one choice of an answer, put together by the SDK where it comes as a stream."""
    asked = {"model": "m", "messages": ASK, "tools": [TOOL], **options}
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0]
    async with client.chat.completions.stream(**asked) as events:
        return (await events.get_final_completion()).choices[0]


@pytest.mark.requirement("R30", "R82")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_answer_has_logprob_and_bytes_of_each_sampled_token(service: Any, text: str, stream: bool) -> None:
    """Exactly the trainer's numbers, one for each of its ids; the bytes add up to what was sampled."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(_asked(rollout.client(), stream=stream, logprobs=True, top_logprobs=0))
    count = trainer.completion(text).span.count
    given = -np.arange(count, dtype=np.float32) / 3
    await trainer.answer(text, logprobs=given.tolist())
    choice = await asked
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert [item.logprob for item in content] == given.tolist()
    assert all(item.top_logprobs == [] for item in content)
    whole = b"".join(bytes(item.bytes) for item in content)
    assert whole.decode() == trainer.codec.decode(np.frombuffer(trainer.completion(text).span.token_ids, "<i4"))
    assert all(bytes(item.bytes).decode(errors="replace") == item.token for item in content)


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_has_no_logprobs_unless_they_are_asked_for(service: Any, stream: bool) -> None:
    """`logprobs` is null, as OpenAI's is; what is asked for is no change of the request that needs a note."""
    rollout, trainer = await service.open(), await service.trainer()
    for options in ({}, {"logprobs": False}, {"logprobs": True}):
        asked = asyncio.create_task(_asked(rollout.client(), stream=stream, **options))
        await trainer.answer("hello")
        assert ((await asked).logprobs is not None) == bool(options.get("logprobs"))
    captured = await service.capture(rollout.rollout_id)
    assert [list(call.normalisations) for call in captured.calls] == [[], [], []]


@pytest.mark.requirement("R34")
async def test_a_repeated_request_gets_its_logprobs_again(service: Any) -> None:
    """The answer that was kept is told as it was."""
    rollout, trainer = await service.open(), await service.trainer()
    client = rollout.client(default_headers={"Idempotency-Key": "one"})
    asked = asyncio.create_task(_asked(client, stream=False, logprobs=True))
    await trainer.answer("hello")
    assert (await asked).logprobs == (await _asked(client, stream=False, logprobs=True)).logprobs


@pytest.mark.requirement("R30", "R82")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_proxied_answer_has_the_engines_logprobs(start: Any, inference: Any, codec: Any, stream: bool) -> None:
    """Transparent proxy: one for each token that the inference service sampled."""
    script = {"strict": False, "turns": [{"reply": "hello", "logprob": -0.25}]}
    service = await start(inference_address=await inference(script))
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    choice = await _asked(rollout.client(), stream=stream, logprobs=True)
    span = (await service.capture(rollout.rollout_id)).calls[0].completion.span
    assert choice.logprobs is not None
    assert [item.logprob for item in choice.logprobs.content] == np.frombuffer(span.logprobs, "<f4").tolist()
    told = b"".join(bytes(item.bytes) for item in choice.logprobs.content).decode()
    assert told == codec.decode(np.frombuffer(span.token_ids, "<i4"))


@pytest.mark.requirement("R30", "R82")
async def test_logprobs_are_null_without_tokens(service: Any) -> None:
    """An endpoint that answers in text alone: nothing is made up."""
    async with upstream(lambda _request, _body: said("ok")) as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        choice = await _asked(rollout.client(), stream=False, logprobs=True)
    assert choice.message.content == "ok" and choice.logprobs is None
