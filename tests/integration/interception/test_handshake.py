"""The handshake of a session: what the service serves, what it refuses, and the sizes that the trainer accepts."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs
from tests.integration.interception.conftest import TRAINER
from tests.integration.interception.test_stream import asking, opened, wait_for_calls

from penstock.client import connect
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


@pytest.mark.requirement("R110")
async def test_log_of_a_session_names_the_client_and_its_version(service: Any) -> None:
    """So that an operator sees which trainers are old."""
    with capture_logs() as logs:
        async with connect({"interception": service.address}, TRAINER) as ps, ps.intercept(identity="t"):
            pass
    (began,) = [line for line in logs if line["event"] == "a session began"]
    assert began["client"].startswith(f"penstock-python/{version('penstock')} grpc-python")
    assert (began["identity"], began["resumed"]) == ("t", False)


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
    """Calls that do not fit are the next ones, in their order; a view that does not fit is left out."""
    text, limit = "y" * (3 << 19), 4 << 20
    view = pb.CallView(body=True)
    rollouts = [await opened(service) for _ in range(4)]
    for rollout in rollouts:
        asking(rollout, extra_body={"metadata": {"x": text}})
        await wait_for_calls(service, rollout, 1)
    leased: list[str] = []
    while len(leased) < 4:
        answer = await service.intercept.LeaseCalls(
            pb.LeaseCallsRequest(max_calls=4, view=view, wait=Duration(seconds=20))
        )
        assert answer.ByteSize() <= limit
        assert all(text.encode() in call.request_body for call in answer.calls)
        leased += [call.rollout_id for call in answer.calls]
    assert leased == [rollout.rollout_id for rollout in rollouts]
    asking(await service.open(), extra_body={"metadata": {"x": "y" * limit}})
    answer = await service.intercept.LeaseCalls(pb.LeaseCallsRequest(view=view, wait=Duration(seconds=20)))
    assert (answer.calls[0].view_truncated, answer.calls[0].request_body) == (True, b"")


@pytest.mark.requirement("R110")
@pytest.mark.parametrize("size", [0, (4 << 20) - 1, (64 << 20) + 1])
async def test_size_out_of_range_is_refused(service: Any, size: int) -> None:
    """4 MiB to 64 MiB."""
    with pytest.raises(InvalidArgument) as refused:
        await begun(service, max_message_bytes=size)
    assert refused.value.violations[0].field == "max_message_bytes"


@pytest.mark.requirement("R41")
async def test_repeated_lease_waits_for_the_first_and_gets_its_calls(service: Any) -> None:
    """A retry may overtake the end of the request that it repeats; another selector's equal id is another request."""
    rollout, other = await service.open(), await service.open()

    def lease(of: Any) -> Any:
        selector = pb.CallSelector(rollout_ids=[of.rollout_id])
        return service.intercept.LeaseCalls(
            pb.LeaseCallsRequest(selector=selector, request_id="1", wait=Duration(seconds=20))
        )

    first, second = lease(rollout), lease(rollout)
    asking(other)
    assert [call.rollout_id for call in (await lease(other)).calls] == [other.rollout_id]
    asking(rollout)
    answers = [(await answer).calls for answer in (first, second)]
    assert [[call.lease_id for call in calls] for calls in answers] == [[answers[0][0].lease_id]] * 2
    assert answers[0][0].rollout_id == rollout.rollout_id


@pytest.mark.requirement("R29")
async def test_results_before_a_goodbye_are_acknowledged(service: Any) -> None:
    """All of them, however many frames they came in."""
    rollouts = [await service.open() for _ in range(8)]
    tasks = [asking(rollout) for rollout in rollouts]
    trainer = await service.trainer(credits=pb.Credits(calls=8))
    calls = [await trainer.call() for _ in rollouts]
    for call in calls:
        await trainer.send(results=pb.Results(results=[trainer.result(call, "ok")]))
    await trainer.send(goodbye=pb.Goodbye())
    await trainer.over.wait()
    accepted = [call_id for frame in trainer.frames for call_id in frame.acknowledged.accepted_call_ids]
    assert sorted(accepted) == sorted(call.call_id for call in calls)
    for task in tasks:
        await task
