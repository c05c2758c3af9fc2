"""Uses of the distributions that a type checker accepts; never run. Each `assert_type` is what an editor shows."""

from collections.abc import Generator, Sequence
from typing import assert_type

from penstock import redteam
from penstock.adapters import trainers
from penstock.adapters.openenv.serving import Listen
from penstock.chat.v1 import completion_pb2
from penstock.client import (
    AgentKeyTerms,
    Bias,
    Completion,
    Exit,
    GateRollout,
    ModelCall,
    Output,
    OutputGap,
    Paced,
    Penstock,
    Rollout,
    RolloutResult,
    RunResult,
    SandboxHandle,
    Selector,
    StreamBatch,
    Task,
    connect,
    sync,
)
from penstock.dashboard.framing import data_frame
from penstock.interception.v1 import intercept_service_pb2, intercept_service_pb2_grpc
from penstock.values import reader

TASK = Task(task_id="t", instruction="i")


def trainer() -> None:
    """The loop of a trainer without await."""
    with sync.connect() as ps:
        assert_type(ps, sync.Penstock)
        group = ps.groups.create(TASK, "shell", 8, run_id="r")
        assert_type(group, sync.GroupHandle)
        for call in group.calls(credits=8):
            assert_type(call, sync.ModelCall)
            answer = ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id)
            assert_type(answer, Completion)
            call.deliver(answer)
        for result in group.results():
            assert_type(result, RolloutResult)
        with ps.stream([TASK], "shell", 8, pacing=Paced(batch=1, max_staleness=1), concurrency=8, run_id="r") as stream:
            for batch in stream.batches():
                assert_type(batch, StreamBatch)
                stream.announce(batch.policy_version + 1)
            assert_type(stream.bias(), Bias)
        assert_type(ps.rollouts.create(TASK, "shell"), sync.RolloutHandle)
        assert_type(ps.rollouts.create(TASK, "shell", n=2), sync.GroupHandle)
        assert_type(ps.rollouts.list(run_id="r"), Generator[Rollout, None, None])


def sandboxes() -> None:
    """Sandboxes without await, without a block."""
    ps = sync.connect()
    with ps.sandboxes.create() as sandbox:
        assert_type(sandbox, sync.SandboxHandle)
        assert_type(sandbox.run(["true"]), RunResult)
        with sandbox.start(["cat"], stdin=True) as process:
            process.write(b"x")
            assert_type(process.output(), Generator[Output | OutputGap, None, None])
            assert_type(process.wait(), Exit)
        for fork in sandbox.fork(2):
            assert_type(fork.made(), sync.SandboxHandle)
    with ps.gate.open() as rollout:
        assert_type(rollout.token, str)
        assert_type(rollout.issue_key(AgentKeyTerms(ttl=60.0)).token, str)
        assert_type(ps.gate.lease_calls(Selector(run_id="r")), Sequence[sync.LeasedCall])
        assert_type(rollout.close(), GateRollout)
    ps.close()


async def asynchronous(ps: Penstock) -> None:
    """The same with await."""
    async with connect() as other:
        assert_type(other, Penstock)
    async with await ps.sandboxes.create() as sandbox:
        assert_type(sandbox, SandboxHandle)
    async with ps.intercept() as session:
        async for call in session.calls():
            assert_type(call, ModelCall)


async def beside(ps: Penstock) -> None:
    """What is beside the client, and the stubs."""
    assert_type(trainers.select([]), trainers.Selection)
    assert_type(await redteam.run(ps), redteam.Report)
    assert_type(Listen(host="127.0.0.1", port=0).host, str)
    assert_type(data_frame(b""), bytes)
    assert_type(reader(Completion, completion_pb2.Completion)(completion_pb2.Completion()), Completion)
    assert_type(intercept_service_pb2.CallResult().call_id, str)
    assert_type(intercept_service_pb2_grpc.InterceptServiceServicer.__name__, str)
