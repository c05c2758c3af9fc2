"""Two teams on one stack: to one of them, what belongs to the other does not exist (R107).

Every RPC, from the descriptors, is called with the other team's ids and with ids of nothing; both must be answered
alike. No answer may hold a word that only the other team uses.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.support.rpcs import METHODS, servers
from tests.support.services.stack import Running, running
from tests.support.waiting import limits

from penstock.client import InterceptSession, Mode, ModelCall, Penstock, Task, connect
from penstock.client.errors import AlreadyExists, NotFound, PermissionDenied
from penstock.client.rollouts.handles import GroupHandle, RolloutHandle
from penstock.client.tasks.spec import Command
from penstock.interception.v1 import intercept_service_pb2 as intercept_pb
from penstock.interception.v1 import intercept_service_pb2_grpc as intercept_grpc

MARK: Final = "onlyteamaknows"
"""In every name that team A chose."""
ENDLESS_S: Final = 2.0
"""How long a stream without end is read."""
APART: Final = {
    "penstock.interception.v1.InterceptService/Intercept": "below, since its frames follow each other",
    "penstock.sandbox.v1.ToolboxService/PrepareToolbox": "it makes what it names; test_namespaces_sandbox has it",
    "penstock.ops.v1.OperationsService/GetStatus": "of the whole service; test_operations has whose ids it names",
}
_REFUSED_UNREAD: Final = tuple(
    f"penstock.inference.v1.InferenceService/{rpc}" for rpc in ("UpdateWeights", "LoadAdapter")
)
_TOKENS: Final = {team: secrets.token_hex(32) for team in ("team-a", "team-b")}
_TIMED_OUT: Final = grpc.StatusCode.DEADLINE_EXCEEDED.name
_NAMES: Final = re.compile(r"[0-9a-f]{16,}")


@dataclass(frozen=True)
class Teams:
    """A stack with a trainer of each team, and what team A holds on it."""

    running: Running
    a: Penstock
    b: Penstock
    group: GroupHandle
    waiting: RolloutHandle
    session: InterceptSession
    call: ModelCall
    ids: Mapping[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def teams(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Teams]:
    """Team A has an ended group, an open terminal, an agent of its own, and a rollout whose call is leased to it."""
    tables = {"namespaces": {team: {"trainer_token": token} for team, token in _TOKENS.items()}}
    settings = dict.fromkeys(("sandbox", "driver", "interception", "inference"), tables)
    task = Task(task_id=f"{MARK}-task", instruction="Copy the word.", setup=[Command(shell="echo hello > note.txt")])
    async with running(tmp_path_factory.mktemp("teams"), settings, agents=False) as found:
        ends = {team: replace(found.stack.endpoints, token=token) for team, token in _TOKENS.items()}
        async with connect(ends["team-a"]) as a, connect(ends["team-b"]) as b:
            spec = (await a.agents.get("shell")).spec
            spec.name = MARK
            await a.agents.register(spec)
            labels = {"team": MARK}
            group = await a.groups.create(
                task,
                MARK,
                2,
                run_id=f"{MARK}-run",
                group_id=f"{MARK}-group",
                labels=labels,
                mode=Mode.TRANSPARENT_PROXY,
            )
            await group.wait()
            terminal = await a.terminals.open(task, labels=labels)
            async with a.intercept(run_id=f"{MARK}-held", identity=MARK) as session:
                waiting = await a.rollouts.create(
                    task, MARK, rollout_id=f"{MARK}-waiting", run_id=f"{MARK}-held", labels=labels
                )
                await a.runs.log(f"{MARK}-held", {MARK: 0.5}, step=1)
                call = await anext(session.calls())
                state = await terminal.refresh()
                (snapshot, *_) = [one async for one in a.sandboxes.snapshots()]
                ids = {
                    "rollout_id": waiting.rollout_id,
                    "group_id": group.group_id,
                    "terminal_id": terminal.terminal_id,
                    "sandbox_id": state.sandbox_id,
                    "snapshot_id": snapshot.snapshot_id,
                    "call_id": call.call_id,
                    "lease_id": call._message.lease_id,
                    "session_id": session.session_id,
                    "run_id": f"{MARK}-held",
                    "identity": "",
                    "name": MARK,
                    "agent": MARK,
                    "task_id": f"{MARK}-task",
                }
                yield Teams(found, a, b, group, waiting, session, call, ids)
                await call.fail("DONE")
                await waiting.result()
            await terminal.close()


def _filled(kind: type[Message], ids: Mapping[str, str], depth: int = 0) -> Iterator[Message]:
    """A request whose every id is one of these: one for each way in which its oneofs may be set."""
    whole, choices = kind(), []
    for field in whole.DESCRIPTOR.fields:
        name = field.name.removesuffix("s") if field.is_repeated else field.name
        oneof = field.containing_oneof
        is_choice = oneof is not None and not oneof.name.startswith("_")
        target: list[Message] = [kind()] if is_choice else [whole]
        if field.type == FieldDescriptor.TYPE_STRING and name in ids:
            for message in target:
                if field.is_repeated:
                    getattr(message, field.name).append(ids[name])
                else:
                    setattr(message, field.name, ids[name])
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry and depth < 3:
            if field.message_type.full_name.startswith("google."):
                continue
            inner = list(_filled(GetMessageClass(cast("Descriptor", field.message_type)), ids, depth + 1))
            if not any(one.ByteSize() for one in inner):
                continue
            target = [kind() for _ in inner] if is_choice else [whole]
            for message, one in zip(target, inner, strict=False):
                place = getattr(message, field.name)
                place.add().CopyFrom(one) if field.is_repeated else place.CopyFrom(one)
        else:
            continue
        if is_choice:
            choices += target
    for choice in choices:
        choice.MergeFrom(whole)
    yield from choices or [whole]


async def _answers(
    found: Running, server: str, name: str, request: Message, token: str, limit: float = ENDLESS_S
) -> tuple[str, bytes]:
    """The outcome of an RPC: its code, reason and message; and its answers, of an endless stream those of a moment."""
    method = METHODS[name]
    async with grpc.aio.insecure_channel(found.stack.address(server)) as channel:  # type: ignore[arg-type]
        makers: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        make = makers[method.client_streaming, method.server_streaming](f"/{name}")
        data = request.SerializeToString()
        # A frame that is written as the refusal comes costs its status, in grpc.aio: those two refuse unread.
        given: Any = iter([] if name in _REFUSED_UNREAD else [data]) if method.client_streaming else data
        call = make(given, metadata=(("authorization", f"Bearer {token}"),), timeout=limit)
        answers = b""
        try:
            if method.server_streaming:
                async for answer in call:
                    answers += answer
            else:
                answers = await call
        except grpc.aio.AioRpcError as error:
            ended = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # an endless stream, or a wait
            return _TIMED_OUT if ended else f"{error.code().name}: {error.details()}", answers
        except asyncio.CancelledError:
            # What grpc.aio raises for a client stream whose deadline came while it was sent.
            if not call.done() or await call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return _TIMED_OUT, answers
        return "OK", answers


def _hidden(text: str, ids: Mapping[str, str]) -> str:
    """The text without these ids, and without what is random in every answer."""
    for value in sorted(filter(None, ids.values()), key=len, reverse=True):
        text = text.replace(value, "ID")
    return _NAMES.sub("RANDOM", text)


@pytest.mark.requirement("R107")
@pytest.mark.parametrize(
    ("server", "name"), [(one, name) for name in METHODS for one in servers(name) if name not in APART]
)
async def test_another_teams_ids_are_answered_like_ids_of_nothing(teams: Teams, server: str, name: str) -> None:
    """With the other team's own word in no answer."""
    nothing = {key: re.sub(r"[0-9a-z]", "e", value) for key, value in teams.ids.items()}
    kind = GetMessageClass(METHODS[name].input_type)
    for theirs, nobodys in zip(_filled(kind, teams.ids), _filled(kind, nothing), strict=True):
        for limit in limits(ENDLESS_S):
            outcome, answers = await _answers(teams.running, server, name, theirs, _TOKENS["team-b"], limit)
            expected, _ = await _answers(teams.running, server, name, nobodys, _TOKENS["team-b"], limit)
            assert MARK.encode() not in answers, theirs
            if (outcome == _TIMED_OUT) == (expected == _TIMED_OUT):
                break  # else one of them may have been slow by chance
        else:
            raise AssertionError(f"only one of them is answered in time: {theirs}")
        assert _hidden(outcome, teams.ids) == _hidden(expected, nothing), theirs
    outcome, answers = await _answers(teams.running, server, name, kind(), _TOKENS["team-b"])
    assert MARK.encode() not in answers and MARK not in outcome


