"""The inference service over gRPC."""

import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from safetensors.numpy import save
from tests.support import families
from tests.support.waiting import limits

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_chassis.auth import Role
from penstock_chassis.channel import upload
from penstock_chassis.errors import PenstockError
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import random_config, random_tensors, write_model

Open = Callable[..., Any]
Failure = Callable[[grpc.aio.AioRpcError], PenstockError]

Begin = pb.UpdateWeightsRequest.UpdateBegin
Commit = pb.UpdateWeightsRequest.UpdateCommit


def ids(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def generate(name: str, prompt: Any = range(3, 23), stream: bool = False, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        token_ids=ids(prompt),
        sampling=chat_pb2.Sampling(**({"max_tokens": 16, "seed": 5} | sampling)),
        stream=stream,
    )


async def completion(stub: Any, request: pb.GenerateRequest) -> completion_pb2.Completion:
    events = [event async for event in stub.Generate(request)]
    done: completion_pb2.Completion = events[-1].done.completion
    return done


def push(
    data: bytes, version: int, *, sha256: bytes | None = None, cut: int | None = None, **begin: Any
) -> AsyncIterator[pb.UpdateWeightsRequest]:
    """The frames of a push; with `cut`, the stream breaks off after that many chunks."""

    async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        fields = {"policy_version": version, "format": pb.WEIGHT_FORMAT_SAFETENSORS} | begin
        yield pb.UpdateWeightsRequest(begin=Begin(**fields))
        size = 16 * 1024
        for n, start in enumerate(range(0, len(data), size)):
            if n == cut:
                return
            yield pb.UpdateWeightsRequest(chunk=data[start : start + size])
        yield pb.UpdateWeightsRequest(commit=Commit(sha256=sha256 or hashlib.sha256(data).digest()))

    return frames()


@pytest.fixture
def other_weights() -> bytes:
    """Another policy for the model of `model_dir`, as a safetensors file."""
    return save(random_tensors(random_config("qwen3", max_position_embeddings=4096, eos_token_id=None), seed=9))


@pytest.mark.requirement("R86", "R87")
async def test_get_info_says_what_is_served(served: Open, model_dir: Path) -> None:
    """Engine, model, limits, logprobs mode and version are known before anything starts."""
    async with served(model_dir, model_name="demo") as stub:
        info = await stub.GetInfo(pb.GetInfoRequest())
    assert (info.engine, info.model, info.vocabulary_size, info.max_context_tokens) == ("numpy", "demo", 101, 4096)
    assert info.logprobs_mode == completion_pb2.LOGPROBS_MODE_PROCESSED
    assert info.capabilities.seed and info.capabilities.version_spans and not info.capabilities.adapters
    assert "temperature" in info.capabilities.sampling_fields and "stop" not in info.capabilities.sampling_fields
    assert (list(info.stop_token_ids), info.policy_version, info.paused) == ([], 0, False)


@pytest.mark.requirement("R82")
async def test_the_tokenizer_arrives_whole_and_works(served: Open, model_dir: Path) -> None:
    """Clients tokenise with the model's own files; digests name them."""
    files = tiny_tokenizer.build(["some text"] * 3)
    files.write(model_dir)
    big = b"{" + b" " * (2 << 20) + b"}"
    (model_dir / "tokenizer_config.json").write_bytes(big)
    received: dict[str, bytes] = {}
    async with served(model_dir) as stub:
        info = await stub.GetInfo(pb.GetInfoRequest())
        async for part in stub.GetTokenizer(pb.GetTokenizerRequest()):
            assert len(part.chunk) <= 1 << 20
            received[part.file_name] = received.get(part.file_name, b"") + part.chunk
            if part.sha256:
                assert part.sha256 == hashlib.sha256(received[part.file_name]).digest()
    assert received["tokenizer.json"] == files.tokenizer_json
    assert received["chat_template.jinja"].decode() == files.chat_template
    assert received["tokenizer_config.json"] == big
    assert info.tokenizer_sha256.hex() == files.tokenizer_sha256
    assert info.chat_template_sha256.hex() == files.template_sha256


@pytest.mark.requirement("R33")
async def test_a_model_without_a_tokenizer_says_so(served: Open, model_dir: Path, failure: Failure) -> None:
    async with served(model_dir) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [part async for part in stub.GetTokenizer(pb.GetTokenizerRequest())]
    assert failure(caught.value).reason == "TOKENIZER_ABSENT"


@pytest.mark.requirement("R82", "R83")
async def test_a_stream_of_deltas_and_one_answer_carry_the_same_tokens(served: Open, model_dir: Path) -> None:
    """Ids, logprobs and versions are of equal length and exact."""
    async with served(model_dir) as stub:
        events = [event async for event in stub.Generate(generate("r", stream=True, top_logprobs=2))]
        whole = await completion(stub, generate("q"))
    assert events[0].started.prompt_tokens == 20
    streamed = b"".join(event.delta.span.token_ids for event in events[1:-1])
    last = events[-1].done.completion
    assert streamed == last.span.token_ids == whole.span.token_ids
    assert last.span.logprobs == whole.span.logprobs and last.span.count * 4 == len(last.span.logprobs)
    assert last.span.top_count == 2 and len(last.span.top_token_ids) == last.span.count * 8
    assert [(v.policy_version, v.start, v.end) for v in whole.span.versions] == [(0, 0, whole.span.count)]
    assert whole.sampling_used.seed == 5 and whole.sampling_used.temperature == 1.0
    assert whole.usage.prompt_tokens == 20 and whole.usage.completion_tokens == whole.span.count


@pytest.mark.requirement("R64")
async def test_a_generation_without_max_tokens_ends_with_the_context(served: Open, model_dir: Path) -> None:
    """Unset is not zero."""
    async with served(model_dir, max_context_tokens=64) as stub:
        request = generate("r")
        request.sampling.ClearField("max_tokens")
        done = await completion(stub, request)
    assert done.sampling_used.max_tokens == done.span.count == 44
    assert done.finish_reason == chat_pb2.FINISH_REASON_LENGTH


@pytest.mark.requirement("R82")
async def test_score_gives_the_logprobs_that_were_sampled_with(served: Open, model_dir: Path) -> None:
    async with served(model_dir) as stub:
        done = await completion(stub, generate("r"))
        scored = await stub.Score(pb.ScoreRequest(token_ids=ids(range(3, 23)) + done.span.token_ids, start=20))
    assert scored.logprobs == done.span.logprobs


@pytest.mark.requirement("R132")
async def test_score_gives_the_alternatives_that_were_sampled_with(served: Open, model_dir: Path) -> None:
    """Encoded as those of a completion; none unless asked for."""
    async with served(model_dir) as stub:
        done = await completion(stub, generate("r", top_logprobs=4))
        wanted = pb.ScoreRequest(token_ids=ids(range(3, 23)) + done.span.token_ids, start=20, top_logprobs=4)
        scored = await stub.Score(wanted)
        wanted.ClearField("top_logprobs")
        plain = await stub.Score(wanted)
    assert scored.top_count == 4 and scored.logprobs == plain.logprobs == done.span.logprobs
    assert (scored.top_token_ids, scored.top_logprobs) == (done.span.top_token_ids, done.span.top_logprobs)
    assert not plain.top_count and not plain.top_token_ids and not plain.top_logprobs


@pytest.mark.requirement("R132")
async def test_a_batch_has_the_scores_of_its_sequences_and_the_failures_of_the_rest(
    served: Open, model_dir: Path, failure: Any
) -> None:
    """More sequences than are scored at once, each with its own answer."""
    good = [
        pb.ScoreRequest(token_ids=ids(range(3, 9 + n)), start=1 + n % 3, top_logprobs=n % 4, temperature=1 + n / 50)
        for n in range(40)
    ]
    bad = [
        (pb.ScoreRequest(token_ids=ids(range(3, 9)), start=6), "INVALID_ARGUMENT", "FIELD_INVALID"),
        (pb.ScoreRequest(token_ids=ids([3, 9999]), start=1), "INVALID_ARGUMENT", "FIELD_INVALID"),
        (pb.ScoreRequest(token_ids=ids([3, 4]), start=1, top_logprobs=21), "INVALID_ARGUMENT", "FIELD_INVALID"),
        (
            pb.ScoreRequest(token_ids=ids([3, 4]), start=1, exact_version=1),
            "FAILED_PRECONDITION",
            "POLICY_VERSION_UNAVAILABLE",
        ),
    ]
    request = pb.ScoreBatchRequest(sequences=[*good[:20], *(one for one, _, _ in bad), *good[20:]])
    async with served(model_dir) as stub:
        answers = {answer.index: answer async for answer in stub.ScoreBatch(request)}
        alone = [await stub.Score(one) for one in good]
        for count in (0, 1025):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ScoreBatch(pb.ScoreBatchRequest(sequences=[good[0]] * count)).read()
            assert failure(caught.value).violations[0].field == "sequences"
    assert sorted(answers) == list(range(44))
    assert [answers[n].score for n in (*range(20), *range(24, 44))] == alone
    for n, (_, code, reason) in enumerate(bad):
        failed = answers[20 + n].failure
        assert (failed.code, failed.reason) == (getattr(grpc.StatusCode, code).value[0], reason)
    assert [text.split(":")[0] for n in range(20, 24) for text in answers[n].failure.violations] == [
        "start",
        "token_ids[1]",
        "top_logprobs",
    ]


@pytest.mark.requirement("R32")
async def test_cancelling_the_call_aborts_the_generation(served: Open, model_dir: Path) -> None:
    """A cancelled wait releases what it held."""
    async with served(model_dir, max_concurrency=1) as stub:
        call = stub.Generate(generate("long", stream=True, max_tokens=4000))
        await call.read()
        call.cancel()
        # With one slot this can only end when the other has gone.
        done = await completion(stub, generate("next"))
        watch = stub.WatchStats(pb.WatchStatsRequest())
        stats = await watch.read()
        watch.cancel()
    assert done.span.count > 0 and stats.aborted == 1 and stats.running == 0


@pytest.mark.requirement("R29")
async def test_abort_ends_a_generation_with_its_tokens_so_far(served: Open, model_dir: Path) -> None:
    """An abort from elsewhere is an end, not an error."""
    async with served(model_dir) as stub:
        for target in (
            pb.AbortRequest(requests=pb.AbortRequest.RequestIds(request_ids=["r"])),
            pb.AbortRequest(session_id="s"),
            pb.AbortRequest(all=True),
        ):
            request = generate("r", stream=True, max_tokens=4000)
            request.session_id = "s"
            call = aiter(stub.Generate(request))
            events = [await anext(call)]
            await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP))
            assert (await stub.Abort(target)).aborted_count == 1
            await stub.Resume(pb.ResumeRequest())
            events += [event async for event in call]
            assert events[-1].done.completion.finish_reason == chat_pb2.FINISH_REASON_ABORT
            assert (await stub.Abort(target)).aborted_count == 0


