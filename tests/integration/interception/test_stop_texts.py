"""A stop text that matched is sampled, and trained on, and never shown: in each dialect, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.integration.interception.test_sources import PROXY, from_caller, said, upstream

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as intercept
from penstock.trajectory.v1 import trajectory_pb2
from penstock_codec.chat import Message, ReasoningPart, TextPart, ToolCallPart
from penstock_interception.rollouts.conversations import before_stop

ASK, MORE = "list the files", "and now?"
DIALECTS = ("chat", "messages", "responses", "generate_content")


def request(dialect: str, stop: str, said: str | None, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """A first request, or the one after `said` was shown."""
    turns = [("user", ASK)] if said is None else [("user", ASK), ("assistant", said), ("user", MORE)]
    plain = [{"role": role, "content": text} for role, text in turns]
    if dialect == "chat":
        return "/v1/chat/completions", {"model": "m", "messages": plain, "stop": [stop], "stream": stream}
    if dialect == "messages":
        return "/v1/messages", {
            "model": "m", "max_tokens": 50, "messages": plain, "stop_sequences": [stop], "stream": stream,
        }  # fmt: skip
    if dialect == "responses":
        return "/v1/responses", {"model": "m", "input": plain, "stop": stop, "stream": stream}
    contents = [{"role": "user" if role == "user" else "model", "parts": [{"text": text}]} for role, text in turns]
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/v1beta/models/m:{method}", {"contents": contents, "generationConfig": {"stopSequences": [stop]}}


def shown(dialect: str, text: str) -> str:
    """What an answer shows, from JSON or from events: the longest text that stands at the dialect's places for it."""
    values = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    if not values:
        values = [json.loads(text)]
    if dialect == "chat":
        parts = [value["choices"][0] for value in values if value["choices"]]
        return "".join((part.get("delta") or part.get("message"))["content"] or "" for part in parts if _content(part))
    if dialect == "messages":
        whole = "".join(block.get("text", "") for block in values[0].get("content", ()))
        return whole or "".join(value.get("delta", {}).get("text", "") for value in values)
    if dialect == "responses":
        output = values[-1].get("response", values[-1])["output"]
        assert "".join(value.get("delta", "") for value in values) in ("", output[0]["content"][0]["text"])
        return "".join(part["text"] for item in output for part in item["content"])
    parts = [part for value in values for part in value["candidates"][0]["content"].get("parts", ())]
    return "".join(part.get("text", "") for part in parts)


def result(call: intercept.ModelCall, ids: Any) -> intercept.CallResult:
    """An answer that the stop text ended, as an engine samples it: without a token that ends the turn."""
    array = np.asarray(ids, "<i4")
    span = completion_pb2.TokenSpan(
        token_ids=array.tobytes(),
        count=array.size,
        logprobs=np.full(array.size, -0.5, "<f4").tobytes(),
        logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
        versions=[completion_pb2.PolicyVersionSpan(policy_version=1, start=0, end=array.size)],
    )
    completion = completion_pb2.Completion(span=span, finish_reason=chat_pb2.FINISH_REASON_STOP, stop_text="END")
    return intercept.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)


def _content(part: dict[str, Any]) -> bool:
    return "content" in (part.get("delta") or part.get("message") or {})


