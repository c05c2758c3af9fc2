"""The driver's RPCs as a client in any language meets them: idempotence, paging, roles, watches, agents as data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from tests.integration.driver.stack import TOKEN, Stack
from tests.support.endpoints.upstream import vendor

from penstock.driver.v1 import (
    agent_pb2,
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    terminal_service_pb2,
    terminal_service_pb2_grpc,
)
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import process_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect, error_from_rpc
from penstock_chassis.errors import PenstockError, Unauthenticated
from penstock_driver.agents.registry import built_in_specs


@pytest.fixture
async def channel(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(stack.driver.address, TOKEN) as channel:
        yield channel


@pytest.fixture
def rollouts(channel: grpc.aio.Channel) -> Any:
    return rollout_service_pb2_grpc.RolloutServiceStub(channel)


@pytest.fixture
def agents(channel: grpc.aio.Channel) -> Any:
    return agent_service_pb2_grpc.AgentServiceStub(channel)


def echo_agent(**changes: Any) -> agent_pb2.AgentSpec:
    """An agent that a client brings: it prints one event and calls nobody."""
    settings = Struct()
    settings.update({"url": "{{base_url}}", "key": "{{api_key}}", "words": "{{option.words}}"})
    values: dict[str, Any] = {
        "name": "echo",
        "version": "1",
        "argv": ["/bin/sh", "-c", 'printf \'{"type":"say","text":"%s"}\\n\' "$(cat)"; cat "$HOME/echo.json" >&2'],
        "instruction": agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
        "files": [agent_pb2.ConfigFile(path="echo.json", json=settings)],
        "dialects": [trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        "options": [agent_pb2.AgentOption(name="words", type=agent_pb2.AgentOption.TYPE_INTEGER)],
        "events": agent_pb2.EventMapping(
            source=agent_pb2.EventMapping.SOURCE_STDOUT_JSON_LINES,
            rules=[
                agent_pb2.EventRule(
                    when="type == 'say'", kind=agent_pb2.AGENT_EVENT_KIND_ASSISTANT, fields={"text": "text"}
                )
            ],
        ),
    }
    return agent_pb2.AgentSpec(**{**values, **changes})


def echo_rollout(**changes: Any) -> rollout_pb2.RolloutSpec:
    task = rollout_pb2.Task(task_id="echo", instruction="hello there", metadata=None)
    source = interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny"))
    values: dict[str, Any] = {
        "task": task,
        "agent": rollout_pb2.AgentChoice(name="echo"),
        "mode": interception_pb2.MODE_INTERCEPTION_GATE,
        "source": source,
    }
    return rollout_pb2.RolloutSpec(**{**values, **changes})


@pytest.fixture
async def echo(agents: Any) -> agent_service_pb2.Agent:
    """The echo agent, registered."""
    answer = await agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=echo_agent()))
    agent: agent_service_pb2.Agent = answer.agent
    return agent


async def refusal(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def wait(rollouts: Any, rollout_id: str) -> rollout_pb2.Rollout:
    request = rollout_service_pb2.WaitRolloutRequest(rollout_id=rollout_id)
    answer = await rollouts.WaitRollout(request, timeout=60)
    rollout: rollout_pb2.Rollout = answer.rollout
    return rollout


@pytest.mark.requirement("R17", "R66")
async def test_an_agent_that_a_client_registers_runs_like_a_built_in_one(
    rollouts: Any, agents: Any, echo: agent_service_pb2.Agent
) -> None:
    """Data only; its options are typed, and its stdin is the instruction."""
    options = Struct()
    options.update({"words": 4})
    spec = echo_rollout(agent=rollout_pb2.AgentChoice(name="echo", options=options))
    answer = await rollouts.CreateRollout(rollout_service_pb2.CreateRolloutRequest(request_id="reg-1", spec=spec))
    ended = await wait(rollouts, answer.rollout.rollout_id)
    assert not ended.outcome.HasField("failure"), ended.outcome
    assert not ended.outcome.HasField("reward")
    assert ended.agent_spec_sha256 == echo.spec_sha256
    assert json.loads(ended.outcome.agent_exit.stderr_tail)["words"] == 4
    request = rollout_service_pb2.WatchRolloutRequest(rollout_id=ended.rollout_id)
    told = [message.event.agent_event async for message in rollouts.WatchRollout(request)]
    assert [dict(event.data) for event in told if event.kind] == [{"text": "hello there"}]
    listed = await agents.ListAgents(agent_service_pb2.ListAgentsRequest())
    assert [agent.spec.name for agent in listed.agents] == sorted(["echo", *(spec.name for spec in built_in_specs())])


@pytest.mark.requirement("R17", "R63")
async def test_invalid_agent_is_refused_by_field_and_a_builtin_name_is_taken(agents: Any) -> None:
    """Nothing is registered."""
    wrong = echo_agent(name="Wrong", version="", argv=["x", "{{api_key}}"])
    error = await refusal(agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=wrong)))
    assert error.reason == "FIELD_INVALID"
    assert {violation.field for violation in error.violations} == {"name", "version"}
    taken = agent_service_pb2.RegisterAgentRequest(spec=echo_agent(name="shell"))
    assert (await refusal(agents.RegisterAgent(taken))).reason == "AGENT_BUILT_IN"
    unset = echo_agent(instruction=agent_pb2.InstructionDelivery())
    error = await refusal(agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=unset)))
    assert [violation.field for violation in error.violations] == ["instruction.method"]


@pytest.mark.requirement("R63", "R66")
async def test_a_spec_is_checked_without_being_registered(agents: Any) -> None:
    """What does not hold is a finding for each mistake, what could be better a warning, and nothing stays."""

    async def check(**wanted: Any) -> list[tuple[str, int, str]]:
        request = agent_service_pb2.CheckAgentRequest(**wanted)
        return [(item.step, item.outcome, item.message) async for item in agents.CheckAgent(request)]

    response = agent_service_pb2.CheckAgentResponse
    found = await check(spec=echo_agent(name="Wrong", argv=["x", "{{api_key}}"]), spec_only=True)
    assert {outcome for _, outcome, _ in found} == {response.OUTCOME_FAILED}
    assert any(message.startswith("name: ") for *_, message in found)
    found = await check(spec=echo_agent(name="unseen"), spec_only=True)
    assert found[-1][:2] == ("spec", response.OUTCOME_OK)
    assert {outcome for _, outcome, _ in found[:-1]} <= {response.OUTCOME_WARNING}
    assert (await refusal(check(name="shell", spec=echo_agent()))).reason == "FIELD_INVALID"
    unseen = agent_service_pb2.GetAgentRequest(name="unseen")
    assert (await refusal(agents.GetAgent(unseen))).reason == "AGENT_UNKNOWN"


@pytest.mark.requirement("R25")
async def test_repeated_creation_returns_the_same_rollout_and_a_different_one_is_refused(
    rollouts: Any, echo: agent_service_pb2.Agent
) -> None:
    """By request id, and by an identifier that the client chose."""
    request = rollout_service_pb2.CreateRolloutRequest(request_id="same", spec=echo_rollout(), rollout_id="mine-1")
    answers = await asyncio.gather(*(rollouts.CreateRollout(request) for _ in range(5)))
    answers.append(await rollouts.CreateRollout(request))
    assert {answer.rollout.rollout_id for answer in answers} == {"mine-1"}
    other = rollout_service_pb2.CreateRolloutRequest(request_id="same", spec=echo_rollout(run_id="x"))
    assert (await refusal(rollouts.CreateRollout(other))).reason == "REQUEST_ID_REUSED"
    reused = rollout_service_pb2.CreateRolloutRequest(request_id="new", spec=echo_rollout(), rollout_id="mine-1")
    assert (await refusal(rollouts.CreateRollout(reused))).reason == "ROLLOUT_EXISTS"
    await wait(rollouts, "mine-1")


@pytest.mark.requirement("R63")
async def test_run_budgets_and_key_terms_reach_the_gate_or_are_refused_first(
    rollouts: Any, echo: agent_service_pb2.Agent
) -> None:
    """What does not hold is named by field; a difference from the run's budgets refuses the creating call."""
    terms: dict[str, Any] = {
        "run_id": "run",
        "run_budgets": interception_pb2.RunBudgets(max_calls=9, call_rate=interception_pb2.CallRate(calls=5)),
        "token_terms": interception_pb2.TokenTerms(scopes=[interception_pb2.TOKEN_SCOPE_COMPLETIONS]),
    }
    request = rollout_service_pb2.CreateRolloutRequest(request_id="one", spec=echo_rollout(**terms))
    created = (await rollouts.CreateRollout(request)).rollout
    assert created.spec.run_budgets.max_calls == 9
    assert not (await wait(rollouts, created.rollout_id)).outcome.HasField("failure")
    other = {**terms, "run_budgets": interception_pb2.RunBudgets(max_calls=8)}
    request = rollout_service_pb2.CreateRolloutRequest(request_id="two", spec=echo_rollout(**other))
    error = await refusal(rollouts.CreateRollout(request))
    assert error.reason == "RUN_BUDGETS_DIFFER"
    fields = {violation.field for violation in error.violations}
    assert fields == {"run_budgets.max_calls", "run_budgets.call_rate"}
    wrong: dict[str, Any] = {
        "budgets": interception_pb2.Budgets(max_request_bytes=0, call_rate=interception_pb2.CallRate(burst=0)),
        "run_budgets": interception_pb2.RunBudgets(max_calls=0),
        "token_terms": interception_pb2.TokenTerms(scopes=[99], ttl=Duration()),  # type: ignore[list-item]
    }
    request = rollout_service_pb2.CreateRolloutRequest(request_id="three", spec=echo_rollout(**wrong))
    error = await refusal(rollouts.CreateRollout(request))
    assert {violation.field for violation in error.violations} == {
        "spec.budgets.max_request_bytes",
        "spec.budgets.call_rate.calls",
        "spec.budgets.call_rate.burst",
        "spec.run_budgets.max_calls",
        "spec.run_budgets",
        "spec.token_terms.scopes[0]",
        "spec.token_terms.ttl",
    }


