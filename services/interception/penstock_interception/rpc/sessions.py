"""What a trainer asks of its session, from messages."""

from __future__ import annotations

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_interception.rpc import convert
from penstock_interception.sessions import DEFAULT_CREDIT_BYTES, Credits, Selector, View


def selector_from(selector: pb.CallSelector) -> Selector:
    """Which rollouts' calls a trainer takes."""
    return Selector(
        selector.run_id if selector.HasField("run_id") else None,
        selector.group_id if selector.HasField("group_id") else None,
        frozenset(selector.rollout_ids),
        frozenset(selector.labels.items()),
    )


def credits_from(credit: pb.Credits, *, least: int, bytes_now: int = DEFAULT_CREDIT_BYTES) -> Credits:
    """How much it takes at once; `bytes_now` where it does not say how many bytes.

    Raises InvalidArgument that names the field.
    """
    if credit.calls < least:
        raise convert.invalid("credits.calls", f"at least {least}")
    if credit.HasField("bytes") and credit.bytes < 1:
        raise convert.invalid("credits.bytes", "at least 1")
    return Credits(credit.calls, credit.bytes if credit.HasField("bytes") else bytes_now)


def view_from(view: pb.CallView) -> View:
    """What it wants to see of each call."""
    return View(messages=view.messages, body=view.body)
