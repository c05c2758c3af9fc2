"""Fields that a service does not know."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_chassis.validation import refuse_unknown, selects

UNKNOWN = b"\xa2\x06\x02\x08\x01"
"""Field 100, a message."""


def later(message: Any) -> Any:
    """The message as a newer client sends it."""
    return type(message).FromString(message.SerializeToString() + UNKNOWN)


@pytest.mark.requirement("R108")
def test_unknown_fields_at_any_depth_are_refused_by_their_place() -> None:
    """In a message, in one inside, in one of several."""
    inside = pb.Hello(selector=later(pb.CallSelector(run_id="a", labels={"k": "v"})))
    several = pb.Results(results=[pb.CallResult(call_id="a"), later(pb.CallResult(call_id="b"))])
    for message, place in ((later(pb.Hello()), "hello"), (inside, "hello.selector"), (several, "hello.results")):
        with pytest.raises(InvalidArgument) as refused:
            refuse_unknown(message, "hello")
        assert refused.value.reason == "FIELD_UNKNOWN"
        assert [violation.field for violation in refused.value.violations] == [place]
        assert "field 100" in refused.value.violations[0].description


@pytest.mark.requirement("R108")
def test_known_fields_pass() -> None:
    """Maps and messages inside too."""
    refuse_unknown(pb.Hello(selector=pb.CallSelector(labels={"k": "v"}), held=pb.HeldCalls(call_ids=["a"])))


@pytest.mark.requirement("R108")
def test_methods_that_select_are_known_by_their_names() -> None:
    """What creates or answers may have fields that an older service ignores."""
    selecting = ("x.S/ListCalls", "x.S/DeleteSandboxes", "x.S/WatchCalls", "x.S/ExportTrajectories", "x.S/RevokeTokens")
    assert all(map(selects, selecting))
    assert not any(map(selects, ("x.S/CreateRollout", "x.S/CompleteCalls", "x.ListService/GetStatus")))