@pytest.mark.requirement("R26")
async def test_a_group_is_watched_in_one_stream_that_ends_with_the_group(
    rollouts: Any, echo: agent_service_pb2.Agent
) -> None:
    """Each rollout's events in order and without gaps, resumable by the position of each."""
    request = rollout_service_pb2.CreateGroupRequest(request_id="g", spec=echo_rollout(), size=3, group_id="grp")
    group = (await rollouts.CreateGroup(request)).group
    assert list(group.rollout_ids) == ["grp-0", "grp-1", "grp-2"]
    watch = rollout_service_pb2.WatchGroupRequest(group_id="grp")
    messages = [message async for message in rollouts.WatchGroup(watch) if not message.HasField("heartbeat")]
    assert messages[-1].group.complete
    assert sorted(messages[-1].group.result_rollout_ids) == ["grp-0", "grp-1", "grp-2"]
    by_rollout: dict[str, list[int]] = {}
    for message in messages[:-1]:
        by_rollout.setdefault(message.event.rollout_id, []).append(message.event.sequence)
    assert all(sequences == list(range(1, len(sequences) + 1)) for sequences in by_rollout.values())
    watch.after_sequences.update({"grp-0": 2, "grp-1": 10**6, "grp-2": 10**6})
    rest = [message.event.sequence async for message in rollouts.WatchGroup(watch) if message.HasField("event")]
    assert rest == by_rollout["grp-0"][2:]
    await rollouts.DeleteGroup(rollout_service_pb2.DeleteGroupRequest(group_id="grp"))
    await rollouts.DeleteGroup(rollout_service_pb2.DeleteGroupRequest(group_id="grp"))
    gone = rollouts.GetGroup(rollout_service_pb2.GetGroupRequest(group_id="grp"))
    assert (await refusal(gone)).reason == "GROUP_UNKNOWN"


