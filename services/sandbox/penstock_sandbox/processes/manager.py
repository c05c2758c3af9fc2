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
from types import MappingProxyType

from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Violation,
)
from penstock_chassis.validation import invalid
from penstock_sandbox.domain.backend import SandboxHandle, StartFailed
from penstock_sandbox.domain.model import Command, Exit, ProcessSpec, RunResult, SeedFile, Stream
from penstock_sandbox.files import absolute, write_whole
from penstock_sandbox.processes.process import RunningProcess

_KEPT = 256
_BATCH = 16
"""Eviction runs once per this many further processes, so that not every start pays for it."""
_RUNNING_LIMIT = 1024
_NONE: Mapping[str, str] = MappingProxyType({})


class Processes:
    def __init__(
        self, handle: SandboxHandle, env: Mapping[str, str], spool: Path, search: Mapping[str, str] = _NONE
    ) -> None:
        """``search``: directories by variable, each appended to what a command, or the image, sets there itself."""
        self._handle = handle
        self._env = env
        self._network_env: Mapping[str, str] = {}
        self._search = search
        self._spool = spool
        self._known: dict[str, RunningProcess] = {}
        self._look_at = _KEPT + _BATCH
        self._holds_timeouts = False

    async def start(
        self,
        spec: ProcessSpec,
        tail: int = 0,
        stdin: bytes | None = None,
        *,
        files: Sequence[SeedFile] = (),
        to_end: bool = False,
    ) -> RunningProcess:
        """Starts a process, or joins the one with the same id and content (including ``stdin`` and ``files``).

        ``files`` are written before; if one cannot be, nothing is started. ``to_end``: the caller waits for its end.

        Raises AlreadyExists (PROCESS_ID_REUSED) for the same id with other content.
        """
        process, begun = self._entered(spec, tail, stdin, files, to_end=to_end)
        # Shielded: a cancelled caller can come back and join by the same id.
        await asyncio.shield(begun)
        return process

    def _entered(
        self, spec: ProcessSpec, tail: int, stdin: bytes | None, files: Sequence[SeedFile], *, to_end: bool
    ) -> tuple[RunningProcess, asyncio.Future[None]]:
        """Returns a process and its start, which may go on. Arguments and errors as in ``start``."""
        _check(spec)
        if spec.command.user not in ("", self._handle.user):
            raise FailedPrecondition(
                f"processes of this sandbox run as {self._handle.user} only",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "root"},
            )
        content = _digest(stdin, files)
        process = self._known.get(spec.id)
        if process is not None:
            if process.spec != spec or process.given_digest != content:
                raise AlreadyExists("the process id was used for another request", reason="PROCESS_ID_REUSED")
            return process, process.started
        forgotten = self._make_room()
        kill_others = self._kill_others if spec.kill_all_after else None
        process = RunningProcess(spec, content, self._spool, tail, kill_others)
        self._known[spec.id] = process
        return process, asyncio.ensure_future(self._start(process, forgotten, files, to_end))

    async def _start(
        self, process: RunningProcess, forgotten: Sequence[RunningProcess], files: Sequence[SeedFile], to_end: bool
    ) -> None:
        for ended in forgotten:
            await ended.aclose()
        command = process.spec.command
        argv = command.argv if command.shell is None else ("/bin/bash", "-c", command.shell)
        cwd = command.cwd if command.cwd.startswith("/") else f"{self._handle.workdir}/{command.cwd}".rstrip("/")
        try:
            for file in files:
                await write_whole(self._handle, absolute(self._handle, file.path), file.content, file.mode)
            handle = await self._handle.start(
                argv,
                self._environment(command),
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
            if self._holds_timeouts:
                process.hold_timeout()

    def set_network_env(self, env: Mapping[str, str]) -> None:
        """Sets the variables of the sandbox's network, for processes that start from now on; others prevail."""
        self._network_env = env

    def _environment(self, command: Command) -> dict[str, str]:
        made = {
            **self._handle.default_env,
            **self._network_env,
            **self._env,
            **command.env,
            **command.secret_env,
        }
        for name, folders in self._search.items():
            # A task that sets PYTHONPATH=src keeps its packages.
            made[name] = f"{made[name]}:{folders}" if made.get(name) else folders
        # In one order: that of a message's map differs from process to process.
        return dict(sorted(made.items()))

    def hold_timeouts(self) -> None:
        """Lets the timeouts of all commands stand still, of those too that are started meanwhile."""
        self._holds_timeouts = True
        for process in self._known.values():
            process.hold_timeout()

    def release_timeouts(self) -> None:
        """Lets held timeouts run."""
        self._holds_timeouts = False
        for process in self._known.values():
            process.release_timeout()

    def get(self, process_id: str) -> RunningProcess:
        """Returns a process. Raises NotFound (PROCESS_UNKNOWN)."""
        process = self._known.get(process_id)
        if process is None:
            raise NotFound("no such process in this sandbox", reason="PROCESS_UNKNOWN")
        return process

    def all(self) -> list[RunningProcess]:
        """Returns every known process, newest first."""
        return list(reversed(self._known.values()))

    async def run(
        self,
        command: Command,
        stdin: bytes,
        output_limit: int,
        process_id: str = "",
        *,
        kill_all_after: bool = False,
        files: Sequence[SeedFile] = (),
    ) -> RunResult:
        """Runs a command to its end, or joins the run with this id. Its last caller's cancellation kills it."""
        half = output_limit // 2
        spec = ProcessSpec(
            id=process_id or f"run-{secrets.token_hex(8)}",
            command=command,
            stdin=bool(stdin),
            output_limit=output_limit - half,
            kill_all_after=kill_all_after,
        )
        process, begun = self._entered(spec, half, stdin, files, to_end=True)
        process.callers += 1
        try:
            await asyncio.shield(begun)
            if stdin and process.feeding is None and process.exit is None:
                process.feeding = asyncio.create_task(_feed(process, stdin))
            await process.ended.wait()
        except BaseException:
            process.callers -= 1
            if process.callers == 0:
                await asyncio.shield(asyncio.ensure_future(_kill_begun(process, unless_joined=True)))
            raise
        else:
            process.callers -= 1
        finally:
            if process.callers == 0 or process.exit is not None:
                await process.stop_feeding()
        assert process.exit is not None
        return RunResult(process.exit, process.outputs[Stream.STDOUT].ends(), process.outputs[Stream.STDERR].ends())

    async def kill(self, process_id: str, *, everything: bool = False) -> Exit:
        """Kills a process and its descendants, or ``everything`` in the sandbox; returns once all are dead.

        Raises NotFound (PROCESS_UNKNOWN), Internal (KILL_FAILED).
        """
        process = self.get(process_id)
        ended = await process.kill()
        if everything:
            await self._kill_others(process)
        return ended

    async def _kill_others(self, process: RunningProcess) -> None:
        """Kills everything in the sandbox, after the end of `process`."""
        # Two that each kill all others after their end do not wait for each other.
        others = [other for other in self._known.values() if other is not process and not other.is_clearing]
        # Known processes first, so that each exits as KILLED.
        for other in others:
            if other.exit is None:
                await _kill_begun(other)
        if not await self._handle.kill_everything():
            await process.kill_leftovers()
            for other in others:
                # Hundreds of ended processes are kept, and the backend is asked about each.
                if not other.is_tree_dead:
                    await _kill_begun(other)

    async def kill_all(self) -> None:
        """Kills everything in the sandbox; returns once all are dead. Raises Internal (KILL_FAILED)."""
        known = list(self._known.values())
        for process in known:
            await _kill_begun(process)
        if known:
            await self._kill_others(known[-1])

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


def _digest(stdin: bytes | None, files: Sequence[SeedFile]) -> bytes | None:
    """Returns what differs between two requests with one spec: a digest, because the content is not kept."""
    if stdin is None and not files:
        return None
    parts: list[object] = [stdin and hashlib.sha256(stdin).digest()]
    parts += ((file.path, file.mode, hashlib.sha256(file.content).digest()) for file in files)
    return hashlib.sha256(repr(parts).encode()).digest()


async def _kill_begun(process: RunningProcess, *, unless_joined: bool = False) -> None:
    """Kills a process, unless its start fails: nothing is left of it then, and its error is its own caller's.

    ``unless_joined``: nor if, once it has started, a caller waits for its end.
    """
    await asyncio.wait([process.started])
    if process.started.exception() is None and not (unless_joined and process.callers):
        await process.kill()


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
