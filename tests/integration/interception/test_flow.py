"""How calls flow, over real streams: shared runs, trainers that die, weight syncs in each dialect, staleness bounds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import aiohttp
import pytest
from tests.integration.interception.conftest import tokens_completion
from tests.integration.interception.dialects.test_chat import ASK
from tests.support.waiting import eventually

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2

TEXT = "list the files"


@dataclass(frozen=True)
class Wire:
    """One dialect's streamed request, by hand: what a client ignores while it waits, and how a failure is framed."""

    path: str
    body: dict[str, Any]
    keep_alive: bytes
    failure: bytes


WIRES = {
    "chat": Wire(
        "/v1/chat/completions",
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": TEXT}]},
        b": keep-alive",
        b'data: {"error"',
    ),
    "messages": Wire(
        "/v1/messages",
        {"model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": TEXT}]},
        b"event: ping",
        b"event: error",
    ),
    "responses": Wire(
        "/v1/responses", {"model": "m", "stream": True, "input": TEXT}, b"event: response.in_progress", b"event: error"
    ),
    "generate_content": Wire(
        "/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": TEXT}]}]}, b"", b'"error"'
    ),
}


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    """Each dialect."""
    return WIRES[request.param]


def asking(http: aiohttp.ClientSession, service: Any, rollout: Any, wire: Wire) -> Any:
    """A streamed request."""
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}{wire.path}"
    return http.post(url, json=wire.body, headers={"authorization": f"Bearer {rollout.token}"})


def chatting(rollout: Any, text: str) -> asyncio.Task[Any]:
    """The SDK's request, not streamed."""
    messages: list[Any] = [{"role": "user", "content": text}]
    return asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=messages))


@pytest.mark.requirement("R30")
async def test_weight_sync_sends_keep_alives_then_the_answer(
    start: Any, http: aiohttp.ClientSession, wire: Wire
) -> None:
    """R30, decision 8: while calls are held back an agent of any dialect sees signs of life and nothing else."""
    service = await start(first_byte_s=0.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()
    await trainer.send(pause=pb.PauseCalls(reason="weight sync"))
    await trainer.frame("paused")
    async with asking(http, service, rollout, wire) as answer:
        assert answer.status == 200
        seen = 0
        while seen < 3:
            seen += (await answer.content.readline()).rstrip(b"\n").startswith(wire.keep_alive)
        assert not [frame for frame in trainer.frames if frame.HasField("calls")]
        await trainer.send(resume=pb.ResumeCalls())
        await trainer.answer("after the sync")
        assert b"after the sync" in await answer.read()


@pytest.mark.requirement("R30")
@pytest.mark.parametrize("in_stream", [False, True])
async def test_failure_is_a_status_within_the_grace_and_an_event_later(
    start: Any, http: aiohttp.ClientSession, wire: Wire, in_stream: bool
) -> None:
    """`first_byte_s` is the operator's: how long a plain HTTP status stays possible."""
    service = await start(first_byte_s=0.0 if in_stream else 60.0, keep_alive_s=0.01)
    rollout, trainer = await service.open(), await service.trainer()

    async def ask() -> tuple[int, bytes]:
        async with asking(http, service, rollout, wire) as answer:
            return answer.status, await answer.read()

    async def fail() -> None:
        call = await trainer.call()
        failure = pb.CallFailure(reason="NO_ROOM", retriable=True)
        await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))

    if not in_stream:
        asked = asyncio.create_task(ask())
        await fail()
        status, body = await asked
        assert status == 503 and json.loads(body)["error"]
        return
    async with asking(http, service, rollout, wire) as answer:
        assert answer.status == 200
        await fail()
        assert wire.failure in await answer.read()


