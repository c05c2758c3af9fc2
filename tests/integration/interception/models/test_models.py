"""Several models answer a rollout's calls: by name, turn and class, with policies that have versions of their own."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import openai
import pytest
from tests.integration.interception.conftest import Rollout, Service, tiny_source, tokens_completion
from tests.support.endpoints.upstream import Vendor, vendor
from tests.support.services.engines import RunningEngine
from tests.support.waiting import eventually

from penstock.analysis.verify_chain import verify
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.tables import rows
from penstock.tables.columns import Row, sealed
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import error_from_rpc
from penstock_codec import tiny_tokenizer
from penstock_inference.testing import open_inference
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call

PROXY = interception_pb2.MODE_TRANSPARENT_PROXY
CALLS = 24
TEACHER = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference(name="teacher"))
Serving = Callable[..., AbstractAsyncContextManager[Service]]


def reply(number: int) -> str:
    return f"the teacher's answer {number}"


@asynccontextmanager
async def teacher_at(tokenizer: Path, folder: Path) -> AsyncIterator[RunningEngine]:
    """A real inference service; its n-th answer of a rollout is `reply(n)`."""
    folder.mkdir()
    script = folder / "script.json"
    script.write_text(json.dumps({"strict": False, "turns": [{"reply": reply(n)} for n in range(CALLS)]}))
    options = {"script": str(script)}
    async with open_inference(tokenizer, folder, engine="scripted", engine_options=options) as opened:
        yield RunningEngine(opened.address, opened.channel, AsyncExitStack())


@pytest.fixture
async def teacher(tokenizer_dir: Path, tmp_path: Path) -> AsyncIterator[RunningEngine]:
    async with teacher_at(tokenizer_dir, tmp_path / "teacher") as engine:
        yield engine


@pytest.fixture
def taught(serving: Serving, teacher: RunningEngine) -> Serving:
    """Services on one state directory, which know the teacher."""
    return lambda **changes: serving(inference={"teacher": {"address": teacher.address}}, **changes)


def model(policy_id: str, **fields: Any) -> interception_pb2.RolloutModel:
    return interception_pb2.RolloutModel(policy_id=policy_id, **fields)


def rule(**fields: Any) -> interception_pb2.CallRule:
    return interception_pb2.CallRule(**fields)


async def ask(rollout: Rollout, *texts: str, requested: str = "m", **options: Any) -> str:
    """Asks with this conversation, user and assistant in turn; returns the answer."""
    roles: Any = ("user", "assistant")
    messages: Any = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    async with rollout.client() as client:
        answer = await client.chat.completions.create(model=requested, messages=messages, **options)
    return answer.choices[0].message.content or ""


@dataclass
class Answer:
    """What an engine logged of one of its answers."""

    policy_id: str
    version: int
    ids: list[int]


@dataclass
class Log:
    """The engines' own logs, and who has to answer next by the rules as the test reads them."""

    random: Random
    rules: list[interception_pb2.RolloutModel]
    by_call: dict[str, Answer] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=lambda: {"student": 0, "helper": 0, "teacher": 0})
    taught: int = 0

    def policy_of(self, index: int, turn: int) -> str:
        for one in self.rules:
            calls = one.calls
            if calls.from_index <= index < (calls.until_index or CALLS) and (
                calls.from_turn <= turn < (calls.until_turn or CALLS)
            ):
                return one.policy_id
        raise AssertionError("the last model takes all")


def takeovers(random: Random) -> list[interception_pb2.RolloutModel]:
    """Random rules: spans of positions and of turns, of three policies in turn, and the student for the rest."""
    sources: dict[str, Any] = {"helper": {}, "teacher": {"source": TEACHER, "trained": False}, "student": {}}
    made = []
    for number in range(random.randint(5, 9)):
        what = random.choice(("index", "turn"))
        start = random.randrange(CALLS if what == "index" else CALLS // 3)
        until = start + random.randint(1, 4)
        policy = list(sources)[number % 3]
        made.append(model(policy, calls=rule(**{f"from_{what}": start, f"until_{what}": until}), **sources[policy]))
    return [*made, model("student")]


async def serve(service: Service, policy: str, log: Log) -> None:
    """A trainer of one policy: each answer has a text, and logprobs, that no other has."""
    trainer = await service.trainer(selector=pb.CallSelector(policy_ids=[policy]))
    while True:
        call = await trainer.call()
        assert call.policy_id == policy
        version = log.versions[policy]
        ids = [*service.codec.encode(f"{policy} answers {call.index} with {version}"), service.codec.end_of_turn_id]
        log.by_call[call.call_id] = Answer(policy, version, ids)
        completion = tokens_completion(ids, version=version, logprobs=[-0.25 - call.index] * len(ids))
        result = pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)
        await trainer.deliver(result)


