"""The Python client reaches every RPC of the protos by a typed method."""

from __future__ import annotations

import asyncio
import io
import signal
import tarfile
import typing
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from tests.integration.client.conftest import TASK
from tests.integration.client.rpcs import ELSEWHERE, METHODS, Calls, noted, rpcs

from penstock.client import (
    AgentKeyTerms,
    AlreadyDelivered,
    Annotation,
    Completion,
    FailedPrecondition,
    FinishReason,
    InvalidCompletion,
    LogprobsMode,
    Message,
    NotFound,
    Output,
    Penstock,
    PenstockError,
    Prompt,
    ReplayOrigin,
    Role,
    RolloutClosed,
    SandboxSpec,
    Selector,
    Text,
    TokenScope,
    ToolboxFile,
    ToolboxSpec,
    ToScore,
    WatchStarted,
    connect,
    sync,
)
from penstock.client.types.logprob_diff import Gap, GapReport
from penstock.driver.v1 import agent_pb2
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLASSES = {live.__name__: live for live in sync.LIVE}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the clients of this test call."""
    return noted(monkeypatch)


@pytest_asyncio.fixture(loop_scope="session")
async def ps(stack: LocalStack, calls: Calls) -> AsyncIterator[Penstock]:
    """A client whose calls are noted."""
    async with connect(stack.endpoints) as client:
        yield client


def expected(service: str) -> set[str]:
    """RPCs that a test of this file is to call."""
    return {name for name in METHODS[service] if f"{service}/{name}" not in ELSEWHERE}


async def test_every_rpc_has_a_method_in_the_table() -> None:
    """A new RPC fails here until the client has a method for it."""
    known = {(service, name) for service, methods in METHODS.items() for name in methods}
    assert known == {(rpc.containing_service.name, rpc.name) for rpc in rpcs()}


async def test_methods_of_the_table_have_complete_types() -> None:
    """Each argument and the answer; none is Any."""
    for method in {name for methods in METHODS.values() for name in methods.values()}:
        kind, _, name = method.partition(".")
        function = getattr(CLASSES[kind], name)
        hints, code = typing.get_type_hints(function), function.__code__
        arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        assert {"return", *arguments} <= hints.keys() and typing.Any not in hints.values(), method


async def test_sandboxes_files_and_processes_are_reached(ps: Penstock, calls: Calls) -> None:
    """Each RPC of three services, with what it says."""
    labels = {"of": "every-rpc"}
    snapshot = await ps.sandboxes.prepare(files=[])
    assert await ps.sandboxes.snapshot(snapshot.snapshot_id) == replace(snapshot, setup=())
    assert snapshot.snapshot_id in [item.snapshot_id async for item in ps.sandboxes.snapshots()]
    spec = SandboxSpec(snapshot_id=snapshot.snapshot_id, labels=labels)
    async with await ps.sandboxes.create(spec) as sandbox:
        state = await sandbox.refresh()
        assert (state.state, dict(state.labels), state.workdir) == ("ready", labels, sandbox.workdir)
        assert (sandbox.sandbox_id, "ready") in [item async for item in ps.sandboxes.list(labels=labels)]
        async with aclosing(ps.sandboxes.watch(labels=labels)) as watch:
            seen = await anext(watch)
        assert [item.sandbox.sandbox_id for item in seen.sandboxes] == [sandbox.sandbox_id] and seen.count == 1
        await files(await ps.sandboxes.attach(sandbox.sandbox_id))
        await processes(sandbox)
        assert (await sandbox.renew(60.0)).tzinfo is not None
        await sandbox.stats()
        await sandbox.narrow_network(None)
        with suppress(FailedPrecondition):
            await sandbox.diff()
        for attempt in (sandbox.pause, sandbox.resume):
            with suppress(FailedPrecondition):
                await attempt()
        with suppress(FailedPrecondition):
            async for fork in sandbox.fork(1, labels=labels):
                fork.made()
        async with aclosing(sandbox.watch()) as states:
            assert (await anext(states)).state == "ready"
            assert sandbox.sandbox_id in await ps.sandboxes.delete_all(labels)
            assert [item.state async for item in states][-1] == "deleted"
    await ps.sandboxes.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(NotFound):
        await ps.sandboxes.snapshot(snapshot.snapshot_id)
    assert await ps.sandboxes.backends()
    assert (await ps.sandboxes.node_status()).room > 0
    for service in ("SandboxService", "FileService", "ProcessService"):
        assert calls.of(service) == expected(service)


async def files(sandbox: typing.Any) -> None:
    """A file, a directory and a tree, there and back."""
    await sandbox.write_file("tree/a.txt", b"one")
    await sandbox.make_directory("tree/inside", mode=0o700)
    info = await sandbox.stat("tree/inside")
    assert (info.kind, info.mode) == ("directory", 0o700)
    tar = await sandbox.read_tree("tree")
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert any(name.endswith("a.txt") for name in archive.getnames())
    assert await sandbox.write_tree("copy", tar) >= 2
    assert await sandbox.read_file("copy/a.txt") == b"one"
    assert {item.name async for item in sandbox.files("copy")} == {"a.txt", "inside"}
    await sandbox.remove("copy", recursive=True)


async def processes(sandbox: typing.Any) -> None:
    """Background processes: input, output, signals, a terminal."""
    assert (await sandbox.run(["true"])).ok
    async with await sandbox.start(["cat"], stdin=True) as cat:
        await cat.write(b"first ")
        await cat.write(b"second")
        again = await sandbox.process(cat.process_id)
        await again.close_stdin()
        text = b"".join([item.data async for item in cat.output() if isinstance(item, Output)])
        assert text == b"first second" and cat.info.exit is not None and (await cat.wait()).ok
        assert cat.process_id in [item.process_id async for item in sandbox.processes()]
    async with await sandbox.start(["sh", "-c", "trap 'exit 7' INT; echo ready; while :; do sleep 0.05; done"]) as loop:
        async with aclosing(loop.output()) as output:
            assert (await anext(output)).data == b"ready\n"
        await loop.signal(signal.SIGINT)
        assert (await loop.wait()).code == 7
    async with await sandbox.start(["sh", "-c", "read line; stty size"], pty=(10, 20)) as terminal:
        await terminal.resize(30, 90)
        await terminal.write(b"go\n")
        shown = b"".join([item.data async for item in terminal.output()])
        assert b"30 90" in shown
    sleeper = await sandbox.start(["sleep", "600"])
    assert (await sleeper.kill()).reason == "killed"


async def test_toolboxes_are_reached(ps: Penstock, calls: Calls) -> None:
    """A program that is mounted in a sandbox."""
    program = ToolboxFile("bin/greet", b"#!/bin/sh\necho hello\n")
    toolbox = await ps.toolboxes.prepare(ToolboxSpec(name="greeting", files=[program]))
    assert toolbox.toolbox_id in [item.toolbox_id async for item in ps.toolboxes.list()]
    async with await ps.sandboxes.create(SandboxSpec(toolbox_ids=[toolbox.toolbox_id])) as sandbox:
        assert (await sandbox.run(["greet"])).stdout == b"hello\n"
    await ps.toolboxes.delete(toolbox.toolbox_id)
    assert calls.of("ToolboxService") == expected("ToolboxService")


async def test_gate_serves_an_agent_of_ones_own(ps: Penstock, calls: Calls) -> None:
    """Opened, called, leased and answered without a session, recorded, closed, deleted."""
    assert (await ps.gate.check_source()).model_name
    async with (
        await ps.gate.open(labels={"of": "gate"}, token_terms=AgentKeyTerms(ttl=600.0)) as rollout,
        aclosing(ps.gate.watch_calls([rollout.rollout_id])) as events,
        aclosing(ps.gate.watch()) as loads,
    ):
        assert isinstance(await anext(events), WatchStarted)
        assert (await anext(loads)).open_rollouts >= 1
        key = await rollout.issue_key(AgentKeyTerms(scopes=[TokenScope.COMPLETIONS]))
        assert key.token not in repr(key) and key.info.scopes == (TokenScope.COMPLETIONS,)
        keys = await ps.gate.revoke_keys(rollout.rollout_id, [key.info.key_id])
        assert [item.revoke_time is None for item in keys] == [True, False]
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        url = f"{rollout.base_url()}/chat/completions"
        async with aiohttp.ClientSession() as http:
            asked = asyncio.ensure_future(
                http.post(url, json=body, headers={"authorization": f"Bearer {rollout.token}"})
            )
            (leased,) = await ps.gate.lease_calls(Selector(rollout_ids=[rollout.rollout_id]), lease=60.0)
            assert await leased.extend()
            await leased.deliver(await ps.inference.generate(leased.prompt_token_ids, leased.sampling))
            assert leased.ended and (await asked).status == 200
            with pytest.raises(AlreadyDelivered):
                await leased.deliver(Completion(message=Message(Role.ASSISTANT, (Text("late"),))))
            assert not await leased.extend()
            async with http.post(url, json=body, headers={"authorization": f"Bearer {key.token}"}) as refused:
                assert refused.status == 401
        (call,) = [item async for item in ps.gate.calls(rollout.rollout_id)]
        recorded = await ps.gate.call(call.call_id, body=True)
        assert (
            len(recorded.prompt_token_ids) == recorded.call.prompt_count > 0 and b"hello" in recorded.call.request_body
        )
        assert (await rollout.capture()).calls[0].call_id == call.call_id
        assert (await rollout.refresh()).totals.delivered == 1
        assert rollout.rollout_id in [item.rollout_id async for item in ps.gate.list(labels={"of": "gate"})]
        assert (await rollout.close("DONE")).state == "closed"
        ended = [event async for event in events][-1]
        assert isinstance(ended, RolloutClosed) and ended.reason == "DONE"
    async with await ps.gate.open() as second, aiohttp.ClientSession() as http:
        assert (await ps.gate.hold_calls(second.rollout_id)).held
        assert not (await ps.gate.hold_calls(second.rollout_id, held=False)).held
        assert await ps.gate.load_recording(second.rollout_id, rollout.rollout_id) == 1
        url, headers = f"{second.base_url()}/chat/completions", {"authorization": f"Bearer {second.token}"}
        async with http.post(url, json=body, headers=headers) as answered:
            assert answered.status == 200
        assert (await second.refresh()).totals.replayed == 1
        (again,) = (await second.capture()).calls
        assert again.replayed_from == ReplayOrigin(rollout.rollout_id, 1, call.call_id)
    await rollout.delete()
    with pytest.raises(NotFound):
        await ps.gate.get(rollout.rollout_id)
    assert calls.of("RolloutGateService") == expected("RolloutGateService")
    async with ps.intercept(run_id="none") as session:
        await session.offer_tools([])
    assert calls.of("InterceptService") == expected("InterceptService")


async def test_rejected_answer_of_a_leased_call_may_be_corrected(ps: Penstock) -> None:
    """The same errors as in a session."""
    async with await ps.gate.open() as rollout, aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        url, headers = f"{rollout.base_url()}/chat/completions", {"authorization": f"Bearer {rollout.token}"}
        asked = asyncio.ensure_future(http.post(url, json=body, headers=headers))
        (leased,) = await ps.gate.lease_calls(Selector(rollout_ids=[rollout.rollout_id]))
        with pytest.raises(InvalidCompletion):
            await leased.deliver(Completion(token_ids=np.zeros(0, np.int32), finish_reason=FinishReason.STOP))
        await leased.delegate()
        assert (await asked).status == 200
        assert await ps.gate.lease_calls(Selector(rollout_ids=[rollout.rollout_id]), wait=0.01) == []


async def test_rollouts_groups_agents_and_terminals_are_reached(ps: Penstock, calls: Calls) -> None:
    """Each RPC of the driver."""
    agent = await ps.agents.get("shell")
    assert agent.name in [item.name async for item in ps.agents.list()]
    async with aclosing(ps.agents.check(agent.spec, spec_only=True)) as findings:
        assert [item async for item in findings]
    own = agent_pb2.AgentSpec()
    own.CopyFrom(agent.spec)
    own.name = "every-rpc"
    assert (await ps.agents.register(own)).name == "every-rpc"
    await ps.agents.delete("every-rpc")
    assert calls.of("AgentService") == expected("AgentService")

    rollout = await ps.rollouts.create(TASK, "shell", mode="transparent_proxy", run_id="every-rpc")
    assert [event async for event in rollout.events()] and (await rollout.result()).reward is not None
    assert (await rollout.trajectory()).calls
    await rollout.cancel()
    assert (await ps.rollouts.get(rollout.rollout_id)).outcome is not None
    assert rollout.rollout_id in [item.rollout_id async for item in ps.rollouts.list(run_id="every-rpc")]
    async with aclosing(ps.rollouts.watch(run_id="every-rpc")) as changes:
        await anext(changes)
    assert [item async for item in ps.rollouts.export(run_id="every-rpc")]
    with pytest.raises(FailedPrecondition, match="ended"):
        await rollout.pause()
    await rollout.resume()
    branches = await rollout.branch(1)
    assert (await branches.wait()).ended
    assert (await rollout.regrade()).reward == (await rollout.result()).reward
    await rollout.annotate(Annotation(name="helpful", author="judge", value=1.0))
    await rollout.delete()
    group = await ps.groups.create(TASK, "shell", 1, mode="transparent_proxy")
    await ps.groups.attach(group.group_id)
    assert group.group_id in [item.group_id async for item in ps.groups.list()]
    assert [event async for event in group.events()] and (await group.wait()).ended
    with pytest.raises(FailedPrecondition, match="ended"):
        await group.pause()
    await group.resume()
    await group.cancel()
    await group.delete()
    assert calls.of("RolloutService") == expected("RolloutService")

    await ps.runs.log("every-rpc", {"loss": 0.5}, step=1)
    (metric,) = await ps.runs.metrics("every-rpc")
    assert (metric.name, metric.steps.tolist(), metric.values.tolist()) == ("loss", [1], [0.5])
    assert await ps.runs.delete_metrics("every-rpc") == 1
    assert calls.of("RunService") == expected("RunService")

    async with await ps.terminals.open(TASK) as terminal:
        assert (await terminal.run("echo hello")).ok
        assert not (await terminal.refresh()).ended
    assert calls.of("TerminalService") == expected("TerminalService")


async def test_engine_is_reached(ps: Penstock, calls: Calls) -> None:
    """What the scripted engine lacks, it refuses by a typed error."""
    prompt = Prompt(messages=[Message(Role.USER, (Text("hello"),))])
    ids = await ps.inference.render(prompt)
    shorter = await ps.inference.render(prompt, add_generation_prompt=False)
    assert ids.dtype == np.int32 and list(ids[: len(shorter)]) == list(shorter) and len(shorter) < len(ids)
    completion = await ps.inference.generate(ids)
    assert completion.token_ids is not None
    parsed = await ps.inference.parse(completion.token_ids)
    assert parsed.message.role is Role.ASSISTANT and parsed.malformed_tool_calls == 0
    await ps.inference.info()
    await ps.inference.tokenizer()
    async with aclosing(ps.inference.watch_stats()) as stats:
        await anext(stats)
    await ps.inference.abort(session_id="none")
    await ps.inference.pause()
    await ps.inference.resume()
    figures = dict.fromkeys(("mean", "mean_abs", "max_abs", "kl", "clipped_share"), 0.0)
    figures |= dict.fromkeys(("ratio_mean", "ratio_p01", "ratio_p50", "ratio_p99", "effective_share"), 1.0)
    gap = Gap(policy_version=0, scored_version=None, tokens=1, effective_tokens=1.0, policy_id="", **figures)
    report = GapReport(mode=LogprobsMode.RAW, clip=(0.8, 1.2), sequences=1, overall=gap, versions=(gap,), worst=())
    for attempt in (
        ps.inference.score(ids, 1),
        ps.inference.score_batch([ToScore(ids)]),
        ps.inference.sleep(),
        ps.inference.wake(),
        ps.inference.update_weights(1, {"w": np.zeros(1, np.float32)}),
        ps.inference.init_transfer("none"),
        ps.inference.start_transfer(1),
        ps.inference.load_adapter("a", 1, {"w": np.zeros(1, np.float32)}, {"r": 1}),
        ps.inference.unload_adapter("a"),
        ps.inference.adapters(),
        ps.inference.report_gap(report),
    ):
        with suppress(PenstockError):
            await attempt
    assert calls.of("InferenceService") == expected("InferenceService")


async def test_every_service_says_what_it_is(ps: Penstock, calls: Calls) -> None:
    """Its contract's revision, its limits, its state."""
    info = await ps.operations.server_info("interception")
    assert info.service == "interception" and "top_logprobs" in info.features and info.min_ping_interval > 0
    assert (await ps.operations.status("driver")).service == "driver"
    assert (await ps.operations.drain("inference", wait=True)).drained
    await ps.operations.undrain("inference")
    assert calls.of("OperationsService") == expected("OperationsService")
