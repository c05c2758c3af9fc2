"""Rollouts and groups against a driver that follows a script."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tests.unit.client.conftest import Fakes, Gate, Refusal

from penstock.chat.v1 import completion_pb2
from penstock.client import (
    AgentChoice,
    AgentEvent,
    AgentKeyTerms,
    AlreadyExists,
    Budgets,
    CallRate,
    Cancelled,
    Command,
    Ended,
    FailureCause,
    InvalidArgument,
    McpServer,
    NotFound,
    Penstock,
    PenstockError,
    Phase,
    PhaseChanged,
    PolicyConstraint,
    ResourceExhausted,
    RewardFrom,
    Rollout,
    RolloutHandle,
    RunBudgets,
    Sampling,
    SandboxChoice,
    SeedFile,
    Task,
    TokenScope,
    Unavailable,
    Upstream,
    Verifier,
)
from penstock.client.rollouts import handles
from penstock.client.rollouts.client import spec
from penstock.client.transport.patience import Patience
from penstock.client.transport.rpc import Backoff
from penstock.driver.v1 import agent_pb2, rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

TASK = Task(
    task_id="t1",
    instruction="do 'it' $(now)\n",
    files=[SeedFile("note.txt", b"\xff\x00", 0o600)],
    setup=[Command(["sh", "-c", "true"], timeout=1.5)],
    verifier=Verifier(commands=[Command(shell="test -f x")], reward=RewardFrom.FILE, range=(-1.0, 1.0)),
    env={"A": "b"},
    metadata={"level": 3, "tags": ["x"]},
)
Gathered = Callable[..., Awaitable[list[Any]]]


def rollout(phase: Any = rollout_pb2.PHASE_RUNNING, **fields: Any) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(**{"rollout_id": "r1", "phase": phase, **fields})


def graded(value: float) -> rollout_pb2.Outcome:
    return rollout_pb2.Outcome(reward=trajectory_pb2.Reward(value=value, range_min=0, range_max=1))


def event(sequence: int, rollout_id: str = "r1", **fields: Any) -> rollout_pb2.RolloutEvent:
    return rollout_pb2.RolloutEvent(sequence=sequence, rollout_id=rollout_id, **fields)


def watched(*events: rollout_pb2.RolloutEvent) -> list[Any]:
    return [pb.WatchRolloutResponse(event=item) for item in events]


@pytest.mark.requirement("R64", "R67")
async def test_rollout_request_has_exactly_the_given_fields(fakes: Fakes, ps: Penstock) -> None:
    """Unset and zero are different; R67: an instruction of any content arrives intact."""
    fakes.queue("CreateRollout", pb.CreateRolloutResponse(rollout=rollout()))
    handle = await ps.rollouts.create(
        TASK,
        AgentChoice(name="opencode", options={"thinking": False, "steps": 2}, skip_permissions=True),
        mode="transparent_proxy",
        source=Upstream(base_url="http://127.0.0.1:1/v1", api_key="k", model="m"),
        budgets=Budgets(max_calls=0, wall_time=0.5, call_rate=CallRate(calls=3, period=60)),
        run_budgets=RunBudgets(max_prompt_tokens=0, max_request_bytes=9),
        token_terms=AgentKeyTerms(scopes=["completions", TokenScope.READ], ttl=90),
        policy=PolicyConstraint(max_staleness=0),
        sandbox=SandboxChoice(backend="local", user="worker", own_kernel=True),
        sampling=Sampling(temperature=0.0),
        run_id="run",
        labels={"x": "y"},
        seed=0,
    )
    assert (handle.rollout_id, handle.info.phase) == ("r1", Phase.RUNNING)

    spec = fakes.requests["CreateRollout"][0].spec
    assert spec.task.instruction == "do 'it' $(now)\n"
    assert spec.task.files[0].content == b"\xff\x00" and spec.task.files[0].mode == 0o600
    assert list(spec.task.setup[0].argv.args) == ["sh", "-c", "true"]
    assert spec.task.setup[0].timeout.ToMilliseconds() == 1500
    assert spec.task.verifier.WhichOneof("reward") == "reward_file"
    assert (spec.task.verifier.range_min, spec.task.verifier.commands[0].shell) == (-1.0, "test -f x")
    assert spec.task.metadata["level"] == 3
    assert spec.agent.skip_permissions and spec.agent.options["thinking"] is False
    assert spec.mode == interception_pb2.MODE_TRANSPARENT_PROXY
    assert spec.source.upstream.caller.api_key == "k"
    assert spec.budgets.HasField("max_calls") and not spec.budgets.HasField("max_total_tokens")
    assert (spec.sandbox.backend, spec.sandbox.user, spec.sandbox.own_kernel) == ("local", "worker", True)
    assert (spec.budgets.call_rate.calls, spec.budgets.call_rate.period.seconds) == (3, 60)
    assert not spec.budgets.call_rate.HasField("burst")
    assert spec.run_budgets.HasField("max_prompt_tokens") and not spec.run_budgets.HasField("max_calls")
    assert spec.run_budgets.max_request_bytes == 9
    assert list(spec.token_terms.scopes) == [
        interception_pb2.TOKEN_SCOPE_COMPLETIONS,
        interception_pb2.TOKEN_SCOPE_READ,
    ]
    assert spec.token_terms.ttl.seconds == 90
    assert spec.policy.HasField("max_staleness") and not spec.policy.HasField("min_version")
    assert spec.HasField("seed") and spec.sampling_override.HasField("temperature")
    assert not spec.sampling_override.HasField("top_p") and not spec.HasField("limits")


def test_an_agent_gets_the_servers_of_its_task_before_those_of_the_rollout() -> None:
    """However the agent is given."""
    task = replace(TASK, mcp_servers=[McpServer(name="a", args=["a", "b"], env={"C": "d"})])
    own = AgentChoice(name="codex", mcp_servers=[McpServer(name="b", url="http://127.0.0.1:9")])
    (by_name,) = spec(task, "codex", {}).agent.mcp_servers
    first, second = spec(task, own, {}).agent.mcp_servers
    assert (first.name, list(first.stdio.args), dict(first.stdio.env)) == ("a", ["a", "b"], {"C": "d"})
    assert by_name == first and (second.name, second.url) == ("b", "http://127.0.0.1:9")


async def test_create_during_a_restart_is_repeated_under_its_request_id(fakes: Fakes, ps: Penstock) -> None:
    """Creates are idempotent: a lost answer starts nothing twice."""
    unavailable = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after=0.01)
    fakes.queue("CreateRollout", unavailable, pb.CreateRolloutResponse(rollout=rollout()))
    await ps.rollouts.create(TASK, "shell")
    first, second = fakes.requests["CreateRollout"]
    assert first.request_id == second.request_id and len(first.request_id) == 32


@pytest.mark.requirement("R51")
async def test_a_creation_waits_for_room_and_not_for_a_limit_that_stays(
    fakes: Fakes, ps: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service says which refusals pass: those with a delay."""
    monkeypatch.setattr(handles, "_FULL_FIRST_S", 0.0)
    fakes.queue(
        "CreateRollout",
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "ROLLOUT_LIMIT", retry_after=0.001),
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_EXHAUSTED", message="The run's budget is used up."),
    )
    with pytest.raises(ResourceExhausted, match="used up") as refused:
        await handles.created_with_room(lambda: ps.rollouts.create(TASK, "shell"), "the test stopped")
    assert refused.value.reason == "BUDGET_EXHAUSTED"
    assert len(fakes.requests["CreateRollout"]) == 2