@pytest.mark.requirement("R26")
async def test_trainers_of_one_run_share_its_calls_as_their_credits_allow(service: Any) -> None:
    """No call goes to two of them, nobody holds more than its credits, and what comes free takes the next."""
    rollouts = [await service.open(run_id="run") for _ in range(2)]
    selector = pb.CallSelector(run_id="run")
    trainers = [await service.trainer(selector=selector, credits=pb.Credits(calls=2)) for _ in range(2)]
    tasks = [chatting(rollout, f"{TEXT} {number}") for rollout in rollouts for number in range(3)]
    held = [[await trainer.call(), await trainer.call()] for trainer in trainers]
    assert len({call.call_id for calls in held for call in calls}) == 4
    more = []
    for trainer, calls in zip(trainers, held, strict=True):
        await trainer.deliver(trainer.result(calls[0], "first"))
        more.append(await trainer.call())
    assert len({call.call_id for call in more} | {call.call_id for calls in held for call in calls}) == 6
    for trainer, calls, last in zip(trainers, held, more, strict=True):
        await trainer.deliver(trainer.result(calls[1], "second"), trainer.result(last, "third"))
    told = [(await task).choices[0].message.content for task in tasks]
    assert sorted(told) == ["first", "first", "second", "second", "third", "third"]


@pytest.mark.requirement("R22", "R26")
async def test_dead_trainers_calls_go_to_other_trainers_of_the_run(start: Any) -> None:
    """Each is given again once nobody may resume; an answer that comes too late is refused by type."""
    service = await start(resume_window_s=0.0)
    rollout = await service.open(run_id="run")
    selector = pb.CallSelector(run_id="run")
    dying = await service.trainer(selector=selector)
    tasks = [chatting(rollout, f"{TEXT} {number}") for number in range(3)]
    lost = [await dying.call() for _ in tasks]
    heir = await service.trainer(selector=selector)
    dying.cut()
    again = [await heir.call() for _ in tasks]
    assert {call.call_id for call in again} == {call.call_id for call in lost}
    assert {call.lease_attempt for call in again} == {2}
    late = await heir.deliver(heir.result(lost[0], "with the lease of the dead"))
    # Its session holds the call now, so the answer is its own, whatever lease it shows.
    assert list(late.accepted_call_ids) == [lost[0].call_id]
    stranger = await service.trainer(selector=selector)
    refused = await stranger.deliver(stranger.result(lost[1], "with the lease of the dead"))
    assert [item.reason for item in refused.rejected] == [pb.ResultRejected.REASON_NOT_LEASED]
    rest = [call for call in again if call.call_id != lost[0].call_id]
    await heir.deliver(*(heir.result(call, "in time") for call in rest))
    told = [(await task).choices[0].message.content for task in tasks]
    assert sorted(told) == ["in time", "in time", "with the lease of the dead"]


@pytest.mark.requirement("R87")
async def test_a_staleness_bound_follows_what_any_trainer_of_the_run_announces(service: Any) -> None:
    """R87, decision 8: the newest announced version counts for the run; a call keeps the bound of its lease."""
    policy = interception_pb2.PolicyVersionConstraint(max_staleness=1)
    rollout = await service.open(run_id="run", policy=policy)
    other = await service.open(run_id="another", policy=policy)
    selector = pb.CallSelector(run_id="run")
    sampling = await service.trainer(selector=selector, policy_version=5)
    pushing = await service.trainer(selector=selector, credits=pb.Credits(calls=1))
    elsewhere = await service.trainer(selector=pb.CallSelector(run_id="another"), policy_version=1)
    first, busy = chatting(rollout, "one"), chatting(rollout, "two")
    old, _taken = await sampling.call(), await pushing.call()
    assert old.min_policy_version == 4
    await pushing.send(policy=pb.PolicyAnnounced(policy_version=9))
    stale = await pushing.deliver(pushing.result(_taken, "old", version=3))
    assert [item.reason for item in stale.rejected] == [pb.ResultRejected.REASON_STALE_POLICY]
    third, foreign = chatting(rollout, "three"), chatting(other, "four")
    assert (await sampling.call()).min_policy_version == 8
    assert (await elsewhere.call()).min_policy_version == 0
    accepted = await sampling.deliver(sampling.result(old, "old weights, old bound", version=4))
    assert list(accepted.accepted_call_ids) == [old.call_id]
    assert (await first).choices[0].message.content == "old weights, old bound"
    for task in (busy, third, foreign):
        task.cancel()
    await asyncio.gather(busy, third, foreign, return_exceptions=True)


