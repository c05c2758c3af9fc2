"""Weights, pauses and adapters of the engine `sglang`: exact versions, all or nothing, restored after a loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import load_file, save_file
from tests.support.endpoints.loopback import event_stream, unused_port
from tests.support.endpoints.sglang_server import STOP, VOCAB, SglangServer, sglang_server
from tests.support.waiting import GUARD_S, eventually

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable, Unsupported
from penstock_inference.engines.base import (
    Delta,
    Done,
    EngineOptions,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    UpdateFormat,
    VersionSpan,
)
from penstock_inference.engines.checkpoint import Checkpoint
from penstock_inference.engines.optional_features import AdapterSource
from penstock_inference.engines.sglang import open_engine
from penstock_inference.engines.sglang.engine import SglangEngine
from penstock_inference.engines.sglang.weight_files import lay_out

PROMPT = np.array([5, 6, 7], np.int32)
Open = Callable[..., Any]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with two tensors in one file."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    save_file(tensors(0), directory / "model.safetensors")
    return directory


def tensors(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """The weights `number`."""
    return {"embed.weight": np.ones(3, np.float32), "head.weight": np.full(2, number, np.float32)}


@pytest.fixture
async def opened(model_dir: Path) -> AsyncIterator[Open]:
    """Opens engines that end with the test: `opened(server or URL, option=...)`."""
    async with AsyncExitStack() as stack:

        async def open_(there: SglangServer | str, **extra: str) -> Any:
            url = there if isinstance(there, str) else there.base_url
            options = EngineOptions(model_dir, "ours", work_dir=model_dir.parent, extra={"base_url": url} | extra)
            engine = await open_engine(options)
            stack.push_async_callback(engine.aclose)
            return engine

        yield open_


def request(name: str = "r", *, stream: bool = False, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(**({"max_tokens": 4} | sampling)), stream=stream)


async def finished(engine: SglangEngine, wanted: GenerateRequest) -> Done:
    done = [event async for event in engine.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def push(
    engine: SglangEngine,
    version: int,
    mode: PauseMode = PauseMode.KEEP,
    *,
    update_format: UpdateFormat = UpdateFormat.FULL,
    pushed: dict[str, Any] | None = None,
) -> None:
    await engine.begin_update(version, f"step {version}", update_format)
    await engine.push_tensors(tensors(version) if pushed is None else pushed)
    await engine.commit_update(mode)


async def sampled(server: SglangServer, tokens: int) -> None:
    """Waits until the one request there has so many tokens."""
    await eventually(
        lambda: [len(each.ids) for each in server.sequences.values()] == [tokens], f"{tokens} tokens are sampled"
    )


def versions(done: Done) -> list[int]:
    return [span.policy_version for span in done.version_spans for _ in range(span.start, span.end)]


@pytest.mark.requirement("R49", "R82")
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_spans_are_exact_when_weights_change_in_flight(opened: Open, incremental: bool, stream: bool) -> None:
    """Twice in one completion, also of tokens that were sampled and not sent yet when the weights changed."""
    async with sglang_server(held=True, incremental=incremental, script={8: STOP}) as server:
        engine = await opened(server)
        sent: list[Any] = []

        async def collect() -> None:
            sent.extend([event async for event in engine.generate(request(stream=stream, max_tokens=160))])

        running = asyncio.create_task(collect())
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        sequence = next(iter(server.sequences.values()))
        for version, until in ((1, 3), (2, 7)):
            server.permit(until - len(sequence.ids))
            await sampled(server, until)
            await push(engine, version)
        server.permit(2)
        await running
        done = sent[-1]
        assert sequence.weights == [0] * 3 + [1] * 4 + [2] * 2
        assert versions(done) == sequence.weights and done.token_ids.tolist() == sequence.ids
        assert done.logprobs.tolist() == np.array(sequence.logprobs, np.float32).tolist()
        deltas = [event for event in sent if isinstance(event, Delta)]
        assert [d.policy_version for d in deltas for _ in d.token_ids] == (sequence.weights if stream else [])
        assert "in_place" not in {body.get("mode") for name, body in server.commands}
        assert (engine.info().policy_version, engine.info().policy_label) == (2, "step 2")


@pytest.mark.requirement("R49")
async def test_the_server_s_pause_in_place_would_mislabel_a_token(opened: Open) -> None:
    """Why the other one is used: a step under way is counted for the new weights. The stand-in shows it."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request(max_tokens=6)))
        server.permit(2)
        await sampled(server, 2)
        sequence = next(iter(server.sequences.values()))
        post = engine._endpoint.post
        await post("/pause_generation", {"mode": "in_place"})
        directory = engine._options.model_dir
        await post(
            "/update_weights_from_disk", {"model_path": str(directory), "weight_version": "1", "flush_cache": False}
        )
        labels = server._spans(sequence)
        assert sequence.weights == [0, 0, 0] and labels[-1]["version"] == "1" and labels[-1]["start"] == 2
        running.cancel()
        await asyncio.wait((running,))


