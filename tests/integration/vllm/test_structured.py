"""Completions that are held to a form, by the grammars that the real vLLM compiles."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.vllm.conftest import Served
from tests.support import vllm_models as models

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import PenstockError
from penstock_codec.codec import Codec

pytestmark = pytest.mark.asyncio(loop_scope="session")

Failure = Callable[[grpc.aio.AioRpcError], PenstockError]
FIELD = "sampling.response_format_json"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "who": {"enum": ["me", "you"]}},
    "required": ["ok", "who"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
    "regex": {"type": "regex", "regex": "[ab]{3}-[0-9]{2}"},
    "choice": {"type": "choice", "choice": ["left", "right"]},
    "grammar": {"type": "grammar", "grammar": 'root ::= "x" root | "y"'},
}
HOLDS: dict[str, Callable[[str], object]] = {
    "schema": lambda text: set(json.loads(text)) == {"ok", "who"} and json.loads(text)["who"] in ("me", "you"),
    "regex": lambda text: re.fullmatch("[ab]{3}-[0-9]{2}", text),
    "choice": lambda text: text in ("left", "right"),
    "grammar": lambda text: re.fullmatch("x*y", text),
}


def formed(service: Served, form: Any, **sampling: Any) -> pb.GenerateRequest:
    """A request for a completion of a form."""
    text = form if isinstance(form, str) else json.dumps(form)
    return service.request(response_format_json=text, **({"max_tokens": 1000, "min_tokens": 0} | sampling))


def text_of(completion: completion_pb2.Completion) -> str:
    ids = np.frombuffer(completion.span.token_ids, "<i4")
    return Codec.load(models.tokenizer_files()).decode(ids[ids != completion.stop_token_id])


@pytest.mark.requirement("R63", "R82")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", FORMS)
async def test_a_model_that_babbles_keeps_to_the_form(service: Served, name: str, stream: bool) -> None:
    """The form takes effect, is reported as asked, and logprobs are of what it left to choose from."""
    await service.push(models.random_policy(3))
    request = formed(service, FORMS[name], seed=5, stream=stream)
    done = await service.complete(request)
    assert done.finish_reason == chat_pb2.FINISH_REASON_STOP
    assert done.stop_token_id == models.CONFIG["eos_token_id"]
    assert HOLDS[name](text_of(done)), text_of(done)
    values = np.frombuffer(done.span.logprobs, "<f4")
    assert values.size == done.span.count and np.isfinite(values).all() and (values <= 0).all()
    assert done.sampling_used.response_format_json == request.sampling.response_format_json
    if name == "choice":
        # Once the first letters are there, nothing else is left.
        assert values[-1] > -1e-6


@pytest.mark.requirement("R32")
async def test_formed_and_free_completions_share_a_batch(service: Served) -> None:
    """A form binds who asked for it and nobody else."""
    await service.push(models.random_policy(3))
    requests = [formed(service, FORMS[name]) for name in FORMS for _ in range(2)]
    free = [service.request() for _ in range(4)]
    done = await asyncio.gather(*map(service.complete, [*requests, *free]))
    for name, completion in zip([name for name in FORMS for _ in range(2)], done, strict=False):
        assert HOLDS[name](text_of(completion))
    assert all(completion.span.count == 16 for completion in done[len(requests) :])


@pytest.mark.requirement("R63")
async def test_any_json_object_and_free_text_are_forms_too(service: Served) -> None:
    """As the OpenAI API writes them; a cut by max_tokens is a cut, and not JSON."""
    await service.push(models.random_policy(3))
    cut = await service.complete(formed(service, {"type": "json_object"}, max_tokens=1))
    assert cut.finish_reason == chat_pb2.FINISH_REASON_LENGTH and text_of(cut).startswith("{")
    free = await service.complete(formed(service, {"type": "text"}, max_tokens=16, min_tokens=16))
    assert free.span.count == 16 and not free.sampling_used.HasField("response_format_json")


@pytest.mark.requirement("R33", "R63")
@pytest.mark.parametrize(
    ("form", "sampling", "field"),
    [
        ("{", {}, FIELD),
        ("[]", {}, FIELD),
        ({}, {}, FIELD),
        ({"type": "xml"}, {}, FIELD),
        ({"type": "json_schema"}, {}, FIELD),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, {}, FIELD),
        ({"type": "choice", "choice": []}, {}, FIELD),
        ({"type": "regex", "regex": "(["}, {}, FIELD),
        ({"type": "grammar", "grammar": "root := ="}, {}, FIELD),
        ({"type": "json_object"}, {"min_tokens": 3}, "sampling.min_tokens"),
    ],
)
async def test_a_form_that_cannot_be_is_refused_by_its_field(
    service: Served, failure: Failure, form: Any, sampling: dict[str, Any], field: str
) -> None:
    """Before anything is sampled, and the engine goes on."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.complete(formed(service, form, **sampling))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert failure(caught.value).violations[0].field == field
    assert (await service.complete(service.request())).span.count == 16
