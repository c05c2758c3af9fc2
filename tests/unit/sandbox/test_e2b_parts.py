"""The E2B backend's parts by themselves: what the SDK raises becomes one of ours, and removals end."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from e2b import exceptions as sdk
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.e2b.errors import Denied, Gone, asked
from penstock_sandbox.backends.e2b.removals import Removals

_SECRET = "e2b_secret"
_OURS = (PenstockError, Gone, Denied)

KNOWN = [
    (sdk.SandboxNotFoundException(_SECRET), Gone),
    (sdk.SandboxNotRunningException(_SECRET), Gone),
    (sdk.SandboxUnreachableException(_SECRET), Unavailable),
    (sdk.TimeoutException(_SECRET), Unavailable),
    (sdk.AuthenticationException(_SECRET), FailedPrecondition),
    (sdk.RateLimitException(_SECRET), ResourceExhausted),  # type: ignore[no-untyped-call]
    (sdk.ServiceBusyException(_SECRET), Unavailable),
    (sdk.NotEnoughSpaceException(_SECRET), ResourceExhausted),
    (sdk.InvalidArgumentException(_SECRET), Denied),
    (sdk.SandboxException(_SECRET, status_code=400), Denied),
    (sdk.SandboxException(_SECRET, status_code=404), Denied),
    (sdk.SandboxException(_SECRET, status_code=500), Unavailable),
    (sdk.SandboxException(_SECRET), Unavailable),
    (json.JSONDecodeError(_SECRET, _SECRET, 0), Unavailable),
    (KeyError(_SECRET), Unavailable),
    (TimeoutError(_SECRET), Unavailable),
    (httpx.ConnectError(_SECRET), Unavailable),
    (ConnectionResetError(_SECRET), Unavailable),
    (Exception(f"Body of the request is None {_SECRET}"), Unavailable),
]


@pytest.mark.parametrize(("raised", "kind"), KNOWN, ids=lambda value: type(value).__name__)
async def test_whatever_the_sdk_raises_becomes_one_of_ours_and_says_nothing_of_its_text(
    raised: Exception, kind: type[Exception]
) -> None:
    """R8, R53"""

    async def call() -> None:
        raise raised

    with pytest.raises(_OURS) as caught:
        await asked("call", call())
    assert isinstance(caught.value, kind)
    assert _SECRET not in repr(caught.value) and caught.value.__cause__ is None


async def test_a_cancelled_call_stays_cancelled_even_where_the_sdk_swallows_that() -> None:
    """R32"""
    undone: list[str] = []

    async def swallowing() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "too late"
        raise AssertionError

    async def undo(late: str) -> None:
        undone.append(late)

    asking = asyncio.create_task(asked("call", swallowing(), undo))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert undone == ["too late"]


@given(failures=st.lists(st.sampled_from(["unavailable", "denied"]), max_size=3), gone=st.booleans())
def test_a_removal_is_tried_until_it_succeeds_or_there_is_nothing_to_remove(failures: list[str], gone: bool) -> None:
    """R50"""

    async def run() -> list[str]:
        tried: list[str] = []

        async def once() -> None:
            if len(tried) < len(failures):
                tried.append(failures[len(tried)])
                raise Denied(409) if tried[-1] == "denied" else Unavailable("no", reason="PROVIDER_FAILED")
            tried.append("end")
            if gone:
                raise Gone

        removals = Removals(first_pause_s=0.0)
        await removals.remove("a", once)
        assert tried, "the first attempt is over when remove returns"
        await removals.aclose(60.0)
        return tried

    assert asyncio.run(run()) == [*failures, "end"]


async def test_two_removals_of_one_thing_are_one() -> None:
    """R22"""
    tried = 0

    async def once() -> None:
        nonlocal tried
        tried += 1
        await asyncio.sleep(0)

    removals = Removals()
    await asyncio.gather(*(removals.remove("a", once) for _ in range(5)))
    assert tried == 1
