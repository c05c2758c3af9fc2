"""Sandboxes, for the Python client's subject. What the client has no method for is called by the generated stub."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.client.errors import FailedPrecondition
from penstock.client.sandboxes.handle import SandboxHandle
from penstock.client.tasks.spec import Command, SeedFile
from penstock.client.transport.rpc import Service
from penstock.client.types.results import Exit
from penstock.client.types.sandboxes import SandboxSpec
from penstock.client.wire import results as wire_results
from penstock.client.wire import specs
from penstock.sandbox.v1 import file_service_pb2 as files
from penstock.sandbox.v1 import file_service_pb2_grpc, process_service_pb2_grpc
from penstock.sandbox.v1 import process_service_pb2 as processes

if TYPE_CHECKING:
    from tests.conformance.clients.python_subject import Subject

Json = dict[str, Any]


async def _sandbox(subject: Subject, given: Json) -> SandboxHandle:
    kept = subject.kept("sandboxes")
    if given["sandbox_id"] not in kept:
        kept[given["sandbox_id"]] = await subject.client(given).sandboxes.attach(given["sandbox_id"])
    handle: SandboxHandle = kept[given["sandbox_id"]]
    return handle


def _data(subject: Subject, given: Json) -> tuple[Service, Any, Any]:
    """The sandbox service, with its stubs for processes and files."""
    service: Service = subject.client(given)._services["sandbox"]
    return (
        service,
        process_service_pb2_grpc.ProcessServiceStub(service.channel),
        file_service_pb2_grpc.FileServiceStub(service.channel),
    )


def _exit(end: Exit) -> Json:
    return {"reason": end.reason, "code": end.code}


async def sandbox_create(subject: Subject, given: Json) -> Json:
    spec = SandboxSpec(labels=given.get("labels", {}), lease=given.get("lease_s"))
    made = await subject.client(given).sandboxes.create(spec)
    subject.kept("sandboxes")[made.sandbox_id] = made
    return {"sandbox_id": made.sandbox_id}


async def sandbox_attach(subject: Subject, given: Json) -> Json:
    return {"sandbox_id": (await subject.client(given).sandboxes.attach(given["sandbox_id"])).sandbox_id}


async def sandbox_list(subject: Subject, given: Json) -> Json:
    listed = subject.client(given).sandboxes.list(labels=given["labels"])
    return {"sandbox_ids": [sandbox_id async for sandbox_id, _ in listed]}


async def sandbox_run(subject: Subject, given: Json) -> Json:
    sandbox = await _sandbox(subject, given)
    ran = await sandbox.run(Command(shell=given["shell"]), stdin=given.get("stdin", "").encode())
    return {**_exit(ran.exit), "stdout": ran.stdout.decode(), "stderr": ran.stderr.decode()}


async def process_start(subject: Subject, given: Json) -> Json:
    service, run, _ = _data(subject, given)
    request = processes.StartProcessRequest(
        sandbox_id=given["sandbox_id"],
        process_id=secrets.token_hex(16),
        command=specs.command(Command(shell=given["shell"])),
        stdin=given.get("stdin", False),
    )
    answer = await service.call(run.StartProcess, request, repeatable=True)
    return {"process_id": answer.process.process_id}


async def process_write(subject: Subject, given: Json) -> None:
    (service, run, _), frame = _data(subject, given), processes.WriteStdinRequest
    offsets = subject.kept("stdin offsets")
    where: Json = {"sandbox_id": given["sandbox_id"], "process_id": given["process_id"]}

    async def frames() -> Any:
        yield frame(start=frame.StdinStart(**where, offset=offsets.get(given["process_id"], 0)))
        yield frame(data=given["text"].encode())
        if given.get("last"):
            yield frame(end=frame.StdinEnd())

    answer = await service.push(run.WriteStdin, frames)
    offsets[given["process_id"]] = answer.offset


async def process_output(subject: Subject, given: Json) -> Json:
    service, run, _ = _data(subject, given)
    request = processes.WatchProcessRequest(sandbox_id=given["sandbox_id"], process_id=given["process_id"])
    outputs = {1: b"", 2: b""}
    ended: Json = {}
    async for event in service.stream(run.WatchProcess, request):
        if event.HasField("chunk"):
            outputs[event.chunk.stream] += event.chunk.data
        elif event.HasField("exit"):
            ended = _exit(wire_results.exit_from(event.exit))
    return {**ended, "stdout": outputs[1].decode(), "stderr": outputs[2].decode()}


async def process_wait(subject: Subject, given: Json) -> Json:
    service, run, _ = _data(subject, given)
    request = processes.WaitProcessRequest(sandbox_id=given["sandbox_id"], process_id=given["process_id"])
    answer = await service.call(run.WaitProcess, request)
    return _exit(wire_results.exit_from(answer.process.exit))


async def process_kill(subject: Subject, given: Json) -> Json:
    service, run, _ = _data(subject, given)
    request = processes.KillProcessRequest(sandbox_id=given["sandbox_id"], process_id=given["process_id"])
    answer = await service.call(run.KillProcess, request, repeatable=True)
    return _exit(wire_results.exit_from(answer.exit))


async def file_write(subject: Subject, given: Json) -> None:
    sandbox = await _sandbox(subject, given)
    await sandbox.write_file(given["path"], given["text"].encode(), mode=given.get("mode"))


async def file_read(subject: Subject, given: Json) -> Json:
    return {"text": (await (await _sandbox(subject, given)).read_file(given["path"])).decode()}


async def file_list(subject: Subject, given: Json) -> Json:
    sandbox = await _sandbox(subject, given)
    return {"names": [item.name async for item in sandbox.files(given["path"])]}


async def file_stat(subject: Subject, given: Json) -> Json:
    service, _, tree = _data(subject, given)
    request = files.StatRequest(sandbox_id=given["sandbox_id"], path=given["path"])
    info = (await service.call(tree.Stat, request, repeatable=True)).info
    return {"kind": files.FileKind.Name(info.kind)[10:].lower(), "size": info.size_bytes, "mode": info.mode}


async def file_remove(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).remove(given["path"], recursive=given.get("recursive", False))


async def make_directory(subject: Subject, given: Json) -> None:
    service, _, tree = _data(subject, given)
    request = files.MakeDirectoryRequest(sandbox_id=given["sandbox_id"], path=given["path"])
    await service.call(tree.MakeDirectory, request, repeatable=True)


async def tree_read(subject: Subject, given: Json) -> Json:
    service, _, tree = _data(subject, given)
    request = files.ReadTreeRequest(sandbox_id=given["sandbox_id"], path=given["path"])
    parts = await service.collect(tree.ReadTree, request)
    return {"tar": b"".join(part.tar_chunk for part in parts).hex()}


async def tree_write(subject: Subject, given: Json) -> None:
    (service, _, tree), frame = _data(subject, given), files.WriteTreeRequest

    async def frames() -> Any:
        yield frame(start=frame.WriteTreeStart(sandbox_id=given["sandbox_id"], path=given["path"]))
        yield frame(tar_chunk=bytes.fromhex(given["tar"]))
        yield frame(end=frame.WriteTreeEnd())

    await service.push(tree.WriteTree, frames)


async def sandbox_renew(subject: Subject, given: Json) -> Json:
    end = await (await _sandbox(subject, given)).renew(given["lease_s"])
    return {"expire_time": end.timestamp()}


async def sandbox_pause(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).pause()


async def sandbox_resume(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).resume()


async def sandbox_diff(subject: Subject, given: Json) -> Json:
    found = await (await _sandbox(subject, given)).diff()
    return {"tar": found.tar.hex(), "deleted": list(found.deleted_paths)}


async def sandbox_prepare(subject: Subject, given: Json) -> Json:
    try:
        snapshot = await subject.client(given).sandboxes.prepare(
            files=[SeedFile(path, text.encode()) for path, text in given["files"].items()],
            setup=[Command(shell=line) for line in given["setup"]],
        )
    except FailedPrecondition as error:
        told = "\n".join((error.message, *getattr(error, "__notes__", ())))
        raise FailedPrecondition(told, reason=error.reason, metadata=error.metadata) from error
    return {"snapshot_id": snapshot.snapshot_id}


async def sandbox_fork(subject: Subject, given: Json) -> Json:
    if "snapshot_id" in given:
        children = subject.client(given).sandboxes.fork(given["snapshot_id"], given["count"])
    else:
        children = (await _sandbox(subject, given)).fork(given["count"])
    made = {fork.index: fork.made() async for fork in children}
    for sandbox in made.values():
        subject.kept("sandboxes")[sandbox.sandbox_id] = sandbox
    return {"sandbox_ids": [made[index].sandbox_id for index in sorted(made)]}


async def snapshot_list(subject: Subject, given: Json) -> Json:
    return {"snapshot_ids": [item.snapshot_id async for item in subject.client(given).sandboxes.snapshots()]}


async def snapshot_delete(subject: Subject, given: Json) -> None:
    await subject.client(given).sandboxes.delete_snapshot(given["snapshot_id"])


async def sandbox_delete(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).delete()


COMMANDS: Final[Mapping[str, Callable[[Subject, Json], Awaitable[Json | None]]]] = {
    function.__name__: function
    for function in (
        sandbox_create, sandbox_attach, sandbox_list, sandbox_run, process_start, process_write,
        process_output, process_wait, process_kill, file_write, file_read, file_list, file_stat, file_remove,
        make_directory, tree_read, tree_write, sandbox_renew, sandbox_pause, sandbox_resume, sandbox_diff,
        sandbox_prepare, sandbox_fork, snapshot_list, snapshot_delete, sandbox_delete,
    )
}  # fmt: skip
