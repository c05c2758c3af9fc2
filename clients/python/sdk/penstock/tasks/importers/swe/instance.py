"""A software engineering task of any of the formats, and the task directory that is made of it.

The importers of the formats differ in how a record becomes an `Instance`; what is written, and how it is graded
(programs/swe_grade.py), is the same for all.
"""

import glob
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.client.tasks.field_types import MAX_PATHS
from penstock.tasks.importers.common import GRADER_FOLDER, Choices, Folder, Refused
from penstock.tasks.importers.git import clone_of, extract, git
from penstock.tasks.importers.swe.patches import check_patch, touched

TEST_SECONDS: Final = 1800.0
WORKDIR: Final = "/testbed"
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_BUNDLE: Final = ".penstock-repository.bundle"
_SOLUTION: Final = ".penstock-solution.patch"
_BUG: Final = ".penstock-bug.patch"
_IDENTITY: Final = {"GIT_CONFIG_GLOBAL": "/dev/null"}

# What is tracked becomes one commit in a repository of its own: no earlier or later commit, no branch, no remote, no
# reflog. What the repository ignores, or does not track, stays as it is.
_ONE_COMMIT: Final = """\
set -eu
cd "$1"
settings=$(mktemp)
printf '[safe]\\n\\tdirectory = *\\n[core]\\n\\thooksPath = /dev/null\\n' >"$settings"
export GIT_CONFIG_GLOBAL="$settings" GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=penstock GIT_AUTHOR_EMAIL=penstock@localhost GIT_AUTHOR_DATE=2000-01-01T00:00:00Z
export GIT_COMMITTER_NAME=penstock GIT_COMMITTER_EMAIL=penstock@localhost GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git add -u
commit=$(git commit-tree -m base "$(git write-tree)")
git update-ref refs/heads/penstock "$commit"
rm -rf .penstock-git
git init -q .penstock-git
git -C .penstock-git fetch -q --depth 1 "file://$1" refs/heads/penstock
if [ -f .git/info/exclude ]; then cp .git/info/exclude .penstock-git/.git/info/exclude; fi
rm -rf .git
mv .penstock-git/.git .git
rmdir .penstock-git
git symbolic-ref HEAD refs/heads/main
git reset -q FETCH_HEAD
rm -f .git/FETCH_HEAD "$settings"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A task of a record. Paths are relative to the repository, whose directory in the image is `workdir`.

    `runner` runs the tests: pytest, django or sympy; `test_command` is its command, to which files are appended.
    `fail` have to pass after the work, `keep` too or to be skipped. With `expected` each test of the report has to come
    to what it says there instead. `restored` are put back into the prepared state before the tests; `helpers` are
    copied beside those in `tests`, which only the verifier has. `bug` is a patch that makes the task, and its reverse
    is the solution; else `solution` is a patch, or files by path. `hidden` are paths that the image has and the agent
    must not. `setup` are further shell lines.
    """

    format: str
    statement: str
    repo: str
    base_commit: str
    image: str
    workdir: str = WORKDIR
    runner: str = "pytest"
    test_command: str
    test_patch: str = ""
    fail: Sequence[str] = ()
    keep: Sequence[str] = ()
    expected: Mapping[str, str] | None = None
    test_files: Sequence[str]
    restored: Sequence[str] = ()
    tests: Mapping[str, str] = field(default_factory=dict)
    helpers: Sequence[str] = ()
    hidden: Sequence[str] = ()
    bug: str = ""
    solution: str | Mapping[str, str] = ""
    setup: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write(folder: Folder, task: Instance, choices: Choices) -> None:
    """Fills a task directory. Raises Refused if it cannot be graded, or has no place to come from."""
    base, workdir, restored = task.base_commit, task.workdir, list(task.restored)
    changed, new, _ = touched(task.test_patch)
    check_patch(task.test_patch, "test_patch")
    check_patch(task.bug, "patch")
    folder.content["instruction"] = task.statement
    if task.image and choices.image:
        folder.content["image"] = task.image
        user = "root" if choices.user is None else choices.user
        if user:
            folder.content["sandbox"] = {"user": user}
        if _put_setup(folder, task, choices):
            # The commit that the tests are set back to is gone: the prepared state has them.
            restored, changed = [*restored, *changed], []
    else:
        if task.bug or task.tests:
            raise Refused("it is made from its image, which it needs: import it with images")
        base, workdir = _put_repository(folder, task, choices), ""
    if len(restored) > MAX_PATHS:
        raise Refused(f"its tests change {len(restored)} files; at most {MAX_PATHS} can be restored: try --history")
    _put_verifier(folder, task, choices, _Graded(base, workdir, changed, new, restored))
    _put_solution(folder, task, workdir)
    folder.content["metadata"] = {"format": task.format, "base_commit": task.base_commit, **task.metadata}
    folder.notes += task.notes


@dataclass(frozen=True, slots=True)
class _Graded:
    base: str
    workdir: str
    changed: list[str]
    new: list[str]
    restored: list[str]


def _put_setup(folder: Folder, task: Instance, choices: Choices) -> bool:
    """Sets the commands that make the task of its image; returns whether its history is gone."""
    history = choices.history and not task.bug and not task.tests
    there = {"cwd": task.workdir, "env": _IDENTITY}
    setup: list[Any] = [{"shell": line, **there} for line in task.setup]
    if task.bug:
        folder.content["files"] = [{"path": f"{task.workdir}/{_BUG}", "from": folder.write("bug.patch", task.bug)}]
        changed, new, _ = touched(task.bug)
        setup += [
            {"argv": ["git", "apply", "--whitespace=nowarn", _BUG], **there},
            {"argv": ["git", "add", "-A", "-f", "--", *changed, *new], **there},
            {"argv": ["rm", _BUG], **there},
        ]
    if task.hidden:
        setup.append({"argv": ["rm", "-rf", *task.hidden], **there})
    if not history:
        setup.append(["sh", "-c", _ONE_COMMIT, "sh", task.workdir])
    if setup:
        folder.content["setup"] = setup
    return not history