@pytest.mark.requirement("R82", "R101")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_agents_text_ends_before_the_stop_and_its_tokens_do_not(
    service: Any, http: aiohttp.ClientSession, dialect: str, stream: bool
) -> None:
    """And the next prompt goes on from every sampled id, the stop's included."""
    rollout, trainer = await service.open(), await service.trainer()

    async def post(said: str | None) -> str:
        path, body = request(dialect, "END", said, stream=stream)
        url = f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}"
        async with http.post(url, json=body, headers={"authorization": f"Bearer {rollout.token}"}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    asking = asyncio.create_task(post(None))
    first = await trainer.call()
    ids = np.asarray(trainer.codec.encode("Hello END"), "<i4")
    await trainer.deliver(result(first, ids))
    said = shown(dialect, await asking)
    assert said == "Hello "
    asking = asyncio.create_task(post(said))
    second = await trainer.answer("Done.")
    assert shown(dialect, await asking) == "Done."
    before = np.frombuffer(first.prompt_token_ids, "<i4").tolist() + ids.tolist()
    assert np.frombuffer(second.prompt_token_ids, "<i4").tolist()[: len(before)] == before
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert len(captured.branches) == len(captured.samples) == 1
    [sample] = captured.samples
    spans = [(turn.start, turn.end, turn.untrained_reason) for turn in sample.turns]
    assert spans[0] == (len(before) - ids.size, len(before), "") and not spans[1][2]
    assert captured.calls[0].completion.span.token_ids == ids.tobytes()
    assert captured.calls[0].completion.stop_text == "END"


@pytest.mark.requirement("R30", "R101")
@pytest.mark.parametrize(
    ("told", "reason"),
    [("END", ("stop_sequence", "END")), ("other", ("end_turn", None)), (7, ("end_turn", None))],
)
async def test_the_stop_text_that_an_upstream_tells_is_told_to_the_agent(
    service: Any, told: Any, reason: tuple[str, str | None]
) -> None:
    """As vLLM tells it: a text that was asked for, or the id of a token."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": ASK}], "stop_sequences": ["END"]}

    def answer(_request: Any, _body: dict[str, Any]) -> dict[str, Any]:
        told_answer = said("so ")
        told_answer["choices"][0]["stop_reason"] = told
        return told_answer

    async with upstream(answer) as (url, seen), aiohttp.ClientSession() as http:
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        headers = {"x-api-key": rollout.token, "anthropic-version": "2023-06-01"}
        async with http.post(f"{rollout.base_url}/messages", json=body, headers=headers) as response:
            answered = await response.json()
    assert seen[0][1]["stop"] == ["END"]
    assert (answered["stop_reason"], answered["stop_sequence"]) == reason
    assert answered["content"] == [{"type": "text", "text": "so "}]


@pytest.mark.requirement("R101")
async def test_an_answer_that_is_to_show_its_stop_text_does(service: Any) -> None:
    """A field of vLLM's, which the agent's body carries there."""

    def answer(_request: Any, _body: dict[str, Any]) -> dict[str, Any]:
        shown = said("so END")
        shown["choices"][0]["stop_reason"] = "END"
        return shown

    async with upstream(answer) as (url, _):
        rollout = await service.open(mode=PROXY, source=from_caller(url))
        asked = {"messages": [{"role": "user", "content": ASK}], "stop": "END"}
        answered = await rollout.client().chat.completions.create(
            model="m", **asked, extra_body={"include_stop_str_in_output": True}
        )
    assert answered.choices[0].message.content == "so END"


@pytest.mark.requirement("R101")
async def test_a_trainers_own_text_up_to_the_stop_is_what_was_sampled(service: Any) -> None:
    """Engines leave the stop out of the text beside the tokens: that is no text of a trainer's own."""
    rollout, trainer = await service.open(), await service.trainer()
    for text in ("Hello ", "Hello END"):
        asked = [{"role": "user", "content": f"{ASK} {text}"}]
        asking = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=asked, stop="END"))
        call = await trainer.call()
        made = result(call, trainer.codec.encode("Hello END"))
        made.completion.message.role = chat_pb2.ROLE_ASSISTANT
        made.completion.message.parts.add().text.text = text
        await trainer.deliver(made)
        assert (await asking).choices[0].message.content == "Hello "
    captured = await service.capture(rollout.rollout_id)
    assert "INJECTED" not in {finding.reason for finding in captured.findings}


@pytest.mark.requirement("R101")
@pytest.mark.parametrize(
    ("text", "stop", "last", "left"),
    [
        ("Hello END", "END", 3, "Hello "),
        ("Hello END.", "END", 4, "Hello "),
        ("END, but not this END", "END", 3, "END, but not this "),
        ("aba", "a", 1, "ab"),
        ("xaba", "a", 3, "x"),
        ("Hello END", "END\n", 1, "Hello "),
        ("Hello", "\n\n", 2, "Hello"),
        ("END", "END", 1, ""),
        ("Hello", "END", 1, "Hello"),
        ("ab", "a" * 100, 5, "ab"),
    ],
)
def test_the_stop_is_the_one_that_the_last_token_completed(text: str, stop: str, last: int, left: str) -> None:
    """An earlier one did not end the answer (min_tokens); the last token may say more than the stop."""
    assert before_stop(Message.assistant(text), stop, last).text == left


@pytest.mark.requirement("R101")
def test_a_stop_inside_a_tool_call_leaves_the_call() -> None:
    """What the parser read as a call is shown as one; a stop in the reasoning ends the reasoning."""
    call = Message.assistant("I look.", ToolCallPart("1", "bash", "{}"))
    assert before_stop(call, "look.", 50) == call
    thought = Message.assistant(reasoning="I think END")
    assert before_stop(thought, "END", 3).parts == (ReasoningPart("I think "),)
    assert before_stop(Message.assistant("", reasoning="x"), "END", 3).reasoning == "x"
    assert before_stop(Message.assistant("aEND"), "END", 3).parts == (TextPart("a"),)
