"""The OpenAI SDK against the ingress, a trainer on the stream: the spine of a call."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from penstock.chat.v1 import chat_pb2
from penstock.trajectory.v1 import trajectory_pb2

TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"command": "ls"}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "list the files"}]


@pytest.mark.requirement("R1", "R82")
async def test_call_waits_at_the_gate_and_the_sdk_gets_the_trainers_answer(service: Any) -> None:
    """Of the spine: one call there and back; R82: the ids that were delivered are the ids that are captured."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=ASK))
    call = await trainer.answer("hello there")
    answer = await asked
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == call.prompt_count
    closed = await service.close(rollout.rollout_id)
    assert (closed.totals.calls, closed.totals.delivered) == (1, 1)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert captured.calls[0].completion.span.token_ids == trainer.completion("hello there").span.token_ids
    assert captured.samples[0].count == call.prompt_count + answer.usage.completion_tokens


@pytest.mark.requirement("R83")
async def test_a_rollout_whose_only_answer_was_cut_off_has_nothing_to_train(service: Any) -> None:
    """A sample without a trained token is no usable one, however many calls were captured."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=ASK))
    await trainer.answer("hello there", finish=chat_pb2.FINISH_REASON_LENGTH)
    assert (await asked).choices[0].finish_reason == "length"
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_UNUSABLE
    assert {"NOTHING_TO_TRAIN", "TURN_TRUNCATED"} <= {finding.reason for finding in captured.findings}
    assert captured.samples[0].weight == 0


@pytest.mark.requirement("R82", "R85")
async def test_a_second_turn_continues_the_exact_tokens_of_the_first(service: Any) -> None:
    """The prompt of turn two starts with what was sampled, odd JSON spacing included."""
    rollout, trainer = await service.open(), await service.trainer()
    client = rollout.client()
    first = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK, tools=[TOOL]))
    one = await trainer.answer(CALL)
    message = (await first).choices[0].message
    assert message.tool_calls is not None and message.tool_calls[0].function.name == "bash"
    history = [*ASK, message.model_dump(exclude_none=True), _result(message.tool_calls[0].id, "a.txt")]
    second = asyncio.create_task(client.chat.completions.create(model="m", messages=history, tools=[TOOL]))
    two = await trainer.answer("done")
    assert (await second).choices[0].message.content == "done"
    before = one.prompt_token_ids + trainer.completion(CALL).span.token_ids
    assert two.prompt_token_ids.startswith(before)
    assert two.shared_prefix_count * 4 == len(before)
    assert two.parent_call_id == one.call_id
    captured = await service.capture(rollout.rollout_id)
    sample = captured.samples[0]
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    assert mask.sum() == sum(turn.end - turn.start for turn in sample.turns) and len(sample.turns) == 2


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_role_content_tool_calls_finish_and_usage_in_order(service: Any, usage: bool) -> None:
    """The chunks of a streamed answer, as the SDK reads them."""
    rollout, trainer = await service.open(), await service.trainer()
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    stream = asyncio.create_task(
        rollout.client().chat.completions.create(model="m", messages=ASK, tools=[TOOL], stream=True, **options)
    )
    await trainer.answer("I look." + CALL + CALL.replace("ls", "pwd"))
    chunks = [chunk async for chunk in await stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).strip() == "I look."
    calls = [item for c in chunks if c.choices for item in c.choices[0].delta.tool_calls or ()]
    assert [(item.index, item.function.name) for item in calls] == [(0, "bash"), (1, "bash")]
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == ["tool_calls"]
    assert (chunks[-1].usage is not None) == usage


@pytest.mark.requirement("R4", "R5")
async def test_a_wrong_token_and_an_unknown_rollout_look_the_same(service: Any) -> None:
    """401 for both, with the same body."""
    one, two = await service.open(), await service.open()
    bodies = []
    for url, token in ((one.base_url, two.token), (one.base_url.replace("rollout-1", "nobody"), one.token)):
        client = openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="m", messages=ASK)
        bodies.append(caught.value.response.content)
    assert bodies[0] == bodies[1]


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