@pytest.mark.requirement("R87")
async def test_a_pushed_policy_answers_under_its_version(
    served: Open, model_dir: Path, other_weights: bytes, tmp_path: Path
) -> None:
    """What answers after a push is what a service started on those weights would answer."""
    config = random_config("qwen3", max_position_embeddings=4096, eos_token_id=None)
    other_dir = write_model(tmp_path / "other", config, {})
    (other_dir / "model.safetensors").write_bytes(other_weights)
    async with served(model_dir) as stub, served(other_dir) as other:
        before = await completion(stub, generate("r"))
        answer = await stub.UpdateWeights(push(other_weights, 7, size_bytes=len(other_weights)))
        after, expected = await completion(stub, generate("r")), await completion(other, generate("r"))
    assert answer.policy_version == 7 and answer.phases.load.ToNanoseconds() > 0
    assert before.span.token_ids != after.span.token_ids == expected.span.token_ids
    assert after.span.logprobs == expected.span.logprobs
    assert [v.policy_version for v in after.span.versions] == [7]


@pytest.mark.requirement("R29")
async def test_a_push_may_be_repeated_when_its_answer_was_lost(
    served: Open, model_dir: Path, other_weights: bytes, failure: Failure
) -> None:
    """An idempotent repeat is no error, another content under the same version is."""

    async def announced() -> AsyncIterator[pb.UpdateWeightsRequest]:
        digest = hashlib.sha256(other_weights).digest()
        yield pb.UpdateWeightsRequest(begin=Begin(policy_version=7, format=pb.WEIGHT_FORMAT_SAFETENSORS, sha256=digest))

    async with served(model_dir) as stub:
        await stub.UpdateWeights(push(other_weights, 7))
        assert (await stub.UpdateWeights(push(other_weights, 7))).policy_version == 7
        assert (await stub.UpdateWeights(announced())).policy_version == 7
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            own = (model_dir / "model.safetensors").read_bytes()
            await upload(stub.UpdateWeights, lambda: push(own, 7), timeout=60)
        assert failure(caught.value).reason == "POLICY_VERSION_NOT_NEWER"


