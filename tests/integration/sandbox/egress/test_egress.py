"""Allow-lists (R141): real clients of package indexes and of git reach what is listed, through the recording proxy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.services import Running, start_on
from tests.conformance.sandbox.test_network import DIAL, TALK, upstream
from tests.support.endpoints.egress_upstream import LOGIN, Indexes, running

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss

# Clients leave localhost out by default.
PROXIED = {"NO_PROXY": "", "no_proxy": ""}
FETCH = "import urllib.request as u, sys; print(u.urlopen(sys.argv[1]).read().decode())"
PIP = (
    "python3 -m pip install --disable-pip-version-check --no-cache-dir --target /tmp/{to} "
    "--index-url {url}/simple/ {what}"
)
NPM = "cd /tmp && npm install --no-audit --no-fund --no-update-notifier --registry {url}/npm/ --cache /tmp/npm turtle"


@pytest.fixture
async def indexes(tmp_path: Path) -> AsyncIterator[Indexes]:
    async with running(tmp_path) as started:
        yield started


@asynccontextmanager
async def serving(state: Path, indexes: Indexes, backend: str = "local", **settings: str) -> AsyncIterator[Running]:
    """A service whose operator allows localhost."""
    state.mkdir(exist_ok=True)
    state.chmod(0o755)
    netrc = state / "netrc"
    login, _, password = LOGIN.partition(":")
    netrc.write_text(f"machine localhost login {login} password {password}\n")
    given = {
        "egress_hosts": '["localhost", "*.test", "127.0.0.0/8", "169.254.0.0/16"]',
        "egress_private_addresses": '["127.0.0.1/32"]',
        "egress_ca": str(indexes.ca),
        "egress_netrc": str(netrc),
        **settings,
    }
    async with start_on(state, backend, **given) as service:
        yield service


@pytest.fixture
async def service(tmp_path: Path, indexes: Indexes) -> AsyncIterator[Running]:
    tmp_path.chmod(0o755)
    async with serving(tmp_path / "service", indexes) as started:
        yield started


def allowlist(indexes: Indexes, **fields: Any) -> sb.NetworkPolicy:
    """The indexes' host and ports."""
    given: dict[str, Any] = {
        "hosts": ["localhost"],
        "ports": [indexes.port, indexes.plain_port],
        "recording": "group",
    } | fields
    return sb.NetworkPolicy(allowlist=sb.Allowlist(**given))


async def box_of(service: Running, network: sb.NetworkPolicy, **env: str) -> Box:
    request = ss.CreateSandboxRequest(
        request_id=os.urandom(8).hex(), spec=sb.SandboxSpec(network=network, env={**PROXIED, **env})
    )
    made = await service.sandboxes.CreateSandbox(request, timeout=60)
    return Box(service, made.sandbox)


@pytest.mark.requirement("R141")
async def test_pip_npm_and_git_work_through_the_proxy(service: Running, indexes: Indexes) -> None:
    box = await box_of(service, allowlist(indexes))
    await box.out(PIP.format(to="py", url=indexes.url, what="snail"), timeout_s=100)
    assert await box.out("PYTHONPATH=/tmp/py python3 -c 'import snail; print(snail.SLOW)'") == "True"
    await box.out(NPM.format(url=indexes.url), timeout_s=100)
    assert await box.out("cd /tmp && node -p 'require(\"turtle\")'") == "slow"
    await box.out(f"git clone -q {indexes.url}/git/repo.git /tmp/repo", timeout_s=60)
    assert await box.out("cat /tmp/repo/README") == "fetched"
    assert await box.out(f"curl -sS {indexes.plain_url}/count") == "1"
    assert await box.out(f"python3 -c '{FETCH}' {indexes.url}/count") == "2"


@pytest.mark.requirement("R141")
async def test_the_proxy_serves_containers_too(tmp_path: Path, indexes: Indexes) -> None:
    """On docker: pip in a virtual environment, git, and the model's endpoint beside the proxy."""
    tmp_path.chmod(0o755)
    async with serving(tmp_path / "service", indexes, "docker") as service, upstream() as address:
        one = sb.OneEndpoint(local_port=4000, upstream=address)
        box = await box_of(service, allowlist(indexes, one_endpoint=one))
        await box.out("python3 -m venv /tmp/venv", timeout_s=100)
        await box.out(f"/tmp/venv/bin/{PIP.format(to='py', url=indexes.url, what='snail')}", timeout_s=100)
        assert await box.out("PYTHONPATH=/tmp/py python3 -c 'import snail; print(snail.SLOW)'") == "True"
        await box.out(f"git clone -q {indexes.url}/git/repo.git /tmp/repo", timeout_s=60)
        assert await box.out("cat /tmp/repo/README") == "fetched"
        assert await box.out(f"python3 -c '{FETCH}' {indexes.plain_url}/count") == "1"
        assert (await box.run(shell=TALK, stdin=b"hello")).stdout == b"echo:hello"
        ask = service.sandboxes.SetNetworkPolicy
        denying = allowlist(indexes, one_endpoint=one, denied_hosts=["localhost"])
        await ask(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=denying))
        refused = f"python3 -c '{FETCH}' {indexes.plain_url}/count 2>&1; true"
        assert "the task's list of denied hosts names localhost" in await box.out(refused)
        # The endpoint stays as the proxy goes.
        await ask(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=sb.NetworkPolicy(one_endpoint=one)))
        assert (await box.run(shell=TALK, stdin=b"hello")).stdout == b"echo:hello"
        assert (await box.run(shell=DIAL.format(host="127.0.0.1", port=3128))).exit.code == 9


