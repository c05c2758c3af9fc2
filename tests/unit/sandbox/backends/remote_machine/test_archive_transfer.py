"""What a job reports of its packed files is not believed: its programs may be the agent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.hf.client import Remote
from penstock_sandbox.backends.remote_machine.archive_transfer import capture
from penstock_sandbox.backends.remote_machine.bootstrap import PreparedMachine
from penstock_sandbox.backends.remote_machine.machine import Outcome


class Reports:
    """A job whose programs all succeed and print this."""

    def __init__(self, stdout: str) -> None:
        self._stdout = stdout

    async def run(self, argv: list[str], **kwargs: Any) -> Outcome:
        return Outcome(0, self._stdout, "")


@pytest.mark.requirement("R8", "R89")
@pytest.mark.parametrize("stdout", ["", "\N{SUPERSCRIPT TWO} aa", "-1 aa", f"{'9' * 5000} aa", "99999999999999 aa"])
async def test_a_reported_size_that_is_none_or_too_large_cannot_be_sealed(tmp_path: Path, stdout: str) -> None:
    """Digits that are no number for Python, and more of them than it reads, end as the same error."""
    job = PreparedMachine("/usr/bin/python3", 1000, 1000, as_root=False)
    with pytest.raises(FailedPrecondition) as caught:
        await capture(cast("Remote", Reports(stdout)), job, tmp_path / "archive", 1 << 20)
    assert caught.value.reason == "SEAL_FAILED"