@pytest.mark.requirement("R107")
async def test_a_session_neither_resumes_answers_nor_extends_another_teams_calls(teams: Teams) -> None:
    """By ids that it should not know."""
    address = teams.running.stack.address("interception")
    metadata = (("authorization", f"Bearer {_TOKENS['team-b']}"),)
    failure = intercept_pb.CallFailure(reason="FORGED")
    forged = intercept_pb.CallResult(call_id=teams.call.call_id, lease_id=teams.call._message.lease_id, failure=failure)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = intercept_grpc.InterceptServiceStub(channel)
        stream = stub.Intercept(metadata=metadata)
        hello = intercept_pb.Hello(credits=intercept_pb.Credits(calls=9), resume_session_id=teams.session.session_id)
        await stream.write(intercept_pb.InterceptRequest(hello=hello))
        welcome = (await stream.read()).welcome
        assert not welcome.resumed and welcome.queued_calls == 0 and not welcome.held_call_ids
        await stream.write(intercept_pb.InterceptRequest(pause=intercept_pb.PauseCalls()))
        assert (await stream.read()).paused.open_calls == 0
        await stream.write(intercept_pb.InterceptRequest(results=intercept_pb.Results(results=[forged])))
        (rejected,) = (await stream.read()).acknowledged.rejected
        assert rejected.reason == intercept_pb.ResultRejected.REASON_UNKNOWN_CALL
        completed = await stub.CompleteCalls(
            intercept_pb.CompleteCallsRequest(results=[forged], extend_lease_ids=[teams.call._message.lease_id]),
            metadata=metadata,
        )
        assert completed.acknowledged.rejected[0].reason == intercept_pb.ResultRejected.REASON_UNKNOWN_CALL
        assert list(completed.lost_lease_ids) == [teams.call._message.lease_id]
        stream.cancel()