def _put_verifier(folder: Folder, task: Instance, choices: Choices, graded: _Graded) -> None:
    place = f"{graded.workdir}/" if graded.workdir else ""
    grading = {
        "runner": task.runner,
        "workdir": graded.workdir,
        "base_commit": graded.base,
        "test_patch": task.test_patch,
        "changed_files": graded.changed,
        "new_files": graded.new,
        "helpers": list(task.helpers),
        "test_files": list(task.test_files),
        "test_command": (choices.test_command if task.runner == "pytest" else "") or task.test_command,
        "fail_to_pass": list(task.fail),
        "pass_to_pass": list(task.keep),
        "expected": None if task.expected is None else dict(task.expected),
        "reward": choices.reward,
        "timeout": TEST_SECONDS,
    }
    program, wanted = f"{GRADER_FOLDER}/swe_grade.py", f"{GRADER_FOLDER}/task.json"
    files = [
        {"path": program, "from": folder.program("swe_grade.py")},
        {"path": wanted, "from": folder.write("grading.json", json.dumps(grading, indent=1))},
    ]
    if task.runner != "pytest":
        if choices.test_command:
            note = f"its tests are run by {task.runner}'s own runner: --test-command, which is pytest's, is not used"
            folder.notes.append(note)
        name = f"{task.runner}_report.py"
        files.append({"path": f"{GRADER_FOLDER}/{name}", "from": folder.program(name)})
    for path, content in task.tests.items():
        files.append({"path": place + path, "from": folder.write(f"tests/{path}", content)})
    folder.content["limits"] = {"verify": TEST_SECONDS + 120.0}
    folder.content["verifier"] = {
        "files": files,
        "commands": [{"argv": ["python3", program, wanted], "timeout": TEST_SECONDS + 60.0}],
        "reward": "file",
    }
    if graded.restored:
        folder.content["verifier"]["restore"] = [place + glob.escape(path) for path in graded.restored]


def _put_solution(folder: Folder, task: Instance, workdir: str) -> None:
    patch, reverse = (task.bug, ["-R"]) if task.bug else (task.solution, [])
    if not patch:
        return
    place, cwd = (f"{workdir}/", {"cwd": workdir}) if workdir else ("", {})
    if isinstance(patch, str):
        files = [{"path": place + _SOLUTION, "from": folder.write("solution.patch", patch)}]
        command: dict[str, Any] = {"argv": ["git", "apply", *reverse, "--whitespace=nowarn", _SOLUTION]}
    else:
        files = [{"path": place + path, "from": folder.write(f"solution/{path}", text)} for path, text in patch.items()]
        command = {"argv": ["true"]}
    folder.content["solution"] = {"files": files, "commands": [command | cwd]}


def templated(template: str, *, instance_id: str, repo: str) -> str:
    """Returns the image that a template names for a record."""
    # Docker Hub allows no double underscore, and no capital letters.
    lower = instance_id.lower()
    names = {
        "instance_id": instance_id,
        "docker_id": lower.replace("__", "_1776_"),  # as SWE-bench does it
        "gym_id": lower.replace("__", "_s_"),  # as SWE-Gym does it
        "repo": repo,
    }
    try:
        return template.format_map(names)
    except (KeyError, ValueError, IndexError, AttributeError):
        raise Refused("the image's template may use {instance_id}, {docker_id}, {gym_id} and {repo}") from None


def _put_repository(folder: Folder, task: Instance, choices: Choices) -> str:
    """Writes the repository at its base commit as a bundle of one commit; returns that commit's id."""
    if choices.repositories is None:
        raise Refused("it names no image: set --image-template, or --repositories with a clone")
    repo = task.repo
    if not _REPOSITORY.fullmatch(repo) or {".", ".."} & set(repo.split("/")):
        raise Refused(f"repo must be OWNER/NAME of letters, digits and . _ -, not {repo!r}")
    clone = clone_of(choices.repositories, repo)
    with tempfile.TemporaryDirectory(prefix="penstock-import-") as place:
        tree = Path(place) / "tree"
        tree.mkdir()
        extract(clone, task.base_commit, "", tree)
        git(tree, "init", "-q", "-b", "main")
        git(tree, "add", "-A", "-f")
        git(tree, "commit", "-q", "--allow-empty", "-m", f"{repo} at its base commit")
        commit = git(tree, "rev-parse", "HEAD").strip()
        bundle = Path(place) / "repository.bundle"
        git(tree, "bundle", "create", "-q", str(bundle), "HEAD", "main")
        folder.copy(bundle, "repository.bundle")
    folder.content["files"] = [{"path": _BUNDLE, "from": "repository.bundle"}]
    folder.content["setup"] = [
        {"argv": ["git", "init", "-q", "-b", "main", "."], "env": _IDENTITY},
        {"argv": ["git", "fetch", "-q", _BUNDLE, "main"], "env": _IDENTITY},
        {"argv": ["git", "reset", "-q", "--hard", "FETCH_HEAD"], "env": _IDENTITY},
        ["rm", _BUNDLE],
    ]
    return commit
