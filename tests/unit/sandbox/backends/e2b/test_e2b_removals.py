"""The E2B backend's parts by themselves: what the SDK raises becomes one of ours, and removals end."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from e2b import exceptions as sdk

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.e2b.errors import Denied, Gone, asked

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


@pytest.mark.requirement("R8", "R53")
@pytest.mark.parametrize(("raised", "kind"), KNOWN, ids=lambda value: type(value).__name__)
async def test_sdk_exceptions_become_ours_without_their_text(raised: Exception, kind: type[Exception]) -> None:

    async def call() -> None:
        raise raised

    with pytest.raises(_OURS) as caught:
        await asked("call", call())
    assert isinstance(caught.value, kind)
    assert _SECRET not in repr(caught.value) and caught.value.__cause__ is None


@pytest.mark.requirement("R32")
async def test_a_cancelled_call_stays_cancelled_even_where_the_sdk_swallows_that() -> None:
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
