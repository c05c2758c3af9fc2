"""What operators see of real work, done by the four real services: metrics, traces and logs."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable
from typing import Any

import orjson
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.operations.conftest import PROMPT, Agent, Stack
from tests.support.endpoints.collector import CollectedSpan

from penstock.client import SeedFile, Task
from penstock.client.transport.endpoints import SERVICES
from penstock.interception.v1 import interception_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

GENERATE = "penstock.inference.v1.InferenceService/Generate"
TASK = Task(task_id="t", instruction="Copy note.txt to out.txt.", files=[SeedFile("note.txt", b"word\n")])


async def rolled_out(stack: Stack) -> str:
    """A whole rollout in a real sandbox, its calls answered by a trainer; its id."""
    handle = await stack.ps.rollouts.create(TASK, "shell")
    async for call in handle.calls():
        await call.deliver(await stack.ps.inference.generate(call.prompt_token_ids, call.sampling))
    result = await handle.result()
    assert result.failure is None
    return handle.rollout_id


async def trained(stack: Stack, agent: Agent, asked: Awaitable[dict[str, Any]]) -> str:
    """A trainer answers the agent's call with the engine; the call's id."""
    async with stack.ps.intercept(rollout_ids=[agent.rollout_id]) as session:
        asking = asyncio.ensure_future(asked)
        async for call in session.calls():
            await call.deliver(await stack.ps.inference.generate(call.prompt_token_ids, call.sampling))
            await asking
            return call.call_id
    raise AssertionError("the session ended without a call")


async def test_every_service_exports_its_metrics(stack: Stack) -> None:
    """One rollout is seen in all four: sandboxes, phases, calls, tokens, RPCs; by name and label as they are told."""
    before = await series(stack)
    await rolled_out(stack)
    after = await series(stack)

    def grew(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grew('driver penstock_driver_rollouts_ended_total{caused_by="",end="completed"}') == 1
    assert grew('driver penstock_driver_phase_seconds_count{phase="running"}') == 1
    assert grew('sandbox penstock_sandbox_forks_total{backend="local"}') == 1
    assert grew('sandbox penstock_sandbox_creation_seconds_count{backend="local"}') >= 1
    delivered = 'penstock_gate_calls_total{class="main",dialect="chat_completions",state="delivered"}'
    assert grew(f"interception {delivered}") == 2
    assert grew('interception penstock_gate_answer_seconds_count{by="trainer"}') == 2
    assert grew("interception penstock_gate_queue_wait_seconds_count") == 2
    assert grew('inference penstock_inference_requests_total{end="finished"}') == 2
    sampled = grew('inference penstock_inference_tokens_total{kind="sampled"}')
    assert sampled == grew('interception penstock_gate_tokens_total{kind="completion"}') > 0
    assert grew(f'inference penstock_rpc_seconds_count{{code="OK",method="{GENERATE}"}}') == 2
    for service in SERVICES:
        assert after[f"{service} process_resident_memory_bytes"] > 0
        assert after[f'{service} penstock_disk_free_bytes{{disk="state"}}'] > 0


async def series(stack: Stack) -> dict[str, float]:
    """Every series of every service, by the service's name and its own."""
    found: dict[str, float] = {}
    for service in SERVICES:
        status, text = await stack.scrape(service)
        assert status == 200
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                found[f"{service} {sample.name}{f'{{{labels}}}' if labels else ''}"] = sample.value
    return found


@pytest.mark.requirement("R5", "R8")
async def test_metrics_need_a_token_and_hold_no_id_or_secret(stack: Stack) -> None:
    """Without a token of the service there is nothing; with one, no label tells a rollout or a secret."""
    rollout_id = await rolled_out(stack)
    for service in SERVICES:
        assert (await stack.scrape(service, "nobody"))[0] == 401
        _, text = await stack.scrape(service)
        for secret in (rollout_id, stack.services.operator_token, stack.services.trainer_token, "note.txt"):
            assert secret not in text
        assert not re.search(r"[0-9a-f]{24}", text)