@pytest.mark.requirement("R49")
async def test_a_push_waits_or_aborts_as_it_is_asked_to(opened: Open) -> None:
    """WAIT lets what runs end under the weights before, ABORT ends it with its tokens; what comes later has the new."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request()))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        pushing = asyncio.create_task(push(engine, 1, PauseMode.WAIT))
        late = asyncio.create_task(finished(engine, replace(request("late"), min_policy_version=1)))
        server.permit(8)
        assert versions(await running) == [0] * 4
        await pushing
        assert versions(await late) == [1] * 4
        running = asyncio.create_task(finished(engine, request(max_tokens=40)))
        server.permit(2)
        await sampled(server, 2)
        await push(engine, 2, PauseMode.ABORT)
        done = await running
        assert done.finish_reason is FinishReason.ABORT and versions(done) == [1] * done.token_ids.size
        exact = replace(request("e"), exact_policy_version=1)
        with pytest.raises(FailedPrecondition) as caught:
            await finished(engine, exact)
        assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"


@pytest.mark.requirement("R49")
async def test_without_the_servers_spans_weights_change_only_between_requests(opened: Open) -> None:
    """The refusal is clear, closes the update, and changes nothing."""
    async with sglang_server(spans=False) as server:
        engine = await opened(server)
        can = engine.info().capabilities
        assert can.weight_update and not can.in_flight_update and not can.version_spans
        with pytest.raises(Unsupported, match="in_flight_update"):
            await push(engine, 1, PauseMode.KEEP)
        assert engine.info().policy_version == 0
        await push(engine, 1, PauseMode.WAIT)
        assert (await finished(engine, request())).version_spans == (VersionSpan(1, 0, 4),)


@pytest.mark.requirement("R23", "R49")
async def test_an_abort_after_a_change_without_an_end_keeps_only_tokens_of_known_versions(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's end would tell the rest; it does not come."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request(max_tokens=9)))
        server.permit(1)
        await eventually(lambda: [len(each.token_ids) for each in engine._server.flights] == [1], "one token")
        sequence = next(iter(server.sequences.values()))
        await push(engine, 1)
        server.permit(3)
        await eventually(lambda: len(next(iter(engine._server.flights)).token_ids) == 4, "three more tokens")

        async def refuse(http: web.Request, raw: dict[str, Any]) -> web.Response:
            return web.json_response({}, status=503)

        monkeypatch.setattr(server, "_post_abort_request", refuse)
        assert await engine.abort(everything=True) == 1
        done = await running
        assert sequence.weights[:4] == [0, 1, 1, 1]
        assert (done.finish_reason, versions(done), done.token_ids.size) == (FinishReason.ABORT, [0], 1)


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("incremental", [False, True])
async def test_frozen_generations_continue_at_the_resume(opened: Open, incremental: bool) -> None:
    """KEEP samples nothing; an abort meanwhile has its end. An update in a pause leaves the server paused."""
    async with sglang_server(held=True, incremental=incremental) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request()))
        aborted = asyncio.create_task(finished(engine, request("a", max_tokens=15)))
        await eventually(lambda: len(server.sequences) == 2, "both run there")
        server.permit(2)
        await eventually(lambda: [len(each.token_ids) for each in engine._server.flights] == [1, 1], "a token of each")
        await engine.pause(PauseMode.KEEP)
        server.permit(20)
        assert engine.info().paused and server.paused == "retract"
        assert await engine.abort(request_ids=["a"]) == 1
        ended = await aborted
        assert (ended.finish_reason, versions(ended)) == (FinishReason.ABORT, [0])
        await push(engine, 1)
        assert server.paused == "retract" and sum(len(each.ids) for each in server.sequences.values()) <= 2
        await engine.resume()
        assert versions(await running) == [0, 1, 1, 1]
        assert engine.stats().paused is False


@pytest.mark.requirement("R22", "R130")
async def test_a_pause_that_waits_is_ended_by_a_resume(opened: Open) -> None:
    """It went on until nothing ran, and then reported an engine that runs as paused."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request()))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await eventually(lambda: engine.stats().paused, "it waits")
        await engine.resume()
        async with asyncio.timeout(GUARD_S):
            await pausing
        assert not running.done() and not engine.stats().paused
        server.permit(4)
        assert versions(await running) == [0] * 4


