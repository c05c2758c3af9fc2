"""vLLM's own HTTP server, real and in a process of its own, as the endpoint of the engine `openai`.

One server for all tests here, in order: the first finds the service waiting for it, the last ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import pytest_asyncio
from tests.integration.vllm.conftest import Served
from tests.support import vllm_models as models
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import eventually_async

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_chassis.errors import PenstockError
from penstock_inference.testing import open_inference

pytestmark = pytest.mark.asyncio(loop_scope="session")

Failure = Callable[[grpc.aio.AioRpcError], PenstockError]
KEY = "sk-of-the-upstream"
START_S = 800.0
TOLERANCE = 5e-3


class Upstream(Served):
    """The service, and the server behind it."""

    server: subprocess.Popen[bytes]
    settings: dict[str, Any]
    url: str

    async def running(self) -> float:
        """How many requests vLLM says that it runs."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def upstream(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Upstream]:
    """The service over `vllm serve`, which is only about to start."""
    directory = tmp_path_factory.mktemp("upstream")
    model, port = models.write(directory / "model"), unused_port()
    arguments = {
        "model": str(model),
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": str(models.CONTEXT),
        "logprobs-mode": "processed_logprobs",
        "host": "127.0.0.1",
        "port": str(port),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in arguments.items() for part in (f"--{name}", value)]
    environment = os.environ | {
        "VLLM_API_KEY": KEY,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    settings: dict[str, Any] = {
        "model_dir": model,
        "state_dir": directory / "state",
        "engine": "openai",
        "engine_options": {"base_url": f"{url}/v1", "policy_version": "41"},
        "upstream_api_key": KEY,
    }
    with (directory / "vllm.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        async with open_inference(**settings) as opened:
            made = Upstream(rpc.InferenceServiceStub(opened.channel), directory, opened.address)
            made.server, made.settings, made.url = server, settings, url
            yield made
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def logprobs(completion: completion_pb2.Completion) -> Any:
    return np.frombuffer(completion.span.logprobs, "<f4")


@pytest.mark.requirement("R27", "R86")
async def test_the_service_waits_for_its_upstream_and_then_says_what_it_gives(
    upstream: Upstream, failure: Failure
) -> None:
    """UNAVAILABLE with the reason until vLLM listens; then what it gives, as measured."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await upstream.stub.GetInfo(pb.GetInfoRequest())
    error = failure(caught.value)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.reason == "UPSTREAM_UNREACHABLE" and error.retry_after_s

    async def there() -> bool:
        assert upstream.server.poll() is None, (upstream.directory / "vllm.log").read_text()[-4000:]
        try:
            await upstream.stub.GetInfo(pb.GetInfoRequest())
        except grpc.aio.AioRpcError:
            return False
        return True

    await eventually_async(there, "vLLM listens", within=START_S)
    info = await upstream.stub.GetInfo(pb.GetInfoRequest())
    can = info.capabilities
    assert (info.engine, info.model, info.vocabulary_size) == ("openai", "model", models.VOCAB)
    assert info.engine_version.startswith("vllm ") and info.max_context_tokens == models.CONTEXT
    assert info.logprobs_mode == completion_pb2.LOGPROBS_MODE_PROCESSED
    assert can.token_ids and can.logprobs and can.score and can.abort
    assert not (can.in_flight_update or can.version_spans or can.adapters or can.sleep or can.transfer_backends)
    assert list(info.stop_token_ids) == [models.CONFIG["eos_token_id"]] and info.policy_version == 41


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("stream", [True, False])
async def test_ids_go_in_and_come_out_each_with_its_logprob(upstream: Upstream, stream: bool) -> None:
    """What vLLM sampled, as it sampled it, under the version that its operator states."""
    prompt = range(20, 90)
    # Without a least length, which would take the stop token out of the distribution that is scored.
    request = upstream.request(prompt, stream, max_tokens=48, min_tokens=0, seed=7, top_logprobs=2)
    events = [event async for event in upstream.stub.Generate(request)]
    done = events[-1].done.completion
    values = logprobs(done)
    assert done.span.count == values.size > 1 and done.usage.prompt_tokens == 70
    assert [(v.policy_version, v.start, v.end) for v in done.span.versions] == [(41, 0, values.size)]
    whole = np.asarray(prompt, "<i4").tobytes() + done.span.token_ids
    scored = np.frombuffer((await upstream.stub.Score(pb.ScoreRequest(token_ids=whole, start=70))).logprobs, "<f4")
    assert np.abs(values - scored).max() < TOLERANCE
    if stream:
        assert b"".join(event.delta.span.token_ids for event in events[1:-1]) == done.span.token_ids
        assert b"".join(event.delta.span.logprobs for event in events[1:-1]) == done.span.logprobs
    one_left = await upstream.complete(upstream.request(prompt, top_k=1, temperature=0.7))
    assert np.abs(logprobs(one_left)).max() < 1e-6


@pytest.mark.requirement("R82")
async def test_chat_with_tools_becomes_a_tool_call_and_names_its_stop(upstream: Upstream) -> None:
    """Rendered here, sampled there as ids, parsed here by the ids of the markup."""
    messages = [chat_pb2.Message(role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part(text=chat_pb2.Text(text="look"))])]
    sampling = chat_pb2.Sampling(temperature=0, max_tokens=20)
    tools = [chat_pb2.Tool(name="bash", parameters_json_schema='{"type": "object"}')]
    request = pb.GenerateRequest(
        request_id="tools", chat=pb.ChatPrompt(messages=messages, tools=tools), sampling=sampling
    )
    completion = await upstream.complete(request)
    parsed = await upstream.stub.Parse(pb.ParseRequest(token_ids=completion.span.token_ids, tools=tools))
    assert parsed.message.parts[0].tool_call.name == "bash"
    assert completion.stop_token_id == models.CONFIG["eos_token_id"]
    assert completion.finish_reason == chat_pb2.FINISH_REASON_STOP
    ids = np.frombuffer(completion.span.token_ids, "<i4")
    request.request_id, request.sampling.stop_token_ids[:] = "stopped", [int(ids[1])]
    stopped = await upstream.complete(request)
    assert stopped.span.count == 2 and stopped.stop_token_id == ids[1]


@pytest.mark.requirement("R63")
async def test_bad_requests_are_refused_by_their_field(upstream: Upstream, failure: Failure) -> None:
    """By us where we know the rule, by vLLM's own words where only it does."""
    cases = [
        (upstream.request([models.VOCAB]), "prompt_token_ids[0]"),
        (upstream.request(max_tokens=models.CONTEXT), "sampling.max_tokens"),
        (upstream.request(presence_penalty=9.0), "sampling"),
    ]
    for request, field in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await upstream.complete(request)
        error = failure(caught.value)
        assert (error.reason, error.violations[0].field) == ("FIELD_INVALID", field)
    refused: list[Callable[[], Any]] = [
        lambda: upstream.stub.UpdateWeights(iter([])),
        lambda: upstream.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP)),
        lambda: upstream.stub.Sleep(pb.SleepRequest(level=1)),
    ]
    for asked in refused:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked()
        assert failure(caught.value).reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R3", "R8")