@pytest.mark.requirement("R141")
@pytest.mark.on_demand("64 sandboxes that install with pip and npm: test_siblings shows the same of three")
async def test_a_group_of_sixty_four_fetches_each_object_once(service: Running, indexes: Indexes) -> None:
    room, began = asyncio.Semaphore(16), time.monotonic()

    async def install(number: int) -> None:
        async with room:
            box = await box_of(service, allowlist(indexes))
            await box.out(PIP.format(to="py", url=indexes.url, what="snail"), timeout_s=300)
            await box.out(NPM.format(url=indexes.url), timeout_s=300)
            await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id))

    await asyncio.gather(*map(install, range(64)))
    assert set(indexes.asked.values()) == {1}
    print(f"64 sandboxes, {len(indexes.asked)} objects, one request each, {time.monotonic() - began:.0f} s")


@pytest.mark.requirement("R141")
async def test_siblings_and_replays_get_what_was_recorded_first(service: Running, indexes: Indexes) -> None:
    siblings = [await box_of(service, allowlist(indexes)) for _ in range(3)]
    install = PIP.format(to="py", url=indexes.url, what="snail")
    await asyncio.gather(*(box.out(install, timeout_s=110) for box in siblings))
    counted = f"curl -sS {indexes.url}/count"
    assert [await box.out(counted) for box in siblings] == ["1"] * 3
    assert max(indexes.asked.values()) == 1
    asked = indexes.asked.copy()
    replay = await box_of(service, allowlist(indexes, recorded_only=True))
    await replay.out(install, timeout_s=110)
    assert await replay.out(counted) == "1"
    away = f"curl -sSL {indexes.url}/to?url=http://elsewhere.test/"
    assert "HOST_NOT_ALLOWED: the task's list of hosts does not name elsewhere.test" in await siblings[0].out(away)
    asked = indexes.asked.copy()
    missed = await replay.out(f"curl -sS -w ' %{{http_code}}' {indexes.url}/big")
    assert "NOT_RECORDED" in missed and missed.endswith("403") and indexes.asked == asked
    other = await box_of(service, allowlist(indexes, recording="other"))
    assert await other.out(counted) == "2"


@pytest.mark.requirement("R141", "R13")
async def test_nothing_but_the_proxy_is_reached_and_narrowing_cuts_it(service: Running, indexes: Indexes) -> None:
    box = await box_of(service, allowlist(indexes))
    assert await box.out(f"curl -sS {indexes.url}/private/x") == "for readers"
    assert "token-that-no-sandbox-sees" not in await box.out("env; cat /opt/penstock/egress/*")
    direct = "curl -sS --noproxy '*' --max-time 5 {url}; test $? -ne 0"
    for url in (f"{indexes.url}/count", "http://169.254.169.254/", "http://8.8.8.8/"):
        await box.out(direct.format(url=url))
    await box.out("! getent ahosts example.com && ! touch /opt/penstock/egress/ca.pem 2>/dev/null")
    refused = f"curl -sS {indexes.plain_url}/count"
    narrower = allowlist(indexes, ports=[indexes.port])
    wider = allowlist(indexes, hosts=["localhost", "b.test"])
    ask = service.sandboxes.SetNetworkPolicy
    assert (await failure(ask(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=wider)))).reason == "POLICY_WIDER"
    await ask(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=narrower))
    assert "PORT_NOT_ALLOWED" in await box.out(refused)
    await ask(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=sb.NetworkPolicy(none=sb.NoNetwork())))
    assert await box.out("echo $HTTP_PROXY") == ""
    await box.out("curl -sS --max-time 5 -x http://127.0.0.1:3128 http://localhost/; test $? -eq 7")


@pytest.mark.requirement("R141", "R54")
async def test_hosts_beyond_the_operators_are_refused(service: Running, indexes: Indexes) -> None:
    error = await failure(box_of(service, allowlist(indexes, hosts=["example.com"])))
    assert error.reason == "HOST_NOT_ALLOWED" and "egress_hosts" in str(error)
    error = await failure(box_of(service, allowlist(indexes, hosts=["*"])))
    assert error.reason == "HOST_NOT_ALLOWED"
    error = await failure(box_of(service, allowlist(indexes, hosts=[], ports=[0], proxy_port=80)))
    assert {problem.field.rpartition(".")[2] for problem in error.violations} == {"hosts", "ports", "proxy_port"}
    error = await failure(box_of(service, allowlist(indexes, hosts=[], denied_hosts=["a.test", "*"])))
    (problem,) = error.violations
    assert problem.field == "spec.network.allowlist.denied_hosts[1]" and "'*'" in problem.description


@pytest.mark.requirement("R141", "R13")
async def test_all_that_the_operator_allows_is_reached_but_what_is_denied(service: Running, indexes: Indexes) -> None:
    box = await box_of(service, allowlist(indexes, hosts=[], denied_hosts=["*.test", "127.0.0.2"]))
    kept = await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id))
    assert list(kept.sandbox.spec.network.allowlist.hosts) == ["localhost", "*.test", "127.0.0.0/8", "169.254.0.0/16"]
    assert await box.out(f"curl -sS {indexes.url}/count") == "1"
    ask = "curl -sS http://{}:" + f"{indexes.plain_port}/count"
    assert await box.out(ask.format("127.0.0.1")) == "2"
    for host in ("a.test", "127.0.0.2"):
        assert f"HOST_NOT_ALLOWED: the task's list of denied hosts names {host}" in await box.out(ask.format(host))
    more = allowlist(indexes, hosts=[], denied_hosts=["*.test", "127.0.0.0/8"])
    await service.sandboxes.SetNetworkPolicy(ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=more))
    assert "denied hosts names 127.0.0.1" in await box.out(ask.format("127.0.0.1"))
    assert indexes.asked == {"GET /count": 2}