async def test_errors_come_out_as_themselves_with_reason_and_fields(fakes: Fakes, ps: Penstock) -> None:
    """Bad input gets a typed error that names the field and the reason."""
    violations = (("spec.task.setup[0]", "argv is empty"),)
    fakes.queue(
        "CreateRollout",
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", violations=violations),
        Refusal(grpc.StatusCode.NOT_FOUND, "AGENT_UNKNOWN", message="there are: opencode, pi"),
        Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED"),
    )
    with pytest.raises(InvalidArgument, match=r"spec.task.setup\[0\]: argv is empty") as invalid:
        await ps.rollouts.create(TASK, "shell")
    assert invalid.value.reason == "FIELD_INVALID"
    assert [(item.field, item.description) for item in invalid.value.violations] == list(violations)
    with pytest.raises(NotFound, match="opencode, pi"):
        await ps.rollouts.create(TASK, "shell")
    with pytest.raises(AlreadyExists):
        await ps.rollouts.create(TASK, "shell")


@pytest.mark.requirement("R65")
async def test_an_unknown_mode_is_refused_with_those_that_there_are(ps: Penstock) -> None:
    """A mode that is not there fails with a pointer."""
    with pytest.raises(InvalidArgument, match="black_box, transparent_proxy, interception_gate"):
        await ps.rollouts.create(TASK, "shell", mode="gate")


