"""Users that send an agent further instructions: a script, a model, and what is refused."""

from __future__ import annotations

from asyncio import Event, sleep
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.driver.conftest import Driver, accepted, empty_terms, wire_spec
from tests.unit.driver.world import bash, say

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.domain.failures import classify_exit
from penstock_driver.domain.ports import Command, Exit, ExitReason, GateClosing, ModelRequest
from penstock_driver.domain.records import Record, RequestKey, new_id
from penstock_driver.domain.rollout import Cause, Limits, Phase, RolloutFailed, RolloutSpec, Verifier
from penstock_driver.domain.users import User, UserModel
from penstock_driver.rollouts.conversation.conversation import Conversation
from penstock_driver.rollouts.conversation.user import RolloutUser
from penstock_driver.wire.specs import effective_spec, rollout_spec

pytestmark = pytest.mark.requirement("R133")


def obeys(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The script of an agent that runs its last instruction as a command, and then says what it was."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return say(f"done: {asked[-1]}") if messages[-1]["role"] == "tool" else bash(asked[-1])


def with_user(driver: Driver, user: User, **changes: Any) -> RolloutSpec:
    base = driver.spec()
    verifier = Verifier(
        commands=(Command(shell="cat out.txt | tr -d '\\n' | grep -qx abc && echo 1 > $PENSTOCK_REWARD_FILE"),),
        reward_by_file=True,
    )
    task = replace(base.task, instruction="printf a >> out.txt", verifier=verifier)
    return replace(base, task=task, user=user, **changes)


def at_once(spec: RolloutSpec) -> RolloutSpec:
    """The spec, with all of the work in its first instruction."""
    return replace(spec, task=replace(spec.task, instruction="printf abc > out.txt"))


def turns(events: list[rollout_pb2.RolloutEvent]) -> list[tuple[int, str, str, str]]:
    return [
        (turn.index, turn.agent_message, turn.instruction, turn.end_reason)
        for turn in (event.user_turn for event in events if event.HasField("user_turn"))
    ]


B, C = "printf b >> out.txt", "printf c >> out.txt"


async def test_a_script_goes_on_with_the_same_agent_and_the_verifier_runs_once(driver: Driver) -> None:
    driver.gate.script = obeys
    record = await driver.start(with_user(driver, User(2, (B, C))))
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0
    events = await driver.events(record.rollout_id)
    assert turns(events) == [
        (1, "done: printf a >> out.txt", B, ""),
        (2, f"done: {B}", C, ""),
        (3, f"done: {C}", "", "SCRIPT_ENDED"),
    ]
    assert sum(event.HasField("agent_exited") for event in events) == 3
    last = driver.gate.requests[-1][2]["messages"]
    assert [message["content"] for message in last if message["role"] == "user"] == ["printf a >> out.txt", B, C]
    assert len([message for message in last if message["role"] == "tool"]) == 3
    assert not driver.sandboxes.boxes and driver.gate.closed == {record.rollout_id: "AGENT_EXITED"}


async def test_a_model_sees_the_conversation_with_the_roles_exchanged(driver: Driver) -> None:
    """Its rollout at the gate is open while the agent's is, and ends with [END]."""
    answers = {1: B, 2: C, 3: "Thanks! [END]"}
    driver.gate.script = obeys
    driver.gate.user = lambda body: answers[sum(message["role"] == "user" for message in body["messages"])]
    user = User(8, model=UserModel("You are brief.", empty_terms(), max_tokens=99, temperature=0.5))
    record = await driver.start(with_user(driver, user))
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0
    last = driver.gate.asked[-1]
    assert (last["model"], last["max_tokens"], last["temperature"]) == ("person", 99, 0.5)
    system, *said = last["messages"]
    assert system["content"].startswith("You are brief.") and system["content"].endswith("printf a >> out.txt")
    assert [(message["role"], message["content"]) for message in said] == [
        ("user", "done: printf a >> out.txt"),
        ("assistant", B),
        ("user", f"done: {B}"),
        ("assistant", C),
        ("user", f"done: {C}"),
    ]
    (opened,) = driver.gate.users
    assert (opened.rollout_id, opened.request_id) == (record.rollout_id, f"{record.rollout_id}/user/1")
    assert turns(await driver.events(record.rollout_id))[-1] == (3, f"done: {C}", "", "USER_ENDED")


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (lambda body: "echo on", "MAX_INSTRUCTIONS"),
        (lambda body: " \n", "USER_ENDED"),
        (lambda body: "\0 \0", "USER_ENDED"),
    ],
)
async def test_a_model_that_goes_on_or_falls_silent_ends(
    driver: Driver, says: Callable[[dict[str, Any]], str], reason: str
) -> None:
    driver.gate.script, driver.gate.user = obeys, says
    record = await driver.start(with_user(driver, User(1, model=UserModel("p", empty_terms()))))
    await driver.outcome(record)
    assert turns(await driver.events(record.rollout_id))[-1][3] == reason


