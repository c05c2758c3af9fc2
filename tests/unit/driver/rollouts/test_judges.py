"""Verifiers that ask a judge: what they are given and when, and whose loss a silent judge is."""

from __future__ import annotations

import re
import tarfile
from asyncio import Event
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.driver.conftest import Driver

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock_driver.domain.ports import BackendFacts, Command, GateClosing, ModelRequest
from penstock_driver.domain.rollout import RolloutSpec, Verifier
from penstock_driver.grading import grader
from penstock_driver.rollouts.preflight import Preflight, check_backend
from penstock_driver.wire.specs import effective_spec, rollout_spec

ABLE = BackendFacts("b", True, "", True, True, True, False, True, True, True)
SHOW = 'echo "$PENSTOCK_JUDGE_URL $PENSTOCK_JUDGE_KEY $PENSTOCK_JUDGE_MODEL"'


def wanted() -> rollout_pb2.RolloutSpec:
    """A rollout whose verifier asks an endpoint of the operator's."""
    spec = rollout_pb2.RolloutSpec(mode=interception_pb2.MODE_INTERCEPTION_GATE)
    spec.source.tokenizer.name = "tiny"
    spec.agent.name, spec.task.task_id, spec.task.instruction = "shell", "t", "do it"
    spec.task.verifier.commands.add().shell = "true"
    spec.task.verifier.passed_share.SetInParent()
    spec.task.verifier.judge.source.upstream.name = "judge"
    return spec


def read(driver: Driver, spec: rollout_pb2.RolloutSpec) -> RolloutSpec:
    return rollout_spec(spec, driver.registry, "default")