@pytest.mark.requirement("R26")
async def test_lists_are_paged_and_filtered(rollouts: Any, echo: agent_service_pb2.Agent) -> None:
    """Newest first; a token that is not ours is refused."""
    ids = []
    for number in range(5):
        spec = echo_rollout(run_id="paged", labels={"parity": str(number % 2)})
        request = rollout_service_pb2.CreateRolloutRequest(request_id=f"page-{number}", spec=spec)
        ids.append((await rollouts.CreateRollout(request)).rollout.rollout_id)
    for rollout_id in ids:
        await wait(rollouts, rollout_id)
    found: list[str] = []
    page = rollout_service_pb2.ListRolloutsRequest(
        page_size=2, filter=rollout_service_pb2.RolloutFilter(run_id="paged", ended=True)
    )
    while True:
        answer = await rollouts.ListRollouts(page)
        found += [rollout.rollout_id for rollout in answer.rollouts]
        if not answer.next_page_token:
            break
        page.page_token = answer.next_page_token
    assert found == ids[::-1]
    odd = rollout_service_pb2.RolloutFilter(run_id="paged", labels={"parity": "1"})
    answer = await rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest(filter=odd))
    assert [rollout.rollout_id for rollout in answer.rollouts] == [ids[3], ids[1]]
    for bad in ({"page_size": -1}, {"page_token": "'; DROP TABLE rollouts"}):
        call = rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest(**bad))
        assert (await refusal(call)).reason == "FIELD_INVALID"


