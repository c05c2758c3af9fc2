"""SWE-style records: a repository at a commit, an issue, a hidden test patch, FAIL_TO_PASS and PASS_TO_PASS.

Records are JSON Lines, JSON or Parquet (with pyarrow), with the fields of SWE-bench and its relatives: `instance_id`,
`problem_statement`, `base_commit`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`; optionally `repo`, `patch` (the gold
one, which becomes the task's solution), `image_name`, `docker_image` or `image`, `test_command`. Without an image, a
clone in `repositories` provides the repository at its base commit, without any later history.
"""

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ConfigurationError, InvalidArgument
from penstock.tasks.importers.common import GRADER_FOLDER, Choices, Folder, Imported, Refused

_IMAGES: Final = ("image", "image_name", "docker_image")
_TEST_SECONDS: Final = 1800.0
_CONDA: Final = "/opt/miniconda3/bin/activate"
# The environment of SWE-bench's images if it exists; else the image's own Python.
_TEST_COMMAND: Final = f"if [ -f {_CONDA} ]; then . {_CONDA} testbed; fi; python -m pytest"
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_DIFF: Final = re.compile(r"^diff --git a/(?P<old>.+?) b/(?P<new>.+)$", re.MULTILINE)
_BUNDLE: Final = ".penstock-repository.bundle"

_SOLUTION: Final = ".penstock-solution.patch"


