"""Tools that would run at the provider, past the gate: left out and recorded, or refused, as the operator says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

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


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("dialect", REQUESTS)
async def test_tools_of_the_provider_are_left_out_and_recorded(
    start: Any, http: aiohttp.ClientSession, dialect: str
) -> None:
    """R63, R86: nothing of a call goes past the gate, and what was changed of it can be seen."""
    path, body, name = REQUESTS[dialect]
    service = await start()
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(_post(http, service, rollout, path, body))
    call = await trainer.answer("done")
    assert (await asked)[0] == 200
    captured = await service.capture(rollout.rollout_id)
    assert any(name in note for note in captured.calls[0].normalisations)
    assert call.call_id == captured.calls[0].call_id


@pytest.mark.parametrize("dialect", REQUESTS)
async def test_where_the_operator_says_so_a_request_for_tools_of_the_provider_is_refused(
    start: Any, http: aiohttp.ClientSession, dialect: str
) -> None:
    """R63: refused in the dialect's words before anything is asked, and told in the audit log."""
    path, body, name = REQUESTS[dialect]
    service = await start(provider_tools="refuse")
    rollout = await service.open()
    with capture_logs() as logs:
        status, text = await _post(http, service, rollout, path, body)
    assert status == 400 and name in text and "Switch them off" in text
    assert not (await service.capture(rollout.rollout_id)).calls
    told = [line["audit"] for line in logs if line.get("event") == "audit"]
    assert told == ["provider_tool_refused"]


async def _post(
    http: aiohttp.ClientSession, service: Any, rollout: Any, path: str, body: dict[str, Any]
) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {rollout.token}"}
    async with http.post(
        f"http://{service.ingress}/rollout/{rollout.rollout_id}{path}", json=body, headers=headers
    ) as response:
        return response.status, await response.text()
