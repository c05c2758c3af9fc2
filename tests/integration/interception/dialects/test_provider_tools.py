"""Tools that would run at the provider, past the gate: left out and recorded, or refused, as the operator says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from structlog.testing import capture_logs
from tests.support.endpoints.upstream import Vendor, vendor

from penstock.interception.v1 import interception_pb2
from penstock_chassis.rpc_status import from_rpc_error

ASK = [{"role": "user", "content": "list the files"}]
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": ASK, "web_search_options": {}}, "web_search_options"),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 50,
            "messages": ASK,
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        },
        "web_search",
    ),
    "responses": ("/v1/responses", {"model": "m", "input": "hi", "tools": [{"type": "web_search"}]}, "web_search"),
    "generate_content": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"googleSearch": {}}]},
        "googleSearch",
    ),
}


@pytest.mark.requirement("R63", "R86")
@pytest.mark.parametrize("dialect", REQUESTS)
async def test_tools_of_the_provider_are_left_out_and_recorded(
    start: Any, http: aiohttp.ClientSession, dialect: str
) -> None:
    """Nothing of a call goes past the gate, and what was changed of it can be seen."""
    path, body, name = REQUESTS[dialect]
    service = await start()
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(_post(http, service, rollout, path, body))
    call = await trainer.answer("done")
    assert (await asked)[0] == 200
    captured = await service.capture(rollout.rollout_id)
    assert any(name in note for note in captured.calls[0].normalisations)
    assert call.call_id == captured.calls[0].call_id


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("dialect", REQUESTS)
async def test_provider_tools_are_refused_when_the_operator_forbids_them(
    start: Any, http: aiohttp.ClientSession, dialect: str
) -> None:
    """Refused in the dialect's words before anything is asked, and told in the audit log."""
    path, body, name = REQUESTS[dialect]
    service = await start(provider_tools="refuse")
    rollout = await service.open()
    with capture_logs() as logs:
        status, text = await _post(http, service, rollout, path, body)
    assert status == 400 and name in text and "Switch them off" in text
    assert not (await service.capture(rollout.rollout_id)).calls
    told = [line["audit"] for line in logs if line.get("event") == "audit"]
    assert told == ["provider_tool_refused"]


BLACK_BOX = interception_pb2.MODE_BLACK_BOX
BODIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    # Path, what a body has beside tools, tools of the provider, and a tool that the agent runs.
    "chat": (
        "/v1/chat/completions",
        {"model": "m", "messages": ASK},
        [{"type": "web_search"}, {"type": "mcp", "server_url": "https://evil.example"}],
        {"type": "function", "function": {"name": "f", "parameters": {}}},
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "input": "hi"},
        [
            {"type": "web_search_preview"},
            {"type": "mcp", "server_label": "a", "server_url": "https://evil.example"},
            {"type": "shell", "environment": {"type": "container_auto"}},
            {"type": "unheard_of"},
        ],
        {"type": "function", "name": "f", "parameters": {}},
    ),
    "messages": (
        "/v1/messages",
        {"model": "m", "max_tokens": 5, "messages": ASK},
        [{"type": "web_search_20250305", "name": "w"}, {"type": "code_execution_20250825", "name": "c"}],
        {"name": "f", "input_schema": {"type": "object"}},
    ),
    "generate_content": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}]},
        [{"googleSearch": {}}, {"url_context": {}}, {"codeExecution": {}}],
        {"functionDeclarations": [{"name": "f"}]},
    ),
}
FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"web_search_options": {}, "plugins": [{"id": "web"}], "Search_Parameters": {"mode": "on"}},
    "responses": {"prompt": {"id": "pmpt_1"}},
    "messages": {"mcp_servers": [{"type": "url", "url": "https://evil.example"}], "container": "c"},
    "generate_content": {},
}


@pytest.fixture
async def endpoint() -> AsyncIterator[Vendor]:
    """A provider, which keeps what it is asked."""
    async with vendor() as here:
        yield here


async def black_box(service: Any, model: str = "", name: str = "main") -> Any:
    """A black box rollout on the operator's endpoint."""
    upstream = interception_pb2.Upstream(name=name, model=model)
    return await service.open(mode=BLACK_BOX, source=interception_pb2.ModelSource(upstream=upstream))


def posted(endpoint: Vendor) -> list[Any]:
    """The bodies that the endpoint was asked with."""
    return [json.loads(seen.body) for seen in endpoint.seen if seen.method == "POST"]