@pytest.fixture
def judged(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutSpec]:
    """A rollout of the small task with these commands, graded in a fresh fork with a judge."""

    async def unchanged(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        tarfile.open(fileobj=sink, mode="w").close()
        return []

    monkeypatch.setattr(driver.sandboxes, "diff", unchanged)
    monkeypatch.setattr(grader, "IN_MEMORY", ())  # where these boxes are

    def spec(*commands: str, **changes: Any) -> RolloutSpec:
        verifier = read(driver, wanted()).task.verifier
        assert verifier is not None
        base = driver.spec()
        made = replace(verifier, commands=tuple(Command(shell=shell) for shell in commands), fresh_fork=True, **changes)
        return replace(base, task=replace(base.task, verifier=made))

    return spec


@pytest.mark.requirement("R134", "R60")
async def test_the_last_command_alone_can_ask_and_after_the_agents_end(
    driver: Driver, judged: Callable[..., RolloutSpec]
) -> None:
    """Those before it may run the agent's code. The judge is closed once the rollout's end is on disk."""
    record = await driver.start(judged(SHOW, SHOW))
    outcome = await driver.outcome(record)
    assert outcome.reward.value == 1.0
    first, last = (command.stdout_tail.decode().strip() for command in outcome.grading.commands)
    assert first == ""
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/rollout/judge/v1 sk-judge wise", last)
    ((request, closed),) = driver.gate.judges
    assert request.rollout_id == record.rollout_id and closed == {record.rollout_id: "AGENT_EXITED"}
    assert request.terms.mode == interception_pb2.MODE_TRANSPARENT_PROXY
    assert (request.terms.source.upstream.name, request.terms.budgets.max_calls) == ("judge", 100)
    assert list(request.terms.token_terms.scopes) == [
        interception_pb2.TOKEN_SCOPE_COMPLETIONS,
        interception_pb2.TOKEN_SCOPE_READ,
    ]
    for event in await driver.events(record.rollout_id):
        command = event.command_finished.command
        assert "PENSTOCK_JUDGE_KEY" not in {**command.env, **command.secret_env}


@pytest.mark.requirement("R134", "R43")
@pytest.mark.parametrize(
    ("judging", "ended"),
    [
        (GateClosing(calls=3, unanswered=2, lost=1, last_failure="UPSTREAM_UNREACHABLE"), ("JUDGE_UNANSWERED", True)),
        (GateClosing(calls=3, unanswered=2, lost=1, is_final=True), ("JUDGE_UNANSWERED", False)),
        # Refused as such, or answered afterwards.
        (GateClosing(calls=3, unanswered=2, refused=2), ("REWARD_ABSENT", False)),
    ],
)
async def test_a_judge_that_does_not_answer_is_no_failure_of_the_verifier(
    driver: Driver, judged: Callable[..., RolloutSpec], judging: GateClosing, ended: tuple[str, bool]
) -> None:
    driver.gate.judging = judging
    failure = (await driver.run(judged("false", reward_by_file=True))).failure
    assert (failure.reason, failure.retriable) == ended
    is_the_models = failure.cause == rollout_pb2.FAILURE_CAUSE_MODEL
    assert is_the_models == (ended[0] == "JUDGE_UNANSWERED")


@pytest.mark.requirement("R134", "R43")
@pytest.mark.parametrize(
    ("lost", "ended"), [(1, ("JUDGE_UNANSWERED", True)), (0, ("VERIFIER_TIMED_OUT", False))], ids=["lost", "answered"]
)
async def test_a_verifier_that_asks_a_silent_judge_until_its_time_is_over_has_not_failed(
    driver: Driver,
    judged: Callable[..., RolloutSpec],
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
    ended: tuple[str, bool],
) -> None:
    async def too_long(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(grader.Grader, "grade", too_long)
    driver.gate.judging = GateClosing(calls=3, unanswered=2, lost=lost, last_failure="UPSTREAM_UNREACHABLE")
    failure = (await driver.run(judged("true"))).failure
    assert (failure.reason, failure.retriable) == ended
    assert "the verifier took longer than" in failure.message


@pytest.mark.requirement("R134", "R127")
@pytest.mark.parametrize("lost", ["closed", "unknown"])
async def test_a_judge_that_the_gate_has_lost_is_the_gates_failure(
    driver: Driver, judged: Callable[..., RolloutSpec], lost: str
) -> None:
    """Another one would be asked everything a second time."""
    if lost == "closed":
        driver.gate.judge_closed = True
    else:
        driver.gate.fail["open_judge"] = [NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")]
    failure = (await driver.run(judged("true"))).failure
    assert (failure.reason, failure.retriable) == ("GATE_LOST", True)


@pytest.mark.requirement("R134", "R49")
@pytest.mark.parametrize("reason", ["CHANGES_TOO_LARGE", "CANCELLED"])
async def test_a_judge_is_closed_whose_opening_was_interrupted(
    driver: Driver, judged: Callable[..., RolloutSpec], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The gate may open it all the same, and would count it among its rollouts for good."""
    asked, closings, close = Event(), list[str](), driver.gate.close

    async def open_judge(opening: ModelRequest) -> None:
        asked.set()
        await Event().wait()

    async def noted(rollout_id: str, reason: str) -> GateClosing:
        closings.append(reason)
        return await close(rollout_id, reason)

    async def large(sandbox_id: str, below: Any, sink: Any, max_bytes: int) -> list[str]:
        await asked.wait()
        raise ResourceExhausted("large", reason="DIFF_TOO_LARGE")

    spec = judged("true")
    monkeypatch.setattr(driver.gate, "open_judge", open_judge)
    monkeypatch.setattr(driver.gate, "close", noted)
    if reason == "CHANGES_TOO_LARGE":
        monkeypatch.setattr(driver.sandboxes, "diff", large)
    record = await driver.start(spec)
    await asked.wait()
    if reason == "CANCELLED":
        await driver.manager.cancel(record.rollout_id, "")
    assert (await driver.outcome(record)).failure.reason == reason
    assert closings == ["AGENT_EXITED", "ROLLOUT_ENDED"]


@pytest.mark.requirement("R134", "R46")
async def test_a_judge_is_checked_before_anything_starts(driver: Driver) -> None:
    """The backend, which must be able to make a fresh fork, and the source."""
    spec = read(driver, wanted())
    placed = check_backend(spec, [ABLE])
    assert placed.task.verifier is not None and placed.task.verifier.fresh_fork is True
    with pytest.raises(FailedPrecondition, match="diff"):
        check_backend(spec, [replace(ABLE, diff=False)])
    driver.sandboxes.facts = ABLE
    found = FailedPrecondition("no such endpoint", reason="UPSTREAM_UNKNOWN")
    accepted: list[str] = []

    class Gate:
        async def check(self, terms: Any, *, rollout_id: str, **_: object) -> tuple[str, ...]:
            if terms.source.HasField("upstream"):
                raise found
            accepted.append(rollout_id)
            return ()

    with pytest.raises(FailedPrecondition) as refused:
        await Preflight(driver.sandboxes, Gate()).check(spec, "r")
    assert refused.value.reason == "UPSTREAM_UNKNOWN" and accepted == ["r"]


def _callers_own(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.judge.source.upstream.caller.base_url = "http://127.0.0.1:1"


def _tokenizer(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.judge.source.tokenizer.name = "tiny"


def _budget(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.judge.budgets.max_calls = 0


def _in_place(spec: rollout_pb2.RolloutSpec) -> None:
    spec.task.verifier.fresh_fork = False


@pytest.mark.requirement("R134", "R63")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_callers_own, "judge.source.upstream.caller"),
        (_tokenizer, "judge.source.tokenizer"),
        (_budget, "judge.budgets.max_calls"),
        (_in_place, "judge"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_by_its_field(
    driver: Driver, change: Callable[[rollout_pb2.RolloutSpec], None], field: str
) -> None:
    spec = wanted()
    change(spec)
    with pytest.raises(InvalidArgument) as refused:
        read(driver, spec)
    assert [one.field for one in refused.value.violations] == [f"spec.task.verifier.{field}"]


@pytest.mark.requirement("R134")
def test_a_judges_budget_of_calls_is_in_the_effective_spec(driver: Driver) -> None:
    assert effective_spec(read(driver, wanted())).task.verifier.judge.budgets.max_calls == 100
    given = wanted()
    given.task.verifier.judge.budgets.max_calls = 3
    assert effective_spec(read(driver, given)).task.verifier.judge.budgets.max_calls == 3


@pytest.mark.requirement("R134")
def test_a_verifier_without_a_judge_has_none(driver: Driver) -> None:
    plain = wanted()
    plain.task.verifier.ClearField("judge")
    spec = read(driver, plain)
    assert spec.task.verifier == Verifier(commands=(Command(shell="true"),))
    assert not effective_spec(spec).task.verifier.HasField("judge")