@pytest.mark.requirement("R63")
async def test_a_partial_push_replaces_what_it_names(served: Open, model_dir: Path, other_weights: bytes) -> None:
    tensors = random_tensors(random_config("qwen3", max_position_embeddings=4096, eos_token_id=None), seed=9)
    half = len(tensors) // 2
    parts = [save(dict(list(tensors.items())[:half])), save(dict(list(tensors.items())[half:]))]
    async with served(model_dir) as stub, served(model_dir) as other:
        for version, part in enumerate(parts, start=1):
            await stub.UpdateWeights(push(part, version, format=pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL))
        await other.UpdateWeights(push(other_weights, 2))
        assert await completion_bytes(stub) == await completion_bytes(other)


async def completion_bytes(stub: Any) -> tuple[bytes, bytes]:
    span = (await completion(stub, generate("r"))).span
    return span.token_ids, span.logprobs


@pytest.mark.requirement("R22", "R26")
@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("digest", "DIGEST_MISMATCH"),
        ("broken-off", "UPDATE_FRAME_INVALID"),
        ("garbage", "WEIGHTS_INVALID"),
        ("missing", "TENSOR_MISSING"),
        ("too-large", "UPDATE_TOO_LARGE"),
        ("announced-too-large", "UPDATE_TOO_LARGE"),
        ("version", "POLICY_VERSION_NOT_NEWER"),
        ("format", "FIELD_INVALID"),
        ("no-begin", "UPDATE_FRAME_INVALID"),
        ("silence", "UPDATE_STALLED"),
    ],
)
async def test_a_push_that_fails_changes_nothing_and_keeps_nobody_out(
    served: Open, model_dir: Path, other_weights: bytes, failure: Failure, flaw: str, reason: str
) -> None:
    """Atomic, typed, and over."""

    async def headless() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield pb.UpdateWeightsRequest(chunk=b"x")

    async def silent() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield pb.UpdateWeightsRequest(begin=Begin(policy_version=3, format=pb.WEIGHT_FORMAT_SAFETENSORS))
        await asyncio.Event().wait()

    settings = {"max_update_bytes": 64 * 1024} if flaw == "too-large" else {}
    attempts: dict[str, Any] = {
        "digest": lambda: push(other_weights, 3, sha256=b"\0" * 32),
        "broken-off": lambda: push(other_weights, 3, cut=2),
        "garbage": lambda: push(b"x" * 1000, 3),
        "missing": lambda: push(save({"model.norm.weight": np.zeros(48, np.float32)}), 3),
        "too-large": lambda: push(other_weights, 3),
        "announced-too-large": lambda: push(b"", 3, size_bytes=1 << 40),
        "version": lambda: push(other_weights, 0),
        "format": lambda: push(other_weights, 3, format=pb.WEIGHT_FORMAT_UNSPECIFIED),
        "no-begin": headless,
        "silence": silent,
    }
    for idle_s in limits(0.05) if flaw == "silence" else [60.0]:
        async with served(model_dir, update_idle_s=idle_s, **settings) as stub:
            before = await completion_bytes(stub)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await upload(stub.UpdateWeights, attempts[flaw], timeout=60)
            assert failure(caught.value).reason == reason
            assert (await stub.GetInfo(pb.GetInfoRequest())).policy_version == 0
            assert await completion_bytes(stub) == before
            if flaw == "too-large":
                return
            try:
                taken = await upload(stub.UpdateWeights, lambda: push(other_weights, 1), timeout=60)
            except grpc.aio.AioRpcError as error:
                if flaw == "silence" and failure(error).reason == "UPDATE_STALLED":
                    continue  # the limit on silence is the service's: it was too short for this push on this machine
                raise
            assert taken.policy_version == 1
            return
    raise AssertionError("no limit was long enough")


