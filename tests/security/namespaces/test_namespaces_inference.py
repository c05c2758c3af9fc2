"""Two teams on one inference service: every RPC, from the descriptors, and what one can do to the other's (R107)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest

from penstock.chat.v1 import chat_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock.values.provisional import is_provisional_method
from penstock_chassis.auth import NAMESPACE_HEADER, Role, Token
from penstock_chassis.channel import connect, error_from_rpc
from penstock_chassis.errors import InvalidArgument
from penstock_inference.domain.namespaces import parted, scoped
from penstock_inference.engines.base import (
    EngineInfo,
    EngineOptions,
    GenerateRequest,
    PauseMode,
    Scores,
    TokenIds,
    UpdatePhases,
)
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model

pytestmark = pytest.mark.requirement("R107")

WEIGHTS: Final = (
    *("Pause", "Resume", "Sleep", "Wake", "UpdateWeights"),
    *("InitTransfer", "StartTransfer", "TransferTensors", "FinishTransfer"),
)
"""Changes the engine for all: for operators and for callers of weights_namespace. Transfers, and their ids, are of that
namespace, so no other caller comes as far as an id."""
NAMES: Final = ["Generate", "Score", "ScoreBatch", "Abort", "LoadAdapter", "UnloadAdapter"]
"""Names requests, sessions or adapters; these names are the caller's own, by `namespaces.scoped`."""
SELECTS: Final = ["Abort", "ListAdapters"]
"""Selects among the caller's own; Abort does with `all`."""
OWN: Final = ["ReportGap", "WatchStats"]
"""Gaps are shown to the namespace that reported them; the load in WatchStats is the engine's and names nothing."""
OPEN: Final = ["GetInfo", "GetTokenizer", "Render", "Parse"]
"""The model that is served and its tokenizer: the same for all, and no state of any caller."""

_CONFIG: Final = random_config("qwen3", max_position_embeddings=64, eos_token_id=None)