@pytest.mark.requirement("R107", "R129", "R131")
async def test_another_teams_rollouts_are_neither_branched_replayed_nor_paused(teams: Teams) -> None:
    """Nor are groups put in the place of its own; a team's own rollouts are no way to them."""
    b, ended = teams.b, teams.group.rollout_ids[0]
    own = await b.rollouts.create(Task(task_id="own", instruction="Copy."), "shell", mode=Mode.TRANSPARENT_PROXY)
    await own.result()
    opened = await b.gate.open(run_id="own")
    attacks: Mapping[str, Callable[[], Awaitable[object]]] = {
        "a branch of one that ended": lambda: b.rollouts.branch(ended, 0, 2),
        "a given answer to one that runs": lambda: b.rollouts.branch(
            teams.waiting.rollout_id, teams.call.call_id, answer="x"
        ),
        "a replay of its answers": lambda: b.gate.load_recording(opened.rollout_id, ended),
        "answers put into it": lambda: b.gate.load_recording(teams.waiting.rollout_id, own.rollout_id),
        "a pause": lambda: RolloutHandle(own._driver, teams.waiting.info).pause(),
        "a resumption": lambda: RolloutHandle(own._driver, teams.waiting.info).resume(),
        "a pause of its group": lambda: GroupHandle(own._driver, teams.group.info).pause(),
    }
    for attack, tried in attacks.items():
        with pytest.raises(NotFound) as refused:
            await tried()
        assert refused.value.reason in ("ROLLOUT_UNKNOWN", "GROUP_UNKNOWN"), attack
    with pytest.raises(AlreadyExists):
        await own.branch(0, group_id=teams.group.group_id)
    assert (await teams.a.groups.attach(teams.group.group_id)).info == teams.group.info
    await opened.close()


