"""Sandboxes, for the Python client's subject."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.client import (
    Command,
    Exit,
    FailedPrecondition,
    Output,
    ProcessHandle,
    SandboxHandle,
    SandboxSpec,
    SeedFile,
)

if TYPE_CHECKING:
    from tests.conformance.clients.python_subject import Subject

Json = dict[str, Any]


async def _sandbox(subject: Subject, given: Json) -> SandboxHandle:
    kept = subject.kept("sandboxes")
    if given["sandbox_id"] not in kept:
        kept[given["sandbox_id"]] = await subject.client(given).sandboxes.attach(given["sandbox_id"])
    handle: SandboxHandle = kept[given["sandbox_id"]]
    return handle


async def _process(subject: Subject, given: Json) -> ProcessHandle:
    return await (await _sandbox(subject, given)).process(given["process_id"])


def _exit(end: Exit) -> Json:
    return {"reason": end.reason, "code": end.code}


async def sandbox_create(subject: Subject, given: Json) -> Json:
    spec = SandboxSpec(labels=given.get("labels", {}), lease=given.get("lease_s"))
    made = await subject.client(given).sandboxes.create(spec)
    subject.kept("sandboxes")[made.sandbox_id] = made
    return {"sandbox_id": made.sandbox_id}


async def sandbox_attach(subject: Subject, given: Json) -> Json:
    found = await subject.client(given).sandboxes.attach(given["sandbox_id"])
    subject.kept("sandboxes")[found.sandbox_id] = found
    return {"sandbox_id": found.sandbox_id}


async def sandbox_list(subject: Subject, given: Json) -> Json:
    listed = subject.client(given).sandboxes.list(labels=given["labels"])
    return {"sandbox_ids": [sandbox_id async for sandbox_id, _ in listed]}


async def sandbox_run(subject: Subject, given: Json) -> Json:
    sandbox = await _sandbox(subject, given)
    ran = await sandbox.run(Command(shell=given["shell"]), stdin=given.get("stdin", "").encode())
    return {**_exit(ran.exit), "stdout": ran.stdout.decode(), "stderr": ran.stderr.decode()}


async def process_start(subject: Subject, given: Json) -> Json:
    sandbox = await _sandbox(subject, given)
    started = await sandbox.start(Command(shell=given["shell"]), stdin=given.get("stdin", False))
    return {"process_id": started.process_id}


async def process_write(subject: Subject, given: Json) -> None:
    process = await _process(subject, given)
    await process.write(given["text"].encode())
    if given.get("last"):
        await process.close_stdin()


async def process_output(subject: Subject, given: Json) -> Json:
    process, outputs = await _process(subject, given), {"stdout": b"", "stderr": b""}
    async for item in process.output():
        if isinstance(item, Output):
            outputs[item.stream] += item.data
    return {**_exit(await process.wait()), **{name: data.decode() for name, data in outputs.items()}}


async def process_wait(subject: Subject, given: Json) -> Json:
    return _exit(await (await _process(subject, given)).wait())


async def process_kill(subject: Subject, given: Json) -> Json:
    return _exit(await (await _process(subject, given)).kill())


async def file_write(subject: Subject, given: Json) -> None:
    sandbox = await _sandbox(subject, given)
    await sandbox.write_file(given["path"], given["text"].encode(), mode=given.get("mode"))


async def file_read(subject: Subject, given: Json) -> Json:
    return {"text": (await (await _sandbox(subject, given)).read_file(given["path"])).decode()}


async def file_list(subject: Subject, given: Json) -> Json:
    sandbox = await _sandbox(subject, given)
    return {"names": [item.name async for item in sandbox.files(given["path"])]}


async def file_stat(subject: Subject, given: Json) -> Json:
    info = await (await _sandbox(subject, given)).stat(given["path"])
    return {"kind": info.kind, "size": info.size_bytes, "mode": info.mode}


async def file_remove(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).remove(given["path"], recursive=given.get("recursive", False))


async def make_directory(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).make_directory(given["path"])


async def tree_read(subject: Subject, given: Json) -> Json:
    return {"tar": (await (await _sandbox(subject, given)).read_tree(given["path"])).hex()}


async def tree_write(subject: Subject, given: Json) -> None:
    await (await _sandbox(subject, given)).write_tree(given["path"], bytes.fromhex(given["tar"]))


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