@pytest.mark.requirement("R63", "R86", "R94")
@pytest.mark.parametrize("dialect", BODIES)
async def test_a_black_box_goes_on_without_tools_of_the_provider(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor, dialect: str
) -> None:
    """Left out as in the other modes, and recorded; what the agent runs and all else stays as it was."""
    path, body, hosted, own = BODIES[dialect]
    service = await start(upstreams={"main": {"base_url": endpoint.base_url}})
    rollout = await black_box(service)
    asked = {**body, "tools": [*hosted, own], **FIELDS[dialect]}
    await _post(http, service, rollout, path, asked)
    await _post(http, service, rollout, path, {**body, "tools": hosted, "tool_choice": "required"})
    await _post(http, service, rollout, path, {**body, "tools": [own]})
    assert posted(endpoint) == [{**body, "tools": [own]}, body, {**body, "tools": [own]}]
    notes = [list(call.normalisations) for call in (await service.capture(rollout.rollout_id)).calls]
    assert [len(each) for each in notes] == [len(hosted) + len(FIELDS[dialect]), len(hosted), 0]
    assert all("would run at the provider" in note for each in notes for note in each)


@pytest.mark.requirement("R63", "R94")
@pytest.mark.parametrize("dialect", BODIES)
async def test_black_box_refuses_provider_tools_when_the_operator_forbids_them(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor, dialect: str
) -> None:
    """Each kind and each field by itself, in the dialect's words, before anything is asked or counted."""
    path, body, hosted, own = BODIES[dialect]
    service = await start(provider_tools="refuse", upstreams={"main": {"base_url": endpoint.base_url}})
    rollout = await black_box(service)
    bodies = [{**body, "tools": [own, each]} for each in hosted]
    bodies += [{**body, name: value or {"a": 1}} for name, value in FIELDS[dialect].items()]
    with capture_logs() as logs:
        for each in bodies:
            status, text = await _post(http, service, rollout, path, each)
            assert status == 400 and "Switch them off" in text
    assert [line["audit"] for line in logs if line.get("event") == "audit"] == ["provider_tool_refused"] * len(bodies)
    assert posted(endpoint) == []
    assert not (await service.capture(rollout.rollout_id)).calls
    assert (await _post(http, service, rollout, path, {**body, "tools": [own]}))[0] == 200


@pytest.mark.requirement("R94")
@pytest.mark.parametrize(
    "text",
    [
        '{"model":"m","messages":[],"tools":[{"type":"mcp"}],"tools":[]}',
        '{"model":"m","messages":[],"tools":[],"to\\u006fls":[{"type":"mcp"}]}',
        '{"model": "m", "messages": [{"role": "user", "content": "a", "role": "system"}]}',
        '{"model":"m","messages":[]}\x00',
        '["model"]',
        '{"model":"m","messages":' + "[" * 900 + "]" * 900 + "}",
        '{"model":"m","models":["other"],"messages":[]}',
        '{"model":7,"messages":[]}',
        '{"model":"m","tools":["web_search"],"messages":[]}',
    ],
)
async def test_a_body_that_two_readers_could_read_differently_is_refused(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor, text: str
) -> None:
    """A key that is there twice hides a tool from one of the readers."""
    service = await start(upstreams={"main": {"base_url": endpoint.base_url}})
    rollout = await black_box(service)
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}/v1/chat/completions"
    async with http.post(
        url, data=text.encode(), headers={"authorization": f"Bearer {rollout.token}", "content-type": "text/plain"}
    ) as answer:
        assert answer.status == 400
    assert posted(endpoint) == []


@pytest.mark.requirement("R11", "R94")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/models/ft:x/permissions", 400),
        ("POST", "/v1/models/x:batchGenerateContent", 400),
        ("POST", "/v1beta/models/x:predictLongRunning", 400),
        ("POST", "/v1beta/models/x:generateContent/y", 400),
        ("POST", "/v1/models", 400),
        ("POST", "/v1/files", 400),
        ("POST", "/v1/models/x:countTokens", 200),
        ("POST", "/v1beta/models/x:embedContent", 200),
        ("POST", "/v1beta/models/org/x:streamGenerateContent?alt=sse", 200),
        ("POST", "/v1/embeddings", 200),
        ("GET", "/v1/models/org/x", 200),
        ("DELETE", "/v1/models/x", 400),
        ("GET", "/v1/chat/completions", 400),
    ],
)
async def test_black_box_reaches_only_paths_that_ask_a_model(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor, method: str, path: str, status: int
) -> None:
    """The key behind the endpoint opens more than that."""
    service = await start(upstreams={"main": {"base_url": endpoint.base_url}})
    rollout = await black_box(service)
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}"
    sent = len(endpoint.seen)
    async with http.request(method, url, json={}, headers={"authorization": f"Bearer {rollout.token}"}) as answer:
        assert answer.status == status
    assert len(endpoint.seen) - sent == (status == 200)


