"""The ingress's OpenAPI document against a running service: schemathesis's requests, and the routes there are (R33)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock_interception.domain.calls import Dialect
from penstock_interception.ingress.dialects.base import Ask, DialectCodec
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.ingress.mcp import server

DOCUMENT = Path(__file__).parents[4] / "docs" / "openapi" / "ingress.yaml"
OPERATIONS = [
    (path, method)
    for path, item in yaml.safe_load(DOCUMENT.read_text())["paths"].items()
    for method in item
    if method != "parameters"
]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
SCHEMA = schemathesis.openapi.from_path(DOCUMENT)


@pytest.fixture
async def answered(service: Any) -> AsyncIterator[Any]:
    """A service whose calls are all answered, and a rollout of it."""
    rollout, trainer = await service.open(), await service.trainer()

    async def answer() -> None:
        while True:
            call = await trainer.call()
            await trainer.send(results=_results(trainer.result(call, "the answer")))

    answering = asyncio.create_task(answer())
    yield rollout
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


def _results(*results: Any) -> Any:
    from penstock.interception.v1 import intercept_service_pb2 as pb

    return pb.Results(results=results)


@pytest.mark.requirement("R8", "R33")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_any_request_gets_an_answer_that_the_document_has(
    answered: Any, service: Any, path: str, method: str, mode: GenerationMode
) -> None:
    """Requests that fit the document and requests that do not: no 5xx, and every answer conforms."""
    operation = SCHEMA[path][method]
    if mode is GenerationMode.NEGATIVE and (method == "get" or "{" not in path):
        return  # a path and a token are all that there is

    def one(case: Any) -> None:
        if case.path_parameters and "rollout_id" in case.path_parameters:
            case.path_parameters["rollout_id"] = answered.rollout_id
        headers = {"authorization": f"Bearer {answered.token}"}
        response = case.call(base_url=f"http://{service.ingress}", headers=headers, timeout=30)
        case.validate_response(response, checks=CHECKS)

    def exchange() -> None:
        settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))(
            given(case=operation.as_strategy(generation_mode=mode))(one)
        )()

    await asyncio.get_running_loop().run_in_executor(None, exchange)


@pytest.mark.requirement("R19", "R33")
def test_the_document_has_every_kind_of_request_that_a_dialect_serves() -> None:
    """A route that is served is written down, and one that is written down is served."""
    dialects = (ChatCompletions(), Messages(), Responses(), GenerateContent())
    documented: set[tuple[str, Ask]] = set()
    for path, method in OPERATIONS:
        below = path.removeprefix("/rollout/{rollout_id}").replace("{model}", "m")
        headers: tuple[dict[str, str], ...] = ({}, {"anthropic-version": "1"}, {"x-goog-api-client": "x"})
        found = {
            (dialect.dialect, route.ask)
            for dialect in dialects
            for given in headers
            if (route := dialect.route(method.upper(), below, {}, given)) is not None
        }
        assert found or below in ("/health", server.PATH), path
        documented |= found
    served = {(dialect.dialect, ask) for dialect in dialects for ask in (Ask.COMPLETION, Ask.MODELS, Ask.MODEL)}
    served -= {(Dialect.GENERATE_CONTENT, Ask.MODEL)}  # as /v1/models/{model}, which is there in the others' name
    served |= {(dialect.dialect, Ask.COUNT) for dialect in dialects if type(dialect).count is not DialectCodec.count}
    assert served <= documented