class Engine(NumpyEngine):
    """The numpy engine with the features that it lacks, all without effect but for the adapters' names."""

    loaded: dict[str, AdapterInfo]

    def info(self) -> EngineInfo:
        info = super().info()
        return replace(
            info, capabilities=replace(info.capabilities, adapters=True, sleep=True, transfer_backends=("none",))
        )

    async def generate(self, request: GenerateRequest) -> Any:
        self._check_adapter(request.adapter)
        async for event in super().generate(replace(request, adapter="")):
            yield event

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        self._check_adapter(adapter)
        return await super().score(token_ids, temperature, top_logprobs=top_logprobs)

    def _check_adapter(self, name: str) -> None:
        if name and name not in self.loaded:
            raise InvalidArgument(f"there is no adapter {parted(name)[1]!r}", reason="ADAPTER_UNKNOWN")

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        self.loaded[source.name] = AdapterInfo(source.name, source.policy_version, 1)
        return self.loaded[source.name]

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(sorted(self.loaded.values(), key=lambda one: one.name))

    async def sleep(self, level: int) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def init_transfer(self, backend: str, options: Mapping[str, Any]) -> None:
        pass

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        pass

    async def transfer_tensors(self, descriptor: Any) -> None:
        pass

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        return UpdatePhases(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Teams:
    """The stubs of two teams, of the default namespace's trainer, and of the operator."""

    a: Any
    b: Any
    default: Any
    operator: Any


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """`async with opened(setting=...) as teams`."""
    model = write_model(tmp_path / "model", _CONFIG, random_tensors(_CONFIG))

    async def open_engine(_name: str, options: EngineOptions) -> NumpyEngine:
        engine = await Engine.open(options)
        assert isinstance(engine, Engine)
        engine.loaded = {}
        return engine

    monkeypatch.setattr("penstock_inference.app.open_engine", open_engine)
    tokens = {Role.OPERATOR: "operator-token", Role.TRAINER: "trainer-token"}
    more = [Token(Role.TRAINER, f"team-{name}", f"token-of-{name}") for name in "ab"]

    @asynccontextmanager
    async def open_(**settings: Any) -> AsyncIterator[Teams]:
        async with (
            open_inference(model, tmp_path / "state", tokens=tokens, more=more, **settings) as service,
            connect(service.address, "token-of-a") as a,
            connect(service.address, "token-of-b") as b,
            connect(service.address, "trainer-token") as default,
        ):
            yield Teams(*map(rpc.InferenceServiceStub, (a, b, default, service.channel)))

    return open_


def ids(count: int = 4) -> bytes:
    return np.arange(3, 3 + count, dtype="<i4").tobytes()


def request(name: str, session: str = "", adapter: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        session_id=session,
        adapter=adapter,
        token_ids=ids(),
        sampling=chat_pb2.Sampling(max_tokens=2, seed=5),
    )


async def generated(team: Any, asked: pb.GenerateRequest) -> int:
    """Generates to the end; returns the finish reason."""
    events = [event async for event in team.Generate(asked)]
    return int(events[-1].done.completion.finish_reason)


async def scored(team: Any) -> pb.ScoreResponse:
    response: pb.ScoreResponse = await team.Score(pb.ScoreRequest(token_ids=ids(), start=1))
    return response


async def load(team: Any, name: str, path: str = "", *, refused: bool = False) -> pb.Adapter:
    data = b"weights"

    async def frames() -> AsyncIterator[pb.LoadAdapterRequest]:
        config = "" if path else "{}"
        begin = pb.LoadAdapterRequest.AdapterBegin(name=name, policy_version=1, path=path, adapter_config_json=config)
        yield pb.LoadAdapterRequest(begin=begin)
        if refused:
            return  # a frame that is written as the refusal comes costs its status, in grpc.aio
        if not path:
            yield pb.LoadAdapterRequest(chunk=data)
        digest = b"" if path else hashlib.sha256(data).digest()
        yield pb.LoadAdapterRequest(commit=pb.LoadAdapterRequest.AdapterCommit(sha256=digest))

    adapter: pb.Adapter = (await team.LoadAdapter(frames())).adapter
    return adapter


async def adapters(team: Any, everything: bool = False) -> list[tuple[str, str]]:
    """The namespaces and names that a caller sees, page by page."""
    found: list[tuple[str, str]] = []
    asked = pb.ListAdaptersRequest(page_size=1, all_namespaces=everything)
    while True:
        answer = await team.ListAdapters(asked)
        found += [(one.namespace, one.name) for one in answer.adapters]
        if not answer.next_page_token:
            return found
        asked.page_token = answer.next_page_token


async def refusal(work: Awaitable[Any]) -> tuple[str, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return caught.value.code().name, error_from_rpc(caught.value).reason, error_from_rpc(caught.value).message


@asynccontextmanager
async def in_flight(teams: Teams, *asked: tuple[Any, pb.GenerateRequest]) -> AsyncIterator[list[asyncio.Task[int]]]:
    """Generations that wait, because the engine is paused; at the end it resumes and they end."""
    await teams.operator.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP))
    tasks = [asyncio.create_task(generated(team, one)) for team, one in asked]
    await counted(teams, len(tasks))
    yield tasks
    await teams.operator.Resume(pb.ResumeRequest())
    await asyncio.gather(*tasks)


async def counted(teams: Teams, requests: int) -> None:
    """Wait until the engine has so many requests, scores among them."""
    watch = teams.operator.WatchStats(pb.WatchStatsRequest(interval={"nanos": 100_000_000}))  # type: ignore[arg-type]
    async for stats in watch:
        if stats.waiting + stats.running == requests:
            break
    watch.cancel()


def _call(team: Any, method: str, **metadata: Any) -> Awaitable[Any]:
    """Calls a method that changes the engine with an empty request; UpdateWeights with none."""
    kind = getattr(pb, f"{method}Request")
    call = getattr(team, method)
    # Nothing is written to a request stream: a refusal comes first, and a write that loses the race is an error.
    return call(iter([]) if method == "UpdateWeights" else kind(), **metadata)  # type: ignore[no-any-return]


def test_every_rpc_of_the_inference_service_is_sorted() -> None:
    """A new RPC fails here until it is in one of the tables above, and with it under one of the attacks below."""
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    served = [one.name for one in service.methods if not is_provisional_method(f"{service.full_name}/{one.name}")]
    assert sorted(served) == sorted({*WEIGHTS, *NAMES, *SELECTS, *OWN, *OPEN})
    selecting = [one.name for one in service.methods if "all_namespaces" in one.input_type.fields_by_name]
    assert sorted(selecting) == sorted(SELECTS)