@pytest.mark.requirement("R22", "R87")
@pytest.mark.parametrize("spans", [False, True])
async def test_an_update_does_not_wait_for_what_a_pause_froze(opened: Open, spans: bool) -> None:
    """It would for ever. Without the server's spans nobody could say what sampled the rest: that is refused."""
    async with sglang_server(held=True, spans=spans) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request()))
        server.permit(1)
        await sampled(server, 1)
        await engine.pause(PauseMode.KEEP)
        if spans:
            await push(engine, 1, PauseMode.WAIT)
        else:
            with pytest.raises(FailedPrecondition) as caught:
                await push(engine, 1, PauseMode.WAIT)
            assert caught.value.reason == "GENERATIONS_IN_FLIGHT" and server.number == 0
        await engine.resume()
        server.permit(3)
        assert versions(await running) == [0, *[int(spans)] * 3]
        running = asyncio.create_task(finished(engine, request("next")))
        server.permit(1)
        await sampled(server, 1)
        await engine.pause(PauseMode.KEEP)
        await push(engine, 2, PauseMode.ABORT)
        done = await running
        assert done.finish_reason is FinishReason.ABORT and set(versions(done)) <= {int(spans)}
        assert engine.info().paused and engine.info().policy_version == 2
        await engine.resume()


@pytest.mark.requirement("R63")
async def test_a_retracted_request_with_penalties_is_no_completion(opened: Open) -> None:
    """SGLang forgets which tokens it has counted: what follows would be of another distribution than asked for."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request(max_tokens=3, presence_penalty=1.0)))
        server.permit(1)
        await sampled(server, 1)
        await push(engine, 1)
        server.permit(2)
        with pytest.raises(Unavailable) as caught:
            await running
        assert caught.value.reason == "UPSTREAM_FAILED" and caught.value.retry_after_s


@pytest.mark.requirement("R49")
async def test_a_partial_push_loads_the_whole_model(opened: Open, model_dir: Path) -> None:
    """Of one file with the rest of the tensors and one with the new; files that nothing needs are removed."""
    async with sglang_server() as server:
        engine = await opened(server)
        await push(engine, 1, update_format=UpdateFormat.DELTA, pushed={"head.weight": np.full(2, 7, np.float32)})
        assert server.number == 7 and server.weight_version == "1"
        layout = Path(server.model_path)
        assert {name for file in layout.glob("*.safetensors") for name in load_file(file)} == set(tensors(0))
        await push(engine, 2)
        assert server.number == 2 and not layout.exists()
        await engine.begin_update(3, "", UpdateFormat.FULL)
        await engine.push_path(model_dir)
        await engine.commit_update(PauseMode.WAIT)
        assert server.model_path == str(model_dir.resolve()) and server.number == 0
        assert [name for name, _ in server.commands].count("flush_cache") == 3


@pytest.mark.requirement("R49")
def test_a_layout_has_exactly_the_tensors_in_force(model_dir: Path, tmp_path: Path) -> None:
    """Byte for byte, whatever their types."""
    mixed: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(5, dtype=np.float16),
        "b": np.ones((2, 3), np.float64),
        "c": np.zeros(0, np.float32),
    }
    save_file(mixed, model_dir / "model.safetensors")
    newer: dict[str, Any] = {"b": np.full((2, 3), 4.0)}
    save_file(newer, tmp_path / "newer.safetensors")
    checkpoint = Checkpoint.read(model_dir)
    assert lay_out(checkpoint, tmp_path / "unused") == model_dir.resolve()
    updated = checkpoint.updated([tmp_path / "newer.safetensors"], UpdateFormat.DELTA)
    found = [load_file(file) for file in lay_out(updated, tmp_path / "layout").iterdir()]
    assert sorted(name for file in found for name in file) == ["a", "b", "c"]
    for file in found:
        for name, array in file.items():
            expected = (mixed | newer)[name]
            assert array.dtype == expected.dtype and array.tolist() == expected.tolist()


@pytest.mark.requirement("R49", "R87")
async def test_refused_weights_leave_those_before_in_force(opened: Open) -> None:
    """What does not fit is refused before the server is asked; what the server refuses is loaded back."""
    async with sglang_server() as server:
        engine = await opened(server)
        await push(engine, 1)
        before = server.model_path
        with pytest.raises(FailedPrecondition) as unfit:
            await push(engine, 2, pushed={"head.weight": np.ones(5, np.float32)})
        assert unfit.value.reason == "TENSOR_SHAPE"
        await engine.begin_update(2, "", UpdateFormat.FULL)
        await engine.push_tensors(tensors(2))
        await engine.stage_update()
        server.refuse_paths.add(str(engine._updates._staged[1]))
        with pytest.raises(InvalidArgument) as refused:
            await engine.commit_update()
        assert refused.value.reason == "WEIGHTS_INVALID" and "shape mismatch" in refused.value.message
        assert (server.number, server.weight_version, server.model_path) == (1, "1", before)
        assert engine.info().policy_version == 1 and not server.paused
        assert versions(await finished(engine, request())) == [1] * 4


@pytest.mark.requirement("R27", "R49")
async def test_a_server_that_starts_anew_gets_the_weights_and_adapters_in_force(opened: Open, tmp_path: Path) -> None:
    """It comes up with the weights of its command line."""
    port = unused_port()
    async with sglang_server(port) as server:
        engine = await opened(server)
        await push(engine, 1)
        await engine.load_adapter(source(tmp_path, 1))
    with pytest.raises(Unavailable):
        await finished(engine, request())
    async with sglang_server(port) as server:
        await eventually(lambda: not engine._lookout.lost, "it is found")
        assert (server.number, server.weight_version, list(server.adapters)) == (1, "1", ["style@1#1"])
        assert versions(await finished(engine, request())) == [1] * 4


@pytest.mark.requirement("R27", "R49", "R87")
async def test_a_server_lost_in_a_load_gets_those_in_force_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it had them loaded is unknown; what runs there continues only afterwards, under the old ones."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        running = asyncio.create_task(finished(engine, request()))
        server.permit(1)
        await sampled(server, 1)
        load = server._post_update_weights_from_disk

        async def breaks(http: web.Request, raw: dict[str, Any]) -> web.StreamResponse:
            monkeypatch.undo()
            await load(http, raw)
            await event_stream(http)
            assert http.transport is not None
            http.transport.abort()
            raise ConnectionError

        monkeypatch.setattr(server, "_post_update_weights_from_disk", breaks)
        with pytest.raises(Unavailable) as caught:
            await push(engine, 1)
        assert caught.value.retry_after_s
        await eventually(lambda: not engine._lookout.lost, "it is found")
        assert (server.number, server.weight_version, server.paused) == (0, "0", "")
        assert engine.info().policy_version == 0
        server.permit(3)
        assert versions(await running) == [0] * 4
        await push(engine, 1)
        assert server.number == 1


async def found_again(engine: SglangEngine, server: SglangServer) -> None:
    """Breaks one stream, and waits until the server was found."""

    async def breaks(http: web.Request, raw: dict[str, Any]) -> web.StreamResponse:
        response = await event_stream(http)
        assert http.transport is not None
        http.transport.abort()
        return response

    server.fault = breaks
    with pytest.raises(Unavailable):
        await finished(engine, request("broken"))
    server.fault = None
    await eventually(lambda: not engine._lookout.lost, "it is found")


def loads(server: SglangServer) -> list[dict[str, Any]]:
    return [body for name, body in server.commands if name == "update_weights_from_disk"]


@pytest.mark.requirement("R49", "R82")
async def test_another_clients_weights_never_become_a_version(opened: Open) -> None:
    """Sent as tensors, they leave the path as it is: only their name shows them, to completions, scores and probes."""
    async with sglang_server() as server:
        engine = await opened(server)
        server.number = 4
        server._rename("verl-step-7")
        for call in (finished(engine, request()), engine.score(PROMPT)):
            with pytest.raises(FailedPrecondition, match="'verl-step-7', which this service did not") as caught:
                await call
            assert caught.value.reason == "UPSTREAM_ANSWER_INVALID"
        await found_again(engine, server)
        assert (server.number, server.weight_version, server.paused) == (0, "0", "")
        assert [body["flush_cache"] for body in loads(server)] == [True]
        assert versions(await finished(engine, request())) == [0] * 4
        assert (await engine.score(PROMPT)).policy_version == 0


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("own", ["default", "release-3"])
async def test_weights_of_the_servers_start_are_only_renamed(opened: Open, own: str) -> None:
    """By a name that it gave them itself; once others are in force, that name is another's."""
    async with sglang_server(weight_version=own, number=4) as server:
        engine = await opened(server)
        server._rename(own)
        await found_again(engine, server)
        assert (server.number, server.weight_version, loads(server)) == (4, "0", [])
        await push(engine, 1)
        server.number = 9
        server._rename("release-3")
        await found_again(engine, server)
        assert (server.number, server.weight_version) == (1, "1")


