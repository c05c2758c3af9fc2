"""Images of prompts: from an agent's request to the trainer, the journal, the graph and the sample, token by token."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from google import genai
from google.genai import types as gemini
from tests.integration.interception.conftest import Rollout, Service, Trainer, running, tokens_completion
from tests.integration.interception.test_sources import DEFAULT_INFERENCE, PROXY
from tests.support.vision import PLACEHOLDER_ID, RULE, data_url, png, tokenizer_files

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2
from penstock_codec import Codec
from penstock_inference.testing import open_inference
from penstock_interception.settings import InterceptionSettings

TEXTS = ["what is on the screen", '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>']
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
FIRST, SCREEN, LAST = png(3, 2, 10), png(4, 3, 20), png(1, 1, 30)


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    tokenizer_files(TEXTS).write(directory)
    return directory


@pytest.fixture(scope="session")
def vision_codec() -> Codec:
    return Codec.load(tokenizer_files(TEXTS))


@pytest.fixture
def seeing(settings: Callable[..., InterceptionSettings], vision_dir: Path, vision_codec: Codec) -> Callable[..., Any]:
    """Services, one after the other on one state directory, whose tokenizer is the vision model's."""

    @asynccontextmanager
    async def run(**changes: Any) -> AsyncIterator[Service]:
        async with running(settings(tokenizers={"tiny": vision_dir}, **changes), vision_codec) as service:
            yield service

    return run


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ids_of(data: bytes) -> Any:
    return np.frombuffer(data, "<i4")


async def turn(
    client: openai.AsyncOpenAI, trainer: Trainer, messages: list[Any], answer: str
) -> tuple[pb.ModelCall, Any]:
    """The agent asks, the trainer answers; the call, and the message that the agent got."""
    asked = asyncio.create_task(client.chat.completions.create(model="m", messages=messages, tools=TOOLS))
    answering = asyncio.create_task(trainer.answer(answer))
    asked.add_done_callback(lambda done: done.exception() and answering.cancel())
    return await answering, (await asked).choices[0].message


async def three_turns(rollout: Rollout, trainer: Trainer) -> list[pb.ModelCall]:
    """A question with an image, a screenshot of a tool, another image."""
    client = rollout.client()
    messages: list[Any] = [{"role": "user", "content": [text("what is on the screen "), picture(FIRST)]}]
    first, message = await turn(client, trainer, messages, CALL)
    made = message.tool_calls[0]
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [made.model_dump()]},
        {"role": "tool", "tool_call_id": made.id, "content": [text("done"), picture(SCREEN)]},
    ]
    second, message = await turn(client, trainer, messages, "a list")
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [picture(LAST), text("and FIRST again "), picture(FIRST)]},
    ]
    third, _ = await turn(client, trainer, messages, "a dot")
    return [first, second, third]


@pytest.mark.requirement("R34", "R82", "R137")
async def test_images_are_tokens_of_the_prompt_and_outlive_a_restart(seeing: Callable[..., Any]) -> None:
    """Screenshots of tools too: each call continues the one before it, and no token of an image is trained."""
    async with seeing() as service:
        rollout = await service.open("r")
        trainer = await service.trainer(view=pb.CallView(messages=True, media=True))
        calls = await three_turns(rollout, trainer)
        places = [[(one.token_count, one.data) for one in call.media] for call in calls]
        assert places == [
            [(6, FIRST)],
            [(6, FIRST), (12, SCREEN)],
            [(6, FIRST), (12, SCREEN), (1, LAST), (6, FIRST)],
        ]
        for before, after in itertools.pairwise(calls):
            assert after.parent_call_id == before.call_id
            assert after.shared_prefix_count > before.prompt_count
        for call in calls:
            prompt = ids_of(call.prompt_token_ids)
            covered = np.zeros(prompt.size, np.bool_)
            for one in call.media:
                covered[one.token_start : one.token_start + one.token_count] = True
                assert one.sha256 == hashlib.sha256(one.data).digest() and one.media_type == "image/png"
                assert (one.placeholder_token_id, one.processor_sha256) == (PLACEHOLDER_ID, RULE.sha256)
                assert one.grid[1] * one.grid[2] == 4 * one.token_count
            np.testing.assert_array_equal(covered, prompt == PLACEHOLDER_ID)
        shown = calls[1].messages[2].parts[0].tool_result.parts
        assert shown[1].image.url == f"sha256:{hashlib.sha256(SCREEN).hexdigest()}"
        await service.close("r")
        before = await service.capture("r", include_bodies=True)
    async with seeing() as service:
        after = await service.capture("r", include_bodies=True)
        assert after == before and after.grade == trajectory_pb2.GRADE_EXACT
        (sample,) = after.samples
        mask, ids = np.frombuffer(sample.loss_mask, np.bool_), ids_of(sample.input_ids)
        assert [one.sha256 for one in sample.media] == [one.sha256 for one in calls[2].media]
        assert not any(one.data for one in sample.media) and not mask[ids == PLACEHOLDER_ID].any()
        assert [len(call.media) for call in after.calls] == [1, 1, 2]
        assert base64.b64encode(SCREEN) in after.calls[1].request_body, "put together again"
        assert all(hashlib.sha256(one.request_body).digest() == one.request_body_sha256 for one in after.calls)
        request = pb.GetCallRequest(call_id=after.calls[2].call_id, include_media=True)
        assert [one.data for one in (await service.intercept.GetCall(request)).call.media] == [LAST, FIRST]
        store = service.interceptor.store
        digests = {one.sha256 for one in sample.media}
        assert len(await store.media.read("r", digests)) == 3
        await service.interceptor.rollouts.delete("r")
        assert not await store.media.read("r", digests), "released with the rollout"