@pytest.mark.requirement("R71")
@pytest.mark.parametrize(
    "broken",
    [
        Refusal(grpc.StatusCode.UNAVAILABLE),
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"),
    ],
    ids=["the driver went", "it was not read"],
)
async def test_events_go_on_after_a_break_where_they_were(
    fakes: Fakes, ps: Penstock, gathered: Gathered, broken: Refusal
) -> None:
    """Events are streamed live; a broken stream loses none and repeats none."""
    over = rollout(rollout_pb2.PHASE_ENDED, outcome=graded(0.5), last_sequence=3)
    fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=rollout()), pb.GetRolloutResponse(rollout=over))
    running = rollout_pb2.PhaseChanged(phase=rollout_pb2.PHASE_RUNNING)
    said = rollout_pb2.AgentEvent(kind=agent_pb2.AGENT_EVENT_KIND_TOOL_CALL, raw_line=b"{}")
    said.data.update({"name": "bash", "turn": 1})
    heartbeat = pb.WatchRolloutResponse(heartbeat=pb.WatchHeartbeat())
    fakes.queue(
        "WatchRollout",
        [*watched(event(1, phase_changed=running)), heartbeat, broken],
        watched(event(2, agent_event=said)),  # and an end of stream without `ended`
        watched(event(3, ended=graded(0.5))),
    )
    handle = await ps.rollouts.attach("r1")
    events = await gathered(handle.events())
    assert [item.sequence for item in events] == [1, 2, 3]
    assert events[0].payload == PhaseChanged(Phase.RUNNING)
    assert events[1].payload == AgentEvent("tool_call", {"name": "bash", "turn": 1}, b"{}")
    assert isinstance(events[2].payload, Ended) and events[2].payload.outcome.reward is not None
    assert [item.after_sequence for item in fakes.requests["WatchRollout"]] == [0, 1, 2]


@pytest.mark.requirement("R71")
async def test_an_ended_rollout_has_no_events_after_its_last_one(
    fakes: Fakes, ps: Penstock, gathered: Gathered
) -> None:
    """Whoever watched it to its end, and goes on later from there, need not wait for an error."""
    over = rollout(rollout_pb2.PHASE_ENDED, outcome=graded(0.5), last_sequence=3)
    fakes.queue("GetRollout", *[pb.GetRolloutResponse(rollout=over)] * 2)
    fakes.queue("WatchRollout", [])
    handle = await ps.rollouts.attach("r1")
    assert await gathered(handle.events(after=3)) == []


@pytest.mark.requirement("R74")
async def test_result_is_awaited_without_limit_and_ungraded_is_not_zero(fakes: Fakes, ps: Penstock) -> None:
    """Not graded is not zero; a failure says whose fault it was."""
    failure = rollout_pb2.Failure(
        cause=rollout_pb2.FAILURE_CAUSE_INFRASTRUCTURE,
        reason="DRIVER_RESTARTED",
        retriable=True,
        phase=rollout_pb2.PHASE_RUNNING,
    )
    ended = rollout(rollout_pb2.PHASE_ENDED, outcome=rollout_pb2.Outcome(failure=failure))
    fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=rollout()))
    fakes.queue("WaitRollout", pb.WaitRolloutResponse(rollout=rollout()), pb.WaitRolloutResponse(rollout=ended))
    result = await (await ps.rollouts.attach("r1")).result()
    assert result.reward is None
    assert result.failure is not None and result.failure.retriable
    assert (result.failure.cause, result.failure.phase) == (FailureCause.INFRASTRUCTURE, Phase.RUNNING)