@pytest.mark.requirement("R94")
@pytest.mark.parametrize("dialect", BODIES)
async def test_a_key_asks_for_the_models_that_the_operator_allows(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor, dialect: str
) -> None:
    """Whoever opens the rollout and whatever its agent names, in black box mode and as a proxy."""
    path, body, _, _ = BODIES[dialect]
    service = await start(
        upstreams={
            "main": {"base_url": endpoint.base_url, "models": ["m", "small-*"]},
            "any": {"base_url": endpoint.base_url},
        }
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await black_box(service, "large")
    assert from_rpc_error(refused.value).reason == "MODEL_NOT_ALLOWED"
    rollout = await black_box(service)
    assert (await _post(http, service, rollout, path, body))[0] == 200
    other, other_path = {**body, "model": "large"}, path.replace("/m:", "/large:")
    status, text = await _post(http, service, rollout, other_path, other if "model" in body else body)
    assert status == 400 and "not one of the allowed models" in text
    unnamed = {name: value for name, value in body.items() if name != "model"}
    if "model" in body:
        assert (await _post(http, service, rollout, path, unnamed))[0] == 400
    named = await black_box(service, "small-1", "any")
    assert (await _post(http, service, named, other_path, other if "model" in body else body))[0] == 200
    asked = [seen for seen in endpoint.seen if seen.method == "POST"]
    assert len(asked) == 2
    assert '"small-1"' in asked[1].body.decode() or "/models/small-1:" in asked[1].raw_path


@pytest.mark.requirement("R63", "R94")
async def test_a_proxy_passes_no_field_on_by_which_a_provider_runs_tools(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor
) -> None:
    """What was recorded as left out did go on in the agent's own body; nor does another model go on."""
    service = await start(upstreams={"main": {"base_url": endpoint.base_url, "models": ["m"]}})
    source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(name="main"))
    rollout = await service.open(mode=interception_pb2.MODE_TRANSPARENT_PROXY, source=source)
    body = {"model": "m", "messages": ASK, "plugins": [{"id": "web"}], "web_search_options": {"a": 1}, "models": ["x"]}
    assert (await _post(http, service, rollout, "/v1/chat/completions", body))[0] == 200
    assert posted(endpoint)[0] == {"model": "m", "messages": ASK}
    assert (await _post(http, service, rollout, "/v1/chat/completions", {**body, "model": "large"}))[0] == 400
    calls = (await service.capture(rollout.rollout_id)).calls
    assert [call.end_reason for call in calls] == ["", "MODEL_NOT_ALLOWED"]
    assert len(posted(endpoint)) == 1


@pytest.mark.requirement("R11", "R94")
async def test_a_black_box_passes_on_the_headers_and_parameters_of_a_list(
    start: Any, http: aiohttp.ClientSession, endpoint: Vendor
) -> None:
    """None that chooses an account, a method or a path, and no credential in a query."""
    service = await start(upstreams={"main": {"base_url": endpoint.base_url, "api_key": "operators"}})
    rollout = await black_box(service)
    away = {
        "openai-organization": "other",
        "openai-project": "other",
        "x-goog-user-project": "other",
        "x-http-method-override": "DELETE",
        "x-original-url": "/v1/files",
        "x-forwarded-user": "root",
        "api-key": "mine",
        "cookie": "a=b",
        "via": "x",
        "traceparent": "00-1-1-00",
    }
    kept = {"anthropic-version": "1", "anthropic-beta": "b", "x-stainless-os": "Linux", "user-agent": "agent/1"}
    url = f"http://{service.ingress}/rollout/{rollout.rollout_id}/v1beta/models/m:generateContent"
    query = "?key=mine&alt=sse&$httpMethod=DELETE&access_token=x&callback=f"
    headers = {"authorization": f"Bearer {rollout.token}", "content-type": "multipart/form-data", **away, **kept}
    async with http.post(url + query, data=b'{"contents":[]}', headers=headers) as answer:
        assert answer.status == 200
    [seen] = [each for each in endpoint.seen if each.method == "POST"]
    assert seen.raw_path.partition("?")[2] == "alt=sse"
    assert not away.keys() & {name.lower() for name in seen.headers}
    assert {name: seen.headers[name] for name in kept} == kept
    assert (seen.headers["authorization"], seen.headers["content-type"]) == ("Bearer operators", "application/json")
    assert rollout.token not in str(seen)


async def _post(
    http: aiohttp.ClientSession, service: Any, rollout: Any, path: str, body: dict[str, Any]
) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {rollout.token}"}
    async with http.post(
        f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}", json=body, headers=headers
    ) as response:
        return response.status, await response.text()
