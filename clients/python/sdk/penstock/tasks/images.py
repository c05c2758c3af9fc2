"""Images of tasks with a Dockerfile: named after their content, so that equal content is built once.

The name is the same on every machine; the sandbox service's daemon knows whether the image exists. Building runs
`docker build` here, against the daemon that `DOCKER_HOST` names, which must be the one that makes sandboxes.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
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
    return "" if task.build is None else _image_of(task, task.build)


def contexts_of(task: Task) -> Mapping[str, Path]:
    """Returns the directories of Dockerfiles of a task, its verifier and its companions, by the names of their images.

    Raises:
        ConfigurationError: `IMAGE_CONTEXT`, a directory cannot be read.
    """
    folders = (task.build, None if task.verifier is None else task.verifier.build, *task.companion_builds.values())
    return {_image_of(task, folder): folder for folder in folders if folder is not None}


def _image_of(task: Task, build: Path) -> str:
    found = sha256()
    try:
        for path in sorted(build.rglob("*")):
            kind = b"l" if path.is_symlink() else b"f" if path.is_file() else b"d"
            content = str(path.readlink()).encode() if kind == b"l" else b""
            mode = b"%o" % (path.lstat().st_mode & 0o777) if kind == b"f" else b""
            for part in (kind, str(path.relative_to(build)).encode(), mode):
                found.update(b"%d:" % len(part) + part)
            if kind == b"f":
                _add_file(found, path)
            else:
                found.update(b"%d:" % len(content) + content)
    except OSError as error:
        raise ConfigurationError(f"{build}: {error.strerror}", reason="IMAGE_CONTEXT") from None
    name = "".join(letter if letter.isalnum() else "-" for letter in task.task_id.lower())[:60].strip("-") or "task"
    return f"{REPOSITORY}/{name}:{found.hexdigest()[:16]}"


def _add_file(found: Any, path: Path) -> None:
    """Hashes a file of any size: a build context may have sparse files of terabytes."""
    with path.open("rb") as file:
        found.update(b"%d:" % path.stat().st_size)
        while chunk := file.read(1 << 20):
            found.update(chunk)


def with_image(task: Task) -> Task:
    """Returns the task with the images of its Dockerfile, its verifier's and its companions' set."""
    if image := image_of(task):
        task = replace(task, sandbox=replace(task.sandbox or SandboxChoice(), image=image))
    if task.companion_builds and task.sandbox is not None:
        images = {name: _image_of(task, folder) for name, folder in task.companion_builds.items()}
        beside = [replace(one, image=images.get(one.name, one.image)) for one in task.sandbox.companions]
        task = replace(task, sandbox=replace(task.sandbox, companions=tuple(beside)))
    if task.verifier is not None and task.verifier.build is not None:
        image = _image_of(task, task.verifier.build)
        task = replace(task, verifier=replace(task.verifier, image=image))
    return task


async def build_images(tasks: Sequence[Task], on_progress: Callable[[str], None]) -> None:
    """Builds the missing images of all tasks, one after another; `on_progress` is called with a line for each.

    Raises:
        ConfigurationError: `DOCKER_MISSING`, docker is not installed.
        FailedPrecondition: `IMAGE_BUILD_FAILED`, with the end of the build's output.
    """
    for task in tasks:
        for image, folder in contexts_of(task).items():
            await _build(image, folder, task, on_progress)


async def _build(image: str, folder: Path, task: Task, on_progress: Callable[[str], None]) -> None:
    program = shutil.which("docker")
    if program is None:
        raise ConfigurationError("building images needs the program docker", reason="DOCKER_MISSING")
    if (await _docker(program, "image", "inspect", "--format", "{{.Id}}", image))[0] == 0:
        return
    on_progress(f"building {image} for {task.task_id}")
    code, output = await _docker(program, "build", "--tag", image, str(folder.absolute()))
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
