"""What `penstock doctor` says of an inference service."""

from __future__ import annotations

import pytest

from penstock.cli.commands.doctor import live
from penstock.cli.commands.doctor.findings import of_error
from penstock.cli.commands.doctor.inference import finding, look_at_inference
from penstock.client import Endpoints, Unavailable
from penstock.client.errors import Unauthenticated
from penstock.client.inference.engine_info import EngineInfo
from penstock.client.operations import Trouble
from penstock.client.types.chat import LogprobsMode


def info(*capabilities: str, mode: LogprobsMode = LogprobsMode.UNSPECIFIED) -> EngineInfo:
    return EngineInfo(
        engine="openai",
        engine_version="vllm 0.32",
        model="m",
        max_context_tokens=0,
        vocabulary_size=0,
        stop_token_ids=(),
        tokenizer_sha256=b"",
        chat_template_sha256=b"",
        logprobs_mode=mode,
        policy_version=0,
        paused=False,
        dtype="",
        parameter_count=0,
        tool_call_parser="",
        reasoning_parser="",
        capabilities=frozenset(capabilities),
        sampling_fields=frozenset(),
        transfer_backends=(),
        token_tensors=(),
    )


@pytest.mark.requirement("R86")
def test_untrainable_engine_is_reported() -> None:
    """Whoever reads it knows before the first rollout that there will be no sample."""
    there = {"address": "here"}
    trains = finding(info("token_ids", "logprobs", mode=LogprobsMode.PROCESSED), there)
    assert "token ids and processed logprobs" in trains.found and not trains.advice and trains.details["trainable"]
    for gives, said in ((info("token_ids"), "without logprobs"), (info("abort"), "text alone")):
        told = finding(gives, there)
        assert told.ok and said in told.found and "evaluation only" in told.advice and not told.details["trainable"]


@pytest.mark.requirement("R27")
def test_configured_silent_service_is_a_finding_and_an_absent_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address that was tried is told."""
    monkeypatch.setenv("PENSTOCK_INFERENCE_ADDRESS", "127.0.0.1:9")
    (found,) = look_at_inference()
    assert not found.ok and not found.required and "127.0.0.1:9" in found.found and found.advice
    monkeypatch.delenv("PENSTOCK_INFERENCE_ADDRESS")
    monkeypatch.setenv("PENSTOCK_SANDBOX_ADDRESS", "127.0.0.1:9")
    assert look_at_inference() == []


def test_a_service_that_refuses_or_cannot_answer_yet_is_not_called_missing() -> None:
    """It is there: what has to be mended is the token, or what it waits for."""
    refuses = Unauthenticated("A token is needed", reason="CREDENTIAL_MISSING")
    told = of_error("inference service", "127.0.0.1:1", refuses, "the defaults", {})
    assert (told.failing, told.found) == ("refused", "at 127.0.0.1:1; A token is needed")
    waits = of_error("inference service", "127.0.0.1:1", Unavailable("no model", reason="UPSTREAM"), "x.json", {})
    assert waits.failing == "not ready" and "no model" in waits.found and "--live" in waits.advice
    silent = of_error("inference service", "127.0.0.1:1", TimeoutError(), "x.json", {})
    assert silent.failing == "silent" and "x.json" in silent.advice


def test_a_token_that_all_services_refuse_is_without_repeats() -> None:
    """Four times the same four hundred characters hide what else there is."""
    endpoints = Endpoints(token="wrong", token_origin="PENSTOCK_TOKEN")
    troubles = [
        Trouble(service=name, reason="CREDENTIAL_INVALID", message=f"said by {name}", advice="a", grave=True)
        for name in ("sandbox", "driver")
    ]
    other = Trouble(service="inference", reason="SERVICE_OLD", message="m", advice="a", grave=False)
    together, rest = live._without_repeats(endpoints, [*troubles, other])
    assert together.service == "all" and "sandbox, driver" in together.message and rest == other
    assert together.message.count("PENSTOCK_TOKEN") > 0 and "said by" not in together.message
    assert live._without_repeats(endpoints, [troubles[0], other]) == [troubles[0], other]
