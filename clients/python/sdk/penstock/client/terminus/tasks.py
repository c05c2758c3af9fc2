"""Converts tasks of the Terminus environment's trainers: an instruction, chat messages, a mapping, a `Task`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.client.errors import InvalidArgument
from penstock.client.tasks.spec import Command, SandboxChoice, Verifier
from penstock.client.tasks.task import Task

_INSTRUCTIONS: Final = ("instruction", "prompt", "question", "task")
_SETUP: Final = ("setup", "setup_scripts")
_VERIFY: Final = ("verify", "verify_scripts")
_REFUSED: Final = {
    "sandbox_root": "the operator's setting `state_dir` decides where sandboxes are",
    "sandbox_flavor": "pass the factory a SandboxChoice with resources",
    "hf_sandbox_flavor": "pass the factory a SandboxChoice with resources",
    "forward_hf_token": "no part of this machine's environment reaches a sandbox",
}
"""Keys of the predecessor's tasks that are unsupported here, with the alternative (R65)."""


def as_task(
    task: Any, default_setup: Sequence[str | Command] = (), default_verify: Sequence[str | Command] = ()
) -> Task:
    """Returns the task for a trainer's prompt; see `TerminusSessionFactory.create`."""
    if isinstance(task, Task):
        return task
    given: Mapping[str, Any] = task if isinstance(task, Mapping) else {}
    for key, instead in _REFUSED.items():
        if given.get(key):
            raise InvalidArgument(f"{key}: {instead}", reason="TERMINUS_TASK")
    verify = _commands(_first(given, _VERIFY, default_verify))
    return Task(
        task_id=str(given.get("task_id", "terminus")),
        instruction=_instruction(_first(given, _INSTRUCTIONS, None) if given else task),
        setup=_commands(_first(given, _SETUP, default_setup)),
        verifier=Verifier(commands=verify) if verify else None,
    )


def _instruction(given: Any) -> str:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        user_texts = [m.get("content") for m in given if isinstance(m, Mapping) and m.get("role") == "user"]
        given = user_texts[-1] if user_texts else None
    if not isinstance(given, str) or not given.strip():
        raise InvalidArgument(
            "expected an instruction, chat messages with one of the user, a mapping with an instruction, or a Task",
            reason="TERMINUS_TASK",
        )
    return given


def _commands(given: Any) -> list[Command]:
    items = [given] if isinstance(given, str | Command) else given
    if not isinstance(items, Sequence) or not all(isinstance(item, str | Command) for item in items):
        raise InvalidArgument("setup and verify must be lists of shell commands", reason="TERMINUS_TASK")
    return [item if isinstance(item, Command) else Command(shell=item) for item in items]


def sandbox_of(
    task: Mapping[str, Any], sandbox: SandboxChoice, wall_time: float | None
) -> tuple[SandboxChoice, float | None]:
    """Returns the sandbox and time limit of a mapping's episode: its own values take precedence over the arguments."""
    backend = _first(task, ("sandbox_backend",), sandbox.backend)
    image = _first(task, ("sandbox_image", "hf_sandbox_image"), sandbox.image)
    timeout = _first(task, ("sandbox_timeout", "hf_sandbox_timeout"), wall_time)
    if isinstance(timeout, str):
        raise InvalidArgument("sandbox_timeout: must be in seconds", reason="TERMINUS_TASK")
    return replace(sandbox, backend=backend, image=image), timeout


def _first(given: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), default)