@pytest.mark.requirement("R29", "R108")
async def test_a_completion_with_a_word_of_a_newer_version_is_refused_by_its_field(service: Any) -> None:
    """Not as if it were unset; the call stays with the trainer."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=ASK))
    call = await trainer.call()
    answer = pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=tokens_completion([5, 2]))
    for owner, name in ((answer.completion, "finish_reason"), (answer.completion.span, "logprobs_mode")):
        known = getattr(owner, name)
        setattr(owner, name, 77)
        (rejected,) = (await trainer.deliver(answer)).rejected
        setattr(owner, name, known)
        assert rejected.reason == pb.ResultRejected.REASON_INVALID
        (text,) = rejected.violations
        assert text.partition(": ")[0].endswith(f".{name}")
        assert "that this version knows" in text
    await trainer.deliver(answer)
    await asked


# The way of a call (decision 027) -------------------------------------------------------------------------------------

SERVICE = "penstock_interception."
SPINE = (
    "ingress.connections",
    "ingress.server",
    "ingress.bodies",
    "ingress.dialects.chat.dialect",
    "ingress.retries",
    "interceptor",
    "gate.gate",
    "rollouts.conversations",
    "graph.token_graph",
    "gate.leasing",
    "store.store",
    "rpc.intercept_stream",
    "rpc.frames",
    "wire.convert",
    "rpc.results",
    "rollouts.answers",
)
"""The modules that a held call goes through, in order, as the service's README follows it. All others are leaves."""
ENTERED_MOST = 53
"""Modules of the service with at least one function that is called, leaves included."""
HANDED_ON = frozenset({"<lambda>", "frames"})
"""What a leaf calls because it was given it, and the generator of the session, whose RPC runs before the call."""


@dataclass
class Walk:
    """Calls between modules of the service: from, to, function. "" stands for what is not of the service."""

    steps: list[tuple[str, str, str]]

    @property
    def entered(self) -> set[str]:
        return {to for _, to, _ in self.steps}


@contextmanager
def walked() -> Iterator[Walk]:
    """Notes which modules of the service call which others in this thread, libraries between them left out."""
    walk = Walk([])

    def note(frame: FrameType, event: str, _arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(SERVICE):
            return
        back = frame.f_back
        while back is not None and not back.f_globals.get("__name__", "").startswith(SERVICE):
            back = back.f_back
        origin = "" if back is None else back.f_globals["__name__"]
        if origin != module:
            walk.steps.append((origin.removeprefix(SERVICE), module.removeprefix(SERVICE), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(before)


async def test_a_held_call_goes_through_16_modules_and_enters_the_gate_4_times(service: Any) -> None:
    """The README's steps; whatever else is called is a leaf, which calls no module of the spine."""
    rollout = await service.open()
    trainer = await service.trainer()

    async def one_call(text: str) -> None:
        asked = [{"role": "user", "content": text}]
        async with rollout.client() as client:
            answer = asyncio.create_task(client.chat.completions.create(model="m", messages=asked))
            call = await trainer.answer(TEXT)
            await answer
        # The client's end confirms that it has the answer.
        held = service.interceptor.registry.call(call.call_id)
        await eventually(lambda: held.answer_sent and held.attached == 0, "the answer was sent")

    await one_call("a first call loads what is loaded once")
    with walked() as walk:
        await one_call("and this one is followed")
    assert set(SPINE) <= walk.entered
    assert len(SPINE) <= 16
    assert len(walk.entered) <= ENTERED_MOST, sorted(walk.entered)
    gate = [(origin, name) for origin, to, name in walk.steps if to == "gate.gate"]
    assert sorted(name for origin, name in gate if origin) == ["accept", "admit", "answer_sent", "offer"]
    assert sorted(name for origin, name in gate if not origin) == ["_call_written", "_committed"]  # of its own writes
    back = {
        step for step in walk.steps if step[0] not in {"", *SPINE} and step[1] in SPINE and step[2] not in HANDED_ON
    }
    assert back == set()
