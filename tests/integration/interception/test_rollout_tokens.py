"""Tokens of rollouts at the ingress: scope, expiry, rotation, revocation, and what the audit log has of refusals."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs
from tests.support.endpoints.mcp_agent import post

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock_chassis.rpc_status import from_rpc_error
from penstock_interception.domain.deadlines import Clock
from penstock_interception.rollouts.agent_keys import MAX_TOKENS

Terms = interception_pb2.TokenTerms
COMPLETIONS, READ, TOOLS = (
    interception_pb2.TOKEN_SCOPE_COMPLETIONS,
    interception_pb2.TOKEN_SCOPE_READ,
    interception_pb2.TOKEN_SCOPE_TOOLS,
)
USER = [{"role": "user", "content": "list the files"}]
HOUR = Duration(seconds=3600)
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


async def status(service: Any, rollout: Any, token: str, what: str = "models") -> int:
    """The status of a request with a token: of models, of counting, of a completion that breaks off, of tools."""
    base, headers = f"http://{service.ingress}/rollout/{rollout.rollout_id}", {"x-api-key": token}
    if what == "tools":
        return (await post(f"{base}/mcp", token, PING))[0]
    async with aiohttp.ClientSession(headers=headers) as http:
        if what == "models":
            async with http.get(f"{base}/v1/models") as answer:
                return answer.status
        path = {"count": "/v1/messages/count_tokens", "complete": "/v1/chat/completions"}[what]
        # A body without messages is refused with 400 once its sender is let in.
        body = {"model": "m", "messages": USER} if what == "count" else {"model": "m", "messages": 7}
        async with http.post(base + path, json=body) as answer:
            return answer.status


async def issue(service: Any, rollout: Any, request_id: str = "another", **more: Any) -> gate.IssueTokenResponse:
    """Another token."""
    request = gate.IssueTokenRequest(request_id=request_id, rollout_id=rollout.rollout_id, **more)
    answer: gate.IssueTokenResponse = await service.gate.IssueToken(request)
    return answer


async def refused(rpc: Any) -> Any:
    """What an RPC was refused with."""
    try:
        await rpc
    except Exception as error:  # noqa: BLE001 - told apart by the tests
        return from_rpc_error(error)  # type: ignore[arg-type]
    raise AssertionError("it was not refused")


def set_time(service: Any, later_s: float) -> None:
    """Lets the service's tokens see a later time."""
    service.interceptor.agent_keys._clock = Clock(lambda: time.time() + later_s)


@pytest.mark.requirement("R4", "R6")
@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        ([], {"models", "count", "complete", "tools"}),
        ([COMPLETIONS], {"complete"}),
        ([READ], {"models", "count"}),
        ([TOOLS], {"tools"}),
        ([COMPLETIONS, READ], {"models", "count", "complete"}),
    ],
)
async def test_a_token_opens_what_it_is_for_and_nothing_else(
    service: Any, scopes: list[Any], allowed: set[str]
) -> None:
    """Completions, reading and tools apart; a refusal is final and in the audit log."""
    rollout = await service.open(token_terms=Terms(scopes=scopes))
    with capture_logs() as lines:
        for what in ("models", "count", "complete", "tools"):
            found = await status(service, rollout, rollout.token, what)
            if what in allowed:
                assert found == (400 if what == "complete" else 200)
            else:
                assert found == (400 if what in ("count", "models") else 403), what
    reasons = [line["reason"] for line in lines if line.get("audit") == "scope_refused"]
    names = {"models": "read", "count": "read", "complete": "completions", "tools": "tools"}
    assert reasons == [names[what] for what in names if what not in allowed]