def shown(random: Random, known: list[list[str]], number: int) -> tuple[list[str], int]:
    """The next conversation: a known one goes on, mostly the longest; and how many answers it has."""
    line = known[-1] if random.random() < 0.75 else random.choice(known)
    return [*line, f"question {number}"], len(line) // 2


@pytest.mark.requirement("R133", "R34")
@pytest.mark.parametrize("seed", range(2))
async def test_each_tokens_policy_and_version_are_those_of_the_engine_that_sampled_it(
    taught: Serving, teacher: RunningEngine, seed: int
) -> None:
    """Random takeovers, new versions meanwhile, lines that fork, and a restart in the middle."""
    random = Random(seed)
    log = Log(random, takeovers(random))
    known, expected = [list[str]()], list[str]()
    for start, end in ((0, CALLS // 2), (CALLS // 2, CALLS)):
        async with taught() as service:
            rollout = await service.open("r", models=log.rules)
            async with asyncio.TaskGroup() as group:
                trainers = [group.create_task(serve(service, name, log)) for name in ("student", "helper")]
                for number in range(start, end):
                    texts, turn = shown(random, known, number)
                    policy = log.policy_of(number, turn)
                    expected.append(policy)
                    if random.random() < 0.3:
                        log.versions[policy] += random.randint(1, 3)
                        if policy == "teacher":
                            await teacher.push(log.versions["teacher"])
                    answer = await ask(rollout, *texts)
                    if policy == "teacher":
                        assert answer == reply(log.taught)
                        log.taught += 1
                        captured = await service.capture("r", after_index=number - 1)
                        ids = [*service.codec.encode(answer), service.codec.end_of_turn_id]
                        log.by_call[captured.calls[0].call_id] = Answer(policy, log.versions[policy], ids)
                    known.append([*texts, answer])
                for task in trainers:
                    task.cancel()
    async with taught() as service:
        await service.close("r")
        captured = await service.capture("r")
    assert [call.policy_id for call in captured.calls] == expected
    assert {*expected} == {"student", "helper", "teacher"}
    reasons = {turn.untrained_reason for sample in captured.samples for turn in sample.turns}
    assert {"OTHER_POLICY", "MODEL_UNTRAINED"} <= reasons
    check_calls(captured, log)
    check_samples(captured, log)
    turns, sequences = list(rows.turns(captured)), list(rows.sequences(captured))
    assert verify(turns, sequences).problems == []
    check_left_out(turns, sequences)
    index = next(index for index, row in enumerate(turns) if row["policy_id"] == "student")
    turns[index] = sealed({**turns[index], "policy_id": "helper"}, len(turns))
    assert {problem.call_id for problem in verify(turns, ()).problems} == {turns[index]["call_id"], ""}


def check_left_out(turns: list[Row], sequences: list[Row]) -> None:
    """What somebody leaves out of an export, or says of its models, is found, though each row has a new digest."""
    assert {row["policy_id"]: row["trained"] for row in turns} == {"student": True, "helper": True, "teacher": False}
    own = [row for row in sequences if row["policy_id"] != "helper"]
    found = {problem.message for problem in verify(turns, [sealed({**row}, len(own)) for row in own]).problems}
    count = len(sequences) - len(own)
    assert f"0 samples of policy helper are in the file, but the export had {count}" in found
    assert any("OTHER_POLICY has it that another sample trains it, but none does" in one for one in found)
    taught = [sealed({**row, "trained": True}, len(turns)) for row in turns]
    found = {problem.message for problem in verify(taught, sequences).problems}
    assert any("its model is trained, but its untrained_reason is 'MODEL_UNTRAINED'" in one for one in found)
    assert "whether policy teacher is trained differs from its calls" in found
    new = ("model_name", "trained", "policies")
    old = [{name: value for name, value in row.items() if name not in new} for row in turns]
    assert verify([sealed(row, len(old)) for row in old], sequences).problems == []


def check_calls(captured: trajectory_pb2.Trajectory, log: Log) -> None:
    for call in captured.calls:
        answer, span = log.by_call[call.call_id], call.completion.span
        assert call.policy_id == answer.policy_id
        assert np.frombuffer(span.token_ids, "<i4").tolist() == answer.ids
        assert [(one.policy_version, one.start, one.end) for one in span.versions] == [
            (answer.version, 0, len(answer.ids))
        ]


def check_samples(captured: trajectory_pb2.Trajectory, log: Log) -> None:
    """Each sampled token is its engine's; what may be trained is so once, in a sample of its policy."""
    trained: dict[str, int] = defaultdict(int)
    weights: dict[str, float] = defaultdict(float)
    for sample in captured.samples:
        ids, mask = np.frombuffer(sample.input_ids, "<i4").tolist(), list(sample.loss_mask)
        versions = [one for span in sample.versions for one in [span.policy_version] * (span.end - span.start)]
        assert sample.policy_id != "teacher" or not any(mask)
        weights[sample.policy_id] += sample.weight
        for turn in sample.turns:
            answer, length = log.by_call[turn.call_id], turn.end - turn.start
            assert turn.policy_id == answer.policy_id
            assert ids[turn.start : turn.end] == answer.ids[:length]
            assert versions[:length] == [answer.version] * length
            del versions[:length]
            assert set(mask[turn.start : turn.end]) == {int(not turn.untrained_reason)}
            if not turn.untrained_reason:
                assert turn.policy_id == sample.policy_id
                trained[turn.call_id] += 1
            elif turn.policy_id == "teacher":
                assert turn.untrained_reason in ("MODEL_UNTRAINED", "PARTIAL")
            elif turn.policy_id != sample.policy_id:
                assert turn.untrained_reason in ("OTHER_POLICY", "PARTIAL")
    calls = {call.call_id for call in captured.calls if call.policy_id != "teacher"}
    assert trained == dict.fromkeys(calls, 1)
    used = {log.by_call[call_id].policy_id for call_id in calls}
    assert {policy: round(weights[policy], 9) for policy in used} == dict.fromkeys(used, 1.0)
    assert len({sample.sample_id for sample in captured.samples}) == len(captured.samples)


@pytest.mark.requirement("R133")
async def test_models_are_chosen_by_the_name_that_the_agent_requests(service: Service) -> None:
    models = [model("proposer", name="proposer"), model("solver", name="solver")]
    rollout = await service.open(models=models)
    trainer = await service.trainer()
    for name in ("solver", "proposer"):
        asked = asyncio.ensure_future(ask(rollout, "list the files", requested=name))
        assert (await trainer.answer(name)).policy_id == name
        assert await asked == name
    async with rollout.client() as client:
        assert [one.id async for one in client.models.list()] == ["proposer", "solver"]
        assert (await client.models.retrieve("solver")).id == "solver"
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask(rollout, "list the files", requested="judge")
    assert unknown.value.code == "model_not_found"
    shown = await service.gate.GetRollout(gate.GetRolloutRequest(rollout_id=rollout.rollout_id))
    assert shown.rollout.model_name == "proposer" and shown.rollout.totals.calls == 2


@pytest.mark.requirement("R133")
async def test_a_model_takes_calls_of_a_class_and_an_unnamed_one_any_other_name(taught: Serving) -> None:
    title = rule(call_classes=[trajectory_pb2.CALL_CLASS_TITLE])
    models = [model("title", source=TEACHER, trained=False, calls=title), model("student"), model("named", name="x")]
    hints = interception_pb2.CallHints(title_system_prompts=["Write a title"])
    async with taught() as service:
        rollout = await service.open(models=models, hints=hints)
        trainer = await service.trainer()
        async with rollout.client() as client:
            answer = await client.chat.completions.create(
                model="whatever",
                messages=[{"role": "system", "content": "Write a title"}, {"role": "user", "content": "a"}],
            )
        assert answer.choices[0].message.content == reply(0)
        for name, policy in (("x", "named"), ("y", "student")):
            asked = asyncio.ensure_future(ask(rollout, f"list the files of {name}", requested=name))
            assert (await trainer.answer("ok")).policy_id == policy
            await asked


@pytest.mark.requirement("R133", "R41")
async def test_staleness_is_counted_by_policy(service: Service) -> None:
    """Announcements without a policy are of the only trained one; an untrained model has no bound of its own accord."""
    bounds = interception_pb2.PolicyVersionConstraint(max_staleness=2)
    models = [
        model("solver", name="solver"),
        model("critic", name="critic", policy=interception_pb2.PolicyVersionConstraint(min_version=3)),
        model("teacher", name="teacher", trained=False),
    ]
    rollout = await service.open(models=models, policy=bounds, run_id="run")
    announced = [pb.PolicyAnnounced(policy_id=name, policy_version=10) for name in ("critic", "teacher")]
    trainer = await service.trainer(policy_version=50, policies=announced)
    await trainer.send(policy=pb.PolicyAnnounced(policy_id="solver", policy_version=7))
    least = {}
    for name in ("solver", "critic", "teacher"):
        asked = asyncio.ensure_future(ask(rollout, f"list the files, {name}", requested=name))
        call = await trainer.call()
        least[name] = call.min_policy_version if call.HasField("min_policy_version") else None
        if name == "solver":
            refused = await trainer.deliver(trainer.result(call, "old", version=4))
            assert [one.reason for one in refused.rejected] == [pb.ResultRejected.REASON_STALE_POLICY]
        await trainer.deliver(trainer.result(call, "ok", version=9))
        await asked
    assert least == {"solver": 5, "critic": 3, "teacher": None}
    only = await service.open(models=[models[0], models[2]], policy=bounds)
    await trainer.send(policy=pb.PolicyAnnounced(policy_version=60))
    asked = asyncio.ensure_future(ask(only, "list the files", requested="solver"))
    call = await trainer.call()
    assert call.min_policy_version == 58
    await trainer.deliver(trainer.result(call, "ok", version=60))
    await asked


@pytest.mark.requirement("R133", "R31")
async def test_what_trainers_announce_is_bounded_and_checked(service: Service) -> None:
    """Of all sessions of a selector together; a session that is refused is not there afterwards."""
    trainer = await service.trainer(
        policies=[pb.PolicyAnnounced(policy_id=f"p{n}") for n in range(64)], policy_version=1
    )
    await trainer.send(policy=pb.PolicyAnnounced(policy_id="p0", policy_version=2))
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"policies": [pb.PolicyAnnounced(policy_id="one more")]}, "policies[0].policy_id"),
        ({"policies": [pb.PolicyAnnounced(policy_version=1)]}, "policies[0].policy_id"),
        ({"policies": [pb.PolicyAnnounced(policy_id="p64")]}, "policies"),
        ({"policies": [pb.PolicyAnnounced(policy_id="p0")] * 65}, "policies"),
        ({"selector": pb.CallSelector(policy_ids=["a b"])}, "selector.policy_ids[0]"),
        ({"selector": pb.CallSelector(policy_ids=["a"] * 65)}, "selector.policy_ids"),
    )
    for fields, place in wrong:
        hello = pb.Hello(credits=pb.Credits(calls=1), **fields)
        stream = service.intercept.Intercept(iter([pb.InterceptRequest(hello=hello)]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert [one.field for one in error_from_rpc(refused.value).violations] == [place]
    assert service.interceptor.registry.session_count() == 1
    await trainer.send(policy=pb.PolicyAnnounced(policy_id="p64", policy_version=2))
    await trainer.over.wait()
    assert trainer.error is not None and trainer.error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.requirement("R133")
async def test_a_session_of_some_policies_gets_their_calls_alone(service: Service) -> None:
    """A call waits for a session of its policy, whatever credit others have, also where it asked before they came."""
    models = [model("solver", calls=rule(until_index=1)), model("critic")]
    rollout = await service.open(models=models)
    other = await service.trainer(selector=pb.CallSelector(policy_ids=["critic"]))
    asked = asyncio.ensure_future(ask(rollout, "list the files"))
    late = await asyncio.ensure_future(service.trainer(selector=pb.CallSelector(policy_ids=["solver"])))
    assert (await late.answer("one")).policy_id == "solver"
    await asked
    leased = asyncio.ensure_future(
        service.intercept.LeaseCalls(pb.LeaseCallsRequest(selector=pb.CallSelector(policy_ids=["solver"])))
    )
    asked = asyncio.ensure_future(ask(rollout, "list the files", "one", "and now?"))
    assert (await other.answer("two")).policy_id == "critic"
    await asked
    await service.close(rollout.rollout_id)
    assert list((await other.frame("rollouts_closed")).rollout_ids) == [rollout.rollout_id]
    assert not leased.done()
    leased.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        whose = pb.CallSelector(policy_ids=["solver"])
        await service.intercept.RegisterTools(pb.RegisterToolsRequest(session_id=other.session_id, selector=whose))
    assert [one.field for one in error_from_rpc(refused.value).violations] == ["selector.policy_ids"]


@pytest.mark.requirement("R133")
async def test_an_untrained_upstream_takes_over_as_text(serving: Serving) -> None:
    """What continues its answer is a prompt of the rollout's own tokenizer, and its answer is trained by nobody."""
    source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="cloud", model="big"))
    models = [model("cloud", source=source, trained=False, calls=rule(from_turn=1, until_turn=2)), model("student")]
    async with vendor() as cloud:
        cloud.says = lambda body: "a cloud's answer"
        upstreams = {"cloud": {"base_url": cloud.base_url, "api_key": "sk"}}
        async with serving(upstreams=upstreams) as service:
            rollout = await service.open("r", models=models)
            trainer = await service.trainer()
            texts = ["list the files"]
            for number in range(3):
                asked = asyncio.ensure_future(ask(rollout, *texts))
                if number != 1:
                    await trainer.answer(f"answer {number}")
                texts += [await asked, "and now?"]
            await service.close("r")
            captured = await service.capture("r")
    assert texts[3] == "a cloud's answer" and wanted(cloud) == ["big"]
    assert [call.policy_id for call in captured.calls] == ["student", "cloud", "student"]
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    assert {(one.reason, one.severity) for one in captured.findings} >= {
        ("TOKENS_MISSING", trajectory_pb2.Finding.SEVERITY_INFO)
    }
    assert sum(sum(sample.loss_mask) for sample in captured.samples) == sum(
        call.completion.span.count for call in captured.calls
    )


