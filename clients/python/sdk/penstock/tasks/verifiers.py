"""Verifiers by themselves, to grade ended rollouts again: from a file of its own, a task file, or a set of tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks.spec import Verifier
from penstock.client.tasks.task import build_verifier
from penstock.client.tasks.yaml import YamlFile
from penstock.tasks.images import with_image
from penstock.tasks.sets import load_tasks


def load_verifiers(path: str | Path, *, files_from: Sequence[str | Path] = ()) -> Verifier | Mapping[str, Verifier]:
    """Loads one verifier for all rollouts, or one for each task, by its id.

    A file with `commands` at its top is a verifier: it has the keys that a task file has below `verifier`. Anything
    else is read as `load_tasks` reads it; the verifier of a single task is the one for all.

    Raises:
        InvalidArgument: `TASK_FILE`; `violations` name the fields and lines, or the tasks without a verifier.
    """
    given = Path(path)
    if given.is_file():
        source = YamlFile(given, map(Path, files_from))
        if isinstance(source.content, Mapping) and "commands" in source.content:
            return build_verifier(source)
    found, without = dict[str, Verifier](), list[Violation]()
    for task in load_tasks(given, files_from=files_from).tasks:
        if task.verifier is None:
            without.append(Violation(f"{task.task_id}: verifier", "is missing"))
        else:
            found[task.task_id] = with_image(task).verifier or task.verifier
    if without:
        raise InvalidArgument(f"{given}: no verifier", reason="TASK_FILE", violations=tuple(without))
    return next(iter(found.values())) if len(found) == 1 else found