@pytest.mark.requirement("R49", "R82")
async def test_a_score_beside_a_load_is_asked_for_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server names the new weights before its answer to the load is here: they are no other client's."""
    async with sglang_server() as server:
        engine = await opened(server)
        asked, loaded, checked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        generate, load, check = server._post_generate, server._post_update_weights_from_disk, engine._server.check_name

        async def late(http: web.Request, raw: dict[str, Any]) -> web.StreamResponse:
            asked.set()
            await loaded.wait()
            return await generate(http, raw)

        async def slow(http: web.Request, raw: dict[str, Any]) -> web.Response:
            answer = await load(http, raw)
            loaded.set()
            await checked.wait()
            return answer

        async def checks(name: Any, version: int | None) -> None:
            checked.set()
            await check(name, version)

        monkeypatch.setattr(server, "_post_generate", late)
        monkeypatch.setattr(server, "_post_update_weights_from_disk", slow)
        monkeypatch.setattr(engine._server, "check_name", checks)
        scoring = asyncio.create_task(engine.score(PROMPT))
        await asked.wait()
        await push(engine, 1)
        assert (await scoring).policy_version == 1


@pytest.mark.requirement("R49")
async def test_a_service_that_starts_anew_takes_the_servers_version(opened: Open) -> None:
    """The server kept its weights, but their files are not known: no partial push can be completed."""
    async with sglang_server(weight_version="12") as server:
        engine = await opened(server, policy_version="3")
        assert engine.info().policy_version == 12
        with pytest.raises(FailedPrecondition) as caught:
            await engine.begin_update(13, "", UpdateFormat.DELTA)
        assert caught.value.reason == "WEIGHTS_LOST"
        await push(engine, 13)
        await push(engine, 14, update_format=UpdateFormat.DELTA, pushed={"head.weight": np.full(2, 3, np.float32)})
        assert (server.weight_version, server.number) == ("14", 3)


