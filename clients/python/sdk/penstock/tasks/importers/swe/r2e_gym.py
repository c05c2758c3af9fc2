"""R2E-Gym: a commit of a repository, tests of its own, and what each of them comes to after the commit.

Fields: `repo_name`, `docker_image`, `commit_hash`, `problem_statement` (the issue between [ISSUE] and [/ISSUE]),
`expected_output_json` (what each test comes to), `execution_result_content` (JSON: `test_file_names`,
`test_file_codes`), `parsed_commit_content` (JSON: the commit's files before and after, which become the solution).

The image has the tests and the later commits, which R2E-Gym hides and the agent must not find: both are removed while
the task is set up, and the record's own tests are what grades. As in R2E-Gym the tests have to come to exactly
what is expected, failures included.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.tasks.importers.common import Choices, Refused
from penstock.tasks.importers.records import Record, parsed, required
from penstock.tasks.importers.swe.instance import WORKDIR, Instance
from penstock.tasks.importers.swe.patches import inside
from penstock.tasks.importers.swe.swe_bench import image_of

_TESTS: Final = "r2e_tests"
_ISSUE: Final = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_STATUSES: Final = frozenset({"PASSED", "FAILED", "ERROR"})
_TEST_FOLDERS: Final = frozenset({"tests", "Tests", "test", "Test"})
_IN_IMAGE: Final = (
    "run_tests.sh", "syn_issue.json", "expected_test_output.json", "execution_result.json", "parsed_commit.json",
    "modified_files.json", "modified_entities.json", _TESTS,
)  # fmt: skip
_WARNINGS: Final = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'"
_COMMAND: Final = f"{_WARNINGS} .venv/bin/python -W ignore -m pytest"
_ON_A_SCREEN: Final = (
    f"QT_QPA_PLATFORM=minimal {_WARNINGS} xvfb-run --auto-servernum .venv/bin/python -W ignore -m pytest"
)
# As R2E-Gym: `python` and its programs are those of the repository's environment.
_ENVIRONMENT: Final = (
    'if [ -d .venv/bin ]; then mkdir -p ~/.local/bin && ln -sfn "$PWD/.venv" ~/.venv && '
    'find "$PWD/.venv/bin" ! -type d -exec ln -sf {} ~/.local/bin/ \\; ; fi'
)


def of(record: Record, choices: Choices) -> Instance:
    """Reads a record."""
    if choices.user not in (None, "root"):
        raise Refused("its image has the tests where only root can remove them: import it without --user")
    statement = required(record, "problem_statement")
    issue = _ISSUE.search(statement)
    results = parsed(record, "execution_result_content", dict)
    if results is None:
        raise Refused("it has no execution_result_content, in which its tests are")
    repo = required(record, "repo_name")
    notes: list[str] = []
    return Instance(
        format="r2e-gym",
        statement=(issue[1] if issue else statement).strip() + "\n",
        repo=repo,
        base_commit=required(record, "commit_hash"),
        image=image_of(record, choices, ""),
        workdir=choices.workdir or WORKDIR,
        test_command=_ON_A_SCREEN if repo == "orange3" else _COMMAND,
        test_files=[_TESTS],
        expected=_expected(record),
        tests={f"{_TESTS}/__init__.py": "", **_tests(results)},
        # Tests of Pillow import it from beside them.
        helpers=["Tests/helper.py"],
        restored=[_TESTS, "Tests/helper.py"],
        hidden=[f"/{_TESTS}", "/run_tests.sh", f"/root/{_TESTS}", "/root/run_tests.sh", *_IN_IMAGE],
        setup=[_ENVIRONMENT],
        solution=_solution(record, notes),
        metadata={"repo": repo},
        notes=notes,
    )


def _expected(record: Record) -> dict[str, str]:
    given: Mapping[str, Any] = parsed(record, "expected_output_json", dict) or {}
    found = {_COLOUR.sub("", name).split(" - ")[0]: str(outcome) for name, outcome in given.items()}
    if not found:
        raise Refused("expected_output_json is empty: the task has no test")
    if strange := next((outcome for outcome in found.values() if outcome not in _STATUSES), ""):
        raise Refused(f"expected_output_json: {strange!r} is none of {', '.join(sorted(_STATUSES))}")
    return found


def _tests(results: Mapping[str, Any]) -> dict[str, str]:
    names, codes = results.get("test_file_names"), results.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or not names or len(names) != len(codes):
        raise Refused("execution_result_content: test_file_names and test_file_codes are not lists of one length")
    found = {}
    for name, code in zip(names, codes, strict=True):
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.py", name, re.ASCII):
            raise Refused(f"execution_result_content: test_file_names: {name!r} is not the name of a file")
        found[f"{_TESTS}/{name}"] = str(code)
    return found


def _solution(record: Record, notes: list[str]) -> dict[str, str]:
    """Returns the commit's own files as they are after it; none, with a note, if the record does not have them all."""
    commit = parsed(record, "parsed_commit_content", dict) or {}
    found = dict[str, str]()
    for path, before, after in _changes(commit):
        if not isinstance(after, str) or not (before or after):
            notes.append(f"parsed_commit_content lacks the content of {path}: the task has no solution")
            return {}
        if not after:
            notes.append(f"parsed_commit_content removes {path}, which its solution does not")
            continue
        found[inside(path, "parsed_commit_content")] = after
    if not found:
        notes.append("parsed_commit_content has no file of the repository: the task has no solution")
    return found


def _changes(commit: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields path, content before and content after of the Python files that are no tests: R2E-Gym's gold patch."""
    for change in commit.get("file_diffs") or ():
        path = str(change["header"]["file"]["path"])
        folders, name = set(path.split("/")), path.rpartition("/")[2]
        if name.endswith(".py") and not (
            folders & _TEST_FOLDERS or name.startswith("test_") or name.endswith("_test.py")
        ):
            yield path, change.get("old_file_content"), change.get("new_file_content")
