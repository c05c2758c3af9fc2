"""Images of tasks with a Dockerfile: named after their content, so that equal content is built once.

The name is the same on every machine; the sandbox service's daemon knows whether the image exists. Building runs
`docker build` here, against the daemon that `DOCKER_HOST` names, which must be the one that makes sandboxes.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ConfigurationError, FailedPrecondition
from penstock.client.tasks.spec import SandboxChoice
from penstock.client.tasks.task import Task

REPOSITORY: Final = "penstock-task"
_TAIL_CHARACTERS: Final = 2000


def image_of(task: Task) -> str:
    """Returns the image name of a task's Dockerfile; empty = it has none.

    Raises:
        ConfigurationError: `IMAGE_CONTEXT`, the directory cannot be read.
    """
    if task.build is None:
        return ""
    found = sha256()
    try:
        for path in sorted(task.build.rglob("*")):
            kind = b"l" if path.is_symlink() else b"f" if path.is_file() else b"d"
            content = str(path.readlink()).encode() if kind == b"l" else b""
            mode = b"%o" % (path.lstat().st_mode & 0o777) if kind == b"f" else b""
            for part in (kind, str(path.relative_to(task.build)).encode(), mode):
                found.update(b"%d:" % len(part) + part)
            if kind == b"f":
                _add_file(found, path)
            else:
                found.update(b"%d:" % len(content) + content)
    except OSError as error:
        raise ConfigurationError(f"{task.build}: {error.strerror}", reason="IMAGE_CONTEXT") from None
    name = "".join(letter if letter.isalnum() else "-" for letter in task.task_id.lower())[:60].strip("-") or "task"
    return f"{REPOSITORY}/{name}:{found.hexdigest()[:16]}"


def _add_file(found: Any, path: Path) -> None:
    """Hashes a file of any size: a build context may have sparse files of terabytes."""
    with path.open("rb") as file:
        found.update(b"%d:" % path.stat().st_size)
        while chunk := file.read(1 << 20):
            found.update(chunk)


def with_image(task: Task) -> Task:
    """Returns the task with the image of its Dockerfile set."""
    image = image_of(task)
    return replace(task, sandbox=replace(task.sandbox or SandboxChoice(), image=image)) if image else task


async def build_images(tasks: Sequence[Task], on_progress: Callable[[str], None]) -> None:
    """Builds the missing images of all tasks, one after another; `on_progress` is called with a line for each.

    Raises:
        ConfigurationError: `DOCKER_MISSING`, docker is not installed.
        FailedPrecondition: `IMAGE_BUILD_FAILED`, with the end of the build's output.
    """
    for task in tasks:
        image = image_of(task)
        if image:
            await _build(image, task, on_progress)


async def _build(image: str, task: Task, on_progress: Callable[[str], None]) -> None:
    program = shutil.which("docker")
    if program is None:
        raise ConfigurationError("building images needs the program docker", reason="DOCKER_MISSING")
    if (await _docker(program, "image", "inspect", "--format", "{{.Id}}", image))[0] == 0:
        return
    on_progress(f"building {image} for {task.task_id}")
    code, output = await _docker(program, "build", "--tag", image, str(Path(task.build or ".").absolute()))
    if code != 0:
        raise FailedPrecondition(
            f"the image of {task.task_id} could not be built: {output[-_TAIL_CHARACTERS:]}", reason="IMAGE_BUILD_FAILED"
        )


async def _docker(program: str, *arguments: str) -> tuple[int, str]:
    """Returns exit code and output; cancelling the caller ends the build."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")