@pytest.mark.requirement("R1", "R8")
async def test_kept_and_shown_specs_have_no_secret_and_no_content(
    rollouts: Any, stack: Stack, echo: agent_service_pb2.Agent
) -> None:
    """Neither in answers nor in the driver's journal nor in its log."""
    secret = "sk-test '$(leak)"
    spec = echo_rollout()
    command = process_service_pb2.Command(shell="true", secret_env={"TOKEN": secret})
    spec.task.setup.append(command)
    spec.task.files.add(path="big.txt", content=b"content of a file")
    spec.source.upstream.caller.api_key = secret
    async with vendor() as upstream:
        spec.source.upstream.caller.base_url = upstream.base_url
        request = rollout_service_pb2.CreateRolloutRequest(request_id="secret", spec=spec)
        created = (await rollouts.CreateRollout(request)).rollout
        cancel = rollout_service_pb2.CancelRolloutRequest(rollout_id=created.rollout_id)
        ended = (await rollouts.CancelRollout(cancel)).rollout
    assert ended.spec.task.setup[0].secret_env == {"TOKEN": ""}
    assert ended.spec.limits.agent.seconds == 900
    journal = stack.directory / "driver"
    kept = b"".join(path.read_bytes() for path in journal.iterdir() if path.is_file()) + stack.driver.log.read_bytes()
    assert secret.encode() not in ended.SerializeToString() + kept
    assert b"content of a file" not in ended.SerializeToString() + kept


@pytest.mark.requirement("R24", "R62")
async def test_trajectory_exists_only_after_the_end_and_with_the_gate(
    rollouts: Any, echo: agent_service_pb2.Agent
) -> None:
    """Typed errors, not empty answers."""
    spec = echo_rollout()
    spec.task.setup.add(shell="exit 3")
    request = rollout_service_pb2.CreateRolloutRequest(request_id="no-gate", spec=spec)
    rollout_id = (await rollouts.CreateRollout(request)).rollout.rollout_id
    ended = await wait(rollouts, rollout_id)
    assert ended.outcome.failure.reason == "SETUP_FAILED"

    async def trajectory(wanted: str) -> None:
        async for _ in rollouts.GetTrajectory(rollout_service_pb2.GetTrajectoryRequest(rollout_id=wanted)):
            pass

    assert (await refusal(trajectory(rollout_id))).reason == "TRAJECTORY_ABSENT"
    assert (await refusal(trajectory("nobody"))).reason == "ROLLOUT_UNKNOWN"
    everything = rollout_service_pb2.ExportTrajectoriesRequest()
    exported = {answer.trajectory.rollout_id async for answer in rollouts.ExportTrajectories(everything)}
    assert rollout_id in exported


@pytest.mark.requirement("R5", "R14")
async def test_calls_without_a_token_are_refused(stack: Stack) -> None:
    """Every method refuses a caller without a credential before it looks at anything."""
    async with connect(stack.driver.address) as naked:
        stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(naked)
        terminals: Any = terminal_service_pb2_grpc.TerminalServiceStub(naked)
        for call in (
            terminals.GetTerminal(terminal_service_pb2.GetTerminalRequest(terminal_id="t")),
            terminals.OpenTerminal(terminal_service_pb2.OpenTerminalRequest()),
            stub.GetRollout(rollout_service_pb2.GetRolloutRequest(rollout_id="r")),
            stub.CreateRollout(rollout_service_pb2.CreateRolloutRequest()),
            stub.CancelRollout(rollout_service_pb2.CancelRolloutRequest(rollout_id="r")),
        ):
            assert isinstance(await refusal(call), Unauthenticated)
