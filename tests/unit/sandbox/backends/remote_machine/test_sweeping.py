"""How backends of machines look for leftovers."""

from __future__ import annotations

import pytest

from penstock_sandbox.backends.remote_machine.sweeping import sweep_forever


class Ended(Exception):
    """Ends a loop that has no end of its own."""


async def test_a_look_that_failed_is_repeated_and_no_defect_is_hidden() -> None:
    """A provider that is away is asked again; what nobody expected ends the loop."""
    failures = [OSError("away"), OSError("away"), None, Ended()]

    async def sweep() -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    with pytest.raises(Ended):
        await sweep_forever(sweep, (OSError,), every_s=0.0)
    assert not failures