async def test_a_wrong_key_or_model_stops_the_start(upstream: Upstream) -> None:
    """An operator's mistake is said at once, without the key."""
    for changes, reason in (
        ({"upstream_api_key": "sk-wrong"}, "UPSTREAM_KEY_REFUSED"),
        ({"engine_options": upstream.settings["engine_options"] | {"model": "huge"}}, "UPSTREAM_MODEL_UNKNOWN"),
    ):
        settings = upstream.settings | changes | {"state_dir": upstream.directory / "other"}
        with pytest.raises(PenstockError) as caught:
            async with open_inference(**settings):
                raise AssertionError("it must not start")
        assert caught.value.reason == reason and "sk-" not in caught.value.message


@pytest.mark.requirement("R23")
async def test_aborted_and_abandoned_requests_end_in_vllm(upstream: Upstream) -> None:
    """Nothing goes on computing for nobody."""
    calls = [upstream.endless() for _ in range(3)]
    streams = [upstream.stub.Generate(call) for call in calls]
    for stream in streams:
        assert (await stream.read()).HasField("started") and (await stream.read()).delta.span.count
    assert await upstream.abort(*calls[:2]) == 2
    streams[2].cancel()
    for stream in streams[:2]:
        while (event := await stream.read()) is not grpc.aio.EOF:
            last = event
        last = last.done.completion
        assert last.finish_reason == chat_pb2.FINISH_REASON_ABORT and 0 < last.span.count < models.ENDLESS

    async def idle() -> bool:
        return await upstream.running() == 0

    await eventually_async(idle, "vLLM runs nothing any more")


@pytest.mark.requirement("R27")
async def test_dead_upstream_fails_running_and_new_calls_typed(upstream: Upstream, failure: Failure) -> None:
    """UNAVAILABLE with a delay, in the midst of a completion and after it."""
    running = asyncio.ensure_future(upstream.complete(upstream.endless()))
    await upstream.until(lambda stats: stats.running == 1)
    os.killpg(upstream.server.pid, signal.SIGKILL)
    upstream.server.wait(60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    assert failure(caught.value).reason in ("UPSTREAM_CUT_OFF", "UPSTREAM_UNREACHABLE")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await upstream.complete(upstream.request())
    error = failure(caught.value)
    assert error.reason == "UPSTREAM_UNREACHABLE" and error.retry_after_s