@pytest.mark.requirement("R84")
async def test_a_groups_results_are_all_rollouts_with_samples_as_arrays(fakes: Fakes, ps: Penstock) -> None:
    """Ids, mask and logprobs come out as captured; a rollout without a trajectory is there all the same."""
    group = rollout_pb2.Group(group_id="g", size=2, quorum=2, rollout_ids=["g-0", "g-1"])
    fakes.queue("CreateGroup", pb.CreateGroupResponse(group=group))
    over = rollout_pb2.Group(group_id="g", size=2, ended=True, complete=True, result_rollout_ids=["g-1"])
    fakes.queue(
        "WatchGroup",
        [
            pb.WatchGroupResponse(event=event(3, "g-1", ended=graded(1.0))),
            pb.WatchGroupResponse(event=event(9, "g-0", ended=rollout_pb2.Outcome())),
            Refusal(grpc.StatusCode.UNAVAILABLE),
        ],
        [pb.WatchGroupResponse(group=over)],
    )
    fakes.queue(
        "GetRollout",
        pb.GetRolloutResponse(rollout=rollout(rollout_pb2.PHASE_ENDED, rollout_id="g-1", index=1, outcome=graded(1.0))),
        pb.GetRolloutResponse(rollout=rollout(rollout_pb2.PHASE_ENDED, rollout_id="g-0", index=0)),
    )
    sample = trajectory_pb2.Sample(
        sample_id="s",
        count=3,
        input_ids=b"\1\0\0\0\2\0\0\0\3\0\0\0",
        loss_mask=b"\0\1\1",
        logprobs=b"\0\0\0\0" + b"\0\0\0\xbf" * 2,
        versions=[completion_pb2.PolicyVersionSpan(policy_version=4, start=1, end=3)],
        prompt_count=1,
        weight=1.0,
    )
    fakes.queue(
        "GetTrajectory",
        [
            pb.GetTrajectoryResponse(trajectory=trajectory_pb2.Trajectory(rollout_id="g-1", samples=[sample])),
            pb.GetTrajectoryResponse(trajectory=trajectory_pb2.Trajectory(grade=trajectory_pb2.GRADE_EXACT)),
        ],
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TRAJECTORY_ABSENT"),
    )
    handle = await ps.groups.create(TASK, "shell", 2, spares=1, group_id="g")
    zero, one = await handle.results()
    assert (zero.rollout_id, zero.trajectory, zero.reward) == ("g-0", None, None)
    assert one.reward is not None and one.reward.value == 1.0
    assert one.trajectory is not None and one.trajectory.grade == "exact"
    (taken,) = one.trajectory.samples
    assert taken.input_ids.tolist() == [1, 2, 3] and taken.loss_mask.tolist() == [False, True, True]
    assert taken.logprobs is not None and taken.logprobs.tolist() == [0.0, -0.5, -0.5]
    assert taken.versions[0].policy_version == 4
    assert handle.info.result_rollout_ids == ("g-1",)
    assert dict(fakes.requests["WatchGroup"][1].after_sequences) == {"g-0": 9, "g-1": 3}
    assert fakes.requests["GetTrajectory"][0].samples_only


