"""The handshake of a session: what the service serves, what it refuses, and the sizes that the trainer accepts."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.integration.interception.test_stream import asking

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.channel import typed_errors
from penstock_chassis.errors import FailedPrecondition, InvalidArgument

UNKNOWN = b"\x4a\x08policy-b"
"""Field 9, a text: a condition of a newer version."""


async def begun(service: Any, **hello: Any) -> pb.Welcome:
    """The answer to a Hello; the session then ends."""
    hello.setdefault("credits", pb.Credits(calls=1))
    stream = service.intercept.Intercept()
    with typed_errors():
        await stream.write(pb.InterceptRequest(hello=pb.Hello(**hello)))
        welcome: pb.Welcome = (await anext(aiter(stream))).welcome
        await stream.write(pb.InterceptRequest(goodbye=pb.Goodbye()))
    return welcome


@pytest.mark.requirement("R110")
async def test_welcome_has_the_contract_and_its_features(service: Any) -> None:
    """A trainer may name those that it needs."""
    server = (await begun(service)).server
    assert (server.service, server.max_message_bytes) == ("interception", 64 << 20)
    assert server.contract_revision >= 2
    assert "hello.required_features" in server.features
    assert (await begun(service, required_features=server.features)).session_id


@pytest.mark.requirement("R108")
async def test_required_feature_that_is_not_served_ends_the_session(service: Any) -> None:
    """By name."""
    with pytest.raises(FailedPrecondition, match="lacks teleport") as refused:
        await begun(service, required_features=["hello.required_features", "teleport"])
    assert (refused.value.reason, refused.value.metadata["features"]) == ("FEATURE_MISSING", "teleport")


@pytest.mark.requirement("R108")
async def test_selector_with_an_unknown_condition_selects_nothing(service: Any) -> None:
    """Ignored, it would select the calls of every rollout."""
    selector = pb.CallSelector.FromString(UNKNOWN)
    with pytest.raises(InvalidArgument) as refused:
        await begun(service, selector=selector)
    assert refused.value.reason == "FIELD_UNKNOWN"
    assert refused.value.violations[0].field == "hello.selector"
    with pytest.raises(InvalidArgument) as refused, typed_errors():
        await service.intercept.LeaseCalls(pb.LeaseCallsRequest(selector=selector, wait=Duration(nanos=1)))
    assert refused.value.violations[0].field == "selector"


@pytest.mark.requirement("R110")
async def test_leased_calls_fit_into_the_size_that_a_plain_stub_accepts(service: Any) -> None:
    """Calls that do not fit are leased by the next request; a view that does not fit is left out."""
    text = "y" * (1 << 20)
    rollouts = [await service.open() for _ in range(3)]
    tasks = [asking(rollout, extra_body={"metadata": {"x": text}}) for rollout in rollouts]
    queued: set[str] = set()
    while len(queued) < 3:
        answer = await service.intercept.LeaseCalls(
            pb.LeaseCallsRequest(
                max_calls=3, view=pb.CallView(body=True), max_message_bytes=5 << 19, wait=Duration(seconds=20)
            )
        )
        assert answer.ByteSize() <= 5 << 19
        assert all(text.encode() in call.request_body for call in answer.calls)
        queued |= {call.call_id for call in answer.calls}
    assert len(queued) == 3
    whole = await service.open()
    tasks.append(asking(whole, extra_body={"metadata": {"x": text}}))
    answer = await service.intercept.LeaseCalls(
        pb.LeaseCallsRequest(view=pb.CallView(body=True), max_message_bytes=1 << 20, wait=Duration(seconds=20))
    )
    assert (answer.calls[0].view_truncated, answer.calls[0].request_body) == (True, b"")


@pytest.mark.requirement("R110")
@pytest.mark.parametrize("size", [0, (64 << 10) - 1, (64 << 20) + 1])
async def test_size_out_of_range_is_refused(service: Any, size: int) -> None:
    """64 KiB to 64 MiB."""
    with pytest.raises(InvalidArgument) as refused:
        await begun(service, max_message_bytes=size)
    assert refused.value.violations[0].field == "max_message_bytes"