@pytest.mark.requirement("R72")
@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (FailedPrecondition("used up", reason="BUDGET_EXHAUSTED"), "USER_BUDGET"),
        (FailedPrecondition("20000 tokens", reason="USER_REFUSED"), "USER_REFUSED"),
        (InvalidArgument("too many bytes", reason="FIELD_INVALID"), "USER_REFUSED"),
    ],
)
async def test_a_user_who_cannot_be_asked_any_more_has_ended(
    driver: Driver, refusal: PenstockError, reason: str
) -> None:
    """The work is graded: the agent's last message may be the cause."""
    driver.gate.script = obeys
    driver.gate.fail["ask_user"] = [refusal]
    record = await driver.start(at_once(with_user(driver, User(2, model=UserModel("p", empty_terms())))))
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0 and not outcome.HasField("failure")
    assert [turn[2:] for turn in turns(await driver.events(record.rollout_id))] == [("", reason)]


@pytest.mark.requirement("R72")
async def test_an_agent_that_leaves_its_user_no_time_has_timed_out(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is graded, and the attempt is not repeated: the agent chooses when it ends."""

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        monkeypatch.setattr(Conversation, "left_s", property(lambda _: 0.05))
        return obeys(messages)

    driver.gate.script, driver.gate.user_reached = script, Event()
    user = User(2, model=UserModel("p", empty_terms()))
    record = await driver.start(at_once(with_user(driver, user, max_attempts=3)))
    outcome = await driver.outcome(record)
    assert (outcome.failure.cause, outcome.failure.reason) == (rollout_pb2.FAILURE_CAUSE_TIMEOUT, "AGENT_TIMED_OUT")
    assert outcome.reward.value == 1.0 and (await driver.manager.get(record.rollout_id)).attempts == 1
    assert turns(await driver.events(record.rollout_id))[-1][3] == "AGENT_TIMED_OUT"


async def test_a_gate_that_is_away_for_the_rest_of_the_agents_time_is_not_blamed_on_it(driver: Driver) -> None:
    user = User(2, model=UserModel("p", empty_terms()))
    driver.gate.fail["open_user"] = [Unavailable("away", reason="X") for _ in range(9)]
    request = ModelRequest("r", "r/user/1", empty_terms(), "d", "t")
    with pytest.raises(RolloutFailed) as failed:
        await RolloutUser(user, driver.gate, request, "go").turn([], "done", 0.05)
    assert (failed.value.failure.reason, failed.value.failure.retriable) == ("USER_UNANSWERED", True)


async def test_a_model_that_does_not_answer_is_a_loss_of_the_model(driver: Driver) -> None:
    """After some tries. Another attempt may go well."""
    driver.gate.script = obeys
    driver.gate.fail["ask_user"] = [Unavailable("down", reason="USER_UNANSWERED") for _ in range(3)]
    outcome = await driver.run(with_user(driver, User(2, model=UserModel("p", empty_terms()))))
    failure = outcome.failure
    assert (failure.reason, failure.retriable) == ("USER_UNANSWERED", True)
    assert failure.cause == rollout_pb2.FAILURE_CAUSE_MODEL and not outcome.HasField("reward")


async def test_a_model_that_thinks_for_too_long_is_not_waited_for(driver: Driver) -> None:
    driver.gate.script, driver.gate.user_reached = obeys, Event()
    user = User(2, model=UserModel("p", empty_terms(), timeout_s=0.05))
    failure = (await driver.run(with_user(driver, user))).failure
    assert (failure.reason, failure.retriable) == ("USER_UNANSWERED", True) and "timeout" in failure.message


async def test_an_agent_that_fails_gets_no_further_instruction(driver: Driver) -> None:
    """Its work is graded, as that of any agent that fails."""
    driver.gate.script = lambda messages: 400
    driver.gate.judging = driver.gate.closing = GateClosing(calls=1, unanswered=1, refused=1)
    record = await driver.start(with_user(driver, User(1, (B,)), limits=Limits(agent_s=30)))
    outcome = await driver.outcome(record)
    assert outcome.HasField("failure")
    assert turns(await driver.events(record.rollout_id)) == [(1, "", "", "AGENT_FAILED")]


REFUSALS: list[PenstockError] = [
    FailedPrecondition("a directory", reason="NOT_A_FILE"),
    FailedPrecondition("a link", reason="SYMLINK_IN_PATH"),
    ResourceExhausted("full", reason="DISK_FULL"),
]


@pytest.mark.requirement("R72")
@pytest.mark.parametrize("takes_files", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.reason)
async def test_an_agent_that_prevents_its_further_start_is_graded(
    driver: Driver, refusal: PenstockError, takes_files: bool
) -> None:
    """Its key is revoked before the verifier runs, and the attempt is not repeated."""
    driver.sandboxes.takes_files = takes_files

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        driver.sandboxes.fail["start" if takes_files else "write_files"] = [refusal]
        return obeys(messages)

    driver.gate.script = script
    record = await driver.start(at_once(with_user(driver, User(1, (B,)), max_attempts=3)))
    outcome = await driver.outcome(record)
    failure = outcome.failure
    assert (failure.cause, failure.reason) == (rollout_pb2.FAILURE_CAUSE_AGENT, "AGENT_RESTART_FAILED")
    assert not failure.retriable and refusal.reason in failure.message and outcome.reward.value == 1.0
    assert (await driver.manager.get(record.rollout_id)).attempts == 1
    assert driver.gate.closed == {record.rollout_id: "AGENT_EXITED"} and not driver.sandboxes.boxes


@pytest.mark.requirement("R72")
def test_only_a_further_start_that_fails_is_the_agents() -> None:
    """Lost calls excuse nothing there; a replay that failed before it does."""
    ended, closing = Exit(ExitReason.START_FAILED, message="no directory"), GateClosing(calls=2, unanswered=2, lost=1)
    first = classify_exit(ended, closing, None, (0,), Phase.RUNNING)
    further = classify_exit(ended, closing, None, (0,), Phase.RUNNING, gate_was_away=True, is_further=True)
    replayed = classify_exit(ended, GateClosing(diverged="x"), None, (0,), Phase.RUNNING, is_further=True)
    assert first is not None and further is not None and replayed is not None
    assert (first.cause, first.reason) == (Cause.INFRASTRUCTURE, "AGENT_START_FAILED")
    assert (further.cause, further.reason, further.retriable) == (Cause.AGENT, "AGENT_RESTART_FAILED", False)
    assert further.is_gradable and replayed.reason == "REPLAY_DIVERGED"


def wanted() -> rollout_pb2.RolloutSpec:
    spec = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    spec.agent.name, spec.task.instruction = "shell", "go"
    spec.user.model.prompt = "You are curt."
    return spec


def _no_resume(spec: rollout_pb2.RolloutSpec) -> None:
    spec.agent.name = "mini-swe-agent"


def _no_prompt(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.model.prompt = " "


def _nobody(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.script.SetInParent()


def _too_many(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.max_instructions = 65


def _too_long(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.script.instructions.extend(["ok", "x" * (64 << 10) + "x"])


def _too_hot(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.model.temperature = float("nan")


def _no_tokens(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.model.max_tokens = 0


def _no_time(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.model.timeout.SetInParent()


def _callers_own(spec: rollout_pb2.RolloutSpec) -> None:
    spec.user.model.source.upstream.caller.base_url = "http://127.0.0.1:1"


def _exact(spec: rollout_pb2.RolloutSpec) -> None:
    spec.replay = rollout_pb2.REPLAY_EXACT


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_no_resume, "spec.user"),
        (_no_prompt, "spec.user.model.prompt"),
        (_nobody, "spec.user"),
        (_too_many, "spec.user.max_instructions"),
        (_too_long, "spec.user.script.instructions[1]"),
        (_too_hot, "spec.user.model.temperature"),
        (_no_tokens, "spec.user.model.max_tokens"),
        (_no_time, "spec.user.model.timeout"),
        (_callers_own, "spec.user.model.source.upstream.caller"),
        (_exact, "spec.replay"),
    ],
)
def test_a_user_that_cannot_be_is_refused_by_its_field(
    driver: Driver, change: Callable[[rollout_pb2.RolloutSpec], None], field: str
) -> None:
    spec = wanted()
    change(spec)
    with pytest.raises(InvalidArgument) as refused:
        rollout_spec(spec, driver.registry, "default")
    assert [one.field for one in refused.value.violations] == [field]


def test_a_users_bounds_are_in_the_effective_spec(driver: Driver) -> None:
    user = effective_spec(rollout_spec(wanted(), driver.registry, "default")).user
    assert (user.max_instructions, user.model.max_tokens, user.model.timeout.seconds) == (8, 1024, 300)
    assert user.model.budgets.max_calls == 16
    scripted = wanted()
    scripted.user.script.instructions.extend(["a", "b", "c"])
    assert effective_spec(rollout_spec(scripted, driver.registry, "default")).user.max_instructions == 3


async def left(driver: Driver, wire: rollout_pb2.RolloutSpec, at: Event) -> Record:
    """A rollout that its driver leaves as soon as `at` is set."""
    spec, record = accepted(driver, wire)
    sealed = await driver.opened.parts.specs.sealed(spec, record)
    await driver.records.create(RequestKey(new_id("q"), "d"), [record], sealed=sealed)
    driver.manager.start(spec, [record])
    await at.wait()
    await driver.manager.leave(60)
    return record


def asks_twice() -> rollout_pb2.RolloutSpec:
    wire = wire_spec()
    wire.task.instruction = "printf ki > out.txt"
    return wire


async def gone_on(driver: Driver, record: Record) -> list[rollout_pb2.RolloutEvent]:
    """The events, once the next driver has gone on to the end."""
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert not outcome.HasField("failure") and outcome.reward.value == 1.0, outcome
    assert (await driver.manager.get(record.rollout_id)).attempts == 1
    return await driver.events(record.rollout_id)


@pytest.mark.requirement("R127")
async def test_a_decided_instruction_is_given_once_by_the_next_driver(driver: Driver) -> None:
    """It is on disk before the agent is started, and the agent key is the one that it had."""
    reached = Event()

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool" and not reached.is_set():
            driver.sandboxes.holds = {"start": reached}
        return obeys(messages)

    driver.gate.script = script
    wire = asks_twice()
    wire.user.script.instructions.append("printf wi >> out.txt")
    record = await left(driver, wire, reached)
    assert turns(await driver.events(record.rollout_id)) == [
        (1, "done: printf ki > out.txt", "printf wi >> out.txt", "")
    ]
    driver.sandboxes.holds = {}
    events = await gone_on(driver, record)
    assert [turn[0] for turn in turns(events)] == [1, 2]
    assert sum(event.HasField("agent_exited") for event in events) == 2
    assert driver.gate.requested == [record.rollout_id] * 2


@pytest.mark.requirement("R127", "R72")
async def test_an_agent_that_the_next_driver_cannot_start_is_graded(driver: Driver) -> None:
    reached = Event()

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            driver.sandboxes.holds = {"start": reached}
        return obeys(messages)

    driver.gate.script = script
    wire = asks_twice()
    wire.user.script.instructions.append("true")
    record = await left(driver, wire, reached)
    driver.sandboxes.holds, driver.sandboxes.fail = {}, {"write_files": [REFUSALS[0]]}
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert (outcome.failure.reason, outcome.reward.value) == ("AGENT_RESTART_FAILED", 0.0)
    assert outcome.HasField("reward") and (await driver.manager.get(record.rollout_id)).attempts == 1


@pytest.mark.requirement("R127")
async def test_a_question_that_is_not_answered_is_asked_again_as_it_was(driver: Driver) -> None:
    """So the gate knows it. What the agent has printed before is recorded once."""
    driver.gate.script, reached = obeys, Event()
    wire = asks_twice()
    wire.user.model.prompt = "You want kiwis."
    driver.gate.user_reached = reached
    record = await left(driver, wire, reached)
    driver.gate.user_reached = None
    driver.gate.user = lambda body: "[END]" if len(body["messages"]) > 2 else "printf wi >> out.txt"
    events = await gone_on(driver, record)
    assert [turn[3] for turn in turns(events)] == ["", "USER_ENDED"]
    assert len(driver.gate.asked) == 2
    reported = [event.agent_event.data for event in events if event.HasField("agent_event")]
    said = [data["text"] for data in reported if "text" in data]
    assert said == ["done: printf ki > out.txt", "done: printf wi >> out.txt"]


@pytest.mark.requirement("R127", "R72")
async def test_that_the_agents_time_was_over_is_known_to_the_next_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = Event()

    async def close(rollout_id: str, reason: str) -> GateClosing:
        reached.set()
        await Event().wait()
        raise AssertionError

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        monkeypatch.setattr(Conversation, "left_s", property(lambda _: 0.05))
        monkeypatch.setattr(driver.gate, "close", close)
        return obeys(messages)

    driver.gate.script, driver.gate.user_reached = script, Event()
    wire = asks_twice()
    wire.user.model.prompt = "You want kiwis."
    record = await left(driver, wire, reached)
    monkeypatch.undo()
    driver.manager = driver.make()
    assert await driver.manager.recover() == 1
    outcome = await driver.outcome(record)
    assert outcome.failure.reason == "AGENT_TIMED_OUT" and outcome.HasField("reward")
    assert [turn[3] for turn in turns(await driver.events(record.rollout_id))] == ["AGENT_TIMED_OUT"]


@pytest.mark.requirement("R131")
async def test_a_user_is_asked_in_no_pause(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that the backend cannot freeze may end in one."""
    driver.gate.script, driver.sandboxes.freezes = obeys, False
    driver.gate.hold, classified = Event(), Event()
    asked: list[int] = []
    answered, ask_user = driver.gate.answered, driver.gate.ask_user

    async def counted(rollout_id: str) -> GateClosing:
        classified.set()
        return await answered(rollout_id)

    async def noted(rollout_id: str, body: bytes, timeout_s: float) -> str:
        asked.append(driver.manager.paused_count([rollout_id]))
        return await ask_user(rollout_id, body, timeout_s)

    monkeypatch.setattr(driver.gate, "answered", counted)
    monkeypatch.setattr(driver.gate, "ask_user", noted)
    record = await driver.start(at_once(with_user(driver, User(2, model=UserModel("p", empty_terms())))))
    await driver.gate.called.wait()
    await driver.manager.pause(record.rollout_id, "", None, 30.0)
    driver.gate.hold.set()  # its gate is no real one: it answers
    await classified.wait()
    for _ in range(20):
        await sleep(0)
    await driver.manager.resume(record.rollout_id, 30.0)
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0 and not outcome.HasField("failure"), outcome
    assert asked == [0]


@pytest.mark.requirement("R131")
@pytest.mark.parametrize(
    "error", [FailedPrecondition("no answer", reason="USER_UNANSWERED"), TimeoutError()], ids=["unanswered", "time"]
)
async def test_a_question_whose_time_a_pause_took_is_asked_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is the same question, so the gate has the answer if there was one."""
    driver.gate.script, reached, fails = obeys, Event(), Event()
    bodies: list[bytes] = []
    ask_user = driver.gate.ask_user

    async def kept(rollout_id: str, body: bytes, timeout_s: float) -> str:
        bodies.append(body)
        if len(bodies) == 1:
            reached.set()
            await fails.wait()
            raise error
        return await ask_user(rollout_id, body, timeout_s)

    monkeypatch.setattr(driver.gate, "ask_user", kept)
    spec = at_once(with_user(driver, User(2, model=UserModel("p", empty_terms())), limits=Limits(agent_s=100.0)))
    record = await driver.start(spec)
    await reached.wait()
    await driver.manager.pause(record.rollout_id, "", None, 30.0)
    fails.set()
    await driver.manager.resume(record.rollout_id, 30.0)
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0 and not outcome.HasField("failure"), outcome
    assert len(bodies) == 2 and bodies[0] == bodies[1]
    assert turns(await driver.events(record.rollout_id))[-1][3] == "USER_ENDED"
