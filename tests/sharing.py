"""Which tests one process runs in one go where several share them: those that share what is dear to start.

A file's, as a rule. In the sandbox conformance suite a service variant's, whatever file they stand in: each service is
started once a run, not once a file. Of the attacks a backend's: those on each take minutes, and share nothing.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.sandbox.services import SERVICES
from xdist.scheduler import LoadFileScheduling

_BY_VARIANT = "tests/conformance/sandbox/"
_BY_TEST = "tests/security/test_redteam.py"


class Sharing(LoadFileScheduling):  # type: ignore[misc]  # xdist is not typed
    """`--dist loadfile`, with the sandbox conformance suite by variant and the attacks by backend."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scheduler(config: Any, log: Any) -> Sharing | None:
    """How the tests are shared out; None where the run's options say otherwise."""
    return Sharing(config, log) if config.getoption("dist") == "loadfile" else None


def scope_of(nodeid: str) -> str:
    """What a test is shared out with: all of its variant, or of its kind of attack, where it has one, else its file."""
    file, _, test = nodeid.partition("::")
    if file == _BY_TEST:
        return nodeid.partition("[")[0]
    if file.startswith(_BY_VARIANT):
        parameters = test.partition("[")[2].removesuffix("]")
        named = [name for name in SERVICES if f"{parameters}-".startswith(f"{name}-")]
        if named:
            return _BY_VARIANT + max(named, key=len)
    return file
