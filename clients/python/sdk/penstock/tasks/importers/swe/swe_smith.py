"""SWE-smith: a repository that works, a patch that breaks it, and the tests that fail then.

Fields: `instance_id`, `repo` (the mirror `swesmith/OWNER__NAME.COMMIT`), `image_name`, `patch` (the one that breaks it:
its reverse is the solution), `FAIL_TO_PASS`, `PASS_TO_PASS`, `problem_statement`, `base_commit`.

The image holds what works. The patch is applied while the task is set up, and then all is one commit, since the
difference would be the solution. As in SWE-smith, the files of the tests of FAIL_TO_PASS are run.
"""

from typing import Final

from penstock.tasks.importers.common import Choices, Refused
from penstock.tasks.importers.records import Record, required
from penstock.tasks.importers.swe.instance import WORKDIR, Instance, templated
from penstock.tasks.importers.swe.patches import touched
from penstock.tasks.importers.swe.swe_bench import IN_TESTBED, kept, pytest_files, tests

IMAGE: Final = "jyangballin/swesmith.x86_64.{docker_id}:latest"


def of(record: Record, choices: Choices) -> Instance:
    """Reads a record."""
    if record.get("test_patch"):
        raise Refused("test_patch: a record of SWE-smith has none")
    bug = required(record, "patch")
    touched(bug)
    notes: list[str] = []
    fail, keep = tests(record, "pytest", notes)
    files = pytest_files("", fail)
    run = [test for test in keep if test.partition("::")[0] in files]
    if others := len(keep) - len(run):
        notes.append(
            f"PASS_TO_PASS: {others} tests are in other files than FAIL_TO_PASS; as in SWE-smith, they are not run"
        )
    return Instance(
        format="swe-smith",
        # A record without an issue is a task that SWE-smith's makers had no text for yet.
        statement=required(record, "problem_statement"),
        repo=str(record.get("repo") or ""),
        base_commit=str(record.get("base_commit") or ""),
        image=_image(record, choices),
        workdir=choices.workdir or WORKDIR,
        test_command=f"{IN_TESTBED}python -m pytest",
        fail=fail,
        keep=run,
        test_files=files,
        restored=files,
        bug=bug,
        metadata=kept(record, "repo", "created_at", "strategy"),
        notes=notes,
    )


def _image(record: Record, choices: Choices) -> str:
    """Returns the record's image. One without an owner is of its maker's daemon, and no registry has it."""
    own, repo = str(record.get("image_name") or ""), str(record.get("repo") or "")
    if "/" in own or not choices.image:
        return own
    return templated(choices.image_template or IMAGE, instance_id=repo.rpartition("/")[2], repo=repo)