def source(tmp_path: Path, version: int, *, rank: int = 8, weights: bool = True) -> AdapterSource:
    directory = tmp_path / f"adapter-{version}-{rank}-{weights}"
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    if weights:
        (directory / "adapter_model.safetensors").write_bytes(b"")
    return AdapterSource("style", version, directory)


@pytest.mark.requirement("R47")
async def test_a_completion_keeps_the_adapter_version_with_which_it_began(opened: Open, tmp_path: Path) -> None:
    """Each version is an adapter of its own there, which is unloaded after its last user."""
    async with sglang_server(held=True) as server:
        engine = await opened(server, max_adapters="1")
        info = await engine.load_adapter(source(tmp_path, 1))
        assert (info.name, info.policy_version, info.rank) == ("style", 1, 8) and engine.adapters() == (info,)
        old = asyncio.create_task(finished(engine, replace(request("old"), adapter="style")))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        await engine.load_adapter(source(tmp_path, 2))
        new = asyncio.create_task(finished(engine, replace(request("new"), adapter="style")))
        await eventually(lambda: len(server.sequences) == 2, "both run there")
        assert sorted(server.adapters) == ["style@1#1", "style@2#2"]
        server.permit(8)
        assert versions(await old) == [1] * 4 and versions(await new) == [2] * 4
        await eventually(lambda: list(server.adapters) == ["style@2#2"], "the older version is unloaded")
        assert (await engine.score(PROMPT, adapter="style")).policy_version == 2
        other = replace(source(tmp_path, 3), name="other")
        for wrong, error, reason in (
            (source(tmp_path, 2), FailedPrecondition, "POLICY_VERSION_NOT_NEWER"),
            (source(tmp_path, 4, rank=32), InvalidArgument, "ADAPTER_INVALID"),
            (source(tmp_path, 5, weights=False), InvalidArgument, "ADAPTER_INVALID"),
            (other, ResourceExhausted, "ADAPTER_LIMIT"),
        ):
            with pytest.raises(error) as caught:
                await engine.load_adapter(wrong)
            assert caught.value.reason == reason
        await engine.unload_adapter("style")
        await eventually(lambda: not server.adapters, "it is unloaded")
        server.adapters["style@6#4"] = "of a service before this one"
        await engine.load_adapter(source(tmp_path, 6))
        assert server.adapters["style@6#4"].endswith("adapter-6-8-True")
        await engine.unload_adapter("style")
        with pytest.raises(InvalidArgument) as unknown:
            await finished(engine, replace(request(), adapter="style"))
        assert unknown.value.reason == "ADAPTER_UNKNOWN"


