"""Changes of a sandbox's network access: what is narrower, and what is asked for at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.sandbox.scripted_backend import ScriptedHandle
from tests.unit.sandbox.scripted_domain import opened, pass_turns

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy, SandboxSpec
from penstock_sandbox.sandboxes.policy import is_narrower


@pytest.mark.requirement("R13", "R146")
async def test_narrowings_that_come_together_never_widen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one was wider than the one that was acknowledged before it."""
    go_on, applied = asyncio.Event(), list[NetworkKind]()

    async def slow(handle: ScriptedHandle, policy: NetworkPolicy) -> None:
        if policy.kind is NetworkKind.ONE_ENDPOINT:
            await go_on.wait()
        applied.append(policy.kind)

    monkeypatch.setattr(ScriptedHandle, "set_network", slow)
    async with opened(tmp_path) as domain:
        domain.backend.capabilities = replace(domain.backend.capabilities, networks=frozenset(NetworkKind))
        widest = max(NetworkKind, key=lambda kind: kind.value)
        made = await domain.sandboxes.create("", SandboxSpec(network=NetworkPolicy(widest)))
        endpoint = NetworkPolicy(NetworkKind.ONE_ENDPOINT, local_port=2000, upstream="h:1")
        wider = asyncio.ensure_future(domain.sandboxes.set_network(made.id, endpoint))
        await pass_turns()
        narrower = asyncio.ensure_future(domain.sandboxes.set_network(made.id, NetworkPolicy(NetworkKind.NONE)))
        await pass_turns()
        go_on.set()
        await wider
        await narrower
        assert applied == [NetworkKind.ONE_ENDPOINT, NetworkKind.NONE]
        assert domain.sandboxes.table.get(made.id).view.spec.network.kind is NetworkKind.NONE
        with pytest.raises(FailedPrecondition, match="only be narrowed"):
            await domain.sandboxes.set_network(made.id, endpoint)


LISTED = NetworkPolicy(NetworkKind.ALLOWLIST, local_port=3128, hosts=("*.a.test",), ports=(443, 80), recording="r")


@pytest.mark.requirement("R141", "R13")
@pytest.mark.parametrize(
    ("change", "narrower"),
    [
        ({"hosts": ("b.a.test",)}, True),
        ({"hosts": ("a.test",)}, False),
        ({"ports": (443,)}, True),
        ({"ports": (443, 8080)}, False),
        ({"denied_hosts": ("b.a.test",)}, True),
        ({"hosts": ("*",), "denied_hosts": ("b.a.test",)}, False),
        ({"recorded_only": True}, True),
        ({"recording": "other"}, False),
        ({"one_endpoint": NetworkPolicy(NetworkKind.ONE_ENDPOINT, 2000, "h:1")}, False),
    ],
)
def test_a_list_narrows_in_each_of_its_parts(change: dict[str, object], narrower: bool) -> None:
    changed = replace(LISTED, **change)  # type: ignore[arg-type]
    assert is_narrower(changed, LISTED) is narrower
    if narrower:
        assert not is_narrower(LISTED, changed)


@pytest.mark.requirement("R141", "R54")
async def test_a_list_of_denied_hosts_alone_has_the_hosts_of_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the sandbox's from then on, and it narrows as every list."""

    async def changed(_: ScriptedHandle, policy: NetworkPolicy) -> None:
        assert policy.hosts

    monkeypatch.setattr(ScriptedHandle, "set_network", changed)
    denied = NetworkPolicy(NetworkKind.ALLOWLIST, local_port=3128, denied_hosts=("*.b.test",))
    async with opened(tmp_path, egress_hosts=("*.test", "10.0.0.0/8")) as domain:
        domain.backend.capabilities = replace(domain.backend.capabilities, networks=frozenset(NetworkKind))
        made = await domain.sandboxes.create("", SandboxSpec(network=denied))
        assert made.spec.network == replace(denied, hosts=("*.test", "10.0.0.0/8"))
        more = replace(denied, denied_hosts=("*.b.test", "c.test"))
        await domain.sandboxes.set_network(made.id, more)
        with pytest.raises(FailedPrecondition, match="only be narrowed"):
            await domain.sandboxes.set_network(made.id, denied)
        await domain.sandboxes.set_network(made.id, replace(denied, hosts=("a.test",), denied_hosts=()))
        with pytest.raises(FailedPrecondition, match="only be narrowed"):
            await domain.sandboxes.set_network(made.id, more)
        assert domain.sandboxes.table.get(made.id).view.spec.network.hosts == ("a.test",)
        for hosts, unlisted in ((("*",), "*"), (("*.test", "a.example"), "a.example")):
            with pytest.raises(FailedPrecondition, match="egress_hosts") as refused:
                await domain.sandboxes.create("", SandboxSpec(network=replace(denied, hosts=hosts)))
            assert refused.value.metadata["hosts"] == unlisted
