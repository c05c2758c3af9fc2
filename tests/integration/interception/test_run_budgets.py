"""Budgets of rollouts and of runs, as agents meet them at the ingress and trainers in what was captured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs
from tests.integration.interception.conftest import tokens_completion

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, ResourceExhausted
from penstock_chassis.rpc_status import from_rpc_error
from penstock_interception.domain.deadlines import Clock

Budgets, RunBudgets, CallRate = interception_pb2.Budgets, interception_pb2.RunBudgets, interception_pb2.CallRate
USER = [{"role": "user", "content": "list the files"}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": USER}),
    "responses": ("/v1/responses", {"model": "m", "input": "list the files"}),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": USER}),
    "generateContent": ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "list the files"}]}]}),
}
# What the SDKs and agents of each dialect take for final.
FINAL = {"chat": 403, "responses": 400, "messages": 402, "generateContent": 403}
HOUR = Duration(seconds=3600)


async def ask(service: Any, rollout: Any, dialect: str = "chat", **more: Any) -> tuple[int, Any, Any]:
    """A plain request: status, body, headers."""
    path, body = DIALECTS[dialect]
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}"
    headers = {"x-api-key": rollout.token, "anthropic-version": "2023-06-01"}
    async with aiohttp.ClientSession() as http, http.post(url, json={**body, **more}, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


async def turn(service: Any, rollout: Any, trainer: Any, dialect: str = "chat", text: str = "ok", **more: Any) -> Any:
    """A request that is answered; returns the model call."""
    asked = asyncio.create_task(ask(service, rollout, dialect, **more))
    call = await trainer.answer(text)
    assert (await asked)[0] == 200
    return call


async def refused(opening: Any) -> PenstockError:
    """What an RPC was refused with."""
    try:
        await opening
    except Exception as error:  # noqa: BLE001 - told apart by the tests
        return from_rpc_error(error)  # type: ignore[arg-type]
    raise AssertionError("it was not refused")


async def seen(service: Any, rollout: Any) -> gate.GateRollout:
    """The rollout as the gate sees it."""
    answer = await service.gate.GetRollout(gate.GetRolloutRequest(rollout_id=rollout.rollout_id))
    return answer.rollout  # type: ignore[no-any-return]


@pytest.mark.requirement("R35", "R88")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_used_up_run_ends_all_its_rollouts_for_good(service: Any, dialect: str) -> None:
    """Final in every dialect, told once in the audit log, marked on each rollout; other runs go on."""
    terms: dict[str, Any] = {"run_id": "run", "run_budgets": RunBudgets(max_calls=2)}
    one, two = await service.open(**terms), await service.open(run_id="run")
    other, trainer = await service.open(run_id="another"), await service.trainer()
    with capture_logs() as lines:
        await turn(service, one, trainer, dialect)
        await turn(service, two, trainer, dialect)
        for rollout in (one, two, one):
            status, body, headers = await ask(service, rollout, dialect)
            assert (status, headers["x-should-retry"]) == (FINAL[dialect], "false")
            assert "run" in body["error"]["message"]
            found = await seen(service, rollout)
            assert (found.state, found.exhausted_budget) == (gate.GATE_ROLLOUT_STATE_EXHAUSTED, "run.max_calls")
    assert [(await seen(service, rollout)).totals.refused for rollout in (one, two)] == [2, 1]
    stops = [line for line in lines if line.get("audit") == "budget_exhausted"]
    told = {(line.get("run_id"), line.get("rollout_id"), line["budget"]) for line in stops}
    assert len(stops) == 3
    assert told == {("run", None, "run.max_calls"), *((None, r.rollout_id, "run.max_calls") for r in (one, two))}
    await turn(service, other, trainer, dialect)


@pytest.mark.requirement("R27", "R88")
async def test_a_run_that_is_used_up_opens_no_further_rollout(service: Any) -> None:
    """Refused before a sandbox is made for it, and without a delay to come again."""
    first = await service.open(run_id="run", run_budgets=RunBudgets(max_completion_tokens=1))
    await turn(service, first, await service.trainer())
    error = await refused(service.open(run_id="run"))
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.metadata["budget"]) == ("BUDGET_EXHAUSTED", "run.max_completion_tokens")
    assert error.retry_after_s is None


async def test_a_gate_that_drains_opens_rollouts_of_runs_that_it_counts_alone(service: Any) -> None:
    """Those can be at no other gate; all else is refused until the drain is undone."""
    counted = RunBudgets(max_calls=5)
    await service.open(run_id="run", run_budgets=counted)
    service.interceptor.take(False)
    await service.open(run_id="run", run_budgets=counted)
    for terms in ({}, {"run_id": "run"}, {"run_id": "other", "run_budgets": counted}):
        assert (await refused(service.open(**terms))).reason == "DRAINING"
    service.interceptor.take(True)
    await service.open()


@pytest.mark.requirement("R63")
async def test_first_budgets_of_a_run_are_fixed(service: Any) -> None:
    """The same ones and none at all join the run; a difference is named."""
    fixed = RunBudgets(max_calls=5, wall_time=HOUR, call_rate=CallRate(calls=100))
    await service.open(run_id="run", run_budgets=fixed)
    await service.open(run_id="run", run_budgets=fixed)
    await service.open(run_id="run")
    other = RunBudgets(max_calls=6, call_rate=CallRate(calls=100, burst=1))
    error = await refused(service.open(run_id="run", run_budgets=other))
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "RUN_BUDGETS_DIFFER"
    fields = {violation.field: violation.description for violation in error.violations}
    assert fields == {
        "run_budgets.max_calls": "the run has 5",
        "run_budgets.wall_time": "the run has 3600.0",
        "run_budgets.call_rate": "the run has another",
    }


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"run_budgets": RunBudgets(max_calls=1)}, "run_budgets"),
        ({"run_id": "r", "run_budgets": RunBudgets(max_calls=0)}, "run_budgets.max_calls"),
        ({"budgets": Budgets(max_prompt_tokens=-1)}, "budgets.max_prompt_tokens"),
        ({"budgets": Budgets(max_request_bytes=0)}, "budgets.max_request_bytes"),
        ({"budgets": Budgets(max_request_bytes_per_call=0)}, "budgets.max_request_bytes_per_call"),
        ({"budgets": Budgets(call_rate=CallRate())}, "budgets.call_rate.calls"),
        ({"budgets": Budgets(call_rate=CallRate(calls=1, burst=0))}, "budgets.call_rate.burst"),
        ({"budgets": Budgets(call_rate=CallRate(calls=1, period=Duration()))}, "budgets.call_rate.period"),
        (
            {"run_id": "r", "run_budgets": RunBudgets(call_rate=CallRate(calls=1, period=Duration(seconds=10**6)))},
            "run_budgets.call_rate.period",
        ),
    ],
)
async def test_a_budget_that_means_nothing_is_refused_by_field(service: Any, terms: dict[str, Any], field: str) -> None:
    """Nothing is taken that would not hold."""
    error = await refused(service.open(**terms))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [field]


@asynccontextmanager
async def killed_and_started(serving: Any) -> AsyncIterator[Any]:
    """A service on the state of one that is gone."""
    async with serving() as service:
        yield service


@pytest.mark.requirement("R88")
async def test_runs_usage_survives_a_restart_and_its_rollouts_deletion(serving: Any) -> None:
    """Calls, tokens and bytes of open, closed and deleted rollouts count on; a used-up run stays so."""
    budgets = RunBudgets(max_calls=4, max_prompt_tokens=10**6)
    async with serving() as service:
        trainer = await service.trainer()
        deleted, closed, left = [
            await service.open(name, run_id="run", run_budgets=budgets) for name in ("deleted", "closed", "left")
        ]
        for rollout in (deleted, closed, left):
            await turn(service, rollout, trainer)
        await service.close("closed")
        await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id="deleted"))
        spent = service.interceptor.gate.budgets._runs["default/run"].spent
        assert spent.calls == 3 and spent.prompt_tokens and spent.completion_tokens and spent.request_bytes
    async with serving() as service:
        assert service.interceptor.gate.budgets._runs["default/run"].spent == spent
        error = await refused(service.open(run_id="run", run_budgets=RunBudgets(max_calls=5)))
        assert error.reason == "RUN_BUDGETS_DIFFER"
        await turn(service, left, await service.trainer())
        assert (await ask(service, left))[0] == FINAL["chat"]
    async with serving() as service:
        assert (await refused(service.open(run_id="run"))).reason == "BUDGET_EXHAUSTED"
        assert (await ask(service, left))[0] == FINAL["chat"]
        for name in ("closed", "left"):
            await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id=name))
        assert (await refused(service.open(run_id="run"))).reason == "BUDGET_EXHAUSTED"
    async with serving() as service:
        assert (await refused(service.open(run_id="run"))).reason == "BUDGET_EXHAUSTED"


@pytest.mark.requirement("R23")
async def test_a_run_is_forgotten_when_its_last_rollout_is_long_gone(start: Any) -> None:
    """What nobody asks for any more leaves memory and disk."""
    service = await start(retention_s=0.0)
    await service.open("r", run_id="run", run_budgets=RunBudgets(max_calls=1))
    await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id="r"))
    await service.interceptor.tick()
    assert not service.interceptor.gate.budgets._runs
    await service.interceptor.store.settled()
    assert not await service.interceptor.store.runs.load()
    await service.open("s", run_id="run", run_budgets=RunBudgets(max_calls=2))


@pytest.mark.requirement("R88")
async def test_budgets_that_come_late_count_what_the_run_has_used_already(service: Any) -> None:
    """They bind rollouts that were opened before without any."""
    early, trainer = await service.open(run_id="run"), await service.trainer()
    await turn(service, early, trainer)
    await service.open(run_id="run", run_budgets=RunBudgets(max_calls=1))
    assert (await ask(service, early))[0] == FINAL["chat"]


@pytest.mark.requirement("R13", "R35", "R88")
@pytest.mark.parametrize(
    ("budgets", "name"),
    [
        (Budgets(max_prompt_tokens=3), "max_prompt_tokens"),
        (Budgets(max_request_bytes=140), "max_request_bytes"),
        (Budgets(max_total_tokens=12), "max_total_tokens"),
    ],
)
async def test_tokens_and_bytes_of_a_rollout_are_bounded(service: Any, budgets: Any, name: str) -> None:
    """The first call goes through, the next is refused and the budget named."""
    rollout = await service.open(budgets=budgets)
    await turn(service, rollout, await service.trainer())
    assert (await ask(service, rollout))[0] == FINAL["chat"]
    found = await seen(service, rollout)
    assert found.exhausted_budget == name
    assert found.totals.request_bytes > 0


@pytest.mark.requirement("R96")
async def test_journal_keeps_a_bounded_amount_of_each_rollout(start: Any) -> None:
    """An agent that calls without end is refused for good, and nothing that others said goes."""
    service = await start(max_rollout_bytes=8 << 10)
    other, greedy, trainer = await service.open("other"), await service.open("greedy"), await service.trainer()
    await turn(service, greedy, trainer)
    assert (await ask(service, greedy))[0] == FINAL["chat"]
    assert (await seen(service, greedy)).exhausted_budget == "journal_bytes"
    await turn(service, other, trainer)
    assert (await seen(service, greedy)).totals.calls == 1


@pytest.mark.requirement("R96", "R106")
async def test_alternatives_count_towards_a_rollouts_journal(start: Any) -> None:
    """An agent may ask for twenty of each token: 160 bytes, five times what a token takes without them."""
    service = await start(max_rollout_bytes=16 << 10)
    rollout, trainer = await service.open(), await service.trainer()
    task = asyncio.create_task(ask(service, rollout))
    call = await trainer.call()
    completion = tokens_completion([5] * 60 + [2])
    count, span = 20, completion.span
    span.top_count = count
    span.top_token_ids = np.tile(np.arange(count, dtype="<i4"), span.count).tobytes()
    span.top_logprobs = np.tile(-1 - np.arange(count, dtype="<f4"), span.count).tobytes()
    await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion))
    await task
    assert (await ask(service, rollout))[0] == FINAL["chat"]
    assert (await seen(service, rollout)).exhausted_budget == "journal_bytes"


@pytest.mark.requirement("R13")
async def test_oversized_body_is_a_413_and_the_rollout_continues(service: Any) -> None:
    """Whether its length is told or not; nothing is counted, and the audit log has it."""
    rollout, trainer = await service.open(budgets=Budgets(max_request_bytes_per_call=200)), await service.trainer()
    large = {"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}
    url, headers = rollout.base_url + "/chat/completions", {"x-api-key": rollout.token}

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "messages": [{"role": "user", "content": "'
        yield b"x" * 300
        yield b'"}]}'

    with capture_logs() as lines:
        async with aiohttp.ClientSession() as http:
            for options in ({"json": large}, {"data": pieces()}):
                async with http.post(url, headers=headers, **options) as answer:
                    assert answer.status == 413
                    assert (await answer.json())["error"]["code"] == "request_too_large"
    assert [line["audit"] for line in lines if "audit" in line] == ["body_too_large"] * 2
    await turn(service, rollout, trainer)
    assert (await seen(service, rollout)).totals.calls == 1


@pytest.mark.requirement("R26", "R88")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_call_over_the_rate_gets_a_retry_time_that_holds(service: Any, dialect: str) -> None:
    """429 with its delay in each way that SDKs read; the rollout is not marked."""
    rate = CallRate(calls=1, period=Duration(seconds=30))
    rollout, trainer = await service.open(budgets=Budgets(call_rate=rate)), await service.trainer()
    await turn(service, rollout, trainer, dialect)
    status, body, headers = await ask(service, rollout, dialect)
    assert (status, headers["x-should-retry"]) == (429, "true")
    assert 0 < int(headers["retry-after"]) <= 30
    assert 0 < int(headers["retry-after-ms"]) <= 30_000
    assert "try again in" in body["error"]["message"]
    assert (await seen(service, rollout)).state == gate.GATE_ROLLOUT_STATE_OPEN
    service.interceptor.gate.budgets._clock = Clock(time.time, lambda: time.monotonic() + 30)
    await turn(service, rollout, trainer, dialect)


@pytest.mark.requirement("R26")
async def test_an_sdk_waits_for_the_rate_by_itself(service: Any) -> None:
    """The delay is one that the official SDK obeys, so that its user sees no error."""
    rate = CallRate(calls=1, period=Duration(nanos=100_000_000))
    rollout, trainer = await service.open(budgets=Budgets(call_rate=rate)), await service.trainer()
    client = rollout.client(max_retries=4)
    for number in range(3):
        content: Any = [{"role": "user", "content": f"question {number}"}]
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=content))
        await trainer.answer("ok")
        assert (await asked).choices[0].message.content == "ok"


@pytest.mark.requirement("R88")
async def test_a_runs_rate_is_shared_by_its_rollouts_and_by_counting(service: Any) -> None:
    """One bucket for all; counting tokens costs as much work, and takes from it too."""
    rate = CallRate(calls=2, period=HOUR)
    one = await service.open(run_id="run", run_budgets=RunBudgets(call_rate=rate))
    two, trainer = await service.open(run_id="run"), await service.trainer()
    await turn(service, one, trainer)
    url, headers = f"http://{service.ingress}/rollout/{two.rollout_id}", {"x-api-key": two.token}
    count = {"model": "m", "messages": USER}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/messages/count_tokens", json=count, headers=headers) as answer:
            assert answer.status == 200
        async with http.post(f"{url}/v1/messages/count_tokens", json=count, headers=headers) as answer:
            assert answer.status == 429
    assert (await ask(service, two))[0] == 429
    assert (await ask(service, one))[0] == 429


@pytest.mark.requirement("R84", "R88")
async def test_calls_cut_by_a_budget_are_marked_and_never_trained_on(serving: Any) -> None:
    """The turn is context with BUDGET as its reason, the finding names the budget, a restart keeps both."""
    async with serving() as service:
        budgets = RunBudgets(max_completion_tokens=6)
        rollout = await service.open("r", run_id="run", run_budgets=budgets)
        trainer = await service.trainer()
        asked = asyncio.create_task(ask(service, rollout, max_tokens=100))
        call = await trainer.call()
        assert call.sampling.max_tokens == 6
        cut = trainer.completion("list the files", finish=chat_pb2.FINISH_REASON_LENGTH)
        await trainer.deliver(trainer.result(call, "list the files", finish=chat_pb2.FINISH_REASON_LENGTH))
        assert (await asked)[1]["choices"][0]["finish_reason"] == "length"
        assert cut.span.count
    async with serving() as service:
        await service.close("r")
        captured = await service.capture("r")
        (sample,) = captured.samples
        assert sample.truncated and not any(sample.loss_mask)
        assert [turn.untrained_reason for turn in sample.turns] == ["BUDGET"]
        texts = {finding.reason: finding.message for finding in captured.findings}
        assert "run.max_completion_tokens" in texts["TURN_TRUNCATED"]
        assert "NOTHING_TO_TRAIN" in texts and captured.grade == trajectory_pb2.GRADE_UNUSABLE
        assert any("run.max_completion_tokens" in note for note in captured.calls[0].normalisations)


@pytest.mark.requirement("R84")
async def test_a_limit_of_one_call_is_no_budget_that_was_used_up(service: Any) -> None:
    """What max_tokens_per_call cut is TRUNCATED as any limit of the agent's own."""
    rollout, trainer = await service.open(budgets=Budgets(max_tokens_per_call=4)), await service.trainer()
    asked = asyncio.create_task(ask(service, rollout))
    call = await trainer.call()
    await trainer.deliver(trainer.result(call, "list", finish=chat_pb2.FINISH_REASON_LENGTH))
    await asked
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    assert [turn.untrained_reason for turn in captured.samples[0].turns] == ["TRUNCATED"]
    assert not any(finding.reason == "BUDGET_EXHAUSTED" for finding in captured.findings)


@pytest.mark.requirement("R88")
async def test_a_used_up_budget_is_final_to_the_sdk_of_responses(service: Any) -> None:
    """A 400 with its code, since Codex repeats every other refusal; the SDK asks once."""
    rollout = await service.open(budgets=Budgets(max_calls=1), dialects=[trajectory_pb2.DIALECT_RESPONSES])
    await turn(service, rollout, await service.trainer(), "responses")
    with pytest.raises(openai.BadRequestError) as caught:
        await rollout.client(max_retries=3).responses.create(model="m", input="more")
    assert (caught.value.code, caught.value.type) == ("budget_exhausted", "insufficient_quota")
