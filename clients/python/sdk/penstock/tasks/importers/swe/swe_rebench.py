"""SWE-rebench and SWE-rebench-V2: SWE-bench's form, with an image and a test command for each record.

Further fields: `docker_image` or `image_name`, `install_config` (`test_cmd`: a command or several, of which the last
runs the tests; `log_parser`); V2 has `language`, and its images have the repository in `/NAME`.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.tasks.importers.common import Choices, Refused
from penstock.tasks.importers.records import Record, parsed, required
from penstock.tasks.importers.swe.instance import WORKDIR, Instance
from penstock.tasks.importers.swe.patches import touched
from penstock.tasks.importers.swe.swe_bench import IN_TESTBED, image_of, kept, pytest_files, tests

_IMAGE: Final = "swerebench/sweb.eval.x86_64.{docker_id}:latest"
_PYTEST: Final = re.compile(r"(?:^|[\s/])(?:pytest|py\.test)(?:\s|$)")
# Such a command would not run the files that are appended to it.
_SHELL: Final = re.compile(r"[;&|<>`\n]|\$\(")


def of(record: Record, choices: Choices) -> Instance:
    """Reads a record."""
    config = parsed(record, "install_config", dict) or {}
    if (language := str(record.get("language") or "python").lower()) != "python":
        raise Refused(f"language {language}: only tests of Python are graded")
    if (parser := str(config.get("log_parser") or "parse_log_pytest")) not in (
        "parse_log_pytest",
        "parse_log_pytest_v2",
    ):
        raise Refused(f"install_config.log_parser {parser}: only pytest's tests are graded")
    patch, notes = str(record.get("test_patch") or ""), list[str]()
    fail, keep = tests(record, "pytest", notes)
    touched(str(record.get("patch") or ""))
    return Instance(
        format="swe-rebench",
        statement=required(record, "problem_statement"),
        repo=required(record, "repo"),
        base_commit=required(record, "base_commit"),
        image=image_of(record, choices, _IMAGE),
        workdir=choices.workdir or _workdir(record),
        test_command=_command(config),
        test_patch=patch,
        fail=fail,
        keep=keep,
        test_files=pytest_files(patch, (*fail, *keep)),
        solution=str(record.get("patch") or ""),
        metadata=kept(record, "repo", "version", "created_at", "license_name", "license"),
        notes=notes,
    )


def _command(config: Mapping[str, Any]) -> str:
    given = config.get("test_cmd") or "pytest"
    commands = [str(item).strip() for item in (given if isinstance(given, list) else [given])]
    *before, last = [item for item in commands if item] or ["pytest"]
    if not _PYTEST.search(last):
        raise Refused(f"install_config.test_cmd: {last!r} does not run pytest")
    if _SHELL.search(last):
        raise Refused(f"install_config.test_cmd: {last!r} is more than one command")
    return IN_TESTBED + "".join(f"{item}\n" for item in before) + last


def _workdir(record: Record) -> str:
    if "language" not in record:
        return WORKDIR
    name = required(record, "repo").rpartition("/")[2]
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise Refused(f"repo must be OWNER/NAME of letters, digits and . _ -, not {record['repo']!r}")
    return f"/{name}"