@pytest.mark.requirement("R137")
async def test_another_image_of_the_same_size_is_another_conversation(seeing: Callable[..., Any]) -> None:
    """Their tokens are equal: the digest tells them apart, so that no answer continues a prompt that it did not see."""
    async with seeing() as service:
        rollout, trainer = await service.open(), await service.trainer()
        client = rollout.client()
        words = "what is on the screen " * 40  # long enough to share tokens
        one = [{"role": "user", "content": [text(words), picture(png(9, 9, 1)), text(words)]}]
        other = [{"role": "user", "content": [text(words), picture(png(9, 9, 2)), text(words)]}]
        first, message = await turn(client, trainer, one, "white")
        second, _ = await turn(client, trainer, other, "black")
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.media[0].sha256 != second.media[0].sha256 and first.branch_id != second.branch_id
        assert second.shared_prefix_count <= second.media[0].token_start
        more = [*one, {"role": "assistant", "content": message.content}, {"role": "user", "content": "sure?"}]
        third, _ = await turn(client, trainer, more, "yes")
        assert third.parent_call_id == first.call_id and [m.sha256 for m in third.media] == [first.media[0].sha256]
        await service.close(rollout.rollout_id)
        samples = (await service.capture(rollout.rollout_id)).samples
        assert sorted(sample.media[0].sha256 for sample in samples) == sorted(
            [first.media[0].sha256, second.media[0].sha256]
        )


async def of_chat(rollout: Rollout, root: str) -> None:
    await rollout.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": [text("look "), picture(FIRST)]}]
    )


async def of_responses(rollout: Rollout, root: str) -> None:
    content: Any = [{"type": "input_text", "text": "look "}, {"type": "input_image", "image_url": data_url(FIRST)}]
    await rollout.client().responses.create(model="m", input=[{"role": "user", "content": content}])


async def of_messages(rollout: Rollout, root: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FIRST).decode()}
    content: Any = [{"type": "text", "text": "look "}, {"type": "image", "source": source}]
    client = anthropic.AsyncAnthropic(base_url=root, api_key=rollout.token, max_retries=0)
    await client.messages.create(model="m", max_tokens=32, messages=[{"role": "user", "content": content}])


async def of_generate_content(rollout: Rollout, root: str) -> None:
    options = gemini.HttpOptions(base_url=root, api_version="v1beta")
    client = genai.Client(api_key=rollout.token, http_options=options)
    parts: Any = [gemini.Part.from_text(text="look "), gemini.Part.from_bytes(data=FIRST, mime_type="image/png")]
    await client.aio.models.generate_content(model="m", contents=[gemini.Content(role="user", parts=parts)])


@pytest.mark.requirement("R137")
async def test_all_dialects_make_the_same_prompt_of_an_image(seeing: Callable[..., Any]) -> None:
    async with seeing() as service:
        trainer = await service.trainer()
        prompts = []
        for ask in (of_chat, of_responses, of_messages, of_generate_content):
            rollout = await service.open()
            asked = asyncio.create_task(ask(rollout, rollout.base_url.removesuffix("/v1")))
            call = await trainer.answer("a shade")
            await asked
            (media,) = call.media
            prompts.append((call.prompt_token_ids, media.sha256, media.token_start, media.media_type))
        assert len(set(prompts)) == 1 and prompts[0][1] == hashlib.sha256(FIRST).digest()