@pytest.mark.requirement("R33", "R63", "R65")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": b"abc"}, "token_ids"),
        ({"token_ids": b""}, "prompt_token_ids"),
        ({"token_ids": ids([101])}, "prompt_token_ids[0]"),
        ({"request_id": ""}, "request_id"),
        ({"sampling": chat_pb2.Sampling(max_tokens=5000)}, "sampling.max_tokens"),
        ({"sampling": chat_pb2.Sampling(temperature=-1)}, "sampling.temperature"),
        ({"sampling": chat_pb2.Sampling(temperature=5.5)}, "sampling.temperature"),
        ({"sampling": chat_pb2.Sampling(top_k=0)}, "sampling.top_k"),
        ({"sampling": chat_pb2.Sampling(n=2)}, "sampling.n"),
        ({"sampling": chat_pb2.Sampling(stop=["\n"])}, "sampling.stop"),
        ({"sampling": chat_pb2.Sampling(thinking=True)}, "sampling.thinking"),
    ],
)
async def test_an_invalid_generate_is_refused_with_the_field_named(
    served: Open, model_dir: Path, failure: Failure, change: dict[str, Any], field: str
) -> None:
    """Before anything is started."""
    fields: dict[str, Any] = {"request_id": "r", "token_ids": ids([5, 6]), "sampling": chat_pb2.Sampling(max_tokens=4)}
    async with served(model_dir) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await completion(stub, pb.GenerateRequest(**(fields | change)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure(caught.value).violations[0].field == field


async def test_unsupported_features_are_unimplemented_by_name(served: Open, model_dir: Path, failure: Failure) -> None:
    """A declared capability, never a silent downgrade."""

    with_adapter = generate("r")
    with_adapter.adapter = "lora"
    with_form = generate("r")
    with_form.sampling.response_format_json = '{"type": "json_object"}'
    async with served(model_dir) as stub:
        calls: list[Callable[[], Any]] = [
            lambda: stub.Sleep(pb.SleepRequest()),
            lambda: stub.Wake(pb.WakeRequest()),
            lambda: stub.InitTransfer(pb.InitTransferRequest()),
            lambda: stub.StartTransfer(pb.StartTransferRequest()),
            lambda: stub.TransferTensors(pb.TransferTensorsRequest()),
            lambda: stub.FinishTransfer(pb.FinishTransferRequest()),
            lambda: stub.LoadAdapter(iter([])),  # refused unread; grpc.aio loses the status while a request is written
            lambda: stub.UnloadAdapter(pb.UnloadAdapterRequest()),
            lambda: completion(stub, with_adapter),
            lambda: completion(stub, with_form),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert failure(caught.value).reason == "CAPABILITY_MISSING"
        assert not (await stub.ListAdapters(pb.ListAdaptersRequest())).adapters


@pytest.mark.requirement("R26")
async def test_stats_come_at_the_interval_asked_for(served: Open, model_dir: Path, failure: Failure) -> None:
    """Load is visible."""
    async with served(model_dir) as stub:
        done = await completion(stub, generate("r"))
        watch = stub.WatchStats(pb.WatchStatsRequest(interval=Duration(nanos=100_000_000)))
        seen = [await watch.read() for _ in range(2)]
        watch.cancel()
        assert seen[1].sampled_tokens == done.span.count and seen[1].prompt_tokens == 20
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchStats(pb.WatchStatsRequest(interval=Duration(seconds=3600))).read()
        assert failure(caught.value).violations[0].field == "interval"


@pytest.mark.requirement("R6", "R14")
@pytest.mark.parametrize(
    ("role", "allowed", "refused"),
    [(Role.OBSERVER, "GetInfo", "Pause"), (Role.TRAINER, "Pause", None)],
)
async def test_roles_may_do_what_their_table_says(
    served: Open, model_dir: Path, role: Role, allowed: str, refused: str | None
) -> None:
    """An observer reads; who has no token does nothing."""
    tokens = {Role.OPERATOR: "op-token", Role.TRAINER: "tr-token", Role.OBSERVER: "ob-token"}
    requests = {"GetInfo": pb.GetInfoRequest(), "Pause": pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP)}
    async with served(model_dir, tokens=tokens) as stub, grpc.aio.insecure_channel(stub.address) as channel:
        bare: Any = rpc.InferenceServiceStub(channel)
        bearer = (("authorization", f"Bearer {tokens[role]}"),)
        await getattr(bare, allowed)(requests[allowed], metadata=bearer)
        if refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(bare, refused)(requests[refused], metadata=bearer)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bare.GetInfo(pb.GetInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


MESSAGES = [
    chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, parts=[chat_pb2.Part(text=chat_pb2.Text(text="be brief"))]),
    chat_pb2.Message(role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part(text=chat_pb2.Text(text="hello"))]),
]
TOOL = chat_pb2.Tool(name="bash", description="run", parameters_json_schema='{"type":"object"}')


@pytest.fixture
def chat_dir(tmp_path: Path) -> Path:
    """A random model with a small ChatML tokenizer of its own vocabulary."""
    config = random_config("qwen3", vocab_size=tiny_tokenizer.MIN_VOCAB, max_position_embeddings=4096, eos_token_id=2)
    directory = write_model(tmp_path / "chat", config, random_tensors(config))
    tiny_tokenizer.build(["hello"], tiny_tokenizer.MIN_VOCAB).write(directory)
    return directory


@pytest.mark.requirement("R82")
async def test_untyped_arguments_are_parsed_by_the_offered_tools(served: Open, chat_dir: Path) -> None:
    """As the gate parses them; without the tools they stay text."""
    (chat_dir / "chat_template.jinja").write_text(families.template("qwen3_coder"), "utf-8")
    codec = Codec.load(TokenizerFiles.from_directory(chat_dir))
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
    tool = chat_pb2.Tool(name="bash", parameters_json_schema=schema)
    text = "<tool_call>\n<function=bash>\n<parameter=n>\n30\n</parameter>\n</function>\n</tool_call><|im_end|>"
    async with served(chat_dir) as stub:
        found = [
            (await stub.Parse(pb.ParseRequest(token_ids=ids(codec.encode(text)), tools=tools))).message
            for tools in ([], [tool])
        ]
    assert [json.loads(message.parts[-1].tool_call.arguments_json) for message in found] == [{"n": "30"}, {"n": 30}]


@pytest.mark.requirement("R82")
async def test_messages_render_to_the_ids_of_the_codec_and_completions_parse_back(
    served: Open, chat_dir: Path, failure: Failure
) -> None:
    """Clients without the codec library get the same tokens from the service."""
    codec = Codec.load(TokenizerFiles.from_directory(chat_dir))
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nok{call}<|im_end|>"
    async with served(chat_dir) as stub:
        info = await stub.GetInfo(pb.GetInfoRequest())
        prompt = pb.ChatPrompt(messages=MESSAGES, tools=[TOOL], thinking=False)
        rendered = await stub.Render(pb.RenderRequest(prompt=prompt))
        parsed = await stub.Parse(pb.ParseRequest(token_ids=ids(codec.encode(text))))
        request = generate("r", max_tokens=4)
        request.chat.CopyFrom(prompt)
        events = [event async for event in stub.Generate(request)]
        for bad in (
            pb.ChatPrompt(messages=[chat_pb2.Message()]),
            pb.ChatPrompt(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, parts=[chat_pb2.Part()])]),
            pb.ChatPrompt(messages=MESSAGES, template_options_json="[1]"),
            pb.ChatPrompt(messages=MESSAGES, template_options_json='{"messages": 1}'),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Render(pb.RenderRequest(prompt=bad))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info.tool_call_parser == "hermes"
    shown = codec.decode(np.frombuffer(rendered.token_ids, "<i4"))
    assert "be brief" in shown and "bash: run" in shown and shown.endswith("</think>\n\n")
    assert events[-1].done.prompt_token_ids == rendered.token_ids
    kinds = [part.WhichOneof("part") for part in parsed.message.parts]
    assert kinds == ["reasoning", "text", "tool_call"]
    assert parsed.message.parts[2].tool_call.arguments_json == '{"command": "ls"}'
    assert parsed.finish_reason == chat_pb2.FINISH_REASON_TOOL_CALLS and parsed.malformed_tool_calls == 0