@pytest.mark.parametrize("method", WEIGHTS)
async def test_only_one_namespace_changes_the_engine_for_all(opened: Open, method: str) -> None:
    """An operator who acts in another namespace may as little as its callers."""
    async with opened() as teams:
        acting = ((NAMESPACE_HEADER, "team-a"),)
        for refused in (_call(teams.a, method), _call(teams.operator, method, metadata=acting)):
            code, reason, message = await refusal(refused)
            assert (code, reason) == ("PERMISSION_DENIED", "NAMESPACE_NOT_ALLOWED")
            assert "weights_namespace" in message
        for allowed in (teams.default, teams.operator):
            assert await _reason(_call(allowed, method)) != "NAMESPACE_NOT_ALLOWED"
    async with opened(weights_namespace="team-a") as teams:
        assert await _reason(_call(teams.a, method)) != "NAMESPACE_NOT_ALLOWED"
        assert await _reason(_call(teams.default, method)) == "NAMESPACE_NOT_ALLOWED"


async def _reason(work: Awaitable[Any]) -> str:
    try:
        await work
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error).reason
    return ""


async def test_transfer_of_another_namespace_is_out_of_reach(opened: Open) -> None:
    """With its id too, which a team could have learnt."""
    async with opened() as teams:
        transfer = (await teams.default.StartTransfer(pb.StartTransferRequest(request_id="one"))).transfer_id
        for one in (transfer, "no-such-transfer"):
            for refused in (
                teams.a.TransferTensors(pb.TransferTensorsRequest(transfer_id=one, descriptor_json="{}")),
                teams.a.FinishTransfer(pb.FinishTransferRequest(transfer_id=one)),
            ):
                assert (await refusal(refused))[1] == "NAMESPACE_NOT_ALLOWED"
        await teams.default.FinishTransfer(pb.FinishTransferRequest(transfer_id=transfer))


async def test_adapters_of_one_name_are_each_teams_own(opened: Open) -> None:
    """Neither replaces, unloads, lists or uses the other's."""
    async with opened() as teams:
        assert (await load(teams.a, "own")).namespace == "team-a"
        for name in ("own", "team-a/own", "default/own"):
            for team in (teams.b, teams.default):
                code, reason, message = await refusal(generated(team, request("r", adapter=name)))
                assert (code, reason, message) == (
                    "INVALID_ARGUMENT",
                    "ADAPTER_UNKNOWN",
                    f"there is no adapter {name!r}",
                )
                score = pb.ScoreRequest(token_ids=ids(), start=1, adapter=name)
                assert (await refusal(team.Score(score)))[1:] == (reason, message)
                (failed,) = [one async for one in team.ScoreBatch(pb.ScoreBatchRequest(sequences=[score]))]
                assert (failed.failure.reason, failed.failure.message) == (reason, message)
                await team.UnloadAdapter(pb.UnloadAdapterRequest(name=name))
                assert await adapters(team) == []
        await generated(teams.a, request("r", adapter="own"))
        assert (await load(teams.b, "own")).namespace == "team-b"
        assert (await load(teams.default, "team-a/own")).name == "team-a/own"
        await teams.b.UnloadAdapter(pb.UnloadAdapterRequest(name="own"))
        await teams.a.Score(pb.ScoreRequest(token_ids=ids(), start=1, adapter="own"))
        assert await adapters(teams.a) == [("team-a", "own")]
        assert await adapters(teams.default) == [("default", "team-a/own")] == await adapters(teams.operator)
        assert await adapters(teams.operator, everything=True) == [("default", "team-a/own"), ("team-a", "own")]
        assert (await refusal(adapters(teams.a, everything=True)))[1] == "NAMESPACE_NOT_ALLOWED"


async def test_adapter_paths_are_for_the_namespace_of_the_weights(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "one").mkdir(parents=True)
    async with opened(adapters_dir=tmp_path / "adapters") as teams:
        for path in ("one", "none"):
            assert (await refusal(load(teams.a, "own", path=path, refused=True)))[1] == "NAMESPACE_NOT_ALLOWED"
        assert (await load(teams.default, "own", path="one")).name == "own"


async def test_aborts_reach_the_callers_namespace_alone(opened: Open) -> None:
    """By request, by session, and all of them; guesses of the engine's names too."""
    async with (
        opened() as teams,
        in_flight(teams, (teams.a, request("r", "s")), (teams.default, request("r", "s"))) as (of_a, of_default),
    ):
        targets: list[dict[str, Any]] = [
            *({"requests": {"request_ids": [name]}} for name in ("r", "team-a/r", "default/r")),
            *({"session_id": name} for name in ("s", "team-a/s", "default/s")),
            {"all": True},
        ]
        for target in targets:
            assert (await teams.b.Abort(pb.AbortRequest(**target))).aborted_count == 0, target
        both = pb.AbortRequest(all=True, all_namespaces=True)
        assert (await refusal(teams.b.Abort(both)))[1] == "NAMESPACE_NOT_ALLOWED"
        assert not of_a.done() and not of_default.done()
        assert (await teams.a.Abort(pb.AbortRequest(all=True))).aborted_count == 1
        assert await of_a == chat_pb2.FINISH_REASON_ABORT
        assert not of_default.done()
        assert (await teams.operator.Abort(both)).aborted_count == 1