@pytest.mark.requirement("R5")
async def test_a_token_expires_and_looks_as_any_other_that_is_not_valid(service: Any) -> None:
    """The answer is the one that a stranger gets, byte for byte; the audit log has the reason."""
    rollout = await service.open(token_terms=Terms(ttl=HOUR))
    assert await status(service, rollout, rollout.token) == 200
    set_time(service, 3601)
    url = rollout.base_url + "/models"
    bodies = set()
    with capture_logs() as lines:
        async with aiohttp.ClientSession() as http:
            for token in (rollout.token, "pst_" + "A" * 80, "nonsense", ""):
                async with http.get(url, headers={"x-api-key": token}) as answer:
                    bodies.add((answer.status, await answer.read()))
            other = url.replace(rollout.rollout_id, "nobody")
            async with http.get(other, headers={"x-api-key": rollout.token}) as answer:
                bodies.add((answer.status, await answer.read()))
    assert len(bodies) == 1 and next(iter(bodies))[0] == 401
    told = [line for line in lines if line.get("audit") == "credential_refused"]
    assert [line["reason"] for line in told] == ["expired", "not_ours", "not_ours", "missing", "not_ours"]
    assert [line["rollout_id"] for line in told] == [rollout.rollout_id] * 4 + ["nobody"]
    assert not any(rollout.token in str(line) for line in lines)


@pytest.mark.requirement("R4")
async def test_a_token_is_rotated_while_the_rollout_goes_on(service: Any) -> None:
    """The old one lives through its grace, then it is void; what it had asked before is answered."""
    rollout, trainer = await service.open(), await service.trainer()
    messages: Any = USER
    asked = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=messages))
    call = await trainer.call()
    fresh = await issue(service, rollout, retire_others_after=Duration(seconds=60))
    assert fresh.token != rollout.token
    assert [await status(service, rollout, token) for token in (rollout.token, fresh.token)] == [200, 200]
    set_time(service, 61)
    with capture_logs() as lines:
        assert [await status(service, rollout, token) for token in (rollout.token, fresh.token)] == [401, 200]
    assert [line["reason"] for line in lines if line.get("audit") == "credential_refused"] == ["revoked"]
    await trainer.deliver(trainer.result(call, "late"))
    assert (await asked).choices[0].message.content == "late"


async def test_issuing_is_idempotent_and_brings_no_dead_token_back(serving: Any) -> None:
    """A repeated request gets the same token, over a restart too; with other terms it is refused."""
    async with serving() as service:
        rollout = await service.open()
        terms = Terms(scopes=[TOOLS], ttl=HOUR)
        one = await issue(service, rollout, "same", terms=terms)
        two = await issue(service, rollout, "same", terms=terms)
        assert one == two
        assert list(one.info.scopes) == [TOOLS]
        assert one.info.expire_time.ToSeconds() - one.info.create_time.ToSeconds() == 3600
        error = await refused(issue(service, rollout, "same"))
        assert isinstance(error, AlreadyExists) and error.reason == "REQUEST_ID_REUSED"
        request = gate.RevokeTokensRequest(rollout_id=rollout.rollout_id, token_ids=[one.info.token_id])
        tokens = (await service.gate.RevokeTokens(request)).tokens
        assert [token.HasField("revoke_time") for token in tokens] == [False, True]
    async with serving() as service:
        service.ingress = service.ingress
        again = await issue(service, rollout, "same", terms=terms)
        assert again.token == one.token
        assert await status(service, rollout, again.token, "tools") == 401
        assert await status(service, rollout, rollout.token, "tools") == 200


@pytest.mark.requirement("R4")
async def test_all_tokens_are_revoked_at_once_and_another_may_be_issued(serving: Any) -> None:
    """The rollout itself goes on; a restart brings none of them back."""
    async with serving() as service:
        rollout = await service.open()
        second = (await issue(service, rollout)).token
        revoke = gate.RevokeTokensRequest(rollout_id=rollout.rollout_id)
        with capture_logs() as lines:
            await service.gate.RevokeTokens(revoke)
            await service.gate.RevokeTokens(revoke)
        assert [line["count"] for line in lines if line.get("audit") == "agent_keys_revoked"] == [2]
        assert [await status(service, rollout, token) for token in (rollout.token, second)] == [401, 401]
    async with serving() as service:
        assert [await status(service, rollout, token) for token in (rollout.token, second)] == [401, 401]
        third = (await issue(service, rollout, "third")).token
        assert await status(service, rollout, third) == 200
        await service.close(rollout.rollout_id)
        assert await status(service, rollout, third) == 401
        error = await refused(issue(service, rollout, "fourth"))
        assert isinstance(error, FailedPrecondition) and error.reason == "ROLLOUT_CLOSED"


