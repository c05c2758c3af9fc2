"""Shortens the pauses that `hf-sandbox` makes while a job starts: on the path of a service under the conformance suite.

The SDK sleeps 15 s before it first asks whether a sandbox is there, and 3 s between askings. Nothing else of it is
changed, and `tests/integration/sandbox/test_hf_stand_in.py` runs it as it is."""

import time

_sleep = time.sleep


def sleep(seconds: float) -> None:
    """Sleep, but not for the SDK's two pauses."""
    _sleep(0.3 if seconds in (15, 3) else seconds)


time.sleep = sleep  # type: ignore[assignment]