def wanted(cloud: Vendor) -> list[str]:
    return [json.loads(seen.body)["model"] for seen in cloud.completions]


@pytest.mark.requirement("R133", "R27")
async def test_a_model_with_another_tokenizer_is_refused_before_the_rollout_begins(
    serving: Serving, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_tokenizer.build(["other texts altogether"]).write(other)
    models = [model("teacher", source=TEACHER, trained=False, calls=rule(from_index=3)), model("student")]
    check = gate.CheckSourceRequest(mode=interception_pb2.MODE_INTERCEPTION_GATE, source=tiny_source(), models=models)
    async with (
        teacher_at(other, tmp_path / "foreign") as engine,
        serving(inference={"teacher": {"address": engine.address}}) as service,
    ):
        for asked in (service.open(models=models), service.gate.CheckSource(check)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert error_from_rpc(refused.value).reason == "TOKENIZER_MISMATCH"


@pytest.mark.requirement("R133")
async def test_in_proxy_mode_each_model_answers_at_once(taught: Serving) -> None:
    models = [model("teacher", source=TEACHER, trained=False, calls=rule(from_index=1)), model("student")]
    async with taught() as service:
        rollout = await service.open(models=models, mode=PROXY, source=TEACHER)
        first = await ask(rollout, "list the files")
        assert await ask(rollout, "list the files", first, "and now?") == reply(1)
        await service.close(rollout.rollout_id)
        captured = await service.capture(rollout.rollout_id)
    assert [(call.policy_id, call.answerer) for call in captured.calls] == [
        ("student", trajectory_pb2.ANSWERER_INFERENCE),
        ("teacher", trajectory_pb2.ANSWERER_INFERENCE),
    ]


@pytest.mark.requirement("R133", "R34")
async def test_a_restart_keeps_the_model_that_a_waiting_call_was_chosen_for(taught: Serving) -> None:
    """Also where it would be another one now: its twin, which was answered meanwhile, has made it a retry."""
    retries = rule(call_classes=[trajectory_pb2.CALL_CLASS_RETRY])
    models = [model("teacher", source=TEACHER, trained=False, calls=retries), model("student")]
    async with taught() as service:
        rollout = await service.open("r", models=models)
        trainer = await service.trainer(credits=pb.Credits(calls=1))
        first, second = (asyncio.ensure_future(ask(rollout, "list the files")) for _ in range(2))
        call = await trainer.call()

        def others() -> list[Call]:
            return [one for one in service.interceptor.registry.open_calls() if one.id != call.call_id]

        await eventually(lambda: [one.policy_id for one in others()] == ["student"], "the other call waits")
        (waiting,) = others()
        assert waiting.state is CallState.QUEUED
        await trainer.send(credits=pb.Credits(calls=0))
        await trainer.deliver(trainer.result(call, "one"))
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
    async with taught() as service:
        trainer = await service.trainer()
        again = await trainer.call()
        assert (again.call_id, again.policy_id) == (waiting.id, "student")
        assert again.call_class == trajectory_pb2.CALL_CLASS_RETRY
