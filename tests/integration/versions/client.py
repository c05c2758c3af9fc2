"""A trainer for the pairs of versions: nothing here is newer than the baseline, and the client is what is installed.

    python client.py CONNECTION.json INPUT.json

Uses sandboxes and their processes, answers the calls of a group at the gate with the input's tokens, lists, watches and
exports its rollouts, generates, pushes weights. Prints one JSON object; the test says what it must be.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from penstock.client import Command, Completion, Penstock, RewardFrom, SeedFile, Task, Verifier, connect
from penstock.sandbox.v1 import process_service_pb2 as processes
from penstock.sandbox.v1 import process_service_pb2_grpc

Json = dict[str, Any]

RUN = "versions"
TASK = Task(
    task_id="copy",
    instruction="Copy the word in note.txt to out.txt.",
    files=[SeedFile("note.txt", b"kiwi\n")],
    setup=[Command(["test", "-f", "note.txt"])],
    verifier=Verifier(
        commands=[Command(shell='grep -qx kiwi out.txt && echo 0.75 > "$PENSTOCK_REWARD_FILE"')],
        reward=RewardFrom.FILE,
    ),
    metadata={"level": 1},
)


async def sandboxes(ps: Penstock, connection: Mapping[str, Any]) -> Json:
    """A sandbox with files and a command, in the list while it lives."""
    labels = {"of": RUN}
    async with await ps.sandboxes.create() as plain:
        snapshot = await ps.sandboxes.prepare(files=[SeedFile("seed.txt", b"seed")], setup=[Command(["true"])])
        (child,) = [fork.made() async for fork in ps.sandboxes.fork(snapshot.snapshot_id, 1, labels=labels)]
        async with child as sandbox:
            await sandbox.write_file("a.txt", b"one\n", mode=0o600)
            ran = await sandbox.run(["cat", "a.txt", "seed.txt", "-"], stdin=b"three")
            listed = [item async for item in ps.sandboxes.list(labels=labels)]
            return {
                "listed": listed == [(sandbox.sandbox_id, "ready")],
                "others": plain.sandbox_id in [sandbox_id async for sandbox_id, _ in ps.sandboxes.list()],
                "read": (await sandbox.read_file("a.txt")).decode(),
                "files": [item.name async for item in sandbox.files()],
                "ran": [ran.exit.reason, ran.exit.code, ran.stdout.decode()],
                "process": await process(sandbox.sandbox_id, connection),
            }


async def process(sandbox_id: str, connection: Mapping[str, Any]) -> Json:
    """A process by the generated stubs, as a client that has nothing else calls it."""
    metadata = (("authorization", f"Bearer {connection['token']}"),)
    where: Json = {"sandbox_id": sandbox_id, "process_id": "watched"}
    frame = processes.WriteStdinRequest

    async def frames() -> AsyncIterator[processes.WriteStdinRequest]:
        yield frame(start=frame.StdinStart(**where, offset=0))
        yield frame(data=b"a line\n")
        yield frame(end=frame.StdinEnd())

    async with grpc.aio.insecure_channel(connection["addresses"]["sandbox"]) as channel:
        stub = process_service_pb2_grpc.ProcessServiceStub(channel)
        command = processes.StartProcessRequest(**where, stdin=True)
        command.command.shell = "cat; echo ended >&2; exit 3"
        await stub.StartProcess(command, metadata=metadata)
        await stub.WriteStdin(frames(), metadata=metadata)
        seen: Json = {"stdout": "", "stderr": ""}
        async for event in stub.WatchProcess(processes.WatchProcessRequest(**where), metadata=metadata):
            if event.HasField("chunk"):
                seen["stdout" if event.chunk.stream == 1 else "stderr"] += event.chunk.data.decode()
            elif event.HasField("exit"):
                seen["code"] = event.exit.code
        waited = await stub.WaitProcess(processes.WaitProcessRequest(**where), metadata=metadata)
        listed = await stub.ListProcesses(processes.ListProcessesRequest(sandbox_id=sandbox_id), metadata=metadata)
        known = [item.process_id for item in listed.processes]
        return seen | {"waited": waited.process.exit.code, "listed": "watched" in known}


async def rollouts(ps: Penstock, answers: list[Json]) -> Json:
    """A group at the gate, whose calls are answered with these tokens, in the order of each rollout's calls."""
    group = await ps.groups.create(TASK, "shell", 2, run_id=RUN, labels={"of": RUN})
    asked: list[int] = []
    async for call in group.calls():
        asked.append(call.index)
        given = answers[call.index]
        assert len(call.prompt_token_ids) == call.prompt_count > 0
        await call.deliver(Completion.of_tokens(given["token_ids"], given["logprobs"], policy_version=7))
    results = await group.results()
    watched: list[str] = []
    async for changes in ps.rollouts.watch(run_id=RUN):
        watched += [item.rollout_id for item in changes.rollouts]
        if changes.complete:
            break
    ids = sorted(result.rollout_id for result in results)
    exported = {trajectory.rollout_id: trajectory async for trajectory, _ in ps.rollouts.export(run_id=RUN)}
    handle = await ps.rollouts.attach(ids[0])
    return {
        "asked": sorted(asked),
        "outcomes": [[str(result.failure), result.reward and result.reward.value] for result in results],
        "grades": [result.trajectory and str(result.trajectory.grade) for result in results],
        "samples": [sample(exported[rollout_id].samples) for rollout_id in ids],
        "same": [sample((await ps.rollouts.trajectory(ids[0])).samples)],
        "listed": sorted([item.rollout_id async for item in ps.rollouts.list(run_id=RUN)]) == ids,
        "watched": sorted(watched) == ids,
        "phases": [str((await ps.rollouts.get(rollout_id)).phase) for rollout_id in ids],
        "events": len([event async for event in handle.events()]) > 0,
    }


def sample(samples: Any) -> Json:
    """What is trained of a rollout's one sample."""
    (one,) = samples
    mask = np.asarray(one.loss_mask, bool)
    return {
        "trained": one.input_ids[mask].tolist(),
        "logprobs": one.logprobs[mask].tolist(),
        "prompt": one.input_ids[: one.prompt_count].tolist(),
        "versions": sorted({item.policy_version for item in one.versions}),
    }


def counts(completion: Completion) -> bool:
    """Whether each token that was sampled has a logprob."""
    ids, logprobs = completion.token_ids, completion.logprobs
    return ids is not None and logprobs is not None and len(ids) == len(logprobs) > 0


async def engine(ps: Penstock, weights: Path) -> Json:
    """A completion before and after a push of weights."""
    before = await ps.inference.generate([3, 4, 5])
    with np.load(weights) as tensors:
        update = await ps.inference.update_weights(1, dict(tensors))
    after = await ps.inference.generate([3, 4, 5])
    return {
        "counts": [counts(item) for item in (before, after)],
        "version": [
            before.policy_version,
            update.policy_version,
            after.policy_version,
            (await ps.inference.info()).policy_version,
        ],
    }


async def main() -> None:
    """See the module's text."""
    connection = json.loads(Path(sys.argv[1]).read_text())
    given = json.loads(Path(sys.argv[2]).read_text())
    async with connect(Path(sys.argv[1])) as ps:
        seen = {
            "sandboxes": await sandboxes(ps, connection),
            "rollouts": await rollouts(ps, given["answers"]),
            "engine": await engine(ps, Path(given["weights"])),
        }
    print(json.dumps(seen))


asyncio.run(main())
