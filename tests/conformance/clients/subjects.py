"""The clients that the suite is run against: a language is one entry of `SUBJECTS`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from tests.support.services.builds import once_a_run

from clients import nodejs
from tools import golang

ROOT: Final = Path(__file__).resolve().parents[3]
GUARD_S: Final = 180.0
"""How long anything may take: against hangs, no expectation. Clients wait a minute for a service that restarts."""


def build_typescript() -> None:
    """Compiles the TypeScript client with its tests and its subject, strictly."""
    folder = ROOT / "clients" / "typescript"

    def build() -> None:
        prepared = nodejs.environment()
        built = subprocess.run(
            ["npm", "run", "--silent", "build"], cwd=folder, env=prepared, capture_output=True, text=True
        )
        assert built.returncode == 0, f"the TypeScript client does not build:\n{built.stdout}{built.stderr}"

    once_a_run(build, folder / "node_modules" / ".built-for-tests")


def _typescript() -> Sequence[str]:
    build_typescript()
    subject = ROOT / "clients" / "typescript" / "dist" / "test" / "subject.js"
    return (sys.executable, "-m", "clients.nodejs", "node", str(subject))


def _go() -> Sequence[str]:
    program = golang.HOME / "subject"
    # Under the race detector, which makes the program end with an error where it found one.
    command = [
        sys.executable,
        "-m",
        "tools.golang",
        "run",
        "go",
        "build",
        "-race",
        "-ldflags=-w",  # half of the linker's time is a debugger's tables
        "-o",
        str(program),
        "./internal/subject",
    ]

    def build() -> None:
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert built.returncode == 0, f"the Go client does not build:\n{built.stdout}{built.stderr}"

    once_a_run(build, golang.HOME / ".built-for-tests")
    return (str(program),)


def _python() -> Sequence[str]:
    return (sys.executable, "-m", "tests.conformance.clients.python_subject")


SUBJECTS: Final[Mapping[str, Callable[[], Sequence[str]]]] = {
    "python": _python,
    "typescript": _typescript,
    "go": _go,
}
"""By language: builds the subject where it has to be built, and says how to start it from the repository's root."""


@dataclass
class Subject:
    """A subject that runs. Commands may overlap; each has one answer."""

    language: str
    process: asyncio.subprocess.Process
    stderr: Path
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _last: int = 0
    _reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, language: str, argv: Sequence[str], stderr: Path) -> Subject:
        """Starts it without any setting of whoever runs the tests."""
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        surroundings["XDG_STATE_HOME"] = str(stderr.parent / "nobody")
        surroundings["GRPC_VERBOSITY"] = "NONE"  # a library's own remarks are no complaint of the client's
        with stderr.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=ROOT,
                env=surroundings,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
                limit=1 << 27,
            )
        subject = cls(language, process, stderr)
        subject._reader = asyncio.create_task(subject._read())
        return subject

    def send(self, command: Mapping[str, Any]) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Sends a command; gives its number and what will be its answer."""
        assert self.process.stdin is not None
        assert self.process.returncode is None, f"the subject ended with {self.process.returncode}; {self.said()}"
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(orjson.dumps({"id": self._last, **command}) + b"\n")
        return self._last, answer

    async def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        return await self.wait(self.send(command)[1], str(command["do"]))

    async def wait(self, answer: asyncio.Future[dict[str, Any]], what: str) -> dict[str, Any]:
        """The answer; AssertionError when none comes."""
        try:
            async with asyncio.timeout(GUARD_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise AssertionError(f"no answer to {what} in {GUARD_S:g} s; {self.said()}") from None

    async def end(self) -> None:
        """Ends its input; it has to end by itself, in order and without a word of complaint."""
        assert self.process.stdin is not None
        assert self._reader is not None
        self.process.stdin.close()
        async with asyncio.timeout(GUARD_S):
            code = await self.process.wait()
            await self._reader
        complaints = self.stderr.read_text(errors="replace")
        assert (code, complaints) == (0, ""), self.said()

    def said(self) -> str:
        """What it wrote to standard error, for people."""
        return f"it said: {self.stderr.read_text(errors='replace')[-4000:] or 'nothing'}"

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = orjson.loads(line)
            self._answers.pop(answer["id"]).set_result(answer)
        code = await self.process.wait()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(AssertionError(f"the subject ended with {code}; {self.said()}"))