async def test_an_abort_of_an_empty_id_reaches_no_score_of_another_team(opened: Open) -> None:
    """An engine may have no id for a score; an empty one is refused, since it names no request."""
    async with opened() as teams, in_flight(teams, (teams.b, request("r"))) as (of_b,):
        score = asyncio.create_task(scored(teams.a))
        await counted(teams, 2)
        for names in ([""], ["r", ""]):
            abort = teams.b.Abort(pb.AbortRequest(requests=pb.AbortRequest.RequestIds(request_ids=names)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await abort
            error = error_from_rpc(caught.value)
            where = f"requests.request_ids[{len(names) - 1}]"
            assert (error.reason, error.violations[0].field) == ("FIELD_INVALID", where)
        assert not of_b.done() and not score.done()
        await teams.operator.Resume(pb.ResumeRequest())
        assert len((await score).logprobs) == 4 * 3


async def test_request_ids_of_two_teams_in_flight_are_independent(opened: Open) -> None:
    async with opened() as teams, in_flight(teams, (teams.a, request("r")), (teams.b, request("r"))):
        assert (await refusal(generated(teams.a, request("r"))))[1] == "REQUEST_IN_FLIGHT"


async def test_a_quota_counts_the_requests_of_its_namespace_alone(opened: Open) -> None:
    async with opened(namespaces={"team-a": {"quota": 1}}) as teams:
        async with in_flight(teams, (teams.a, request("one")), (teams.b, request("one")), (teams.b, request("two"))):
            for refused in (
                generated(teams.a, request("two")),
                teams.a.Score(pb.ScoreRequest(token_ids=ids(), start=1)),
            ):
                assert (await refusal(refused))[:2] == ("RESOURCE_EXHAUSTED", "NAMESPACE_QUOTA")
        await generated(teams.a, request("two"))
        # A batch has one place, and further ones as far as there are any.
        sequence = pb.ScoreRequest(token_ids=ids(), start=1)
        batch = [answer async for answer in teams.a.ScoreBatch(pb.ScoreBatchRequest(sequences=[sequence] * 5))]
        assert [answer.WhichOneof("outcome") for answer in batch] == ["score"] * 5


async def test_stats_and_info_name_nothing_of_another_team(opened: Open) -> None:
    """A team's report of a gap is its own; the operator sees those of the weights' namespace."""
    gap = pb.LogprobGap(tokens=1, mean_abs=0.5)
    async with opened() as teams, in_flight(teams, (teams.a, request("secret-request", "secret-session"))):
        await load(teams.a, "secret-adapter")
        await teams.a.ReportGap(pb.ReportGapRequest(gap=gap))
        for team, count in ((teams.a, 1), (teams.b, 0), (teams.default, 0), (teams.operator, 0)):
            watch = team.WatchStats(pb.WatchStatsRequest())
            stats = await watch.read()
            watch.cancel()
            assert len(stats.gaps) == count
            for answer in (stats, await team.GetInfo(pb.GetInfoRequest())):
                assert b"secret" not in answer.SerializeToString()
        await teams.default.ReportGap(pb.ReportGapRequest(gap=gap))
        watch = teams.operator.WatchStats(pb.WatchStatsRequest())
        assert len((await watch.read()).gaps) == 1
        watch.cancel()


@pytest.mark.parametrize("name", ["", "r", "a/b", "/", "team-a/r", "default/r", "default/default/r", "Not-One/r", "//"])
def test_no_two_namespaces_give_one_engine_name(name: str) -> None:
    spaces = ("default", "team-a", "team-b")
    names = [scoped(space, name) for space in spaces]
    assert len(set(names)) == (len(spaces) if name else 1)
    for space, made in zip(spaces, names, strict=True):
        assert parted(made) == (space if name else "default", name)
        for other in spaces:
            assert (
                other == space
                or not name
                or made not in (scoped(other, one) for one in (name, made, f"{space}/{name}"))
            )
