"""The processes of one sandbox: started once per id, kept for their watchers, ended with the sandbox.

Purpose: separates start from watch. A process belongs to its sandbox, not to a call.

Invariants
- The same id with the same content is the same process; other content is refused.
- Ended processes are kept for their watchers, at least the latest ``_KEPT``.
- Values of ``secret_env`` go into the process's environment and nowhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Violation,
)
from penstock_chassis.validation import invalid
from penstock_sandbox.domain.backend import SandboxHandle, StartFailed
from penstock_sandbox.domain.model import Command, Exit, ProcessSpec, RunResult, Stream
from penstock_sandbox.processes.process import RunningProcess

_KEPT = 256
_BATCH = 16
"""Eviction runs once per this many further processes, so that not every start pays for it."""
_RUNNING_LIMIT = 1024


class Processes:
    def __init__(self, handle: SandboxHandle, env: Mapping[str, str], spool: Path) -> None:
        self._handle = handle
        self._env = env
        self._spool = spool
        self._known: dict[str, RunningProcess] = {}
        self._look_at = _KEPT + _BATCH

    async def start(
        self, spec: ProcessSpec, tail: int = 0, stdin: bytes | None = None, *, to_end: bool = False
    ) -> RunningProcess:
        """Starts a process, or joins the one with the same id and content (including ``stdin`` if given).

        ``to_end``: the caller waits for its end.

        Raises AlreadyExists (PROCESS_ID_REUSED) for the same id with other content.
        """
        _check(spec)
        if spec.command.user not in ("", self._handle.user):
            raise FailedPrecondition(
                f"processes of this sandbox run as {self._handle.user} only",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "root"},
            )
        content = None if stdin is None else hashlib.sha256(stdin).digest()
        process = self._known.get(spec.id)
        if process is not None:
            if process.spec != spec or process.stdin_digest != content:
                raise AlreadyExists("the process id was used for another request", reason="PROCESS_ID_REUSED")
            await asyncio.shield(process.started)
            return process
        forgotten = self._make_room()
        process = RunningProcess(spec, content, self._spool, tail)
        self._known[spec.id] = process
        # Shielded: a cancelled caller can come back and join by the same id.
        await asyncio.shield(asyncio.ensure_future(self._start(process, forgotten, to_end)))
        return process

    async def _start(self, process: RunningProcess, forgotten: Sequence[RunningProcess], to_end: bool) -> None:
        for ended in forgotten:
            await ended.aclose()
        command = process.spec.command
        argv = command.argv if command.shell is None else ("/bin/bash", "-c", command.shell)
        cwd = command.cwd if command.cwd.startswith("/") else f"{self._handle.workdir}/{command.cwd}".rstrip("/")
        try:
            handle = await self._handle.start(
                argv,
                {**self._handle.default_env, **self._env, **command.env, **command.secret_env},
                cwd,
                process,
                stdin=process.spec.stdin,
                pty=process.spec.pty,
                to_end=to_end,
            )
        except StartFailed as error:
            process.start_failed(str(error))
        except BaseException as error:
            self._known.pop(process.spec.id, None)
            if not process.started.done():
                process.started.set_exception(error)
                # There may be no joiner to retrieve it.
                process.started.exception()
            raise
        else:
            process.began(handle)

    def get(self, process_id: str) -> RunningProcess:
        """Returns a process. Raises NotFound (PROCESS_UNKNOWN)."""
        process = self._known.get(process_id)
        if process is None:
            raise NotFound("no such process in this sandbox", reason="PROCESS_UNKNOWN")
        return process

    def all(self) -> list[RunningProcess]:
        """Returns every known process, newest first."""
        return list(reversed(self._known.values()))

    async def run(self, command: Command, stdin: bytes, output_limit: int, process_id: str = "") -> RunResult:
        """Runs a command to its end, or joins the run with this id. Its last caller's cancellation kills it."""
        half = output_limit // 2
        spec = ProcessSpec(
            id=process_id or f"run-{secrets.token_hex(8)}",
            command=command,
            stdin=bool(stdin),
            output_limit=output_limit - half,
        )
        try:
            process = await self.start(spec, half, stdin, to_end=True)
        except asyncio.CancelledError:
            begun = self._known.get(spec.id)
            if begun is not None and not process_id:  # without an id no caller can come back for it
                await asyncio.shield(asyncio.gather(begun.kill(), return_exceptions=True))
            raise
        process.callers += 1
        feeding = asyncio.create_task(_feed(process, stdin)) if stdin and process.callers == 1 else None
        try:
            await process.ended.wait()
        except BaseException:
            if process.callers == 1:
                await asyncio.shield(asyncio.ensure_future(process.kill()))
            raise
        finally:
            process.callers -= 1
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        assert process.exit is not None
        return RunResult(process.exit, process.outputs[Stream.STDOUT].ends(), process.outputs[Stream.STDERR].ends())

    async def kill(self, process_id: str, *, everything: bool = False) -> Exit:
        """Kills a process and its descendants, or ``everything`` in the sandbox; returns once all are dead.

        Raises NotFound (PROCESS_UNKNOWN), Internal (KILL_FAILED).
        """
        process = self.get(process_id)
        ended = await process.kill()
        if everything:
            others = [other for other in self._known.values() if other is not process]
            # Known processes first, so that each exits as KILLED.
            for other in others:
                if other.exit is None:
                    await other.kill()
            if not await self._handle.kill_everything():
                for other in others:
                    await other.kill()
        return ended

    def condemn(self) -> None:
        """Marks every process: the sandbox is about to be deleted."""
        for process in self._known.values():
            process.condemn()

    async def aclose(self) -> None:
        """Forgets all processes; the sandbox has ended."""
        for process in self._known.values():
            await process.aclose()

    def _make_room(self) -> list[RunningProcess]:
        """Removes the oldest ended processes; the caller closes them."""
        if len(self._known) < self._look_at:
            return []
        ended = [key for key, process in self._known.items() if process.exit is not None]
        if len(self._known) - len(ended) >= _RUNNING_LIMIT:
            raise ResourceExhausted(
                "too many running processes in this sandbox", reason="PROCESS_LIMIT", retry_after_s=1
            )
        oldest = [self._known.pop(key) for key in ended[: max(0, len(ended) - _KEPT)]]
        self._look_at = min(len(self._known) + _BATCH, _RUNNING_LIMIT)
        return oldest


