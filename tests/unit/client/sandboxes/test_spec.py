"""What a sandbox shall be, as it is asked for."""

from __future__ import annotations

from dataclasses import fields

import pytest

from penstock.client import Companion, HealthCheck, OneEndpoint, Resources, SandboxSpec
from penstock.client.wire import sandboxes

SAID = SandboxSpec(
    backend="local",
    image="debian",
    resources=Resources(pids=7),
    network=OneEndpoint(local_port=8080, upstream="127.0.0.1:1"),
    env={"A": "b"},
    user="worker",
    lease=1.5,
    labels={"owner": "me"},
    own_kernel=True,
    repeatable=True,
    toolbox_ids=["t"],
    companions=[Companion(name="db", image="postgres", health_check=HealthCheck(argv=["ready"], timeout=1.5))],
)


@pytest.mark.requirement("R63")
def test_all_sandbox_fields_are_sent() -> None:
    """No field is forgotten on the way."""
    asked = sandboxes.spec(SAID)
    assert (asked.backend, asked.base.image, asked.user, asked.own_kernel) == ("local", "debian", "worker", True)
    assert (asked.resources.pids, asked.network.one_endpoint.local_port) == (7, 8080)
    assert (dict(asked.env), dict(asked.labels), asked.lease.ToMilliseconds()) == ({"A": "b"}, {"owner": "me"}, 1500)
    (beside,) = asked.companions
    check = beside.health_check
    assert (beside.name, list(check.argv), check.timeout.ToMilliseconds()) == ("db", ["ready"], 1500)
    assert sandboxes.spec(SandboxSpec(snapshot_id="s")).base.snapshot_id == "s"
    assert {field.name for field in fields(SandboxSpec)} == {field.name for field, _ in asked.ListFields()} - {
        "base"
    } | {"image", "snapshot_id"}


@pytest.mark.requirement("R64")
def test_omitted_fields_stay_unset() -> None:
    """Unset and empty are different."""
    assert not sandboxes.spec(SandboxSpec()).ListFields()
