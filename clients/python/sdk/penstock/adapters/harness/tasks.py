"""Converts harness workers' tasks and training policies to a `Task` and a `Sampling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from penstock.client.errors import InvalidArgument
from penstock.client.tasks.spec import Command, SeedFile, Verifier
from penstock.client.tasks.task import Task
from penstock.client.types.chat import Sampling

_KEYS: Final = ("instruction", "prompt", "question", "task")


def task_of(prompt: Any, base: Task | None = None) -> Task:
    """Returns the task for a worker's prompt: a Task, a text, chat messages, or a mapping.

    Raises:
        InvalidArgument: `HARNESS_TASK`, it is none of these or has an unknown key.
    """
    if isinstance(prompt, Task):
        return prompt
    if isinstance(prompt, Mapping):
        return _task_of_mapping(prompt, base)
    text = prompt if isinstance(prompt, str) else _last_of_user(prompt)
    return replace(base, instruction=text) if base is not None else Task(task_id="session", instruction=text)


def _task_of_mapping(given: Mapping[str, Any], base: Task | None) -> Task:
    known = {*_KEYS, "setup", "setup_shell", "verify", "upload_files", "task_id", "metadata"}
    if unknown := given.keys() - known:
        raise _no_task(f"it has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    texts = [given[key] for key in _KEYS if given.get(key)]
    if len(texts) != 1:
        raise _no_task(f"it needs exactly one of {', '.join(_KEYS)}")
    text = texts[0] if isinstance(texts[0], str) else _last_of_user(texts[0])
    task = replace(base, instruction=text) if base is not None else Task(task_id="session", instruction=text)
    setup = [*_lines(given, "setup"), *_lines(given, "setup_shell")]
    verify = _lines(given, "verify")
    files = given.get("upload_files") or {}
    if not isinstance(files, Mapping) or not all(isinstance(item, str | bytes) for item in files.values()):
        raise _no_task("upload_files must be a mapping of path to text")
    added = [
        SeedFile(path, content.encode() if isinstance(content, str) else content) for path, content in files.items()
    ]
    return replace(
        task,
        task_id=str(given.get("task_id") or task.task_id),
        setup=(*task.setup, *setup),
        files=(*task.files, *added),
        verifier=Verifier(commands=verify) if verify else task.verifier,
        metadata={**task.metadata, **(given.get("metadata") or {})},
    )


def _lines(given: Mapping[str, Any], name: str) -> list[Command]:
    value = given.get(name) or ()
    lines = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(line, str) and line.strip() for line in lines):
        raise _no_task(f"{name} must be a shell line, or a list of shell lines")
    return [Command(shell=line) for line in lines]


def _last_of_user(messages: Any) -> str:
    """Returns the text of the user's last message."""
    if isinstance(messages, Sequence) and not isinstance(messages, bytes):
        for message in reversed(messages):
            if isinstance(message, Mapping) and message.get("role") == "user":
                content = message.get("content")
                if isinstance(content, str):
                    return content
                if isinstance(content, Sequence):
                    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
                    if all(isinstance(text, str) for text in texts):
                        return "".join(map(str, texts))
    raise _no_task("it must be a Task, a text, a mapping, or a chat with a user's text")


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """Converts a worker's training policy. A filter that is off stays set, so that it replaces the agent's: top_k -1
    becomes 0.

    Raises:
        InvalidArgument: `HARNESS_SAMPLING`, an unknown field.
    """
    known = {item.name for item in fields(Sampling)}
    if unknown := given.keys() - known:
        raise InvalidArgument(f"sampling has unknown fields: {', '.join(sorted(unknown))}", reason="HARNESS_SAMPLING")
    kept = {name: value for name, value in given.items() if value is not None}
    if kept.get("top_k") == -1:
        kept["top_k"] = 0
    return Sampling(**kept)


def _no_task(message: str) -> InvalidArgument:
    return InvalidArgument(f"The prompt is not a task: {message}", reason="HARNESS_TASK")