def import_all(source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports every record of a file."""
    for number, record in enumerate(_records(source), 1):
        name = str(record.get("instance_id") or f"record-{number}")
        folder = Folder(destination, name)
        yield folder.filled(partial(_fill, folder, record, choices))


def _records(source: Path) -> Iterator[Mapping[str, Any]]:
    """Reads the records. Raises InvalidArgument `TASK_IMPORT`; ConfigurationError `PYARROW_MISSING`."""
    if source.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet  # 60 MB that few need
        except ModuleNotFoundError:
            raise ConfigurationError(
                "Parquet needs pyarrow: pip install 'penstock[parquet]', or use JSON Lines", reason="PYARROW_MISSING"
            ) from None
        yield from parquet.read_table(source).to_pylist()
        return
    try:
        text = source.read_text(encoding="utf-8")
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(one) for one in text.split("\n") if one.strip()]  # other line ends may stand in a text
        )
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{source} has no records: {error}", reason="TASK_IMPORT") from None
    for record in found:
        if not isinstance(record, dict):
            raise InvalidArgument(
                f"{source}: a record must be an object, not {type(record).__name__}", reason="TASK_IMPORT"
            )
        yield record


def _fill(folder: Folder, record: Mapping[str, Any], choices: Choices) -> None:
    statement, patch = _required(record, "problem_statement"), str(record.get("test_patch") or "")
    fail, keep = _tests(record, "FAIL_TO_PASS"), _tests(record, "PASS_TO_PASS")
    if not fail:
        raise Refused("FAIL_TO_PASS is empty: the task has no test to make pass")
    changed, new, gone = _touched(patch)
    named = {test.partition("::")[0] for test in (*fail, *keep) if "::" in test}
    # pytest runs nothing at all if one of the files that it is given is not there.
    files = sorted((named | _python(changed + new)) - gone)
    if not files:
        raise Refused("neither the test patch nor the names of the tests have the files to run with pytest")
    base = _required(record, "base_commit")
    folder.content["instruction"] = statement
    image = next((str(record[name]) for name in _IMAGES if record.get(name)), "") or _templated(choices, record)
    workdir = choices.workdir
    if image and choices.image:
        folder.content["image"] = image
        user = "root" if choices.user is None else choices.user
        if user:
            folder.content["sandbox"] = {"user": user}
    else:
        base = _put_repository(folder, record, base, choices)
        workdir = ""
    grading = {
        "workdir": workdir,
        "base_commit": base,
        "test_patch": patch,
        "changed_files": changed,
        "new_files": new,
        "test_files": files,
        "test_command": choices.test_command or str(record.get("test_command") or _TEST_COMMAND),
        "fail_to_pass": fail,
        "pass_to_pass": keep,
        "reward": choices.reward,
        "timeout": _TEST_SECONDS,
    }
    program, wanted = f"{GRADER_FOLDER}/swe_grade.py", f"{GRADER_FOLDER}/task.json"
    folder.content["limits"] = {"verify": _TEST_SECONDS + 120.0}
    folder.content["verifier"] = {
        "files": [
            {"path": program, "from": folder.program("swe_grade.py")},
            {"path": wanted, "from": folder.write("grading.json", json.dumps(grading, indent=1))},
        ],
        "commands": [{"argv": ["python3", program, wanted], "timeout": _TEST_SECONDS + 60.0}],
        "reward": "file",
    }
    if record.get("patch"):
        solution = folder.write("solution.patch", str(record["patch"]))
        apply: dict[str, Any] = {"argv": ["git", "apply", "--whitespace=nowarn", _SOLUTION]}
        folder.content["solution"] = {
            "files": [{"path": f"{workdir}/{_SOLUTION}" if workdir else _SOLUTION, "from": solution}],
            "commands": [apply | ({"cwd": workdir} if workdir else {})],
        }
    kept = ("repo", "version", "created_at", "difficulty")
    folder.content["metadata"] = {
        "format": "swe",
        "base_commit": _required(record, "base_commit"),
        **{key: str(record[key]) for key in kept if record.get(key)},
    }


def _required(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"it has no {name}")
    return value


def _tests(record: Mapping[str, Any], name: str) -> list[str]:
    """Returns a list, given as a list or as JSON text, which is how these records often have it."""
    value = record.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Refused(f"{name} is neither a list nor one as JSON") from None
    if not isinstance(value, list | None):
        raise Refused(f"{name} is neither a list nor one as JSON")
    found = [str(item) for item in value or ()]
    if strange := next((item for item in found if "::" not in item and not re.fullmatch(r"\w+", item)), None):
        raise Refused(f"{name}: {strange!r} is not a test of pytest")
    return found


def _touched(patch: str) -> tuple[list[str], list[str], set[str]]:
    """Returns the files that a patch changes or removes, those that it creates, and those that are gone after it."""
    changed, new, gone = [], [], set()
    matches = list(_DIFF.finditer(patch))
    for match, after in zip(matches, [*matches[1:], *[None] * bool(matches)], strict=True):
        head = patch[match.end() : after.start() if after else None].partition("\n@@")[0]
        if "\ndeleted file mode" in head or "\nrename from " in head:
            gone.add(match["old"])
        if "\nnew file mode" in head:
            new.append(match["new"])
        elif match["old"] != match["new"]:
            changed.append(match["old"])
            new.append(match["new"])
        else:
            changed.append(match["old"])
    for path in (*changed, *new):
        if path.startswith("/") or ".." in Path(path).parts:
            raise Refused(f"the test patch leads out of the repository: {path}")
    return changed, new, gone - set(new)


def _python(files: list[str]) -> set[str]:
    return {file for file in files if re.search(r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$", file)}


def _templated(choices: Choices, record: Mapping[str, Any]) -> str:
    if not choices.image_template or not choices.image:
        return ""
    instance = str(record.get("instance_id", ""))
    # Docker Hub allows no double underscore, and no capital letters.
    names = {
        "instance_id": instance,
        "docker_id": instance.lower().replace("__", "_1776_"),
        "repo": str(record.get("repo", "")),
    }
    try:
        return choices.image_template.format_map(names)
    except (KeyError, ValueError, IndexError):
        raise Refused("the image's template may use {instance_id}, {docker_id} and {repo}") from None


def _put_repository(folder: Folder, record: Mapping[str, Any], base: str, choices: Choices) -> str:
    """Writes the repository at its base commit as a bundle of one commit; returns that commit's id."""
    if choices.repositories is None:
        raise Refused("it names no image: set --image-template, or --repositories with a clone")
    repo = _required(record, "repo")
    if not _REPOSITORY.fullmatch(repo) or {".", ".."} & set(repo.split("/")):
        raise Refused(f"repo must be OWNER/NAME of letters, digits and . _ -, not {repo!r}")
    home = choices.repositories.resolve()
    names = (repo, repo.replace("/", "__"), repo.rpartition("/")[2])
    clone = next((path for name in names if (path := (home / name).resolve()).is_dir()), None)
    if clone is None or not clone.is_relative_to(home) or clone == home:
        raise Refused(f"{choices.repositories} has no clone of {repo}")
    with tempfile.TemporaryDirectory(prefix="penstock-import-") as place:
        tree = Path(place) / "tree"
        tree.mkdir()
        archive = Path(place) / "tree.tar"
        _git(clone, "archive", "--format=tar", f"--output={archive}", "--end-of-options", base)
        _run(["tar", "-xf", str(archive), "-C", str(tree)])
        _git(tree, "init", "-q", "-b", "main")
        _git(tree, "add", "-A", "-f")
        _git(tree, "commit", "-q", "--allow-empty", "-m", f"{repo} at its base commit")
        commit = _git(tree, "rev-parse", "HEAD").strip()
        bundle = Path(place) / "repository.bundle"
        _git(tree, "bundle", "create", "-q", str(bundle), "HEAD", "main")
        folder.copy(bundle, "repository.bundle")
    folder.content["files"] = [{"path": _BUNDLE, "from": "repository.bundle"}]
    identity = {"GIT_CONFIG_GLOBAL": "/dev/null"}
    folder.content["setup"] = [
        {"argv": ["git", "init", "-q", "-b", "main", "."], "env": identity},
        {"argv": ["git", "fetch", "-q", _BUNDLE, "main"], "env": identity},
        {"argv": ["git", "reset", "-q", "--hard", "FETCH_HEAD"], "env": identity},
        ["rm", _BUNDLE],
    ]
    return commit


def _git(folder: Path, *arguments: str) -> str:
    """Runs git with a fixed name and time, so that the same content is the same commit."""
    settings = (
        "user.name=penstock",
        "user.email=penstock@localhost",
        "core.hooksPath=/dev/null",
        "commit.gpgsign=false",
    )
    flags = [part for item in settings for part in ("-c", item)]
    when = "2000-01-01T00:00:00+00:00"
    env = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return _run(["git", "-C", str(folder), *flags, *arguments], env)


def _run(argv: list[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )
    if done.returncode != 0:
        raise Refused(f"{shlex.join(argv[:6])}: {done.stderr.strip()[-300:]}")
    return done.stdout
