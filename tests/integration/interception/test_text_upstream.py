"""An inference service whose endpoint gives text alone: rollouts through it are for evaluation, and say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.chat.v1 import chat_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import error_from_rpc
from penstock_inference.testing import open_inference

ASK: list[Any] = [{"role": "user", "content": "list the files"}]
TOOL: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
INFERENCE = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference())
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """An inference service that asks an endpoint; gives its address and a stub."""
    async with AsyncExitStack() as stack:

        async def open_(base_url: str, key: str, model_dir: Path) -> tuple[str, Any]:
            opening = open_inference(
                model_dir,
                tmp_path / "asking",
                model_name="ours",
                engine="openai",
                engine_options={"base_url": base_url, "idle_timeout_s": "60"},
                upstream_api_key=key,
            )
            opened = await stack.enter_async_context(opening)
            return opened.address, rpc.InferenceServiceStub(opened.channel)

        yield open_


@pytest.mark.requirement("R82", "R85")
async def test_text_endpoint_is_captured_as_text_and_graded_so(
    start: Any, asking: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Another Penstock's ingress is the endpoint; nothing is tokenised in the place of what is not told."""
    behind = await start()
    there, trainer = await behind.open("behind"), await behind.trainer()
    address, _ = await asking(there.base_url, there.token, tokenizer_dir)
    service = await start(inference_address=address, state_dir=tmp_path / "front")
    rollout = await service.open("front", mode=PROXY, source=INFERENCE)
    client = rollout.client()

    async def turn(messages: list[Any], text: str) -> Any:
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=messages, tools=[TOOL]))
        seen = await trainer.answer(text)
        return (await asked).choices[0], seen

    first, seen = await turn(ASK, CALL)
    assert first.finish_reason == "tool_calls" and first.message.tool_calls[0].function.name == "bash"
    # The endpoint saw the conversation and the tools as the agent sent them.
    assert "list the files" in behind.codec.decode(list(memoryview(seen.prompt_token_ids).cast("i")))
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "README"}
    last, _ = await turn([*ASK, first.message.model_dump(exclude_none=True), result], "There is a README.")
    assert (last.finish_reason, last.message.content) == ("stop", "There is a README.")
    await service.close("front")
    captured = await service.capture("front")
    assert captured.capture_level == trajectory_pb2.CAPTURE_LEVEL_TEXT
    assert captured.grade == trajectory_pb2.GRADE_UNUSABLE and not captured.samples
    reasons = [finding.reason for finding in captured.findings]
    assert reasons.count("TOKENS_MISSING") == 2 and "NOTHING_TO_TRAIN" in reasons
    assert [call.completion.engine for call in captured.calls] == ["openai", "openai"]
    assert not any(call.completion.HasField("span") for call in captured.calls)


@pytest.mark.requirement("R63")
async def test_an_endpoint_of_text_takes_messages_and_no_token_ids(
    start: Any, asking: Any, tokenizer_dir: Path
) -> None:
    """What such an endpoint cannot honour is refused by its name."""
    behind = await start()
    there, trainer = await behind.open("behind"), await behind.trainer()
    _, stub = await asking(there.base_url, there.token, tokenizer_dir)
    info = await stub.GetInfo(pb.GetInfoRequest())
    assert not info.capabilities.token_ids and not info.capabilities.logprobs
    chat = pb.ChatPrompt(
        messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part(text=chat_pb2.Text(text="hi"))])]
    )

    async def refused(**fields: Any) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [event async for event in stub.Generate(pb.GenerateRequest(request_id="r", **fields))]
        return error_from_rpc(caught.value)

    assert (await refused(token_ids=b"\0\0\0\0")).reason == "CAPABILITY_MISSING"
    filtered = await refused(chat=chat, sampling=chat_pb2.Sampling(top_k=5))
    assert filtered.violations[0].field == "sampling.top_k"
    bound = await refused(chat=chat, version=pb.PolicyVersionBound(min_version=1))
    assert bound.reason == "POLICY_VERSION_UNAVAILABLE"
    call = stub.Generate(pb.GenerateRequest(request_id="held", chat=chat))
    await trainer.call()
    await stub.Abort(pb.AbortRequest(requests=pb.AbortRequest.RequestIds(request_ids=["held"])))
    events = [event async for event in call]
    assert events[-1].done.completion.finish_reason == chat_pb2.FINISH_REASON_ABORT
    assert not events[-1].done.completion.HasField("message")