@pytest.mark.requirement("R63", "R82")
async def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(served: Open, chat_dir: Path) -> None:
    """The tokens of the stop text stay, nothing after them."""
    codec = Codec.load(TokenizerFiles.from_directory(chat_dir))
    async with served(chat_dir) as stub:
        free = await completion(stub, generate("free", max_tokens=60))
        tokens = np.frombuffer(free.span.token_ids, "<i4")
        # Two printable neighbours of the completion make the stop text, so that it spans tokens.
        plain = [n for n in range(5, tokens.size - 1) if all(9 <= t < 9 + 94 for t in tokens[n : n + 2])]
        stop = codec.decode(tokens[plain[0] : plain[0] + 2])
        stopped = await completion(stub, generate("stopped", max_tokens=60, stop=["never there", stop]))
    cut = next(n for n in range(1, tokens.size + 1) if stop in codec.decode(tokens[:n]))
    assert stopped.span.token_ids == tokens[:cut].tobytes()
    assert stopped.finish_reason == chat_pb2.FINISH_REASON_STOP and stopped.stop_text == stop
    assert list(stopped.sampling_used.stop) == ["never there", stop]


async def test_a_service_without_a_tokenizer_renders_and_parses_nothing(
    served: Open, model_dir: Path, failure: Failure
) -> None:
    """A declared capability."""
    request = generate("r")
    request.chat.CopyFrom(pb.ChatPrompt(messages=MESSAGES))
    async with served(model_dir) as stub:
        calls: list[Callable[[], Any]] = [
            lambda: stub.Render(pb.RenderRequest(prompt=pb.ChatPrompt(messages=MESSAGES))),
            lambda: stub.Parse(pb.ParseRequest(token_ids=ids([1]))),
            lambda: completion(stub, request),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert failure(caught.value).reason == "CAPABILITY_MISSING"


async def test_the_scripted_engine_speaks_the_same_protocol(served: Open, tmp_path: Path) -> None:
    """A real agent's start can be checked without a model."""
    files = tiny_tokenizer.build(["hello"])
    files.write(tmp_path / "model")
    (tmp_path / "s.yaml").write_text("turns: [{reply: hello}]")
    codec = Codec.load(files)
    options = {"engine": "scripted", "engine_options": {"script": str(tmp_path / "s.yaml")}}
    async with served(tmp_path / "model", **options) as stub:
        info = await stub.GetInfo(pb.GetInfoRequest())
        done = await completion(stub, generate("r", codec.encode("hi there")))
    assert info.logprobs_mode == done.span.logprobs_mode == completion_pb2.LOGPROBS_MODE_SCRIPTED
    assert codec.decode(np.frombuffer(done.span.token_ids, "<i4")) == "hello<|im_end|>"


async def test_a_script_that_was_not_played_out_fails_its_owner(served: Open, tmp_path: Path) -> None:
    """A strict fake's leftovers are seen by the test."""
    tiny_tokenizer.build(["hello"]).write(tmp_path / "model")
    (tmp_path / "s.yaml").write_text("turns: [{reply: hello}]")
    with pytest.raises(PenstockError) as caught:
        async with served(tmp_path / "model", engine="scripted", engine_options={"script": str(tmp_path / "s.yaml")}):
            pass
    assert caught.value.reason == "SCRIPT_UNCONSUMED"


@pytest.mark.requirement("R66")
async def test_an_unknown_engine_is_refused_with_those_that_there_are(served: Open, model_dir: Path) -> None:
    with pytest.raises(PenstockError, match=r"numpy, .*scripted") as caught:
        async with served(model_dir, engine="vlm"):
            pass
    assert caught.value.reason == "ENGINE_UNKNOWN"


@pytest.mark.requirement("R27", "R70")
async def test_the_process_says_when_it_is_ready_and_stops_on_sigterm(model_dir: Path, tmp_path: Path) -> None:
    """`python -m penstock_inference` is the service."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_inference",
        *("--model-dir", str(model_dir), "--port", "0", "--anonymous", "--state-dir", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        ready = (await process.stdout.readline()).decode()
        assert '"event":"ready"' in ready and '"inference"' in ready
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


@pytest.mark.requirement("R33")
async def test_invalid_model_directory_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    """The start fails with what is wrong, not with a traceback."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_inference",
        *("--model-dir", str(tmp_path), "--port", "0", "--anonymous", "--state-dir", str(tmp_path)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert "config.json" in said.decode() and "Traceback" not in said.decode()