async def _feed(process: RunningProcess, stdin: bytes) -> None:
    try:
        writer = process.take_stdin()
        await process.write_stdin(writer, 0, stdin)
        await process.close_stdin(writer)
    except FailedPrecondition as error:
        # As in a shell's pipe, a command that does not read its input may still succeed.
        if error.reason != "STDIN_CLOSED":
            raise


def _check(spec: ProcessSpec) -> None:
    command = spec.command
    texts = (
        ("command.argv.args", command.argv),
        ("command.shell", (command.shell or "",)),
        ("command.cwd", (command.cwd,)),
        ("command.env", (*command.env, *command.env.values())),
        ("command.secret_env", (*command.secret_env, *command.secret_env.values())),
    )
    problems = [Violation(field, "contains a NUL byte") for field, values in texts if "\0" in "".join(values)]
    if command.shell is None and not command.argv:
        problems.append(Violation("command", "is empty"))
    for field, names in (("command.env", command.env), ("command.secret_env", command.secret_env)):
        if "" in names or "=" in "".join(names):
            problems.append(Violation(field, "a name is empty or contains '='"))
    if command.timeout_s is not None and command.timeout_s <= 0:
        problems.append(Violation("command.timeout", "is not positive"))
    if spec.output_limit < 0:
        problems.append(Violation("output_limit_bytes", "is negative"))
    if problems:
        raise invalid(problems)
