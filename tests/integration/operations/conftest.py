"""One stack of four real services that tell everything: metrics, traces to a real collector, and every line of log."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from tests.support.endpoints.collector import Collector, collecting

from penstock.client import Penstock, connect
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2, rollout_gate_service_pb2_grpc
from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer

SCRIPT: Final = """
strict: false
turns:
  - when: {has_tool_result: false, prompt_contains: note.txt}
    repeat: true
    reply: |-
      <tool_call>
      {"name": "bash", "arguments": {"command": "cat note.txt > out.txt"}}
      </tool_call>
  - repeat: true
    reply: Done.
"""
PROMPT: Final = "an-unmistakable-prompt"
"""What an agent says: it must show in no trace, log or metric."""


@dataclass
class Stack:
    """The services, a client of them as operator, and where their traces go."""

    services: LocalStack
    ps: Penstock
    collector: Collector
    _http: aiohttp.ClientSession = field(repr=False)

    @asynccontextmanager
    async def agent(self, **options: Any) -> AsyncIterator[Agent]:
        """An agent with a rollout of its own at the gate, and no sandbox."""
        gate = self.ps.operations._services["interception"]
        stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(gate.channel)
        rollout_id = f"agent-{secrets.token_hex(6)}"
        options.setdefault("mode", interception_pb2.MODE_INTERCEPTION_GATE)
        source = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference())
        request = rollout_gate_service_pb2.OpenRolloutRequest(
            request_id=rollout_id, rollout_id=rollout_id, source=source, **options
        )
        opened = await gate.call(stub.OpenRollout, request)
        url = f"http://{opened.ingress_address}{opened.endpoints[0].base_path}/chat/completions"
        agent = Agent(rollout_id, url, opened.token, self._http)
        try:
            yield agent
        finally:
            close = rollout_gate_service_pb2.CloseRolloutRequest(rollout_id=rollout_id, reason="AGENT_EXITED")
            await gate.call(stub.CloseRollout, close)
            await asyncio.gather(*agent.asking, return_exceptions=True)

    async def scrape(self, service: str, token: str | None = None) -> tuple[int, str]:
        """The status and the text of a service's metrics."""
        headers = {"Authorization": f"Bearer {token or self.services.trainer_token}"}
        url = f"http://{self.services.metrics_addresses[service]}/metrics"  # type: ignore[index]
        async with self._http.get(url, headers=headers) as answer:
            return answer.status, await answer.text()


@dataclass
class Agent:
    """Asks the model."""

    rollout_id: str
    url: str
    token: str = field(repr=False)
    http: aiohttp.ClientSession = field(repr=False)
    asking: list[asyncio.Task[dict[str, Any]]] = field(default_factory=list)

    async def ask(self, **headers: str) -> dict[str, Any]:
        """One model call, to its answer."""
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        headers["Authorization"] = f"Bearer {self.token}"
        async with self.http.post(self.url, json=body, headers=headers) as answer:
            said: dict[str, Any] = await answer.json()
            return said

    def asks(self) -> asyncio.Task[dict[str, Any]]:
        """The same, while the test goes on."""
        self.asking.append(asyncio.ensure_future(self.ask()))
        return self.asking[-1]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Once for all tests."""
    model: Path = tmp_path_factory.mktemp("model")
    tiny_tokenizer.build().write(model)
    script = model / "script.yaml"
    script.write_text(SCRIPT)
    async with collecting() as collector:
        each = {
            "metrics_port": 0,
            "otlp_endpoint": f"http://{collector.address}",
            "otlp_token": "an-otlp-token",
            "log_level": "debug",
        }
        services = LocalStack(
            model_dir=model,
            engine="scripted",
            engine_options={"script": str(script)},
            state_dir=tmp_path_factory.mktemp("state"),
            settings=dict.fromkeys(("inference", "interception", "sandbox", "driver"), each),
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            async with services, connect(services.endpoints) as ps, aiohttp.ClientSession() as http:
                yield Stack(services, ps, collector, http)