async def test_one_trace_goes_from_agent_through_gate_and_trainer_to_engine(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's trace context is joined; each span stands below the one that it was done for; ids, never prompts."""
    own = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(own))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    trace_id, agents_span = secrets.token_hex(16), secrets.token_hex(8)
    async with stack.agent(group_id="a-group") as agent:
        call_id = await trained(stack, agent, agent.ask(traceparent=f"00-{trace_id}-{agents_span}-01"))
        spans = await of_trace(stack, trace_id, "model call", "queue", "answer", GENERATE)

    whole, queue, answer, generate = (spans[name] for name in ("model call", "queue", "answer", GENERATE))
    (train,) = own.get_finished_spans()
    assert train.context is not None and train.parent is not None
    assert whole.parent_id == agents_span
    assert queue.parent_id == answer.parent_id == whole.span_id
    assert f"{train.context.trace_id:032x}" == trace_id
    assert f"{train.parent.span_id:016x}" == answer.span_id
    assert generate.parent_id == f"{train.context.span_id:016x}"
    assert [span.service for span in (whole, generate)] == ["penstock-interception", "penstock-inference"]
    for span in (whole, generate):
        assert span.facts["penstock.call_id"] == call_id
        assert span.facts["penstock.rollout_id"] == agent.rollout_id
        assert span.facts["penstock.group_id"] == "a-group"
        assert not span.failed
    assert whole.facts["penstock.completion_tokens"] == generate.facts["penstock.sampled_tokens"] > 0
    for span in (whole, generate):
        assert span.facts["gen_ai.operation.name"] == "chat"
        assert span.facts["gen_ai.response.model"]
        assert span.facts["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
        assert span.facts["gen_ai.usage.output_tokens"] == whole.facts["penstock.completion_tokens"]
        assert span.facts["gen_ai.usage.input_tokens"] == whole.facts["penstock.prompt_tokens"] > 0
    assert whole.facts["gen_ai.request.model"] and whole.facts["gen_ai.conversation.id"] == agent.rollout_id
    assert PROMPT not in str(stack.collector.spans)


async def test_trace_is_complete_with_an_untraced_trainer_or_a_direct_engine(
    stack: Stack,
) -> None:
    """Without a span of the trainer's, or without a trainer, the engine's stands below the gate's wait for it."""
    for mode in (interception_pb2.MODE_INTERCEPTION_GATE, interception_pb2.MODE_TRANSPARENT_PROXY):
        trace_id = secrets.token_hex(16)
        parent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        async with stack.agent(mode=mode) as agent:
            if mode == interception_pb2.MODE_INTERCEPTION_GATE:
                await trained(stack, agent, agent.ask(traceparent=parent))
            else:
                await agent.ask(traceparent=parent)
            spans = await of_trace(stack, trace_id, "model call", "answer", GENERATE)
        assert spans[GENERATE].parent_id == spans["answer"].span_id
        assert spans["answer"].parent_id == spans["model call"].span_id


async def test_a_trace_that_its_sender_does_not_want_is_not_recorded(stack: Stack) -> None:
    """The agent's sampling decision holds: what it left out is left out everywhere, and costs no export."""
    trace_id = secrets.token_hex(16)
    async with stack.agent() as agent:
        await trained(stack, agent, agent.ask(traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-00"))
        # A later call's spans are there: those of an earlier one would be.
        later = secrets.token_hex(16)
        await trained(stack, agent, agent.ask(traceparent=f"00-{later}-{secrets.token_hex(8)}-01"))
        await of_trace(stack, later, "model call", GENERATE)
    assert not [span for span in stack.collector.spans if span.trace_id == trace_id]


async def of_trace(stack: Stack, trace_id: str, *names: str) -> dict[str, CollectedSpan]:
    """The trace's spans by name, once these are there."""

    def ours(spans: list[CollectedSpan]) -> dict[str, CollectedSpan]:
        return {span.name: span for span in spans if span.trace_id == trace_id}

    return ours(await stack.collector.until(lambda spans: set(names) <= ours(spans).keys()))


async def test_ids_of_a_rollout_and_its_call_appear_in_all_four_logs(stack: Stack) -> None:
    """Every service's log has lines with the rollout's id; those about a call have the call's, and its trace's."""
    rollout_id = await rolled_out(stack)
    of_rollout = {
        name: [line for line in log(stack, name) if line.get("rollout_id") == rollout_id] for name in SERVICES
    }
    for name, lines in of_rollout.items():
        assert lines, f"the {name} service's log does not know the rollout"
    calls = {line["call_id"] for line in of_rollout["interception"] if line["event"] == "call"}
    assert len(calls) == 2
    generated = {line["call_id"] for line in of_rollout["inference"] if line.get("method") == GENERATE}
    assert generated == calls
    assert all(line["trace_id"] for line in of_rollout["interception"] if line["event"] == "call")
    (end,) = [line for line in of_rollout["driver"] if line["event"] == "rollout ended"]
    assert end["end"] == "completed"
    sandboxes = {line["sandbox_id"] for line in of_rollout["sandbox"] if line["event"] == "sandbox ready"}
    assert sandboxes and sandboxes <= {line.get("sandbox_id") for line in of_rollout["sandbox"] if "method" in line}


@pytest.mark.requirement("R8")
async def test_no_log_holds_a_secret_or_a_conversation(stack: Stack) -> None:
    """Tokens of every kind, prompts and bodies are in no line, at the chattiest level."""
    async with stack.agent() as agent:
        await trained(stack, agent, agent.ask())
        tokens = (stack.services.operator_token, stack.services.trainer_token, agent.token, "an-otlp-token", PROMPT)
    for name in SERVICES:
        text = (stack.services.log_dir / f"{name}.log").read_text()
        for secret in tokens:
            assert secret not in text, name
    assert stack.collector.metadata[0]["authorization"] == "Bearer an-otlp-token"


def log(stack: Stack, service: str) -> list[dict[str, Any]]:
    """The lines of a service's log."""
    text = (stack.services.log_dir / f"{service}.log").read_text()
    return [orjson.loads(line) for line in text.splitlines() if line.startswith("{")]
