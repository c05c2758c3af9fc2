"""Harbor's lists of tasks: registry.json, which names folders of git repositories, and a data set's dataset.toml.

registry.json is a list of data sets: `name`, `version`, `description`, `tasks` (each `name`, `git_url`,
`git_commit_id`, `path`). Nothing is downloaded: a task comes from a clone in `--repositories`, at the commit that is
named, or from beside the registry where it names no repository.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import InvalidArgument
from penstock.tasks.importers.common import Choices, Folder, Imported, Refused, text_of
from penstock.tasks.importers.git import clone_of, extract
from penstock.values.similar_names import did_you_mean

MAX_REGISTRY_BYTES: Final = 64 << 20
_URL: Final = re.compile(
    r"(?:https://|ssh://(?:[\w.-]+@)?|[\w.-]+@)[\w.-]+[/:](?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?/?", re.ASCII
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def import_all(
    source: Path, destination: Path, choices: Choices, fill: Callable[[Folder, Path, Choices], None]
) -> Iterator[Imported]:
    """Imports the tasks of a registry's data set that `choices` selects.

    Raises:
        InvalidArgument: `TASK_IMPORT`; it is no registry, or has several data sets of which none was chosen.
    """
    tasks = _chosen(source, choices.dataset).get("tasks")
    for number, task in enumerate(tasks if isinstance(tasks, list) else (), 1):
        name = str(task.get("name") or f"task-{number}") if isinstance(task, dict) else f"task-{number}"
        if choices.selects(name):
            folder = Folder(destination, name.rpartition("/")[2])
            yield folder.filled(partial(_fill, folder, source, task, choices, fill))


def absent(source: Path) -> list[str]:
    """Returns the names of the tasks that a directory's dataset.toml lists and that are not there.

    Raises:
        InvalidArgument: `TASK_IMPORT`; the list cannot be read.
    """
    if not (source / "dataset.toml").is_file():
        return []
    try:
        listed = tomllib.loads(text_of(source / "dataset.toml", MAX_REGISTRY_BYTES)).get("tasks") or []
        names = [str(task["name"]).rpartition("/")[2] for task in listed]
    except (Refused, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{source / 'dataset.toml'} is not a list of tasks: {error}", reason="TASK_IMPORT"
        ) from None
    homes = (source, source / "tasks")
    return [name for name in names if not any((home / name / "task.toml").is_file() for home in homes)]


def _chosen(source: Path, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text_of(source, MAX_REGISTRY_BYTES))
        sets = [item for item in (found if isinstance(found, list) else [found]) if isinstance(item["tasks"], list)]
        by_name = {f"{item['name']}@{item.get('version') or ''}": item for item in sets}
    except (Refused, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{source} is not a registry of Harbor: {error}", reason="TASK_IMPORT") from None
    matches = [name for name in by_name if not wanted or wanted in (name, name.rpartition("@")[0])]
    if len(matches) != 1:
        some = ", ".join(sorted(by_name)[:20]) + (", ..." if len(by_name) > 20 else "")
        meant = "" if matches else did_you_mean(wanted, [*by_name, *(name.rpartition("@")[0] for name in by_name)])
        raise InvalidArgument(
            f"{source}: {len(matches)} data sets match {wanted!r}{meant or ';'} choose one by --dataset: {some}",
            reason="TASK_IMPORT",
        )
    return dict(by_name[matches[0]])


def _fill(
    folder: Folder, source: Path, task: Any, choices: Choices, fill: Callable[[Folder, Path, Choices], None]
) -> None:
    if not isinstance(task, dict):
        raise Refused("it is not an object with name, git_url, git_commit_id and path")
    path = str(task.get("path") or "")
    if not path or path.startswith("/") or ".." in Path(path).parts:
        raise Refused(f"path: {path!r} is not a folder of the repository")
    if not task.get("git_url"):
        fill(folder, _beside(source, path), choices)
        return
    clone, commit = _clone(task, choices), str(task.get("git_commit_id") or "HEAD")
    if commit != "HEAD" and not _COMMIT.fullmatch(commit):
        raise Refused(f"git_commit_id: {commit!r} is not a commit's id")
    if commit == "HEAD":
        folder.notes.append(f"git_commit_id: none is named: it is as in {clone} at HEAD")
    with tempfile.TemporaryDirectory(prefix="penstock-import-") as place:
        tree = Path(place) / Path(path).name
        tree.mkdir()
        extract(clone, commit, path.rstrip("/"), tree)
        fill(folder, tree, choices)


def _beside(source: Path, path: str) -> Path:
    found = (source.parent / path).resolve()
    if not found.is_relative_to(source.parent.resolve()) or not found.is_dir():
        raise Refused(f"path: there is no {path} beside the registry")
    return found


def _clone(task: dict[str, Any], choices: Choices) -> Path:
    url = str(task["git_url"])
    match = _URL.fullmatch(url)
    if match is None or {".", ".."} & set(match["repo"].split("/")):
        raise Refused(f"git_url: {url!r} is no address of a repository OWNER/NAME")
    repo = match["repo"]
    how = f"git clone {url} {choices.repositories or 'clones'}/{repo.replace('/', '__')}"
    if choices.repositories is None:
        raise Refused(f"git_url: {url} is not downloaded: {how}, and set --repositories")
    try:
        return clone_of(choices.repositories, repo)
    except Refused as error:
        raise Refused(f"{error}: {how}") from None
