"""SWE-bench (Full, Lite, Verified), SWE-Gym, and records of the same form with an image or a clone.

Fields: `instance_id`, `repo`, `base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`, `patch`
(the gold one, which becomes the solution), `version`; of newer editions `image`, `log_parser`, `eval_type`,
`image_assets`; of others `image_name`, `docker_image`, `test_command`.

Django's tests are run by its tests/runtests.py and SymPy's by sympy.test, as in SWE-bench, all others by pytest.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.tasks.importers.common import Choices, Refused
from penstock.tasks.importers.records import Record, parsed, required
from penstock.tasks.importers.swe.instance import WORKDIR, Instance, templated
from penstock.tasks.importers.swe.patches import inside, touched

IMAGE: Final = "swebench/sweb.eval.x86_64.{docker_id}:latest"
_SWE_GYM_IMAGE: Final = "xingyaoww/sweb.eval.x86_64.{gym_id}:latest"
_CONDA: Final = "/opt/miniconda3/bin/activate"
# The environment of SWE-bench's images if it exists; else the image's own Python.
IN_TESTBED: Final = f"if [ -f {_CONDA} ]; then . {_CONDA} testbed; fi; "
_RUNNERS: Final = {"django/django": "django", "sympy/sympy": "sympy"}
_PYTHON_PARSERS: Final = frozenset(
    f"parse_log_{name}"
    for name in (
        "pytest", "pytest_options", "pytest_v2", "seaborn", "matplotlib", "astroid", "flask", "marshmallow", "pvlib",
        "pyvista", "sqlfluff", "xarray", "pydicom", "requests", "pylint", "astropy", "scikit", "sphinx",
    )
)  # fmt: skip
_PARSERS: Final = {"parse_log_django": "django", "parse_log_sympy": "sympy"}
_BUILT: Final = re.compile(r"\.(?:c|cc|cpp|cxx|h|hpp|pyx|pxd|f|f90|rs)$")
_PROGRESS: Final = re.compile(r"\[ *\d+%\]")
_TEST_FILE: Final = re.compile(r"(?:^|/)(?:test_[^/]*|[^/]*_test|tests)\.py$")


def of(record: Record, choices: Choices) -> Instance:
    """Reads a record of SWE-bench, whose images are on Docker Hub."""
    if record.get("language") not in (None, "", "python", "Python"):
        raise Refused(f"language {record['language']}: only tests of Python are graded")
    return _read(record, choices, "swe-bench", IMAGE)


def of_swe_gym(record: Record, choices: Choices) -> Instance:
    """Reads a record of SWE-Gym: SWE-bench's form, with images of its own."""
    return _read(record, choices, "swe-gym", _SWE_GYM_IMAGE)


def of_any(record: Record, choices: Choices) -> Instance:
    """Reads a record of the same form of anybody's, which names its image, or has none."""
    return _read(record, choices, "swe", "")


def _read(record: Record, choices: Choices, form: str, template: str) -> Instance:
    runner = _runner(record)
    statement, patch = required(record, "problem_statement"), str(record.get("test_patch") or "")
    notes: list[str] = []
    fail, keep = tests(record, runner, notes)
    command = str(record.get("test_command") or "")
    if runner == "pytest":
        files, command = pytest_files(patch, (*fail, *keep)), command or f"{IN_TESTBED}python -m pytest"
    else:
        files, command = _run_by(runner, record, patch)
    solution = str(record.get("patch") or "")
    if built := [path for path in touched(solution)[0] if _BUILT.search(path)]:
        notes.append(f"its solution changes {built[0]}, and nothing is compiled again before the tests")
    return Instance(
        format=form,
        statement=statement,
        repo=str(record.get("repo") or ""),
        base_commit=required(record, "base_commit"),
        image=image_of(record, choices, template),
        workdir=choices.workdir or WORKDIR,
        runner=runner,
        test_command=command,
        test_patch=patch,
        fail=fail,
        keep=keep,
        test_files=files,
        solution=solution,
        metadata=kept(record, "repo", "version", "created_at", "difficulty"),
        notes=notes,
    )