@pytest.mark.requirement("R47")
async def test_the_last_user_of_an_unloaded_adapter_leaves_its_successor_loaded(opened: Open, tmp_path: Path) -> None:
    """A version may be loaded again with other files, once it is unloaded; a slow reader still counts as a user."""
    async with sglang_server() as server:
        engine = await opened(server)
        await engine.load_adapter(source(tmp_path, 1))
        slow = engine.generate(replace(request("slow", stream=True), adapter="style"))
        async with aclosing(slow):
            await anext(slow)
            await engine.unload_adapter("style")
            await engine.load_adapter(source(tmp_path, 1, rank=4))
            assert len(server.adapters) == 2
        await eventually(lambda: len(server.adapters) < 2, "the one that was unloaded is gone")
        (left,) = server.adapters.values()
        assert left.endswith("adapter-1-4-True")
        assert versions(await finished(engine, replace(request(), adapter="style"))) == [1] * 4


@pytest.mark.requirement("R47")
async def test_an_adapter_whose_load_is_given_up_does_not_stay_at_the_server(opened: Open, tmp_path: Path) -> None:
    """Its name is of this load alone, so no later one would replace it."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        before = await engine.load_adapter(source(tmp_path, 1))
        running = asyncio.create_task(finished(engine, replace(request(), adapter="style")))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        loading = asyncio.create_task(engine.load_adapter(source(tmp_path, 2), PauseMode.WAIT))
        await eventually(lambda: len(server.adapters) == 2, "the server has it, and the engine waits for what runs")
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await eventually(lambda: list(server.adapters) == ["style@1#1"], "it is unloaded")
        assert engine.adapters() == (before,)
        server.permit(4)
        assert versions(await running) == [1] * 4


@pytest.mark.requirement("R47", "R87")
@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_an_adapter_that_is_replaced_holds_only_its_own_requests_until_it_is_in_force(
    opened: Open, tmp_path: Path, mode: PauseMode
) -> None:
    """A new one waits for nothing. Requests for exactly one version never get another."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        base = asyncio.create_task(finished(engine, request("base")))
        await eventually(lambda: len(server.sequences) == 1, "it runs there")
        async with asyncio.timeout(GUARD_S):
            await engine.load_adapter(source(tmp_path, 1), mode)
        style = replace(request("style", max_tokens=2), adapter="style")
        running = asyncio.create_task(finished(engine, style))
        await eventually(lambda: len(server.sequences) == 2, "both run there")
        engine._admission.hold()  # the next come while the adapter is loaded
        loading = asyncio.create_task(engine.load_adapter(source(tmp_path, 2), mode))
        old = asyncio.create_task(finished(engine, replace(style, request_id="old", exact_policy_version=1)))
        new = asyncio.create_task(finished(engine, replace(style, request_id="new", exact_policy_version=2)))
        other = asyncio.create_task(finished(engine, request("other", max_tokens=2)))
        await eventually(lambda: len(server.adapters) == 2 and engine._admission.waiting == 3, "all wait")
        if mode is PauseMode.WAIT:
            engine._admission.release()
            await eventually(lambda: len(server.sequences) == 3, "another's request runs there meanwhile")
            assert not loading.done() and engine._admission.waiting == 2
            server.permit(40)
        done = await running
        assert set(versions(done)) <= {1} and (done.finish_reason is FinishReason.ABORT) is (mode is PauseMode.ABORT)
        async with asyncio.timeout(GUARD_S):
            assert (await loading).policy_version == 2
        if mode is PauseMode.ABORT:
            engine._admission.release()
        with pytest.raises(FailedPrecondition) as caught:
            await old
        assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
        server.permit(40)
        assert versions(await new) == [2] * 2
        await asyncio.gather(base, other)


@pytest.mark.requirement("R47")
async def test_adapters_are_refused_where_the_server_has_none(opened: Open, tmp_path: Path) -> None:
    """By their capability."""
    async with sglang_server(lora=False) as server:
        engine = await opened(server)
        with pytest.raises(Unsupported):
            await engine.load_adapter(source(tmp_path, 1))
        with pytest.raises(Unsupported):
            await finished(engine, replace(request(), adapter="style"))


@pytest.mark.requirement("R82")
async def test_a_stream_across_a_change_sends_what_is_certain_at_once(opened: Open) -> None:
    """Tokens from before the change come as they are sampled, the others with the end, which has their versions."""
    async with sglang_server(held=True) as server:
        engine = await opened(server)
        async with aclosing(engine.generate(request(stream=True, max_tokens=3))) as events:
            server.permit(1)
            started, first = await anext(events), await anext(events)
            assert started.policy_version == 0 and isinstance(first, Delta) and first.token_ids.size == 1
            await push(engine, 1)
            server.permit(2)
            rest = [event async for event in events]
        assert [event.policy_version for event in rest[:-1]] == [1] and rest[0].token_ids.size == 2
        assert isinstance(rest[-1], Done) and versions(rest[-1]) == [0, 1, 1]