@pytest.mark.requirement("R107")
async def test_another_teams_metrics_are_neither_read_written_nor_deleted(teams: Teams) -> None:
    """By the id of its run: that is another run. Nor may a trainer ask for all, or act for the other team."""
    a, b, run = teams.a, teams.b, teams.ids["run_id"]
    assert await b.runs.metrics(run) == []
    await b.runs.log(run, {MARK: -9.0, "loss": -9.0}, step=1)
    assert await b.runs.delete_metrics(run, names=[MARK]) == 1
    (own,) = await a.runs.metrics(run)
    assert (own.name, own.steps.tolist(), own.values.tolist(), own.namespace) == (MARK, [1], [0.5], "team-a")
    with pytest.raises(PermissionDenied) as refused:
        await b.runs.metrics(run, all_namespaces=True)
    assert refused.value.reason == "NAMESPACE_NOT_ALLOWED"
    async with connect(replace(teams.running.stack.endpoints, token=_TOKENS["team-b"], namespace="team-a")) as forged:
        for attack in (
            forged.runs.metrics(run),
            forged.runs.log(run, {MARK: 1.0}, step=1),
            forged.runs.delete_metrics(run),
        ):
            with pytest.raises(PermissionDenied):
                await attack
    assert await b.runs.delete_metrics(run) == 1
    found = await teams.running.ps.runs.metrics(run, all_namespaces=True)
    assert [(metric.namespace, metric.name) for metric in found] == [("team-a", MARK)]


@pytest.mark.requirement("R107")
async def test_what_a_team_holds_is_still_there_after_all_attacks(teams: Teams) -> None:
    """Its rollouts, its call, its agent; and the team itself sees all of it."""
    a = teams.a
    assert not teams.call.end_reason
    assert {one.rollout_id async for one in a.rollouts.list()} >= {teams.waiting.rollout_id, *teams.group.rollout_ids}
    assert [one.group_id async for one in a.groups.list()] == [teams.group.group_id]
    assert (await a.rollouts.get(teams.waiting.rollout_id)).namespace == "team-a"
    assert (await a.rollouts.trajectory(teams.group.rollout_ids[0])).namespace == "team-a"
    assert (await a.agents.get(MARK)).namespace == "team-a"
    assert teams.call.namespace == "team-a"


@pytest.mark.requirement("R107")
async def test_operator_reaches_every_namespace_and_selects_one_or_all(teams: Teams) -> None:
    """A trainer may name no other namespace, nor ask for all."""
    operator, waiting = teams.running.ps, teams.waiting.rollout_id
    assert (await operator.rollouts.get(waiting)).namespace == "team-a"
    assert waiting not in {one.rollout_id async for one in operator.rollouts.list()}
    assert waiting in {one.rollout_id async for one in operator.rollouts.list(all_namespaces=True)}
    for namespace, reaches in (("team-a", True), ("team-b", False)):
        async with connect(replace(teams.running.stack.endpoints, namespace=namespace)) as acting:
            assert (waiting in {one.rollout_id async for one in acting.rollouts.list()}) is reaches
            if not reaches:
                with pytest.raises(NotFound):
                    await acting.rollouts.get(waiting)
    with pytest.raises(PermissionDenied) as refused:
        [one async for one in teams.b.rollouts.list(all_namespaces=True)]
    assert refused.value.reason == "NAMESPACE_NOT_ALLOWED"
    async with connect(replace(teams.running.stack.endpoints, token=_TOKENS["team-b"], namespace="team-a")) as forged:
        with pytest.raises(PermissionDenied) as refused:
            [one async for one in forged.rollouts.list()]
    assert refused.value.reason == "NAMESPACE_NOT_ALLOWED"


@pytest.mark.requirement("R107")
async def test_equal_names_of_two_teams_are_two_things(teams: Teams) -> None:
    """An agent's name, a run, and the id of a request; the id of a rollout is taken, whoever has it."""
    b = teams.b
    with pytest.raises(NotFound):
        await b.agents.get(MARK)
    spec = (await b.agents.get("shell")).spec
    spec.name, spec.description = MARK, "of team B"
    await b.agents.register(spec)
    assert (await b.agents.get(MARK)).description == "of team B"
    assert (await teams.a.agents.get(MARK)).description != "of team B"
    await b.agents.delete(MARK)
    assert (await teams.a.agents.get(MARK)).namespace == "team-a"


def test_all_that_stands_apart_exists() -> None:
    assert set(APART) <= set(METHODS)