def _runner(record: Record) -> str:
    if record.get("eval_type") not in (None, "", "pass_and_fail"):
        raise Refused(f"eval_type {record['eval_type']}: there a test that never ran counts as passed")
    assets = parsed(record, "image_assets", dict) or {}
    if any(assets.values()):
        raise Refused("image_assets: files that are not in the test patch are not fetched")
    parser = str(record.get("log_parser") or "")
    if parser and parser not in _PYTHON_PARSERS | _PARSERS.keys():
        raise Refused(f"log_parser {parser}: only tests that pytest, Django or SymPy run are graded")
    return _PARSERS.get(parser) or _RUNNERS.get(str(record.get("repo") or ""), "pytest")


def image_of(record: Record, choices: Choices, template: str) -> str:
    """Returns a record's image: its own, that of the user's template, or that of the format's; empty = none."""
    if not choices.image:
        return ""
    own = next((str(record[name]) for name in ("image", "image_name", "docker_image") if record.get(name)), "")
    if own:
        return own
    chosen = choices.image_template or ("" if choices.repositories else template)
    if not chosen:
        return ""
    return templated(chosen, instance_id=str(record.get("instance_id") or ""), repo=str(record.get("repo") or ""))


def tests(record: Record, runner: str, notes: list[str]) -> tuple[list[str], list[str]]:
    """Returns the tests that have to pass, and those that have to keep passing."""
    fail, keep = ([str(item) for item in parsed(record, name, list) or ()] for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if progress := [item for item in keep if _PROGRESS.fullmatch(item)]:
        # SWE-bench's parsers took lines of pytest's progress for tests.
        notes.append(f"PASS_TO_PASS: {', '.join(progress)}: progress of pytest, not tests; left out")
        keep = [item for item in keep if item not in progress]
    if not fail:
        raise Refused("FAIL_TO_PASS is empty: the task has no test to make pass")
    for name, found in (("FAIL_TO_PASS", fail), ("PASS_TO_PASS", keep)):
        strange = next((item for item in found if not _is_test(item, runner)), None)
        if strange is not None:
            raise Refused(f"{name}: {strange!r} is not a test of {runner}")
    return fail, keep


def _is_test(name: str, runner: str) -> bool:
    if runner == "django":  # the first line of a test's docstring stands for its name
        return bool(name.strip())
    return bool(re.fullmatch(r"\w+", name)) or (runner == "pytest" and "::" in name)


def pytest_files(patch: str, named: Sequence[str]) -> list[str]:
    """Returns the files that pytest has to run, those of the test patch and of the tests.

    Raises:
        Refused: there are none; or a path leads out of the repository.
    """
    changed, new, gone = touched(patch)
    files = {inside(test.partition("::")[0], "a test") for test in named if "::" in test}
    # pytest runs nothing at all if one of the files that it is given is not there.
    found = sorted((files | {file for file in changed + new if _TEST_FILE.search(file)}) - gone)
    if not found:
        raise Refused("neither the test patch nor the names of the tests have the files to run with pytest")
    if option := next((file for file in found if file.startswith("-")), ""):
        raise Refused(f"{option!r} is not the name of a file")
    return found


def _run_by(runner: str, record: Record, patch: str) -> tuple[list[str], str]:
    """Returns what Django's or SymPy's own runner runs, and the command that it is appended to."""
    changed, new, gone = touched(patch)
    files = sorted({path for path in changed + new if path.endswith(".py")} - gone)
    environment = "export LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8 PYTHONHASHSEED=0; "
    program = f'python "$PENSTOCK_GRADER/{runner}_report.py" "$PENSTOCK_REPORT"'
    if runner == "django":
        # Django's runner of 1.9 has neither option.
        options = "" if str(record.get("version")) == "1.9" else " --settings=test_sqlite --parallel 1"
        files = [
            path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
            for path in files
            if path.startswith("tests/")
        ]
        program += f" --verbosity 2{options}"
    if not files:
        raise Refused(f"the test patch changes no file that {runner}'s tests are in")
    return files, f"{environment}{IN_TESTBED}{program}"


def kept(record: Record, *names: str) -> dict[str, Any]:
    """Returns fields for the task's metadata, as texts."""
    return {name: str(record[name]) for name in names if record.get(name)}
