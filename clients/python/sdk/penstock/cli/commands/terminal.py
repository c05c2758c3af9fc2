"""`penstock terminal`: a terminal episode by hand, or from a file of commands."""

import asyncio
import os
import sys
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson, FilesFrom, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, err, out, quoted, read, run
from penstock.client import Observation, Penstock, SandboxChoice, Task, Terminal, TerminalHandle
from penstock.tasks.images import with_image

_HELP = "type a shell command per line; the end of the input (Ctrl-D) sends the answer; Ctrl-C closes it without"


def terminal(
    task: Annotated[Path, typer.Argument(help="Task file, YAML or JSON.")],
    answer: Annotated[str, typer.Option(help="The final answer, sent at the end of the input.")] = "",
    backend: Annotated[str, typer.Option(help="Backend of the sandbox; default: the service's.")] = "",
    image: Annotated[str, typer.Option(help="Image of the sandbox; default: the backend's.")] = "",
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds for each command; default: 120.")] = None,
    state_dir: StateDir = None,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Type a task's commands yourself, and have the result graded.

    Each line of the input is a command for the episode's shell, whose state lasts; its end gives the final answer.
    Exit code 0: the episode ended without a failure, with a reward where the task has a verifier.
    """
    wanted = with_image(read(partial(Task.load, files_from=files_from or ()), task))

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            return await _episode(ps, wanted, SandboxChoice(backend=backend, image=image), answer, timeout, as_json)

    run(work())


async def _episode(
    ps: Penstock, task: Task, sandbox: SandboxChoice, answer: str, timeout: float | None, as_json: bool
) -> int:
    with err.status("preparing the sandbox"):
        handle = await ps.terminals.open(task, sandbox=sandbox, command_timeout=timeout)
    async with handle:
        err.print(escape(clean(task.instruction)), soft_wrap=True)
        err.print(f"[dim]{handle.terminal_id}: {_HELP}[/]", soft_wrap=True)
        end = await _typed(handle, as_json) or await handle.answer(answer)
        return _verdict(end, await handle.refresh(), graded=task.verifier is not None, as_json=as_json)


class _Input:
    """Standard input, line by line. A daemon thread reads it, so that a pending read does not delay the program's exit;
    each line is read on demand."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wanted: SimpleQueue[asyncio.Future[str]] = SimpleQueue()
        threading.Thread(target=self._serve, name="standard input", daemon=True).start()

    async def line(self) -> str:
        """Returns the next line with its end; empty at the end of the input."""
        wanted: asyncio.Future[str] = self._loop.create_future()
        self._wanted.put(wanted)
        return await wanted

    def _serve(self) -> None:
        # A reader of its own: the interpreter aborts at exit if a thread still reads from sys.stdin.
        with os.fdopen(os.dup(sys.stdin.fileno()), encoding=sys.stdin.encoding, errors=sys.stdin.errors) as source:
            while True:
                wanted = self._wanted.get()
                line: str | Exception
                try:
                    line = source.readline()
                except (OSError, ValueError) as error:
                    line = error
                try:
                    self._loop.call_soon_threadsafe(_resolve, wanted, line)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more


def _resolve(wanted: asyncio.Future[str], line: str | Exception) -> None:
    if wanted.done():
        return
    if isinstance(line, str):
        wanted.set_result(line)
    else:
        wanted.set_exception(line)


async def _typed(handle: TerminalHandle, as_json: bool) -> Observation | None:
    """Runs commands from standard input; returns the episode's end if it comes first."""
    source = _Input()
    while True:
        if sys.stdin.isatty():
            err.print("[bold]$ [/]", end="")
        line = await source.line()
        if not line:
            return None
        if not line.strip():
            continue
        seen = await handle.run(line.rstrip("\n"))
        if as_json:
            emit({"step_id": seen.step_id, "result": seen.result, "text": seen.text(), "ended": seen.ended})
        else:
            out.print(escape(clean(seen.text())), soft_wrap=True)
        if seen.ended:
            return seen


def _verdict(end: Observation, terminal: Terminal, *, graded: bool, as_json: bool) -> int:
    if as_json:
        emit(
            {
                "terminal_id": terminal.terminal_id,
                "reward": end.reward,
                "failure": end.failure,
                "steps": terminal.step_count,
                "verifier": terminal.verifier,
            }
        )
    for command in terminal.verifier:
        style = "green" if command.exit.ok else "red"
        err.print(f"[{style}]{escape(str(command.exit))}[/] ", quoted(command.command, "dim", lines=1), sep="")
    if end.failure is not None:
        err.print(
            f"[bold red]failed[/]: {escape(clean(f'{end.failure.reason}: {end.failure.message}'))}", soft_wrap=True
        )
        return FAILED
    reward = "not graded" if end.reward is None else f"reward {end.reward.value:g}"
    if not as_json:
        out.print(f"{reward} after {counted(terminal.step_count - 1, 'command')}", soft_wrap=True)
    return FAILED if graded and end.reward is None else OK