REFUSED = {
    "image_remote": "https://example.com/a.png",
    "image_invalid": data_url(b"no image at all"),
    "image_limit": data_url(png(500, 500)),
    "invalid_value": "data:image/png;base64,?",
}


@pytest.mark.requirement("R26", "R137")
@pytest.mark.parametrize("code", REFUSED)
async def test_images_that_cannot_be_used_are_refused_by_name(seeing: Callable[..., Any], code: str) -> None:
    """Nothing is kept of what is too large or no base64."""
    async with seeing() as service:
        rollout = await service.open()
        part = {"type": "image_url", "image_url": {"url": REFUSED[code]}}
        with pytest.raises(openai.BadRequestError) as refused:
            await rollout.client().chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        assert refused.value.code == code
        reasons = [call.end_reason for call in (await service.capture(rollout.rollout_id)).calls]
        assert reasons == ([code.upper()] if code in ("image_remote", "image_invalid") else [])


@pytest.mark.requirement("R137")
async def test_an_engine_gets_the_images_or_refuses_them_before_it_starts(
    seeing: Callable[..., Any], vision_dir: Path, tmp_path: Path
) -> None:
    """By the capability that it publishes. The digest of what it got is checked there."""
    script = tmp_path / "script.yaml"
    script.write_text("turns:\n  - reply: a shade\n    repeat: true\n")
    async with (
        open_inference(
            vision_dir, tmp_path / "inference", engine="scripted", engine_options={"script": str(script)}
        ) as opened,
        seeing(inference_address=opened.address) as service,
    ):
        rollout = await service.open("seen", mode=PROXY, source=DEFAULT_INFERENCE)
        await of_chat(rollout, "")
        (call,) = (await service.capture("seen")).calls
        assert call.completion.engine == "scripted" and [one.token_count for one in call.media] == [6]
    text_only = tmp_path / "text"
    tokenizer_files(TEXTS, rule=None).write(text_only)
    async with (
        open_inference(
            text_only, tmp_path / "inference", engine="scripted", engine_options={"script": str(script)}
        ) as opened,
        seeing(inference_address=opened.address) as service,
    ):
        rollout = await service.open("unseen", mode=PROXY, source=DEFAULT_INFERENCE)
        with pytest.raises(openai.BadRequestError, match="does not support images"):
            await of_chat(rollout, "")


@pytest.mark.requirement("R29", "R137")
async def test_a_delegated_call_takes_its_images_along(
    seeing: Callable[..., Any], vision_dir: Path, tmp_path: Path
) -> None:
    """The trainer has the engine answer."""
    script = tmp_path / "script.yaml"
    script.write_text("turns:\n  - reply: a shade\n")
    async with (
        open_inference(
            vision_dir, tmp_path / "inference", engine="scripted", engine_options={"script": str(script)}
        ) as opened,
        seeing(inference_address=opened.address) as service,
    ):
        rollout, trainer = await service.open("r", source=DEFAULT_INFERENCE), await service.trainer()
        asked = asyncio.create_task(of_chat(rollout, ""))
        call = await trainer.call()
        assert not call.media[0].data
        held = pb.GetCallRequest(call_id=call.call_id, include_media=True)
        assert (await service.intercept.GetCall(held)).call.media[0].data == FIRST
        await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, delegation=pb.Delegation()))
        await asked
        (made,) = (await service.capture("r")).calls
        assert made.answerer == trajectory_pb2.ANSWERER_INFERENCE and made.media[0].sha256 == call.media[0].sha256


@pytest.mark.requirement("R137")
async def test_a_session_without_room_for_images_gets_their_digests(seeing: Callable[..., Any]) -> None:
    """As for messages and bodies: the call says that it was cut."""
    noise = np.random.default_rng(0).bytes(5 << 20)
    large = FIRST[:-12] + b"".join([len(noise).to_bytes(4, "big"), b"teXt", noise, b"\0\0\0\0"]) + FIRST[-12:]
    async with seeing() as service:
        rollout = await service.open()
        trainer = await service.trainer(view=pb.CallView(media=True))
        message = {"role": "user", "content": [picture(large)]}
        asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=[message]))
        call = await trainer.call()
        assert call.view_truncated and call.media[0].sha256 == hashlib.sha256(large).digest()
        assert not call.media[0].data
        await trainer.deliver(
            pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=tokens_completion([5, 6]))
        )
        await asked