@pytest.mark.requirement("R4", "R25")
async def test_a_rollout_of_the_same_name_has_nothing_of_the_one_before(service: Any) -> None:
    """A deleted rollout's token is void for its successor."""
    before = await service.open("same", request_id="one")
    await service.gate.DeleteRollout(gate.DeleteRolloutRequest(rollout_id="same"))
    after = await service.open("same", request_id="two")
    with capture_logs() as lines:
        assert [await status(service, after, token) for token in (before.token, after.token)] == [401, 200]
    assert [line["reason"] for line in lines if line.get("audit") == "credential_refused"] == ["unknown"]


@pytest.mark.requirement("R5", "R63")
async def test_orders_about_tokens_that_mean_nothing_are_refused(service: Any) -> None:
    """By field; an unknown rollout and an unknown token are NOT_FOUND."""
    rollout = await service.open()
    for terms, field in (
        (Terms(scopes=[COMPLETIONS, 99]), "terms.scopes[1]"),  # type: ignore[list-item]
        (Terms(ttl=Duration()), "terms.ttl"),
        (Terms(ttl=Duration(seconds=10**9)), "terms.ttl"),
    ):
        error = await refused(issue(service, rollout, terms=terms))
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == [field]
    error = await refused(issue(service, rollout, retire_others_after=Duration(seconds=-1)))
    assert [violation.field for violation in error.violations] == ["retire_others_after"]
    for ids, kind in ((["zz"], InvalidArgument), (["00" * 16], NotFound)):
        request = gate.RevokeTokensRequest(rollout_id=rollout.rollout_id, token_ids=ids)
        assert isinstance(await refused(service.gate.RevokeTokens(request)), kind)
    unknown = gate.RevokeTokensRequest(rollout_id="nobody")
    assert (await refused(service.gate.RevokeTokens(unknown))).reason == "ROLLOUT_UNKNOWN"


@pytest.mark.requirement("R13", "R23")
async def test_a_rollouts_tokens_are_bounded_in_number(service: Any) -> None:
    """Revoked ones are kept, and count."""
    rollout = await service.open()
    for number in range(MAX_TOKENS - 1):
        await issue(service, rollout, f"n{number}", retire_others_after=Duration())
    error = await refused(issue(service, rollout, "more"))
    assert isinstance(error, ResourceExhausted) and error.reason == "TOKEN_LIMIT"


@pytest.mark.requirement("R8")
async def test_no_token_is_on_disk_and_none_in_what_is_shown(serving: Any, tmp_path: Any) -> None:
    """Ids and terms are stored and shown; a token cannot be made of them without the service's key."""
    async with serving() as service:
        rollout = await service.open()
        second = await issue(service, rollout)
        answer = await service.gate.GetRollout(gate.GetRolloutRequest(rollout_id=rollout.rollout_id))
        assert [list(token.scopes) for token in answer.rollout.tokens] == [[COMPLETIONS, READ, TOOLS]] * 2
        for token in (rollout.token, second.token):
            assert token not in str(answer)
    written = b"".join(path.read_bytes() for path in (tmp_path / "state").glob("interception.sqlite3*"))
    assert rollout.rollout_id.encode() in written
    for token in (rollout.token, second.token):
        assert token.encode() not in written
        assert token.removeprefix("pst_")[40:].encode() not in written


@pytest.mark.requirement("R8")
async def test_an_unknown_route_is_in_the_audit_log_without_its_path(service: Any) -> None:
    """Who asked is told, what he wrote is not."""
    rollout = await service.open()
    with capture_logs() as lines:
        async with aiohttp.ClientSession(headers={"x-api-key": rollout.token}) as http:
            async with http.post(rollout.base_url + "/secret-path") as answer:
                assert answer.status == 404
            async with http.get(f"http://{service.ingress}/secret-path") as answer:
                assert answer.status == 404
    told = [line for line in lines if line.get("audit") == "route_unknown"]
    assert [line.get("rollout_id") for line in told] == [rollout.rollout_id, None]
    assert all(line["peer"] == "127.0.0.1" for line in told)
    assert "secret-path" not in str(told)
