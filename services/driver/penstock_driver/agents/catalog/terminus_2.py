"""Runs Harbor's Terminus 2 inside the sandbox that it works on: `terminus-2 CONFIG.json`, or `terminus-2 --check`.

Harbor's agent is as it is; what it takes for a remote environment is this machine, and each step that it adds to its
trajectory is printed as lines of JSON on standard output.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2  # type: ignore[import-not-found]
from harbor.agents.terminus_2.tmux_session import TmuxSession  # type: ignore[import-not-found]
from harbor.environments.base import ExecResult  # type: ignore[import-not-found]
from harbor.models.agent.context import AgentContext  # type: ignore[import-not-found]


class Here:
    """As much of Harbor's environment as the agent uses, on this machine."""

    session_id = "sandbox"
    default_user = None

    async def exec(
        self,
        command: str,
        cwd: "str | None" = None,
        env: "dict[str, str] | None" = None,
        timeout_sec: "int | None" = None,
        user: "str | int | None" = None,
    ) -> Any:
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        return ExecResult(
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            return_code=process.returncode,
        )


class Agent(Terminus2):  # type: ignore[misc]
    """Terminus 2 that prints its steps, and keeps its terminal's log in a writable place."""

    _emitted = 0

    @property
    def end(self) -> str:
        """How it came to its end: by its own word, or by its limit of turns or the end of its terminal."""
        return "finished" if self._pending_completion else "stopped"

    async def setup(self, environment: Here) -> None:
        self._session = TmuxSession(
            session_name=self.name(),
            environment=environment,
            logging_path=PurePosixPath(self.logs_dir, "terminal.log"),
            local_asciinema_recording_path=None,
            remote_asciinema_recording_path=None,
            pane_width=self.options.tmux_pane_width,
            pane_height=self.options.tmux_pane_height,
            extra_env={},
            user=None,
        )
        await self._session.start()

    def _dump_trajectory(self) -> None:
        super()._dump_trajectory()
        for step in self._trajectory_steps[self._emitted :]:
            self._emit(step)
        self._emitted = len(self._trajectory_steps)

    def _emit(self, step: Any) -> None:
        if step.source != "agent":
            return
        if step.reasoning_content:
            print_event(type="reasoning", text=step.reasoning_content)
        print_event(type="assistant", text=step.message)
        for call in step.tool_calls or []:
            print_event(type="tool_call", id=call.tool_call_id, name=call.function_name, arguments=call.arguments)
        for result in step.observation.results if step.observation else []:
            print_event(type="tool_result", id=result.source_call_id, output=result.content)


def print_event(**line: Any) -> None:
    print(json.dumps({name: value for name, value in line.items() if value is not None}), flush=True)


async def work(config: "dict[str, Any]") -> int:
    logs_dir = Path(config["logs_dir"])
    agent = Agent(logs_dir=logs_dir, model_name=config["model_name"], **config["options"])
    environment, context = Here(), AgentContext()
    instruction = Path(config["instruction_file"]).read_bytes().decode("utf-8")
    await agent.setup(environment)
    try:
        await agent.run(instruction, environment, context)
    except Exception as error:
        logging.exception("Terminus 2 failed")
        print_event(type="done", reason=f"{type(error).__name__}: {error}", failed=True)
        return 1
    finally:
        await environment.exec("tmux kill-server")
    print_event(type="done", reason=agent.end, failed=False)
    return 0


def main() -> int:
    if shutil.which("tmux") is None:
        print(
            "Terminus 2 needs tmux, which this sandbox lacks: use an image with tmux",
            file=sys.stderr,
        )
        return 127
    if sys.argv[1] == "--check":
        print("Terminus", Terminus2(logs_dir=Path("/tmp"), model_name="openai/check").version())
        return 0
    return asyncio.run(work(json.loads(Path(sys.argv[1]).read_bytes())))


if __name__ == "__main__":
    sys.exit(main())