@pytest.mark.requirement("R74")
async def test_a_groups_results_say_which_of_them_are_surplus(fakes: Fakes, ps: Penstock) -> None:
    """Known once the group has ended: a spare may be graded as the last result comes."""
    ids = ["g-0", "g-1"]
    fakes.queue(
        "CreateGroup", pb.CreateGroupResponse(group=rollout_pb2.Group(group_id="g", size=1, spares=1, rollout_ids=ids))
    )
    over = rollout_pb2.Group(
        group_id="g", size=1, spares=1, rollout_ids=ids, ended=True, complete=True, result_rollout_ids=["g-1"]
    )
    fakes.queue(
        "WatchGroup",
        [
            pb.WatchGroupResponse(event=event(3, "g-1", ended=graded(1.0))),
            pb.WatchGroupResponse(event=event(9, "g-0", ended=graded(0.0))),
            pb.WatchGroupResponse(group=over),
        ],
    )
    for index, rollout_id in ((1, "g-1"), (0, "g-0")):
        info = rollout(rollout_pb2.PHASE_ENDED, rollout_id=rollout_id, index=index, outcome=graded(float(index)))
        fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=info))
        fakes.queue("GetTrajectory", Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TRAJECTORY_ABSENT"))
    handle = await ps.groups.create(TASK, "shell", 1, spares=1, group_id="g")
    assert [(one.rollout_id, one.surplus) for one in await handle.results()] == [("g-0", True), ("g-1", False)]


@pytest.mark.requirement("R24")
async def test_the_calls_of_a_group_end_when_the_group_has_ended(
    fakes: Fakes, ps: Penstock, gathered: Gathered
) -> None:
    """The end of what was asked for is the end of the loop."""

    async def gate(stream: Gate) -> None:
        hello = await stream.hello()
        assert hello.selector.group_id == "g"
        await stream.goodbye()

    fakes.converse(gate)
    fakes.queue("GetGroup", pb.GetGroupResponse(group=rollout_pb2.Group(group_id="g")))
    fakes.queue("WaitGroup", pb.WaitGroupResponse(group=rollout_pb2.Group(group_id="g", ended=True)))
    group = await ps.groups.attach("g")
    assert await gathered(group.calls()) == []


async def test_lists_are_followed_to_their_last_page(fakes: Fakes, ps: Penstock, gathered: Gathered) -> None:
    """Paging is the client's business."""
    fakes.queue(
        "ListRollouts",
        pb.ListRolloutsResponse(rollouts=[rollout()], next_page_token="p2"),
        pb.ListRolloutsResponse(rollouts=[rollout(rollout_id="r2")]),
    )
    found = await gathered(ps.rollouts.list(run_id="run", ended=False))
    assert [item.rollout_id for item in found] == ["r1", "r2"]
    assert fakes.requests["ListRollouts"][0].filter.HasField("ended")


@pytest.mark.requirement("R140")
async def test_what_the_drivers_that_are_there_have_is_graded_before_one_that_is_away_is_an_error(
    fakes: Fakes, ps: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each grade comes out, also those under way when the list ends."""
    listed = [handle.info for handle in [await _attached(fakes, ps, name) for name in ("r1", "r2", "r3")]]

    async def without_one(**_: Any) -> AsyncGenerator[Rollout, None]:
        for rollout in listed:
            yield rollout
        raise Unavailable("Cannot reach d1", reason="TRANSPORT_UNAVAILABLE")

    monkeypatch.setattr(ps.rollouts, "list", without_one)
    fakes.queue("RegradeRollout", *[pb.RegradeRolloutResponse()] * 3)
    graded: list[str] = []
    with pytest.raises(Unavailable, match="d1"):
        async for one in ps.rollouts.regrade_all(run_id="run", concurrency=2):
            assert one.error is None
            graded.append(one.rollout.rollout_id)
    assert sorted(graded) == ["r1", "r2", "r3"]


async def _attached(fakes: Fakes, ps: Penstock, rollout_id: str) -> RolloutHandle:
    fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=rollout(rollout_id=rollout_id)))
    return await ps.rollouts.attach(rollout_id)


async def test_exported_fragments_are_put_together_by_rollout(fakes: Fakes, ps: Penstock, gathered: Gathered) -> None:
    """A trajectory arrives whole however it was cut."""

    def part(rollout_id: str, *calls: str, **fields: Any) -> Any:
        made = [trajectory_pb2.Call(call_id=call) for call in calls]
        return pb.ExportTrajectoriesResponse(
            trajectory=trajectory_pb2.Trajectory(rollout_id=rollout_id, calls=made), **fields
        )

    fakes.queue(
        "ExportTrajectories",
        [part("a", "1", outcome=graded(0.25)), part("a", "2"), part("b", outcome=rollout_pb2.Outcome())],
    )
    (first, outcome), (second, none) = await gathered(ps.rollouts.export(run_id="run"))
    assert [call.call_id for call in first.calls] == ["1", "2"]
    assert outcome.reward is not None and outcome.reward.value == 0.25
    assert (second.rollout_id, none.reward) == ("b", None)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the client would have made; none is made."""
    found: list[float] = []
    real = Backoff.next

    def noted(self: Backoff, error: PenstockError | None = None) -> float:
        found.append(real(self, error))
        return 0.0

    monkeypatch.setattr(Backoff, "next", noted)
    return found


@pytest.mark.requirement("R145")
async def test_driver_that_answers_a_wait_at_once_is_polled_with_pauses(
    fakes: Fakes, ps: Penstock, pauses: list[float]
) -> None:
    """Each answer that says nothing new is followed by a pause, which grows; the same for a group."""
    ended = rollout(rollout_pb2.PHASE_ENDED, outcome=graded(1.0))
    same = [pb.WaitRolloutResponse(rollout=rollout()) for _ in range(8)]
    fakes.queue("WaitRollout", *same, pb.WaitRolloutResponse(rollout=ended))
    await (await ps.rollouts._drivers.all())[0].wait("r1")
    assert len(pauses) == 8 and pauses[0] >= 0.05 and pauses[-1] >= 2.5
    pauses.clear()
    groups = [rollout_pb2.Group(group_id="g1", ended=is_over) for is_over in (False, False, True)]
    fakes.queue("WaitGroup", *(pb.WaitGroupResponse(group=group) for group in groups))
    await (await ps.rollouts._drivers.all())[0].wait_group("g1")
    assert len(pauses) == 2


@pytest.mark.requirement("R148")
async def test_silently_dropped_call_is_repeated_when_safe(fakes: Fakes, ps: Penstock, pauses: list[float]) -> None:
    """A flood of others makes the server's core drop calls with CANCELLED: reads and waits are repeated, and who
    is dropped for good is told what to do. A service's own CANCELLED stays what it is."""
    dropped = Refusal(grpc.StatusCode.CANCELLED, message="")
    fakes.queue("GetRollout", dropped, dropped, pb.GetRolloutResponse(rollout=rollout()))
    assert (await ps.rollouts.attach("r1")).rollout_id == "r1"
    ended = rollout(rollout_pb2.PHASE_ENDED, outcome=graded(1.0))
    fakes.queue("WaitRollout", dropped, pb.WaitRolloutResponse(rollout=ended))
    await (await ps.rollouts._drivers.all())[0].wait("r1")
    assert len(pauses) == 3
    fakes.queue("GetRollout", *[dropped] * 5)
    with pytest.raises(Unavailable, match="dropped the call before it was answered") as caught:
        await ps.rollouts.get("r1")
    assert caught.value.reason == "TRANSPORT_CANCELLED"
    fakes.queue("GetRollout", Refusal(grpc.StatusCode.CANCELLED, "OWN_REASON"))
    with pytest.raises(Cancelled):
        await ps.rollouts.get("r1")


async def test_wait_outlasts_a_poll_that_is_not_answered(fakes: Fakes, ps: Penstock, pauses: list[float]) -> None:
    """The caller set no deadline: a poll that times out is repeated, for a rollout and for a group."""
    late = Refusal(grpc.StatusCode.DEADLINE_EXCEEDED)
    ended = rollout(rollout_pb2.PHASE_ENDED, outcome=graded(1.0))
    fakes.queue("WaitRollout", late, pb.WaitRolloutResponse(rollout=ended))
    assert (await (await ps.rollouts._drivers.all())[0].wait("r1")).outcome is not None
    fakes.queue("WaitGroup", late, pb.WaitGroupResponse(group=rollout_pb2.Group(group_id="g1", ended=True)))
    assert (await (await ps.rollouts._drivers.all())[0].wait_group("g1")).ended
    assert len(pauses) == 2


async def test_watch_is_resumed_however_long_its_reader_worked(
    fakes: Fakes, ps: Penstock, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own time does not count; a minute of failures does."""
    away = Refusal(grpc.StatusCode.UNAVAILABLE)
    first, second = event(1, progress=rollout_pb2.Progress()), event(2, ended=graded(1.0))
    fakes.queue("WatchRollout", [*watched(first), away], watched(second))
    fakes.queue("GetRollout", pb.GetRolloutResponse(rollout=rollout()))
    handle = await ps.rollouts.attach("r1")
    loop = asyncio.get_running_loop()
    now = loop.time
    seen = []
    async for each in handle.events():
        seen.append(each.sequence)
        monkeypatch.setattr(loop, "time", lambda: now() + 3600.0)
    assert seen == [1, 2]
    monkeypatch.undo()

    clock = [now()]

    async def later(seconds: float) -> None:
        clock[0] += seconds

    patience = Patience()
    monkeypatch.setattr(loop, "time", lambda: clock[0])
    monkeypatch.setattr(asyncio, "sleep", later)
    begun = clock[0]
    with pytest.raises(Unavailable):
        while True:
            await patience.pause(Unavailable("away", reason="AWAY"))
    monkeypatch.undo()
    assert 60.0 < clock[0] - begun < 120.0
