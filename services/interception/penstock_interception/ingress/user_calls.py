"""Calls of a model that plays a user: from the driver, not from a sandbox, and one answer for each body.

Invariant: such a call has the same budgets, journal, source and record as an agent's. One whose caller is gone stays
open, and its repeat joins it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.validation import invalid_field
from penstock_interception.domain import models
from penstock_interception.domain.calls import CallRequest, CallState, Dialect
from penstock_interception.domain.requests import ChatRequest, merged_sampling
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.ingress import errors
from penstock_interception.ingress.dialects.base import Ask, BadRequest, DialectCodec, Problem, Route
from penstock_interception.ingress.retries import identify, same_call
from penstock_interception.interceptor import Interceptor

MAX_BODY_BYTES: Final = 16 << 20
MAX_TEXT: Final = 256 << 10
"""Characters of an answer that are returned."""
_OF_ITS_TERMS: Final = frozenset({"UPSTREAM_KEY_REFUSED", "UPSTREAM_SAMPLING_UNSUPPORTED"})
"""Reasons why no request of the rollout would be answered, for good."""


class UserCalls:
    """Asks the models that play users, in the dialect of Chat Completions."""

    def __init__(self, interceptor: Interceptor, dialects: Mapping[Dialect, DialectCodec]) -> None:
        self._interceptor = interceptor
        self._dialects = dialects

    @property
    def _dialect(self) -> DialectCodec:
        return self._dialects[Dialect.CHAT_COMPLETIONS]

    async def ask(self, rollout: Rollout, body: bytes) -> tuple[str, str]:
        """Returns the id of the call that has this body, and the text of its answer.

        Raises FailedPrecondition NOT_A_USER, ROLLOUT_CLOSED, USER_REFUSED; InvalidArgument FIELD_INVALID; Unavailable
        USER_UNANSWERED; and what Gate.admit raises.
        """
        if not rollout.spec.user_of:
            raise FailedPrecondition("The rollout has an agent or a verifier, no user.", reason="NOT_A_USER")
        rollout.check_open()
        parsed = await self._parsed(rollout, body)
        call = await self._call(rollout, body, parsed)
        try:
            await asyncio.shield(call.ended)
        finally:
            self._interceptor.detach(call)
        if (problem := errors.of_ended(call)) is not None:
            if not _is_of_the_request(call, problem):
                raise Unavailable(f"The user's model did not answer: {problem.message}", reason="USER_UNANSWERED")
            raise FailedPrecondition(f"The user's model refused: {problem.message}", reason="USER_REFUSED")
        self._interceptor.answer_sent(call)
        answer = json.loads(self._dialect.answer(call, parsed.without_content(None)))
        return call.id, (answer["choices"][0]["message"].get("content") or "")[:MAX_TEXT]

    async def _parsed(self, rollout: Rollout, body: bytes) -> ChatRequest:
        largest = rollout.spec.budgets.max_request_bytes_per_call or MAX_BODY_BYTES
        if len(body) > largest:
            raise invalid_field("body", f"has {len(body)} bytes; at most {largest} are allowed")
        try:
            parsed = await self._interceptor.in_thread(lambda: self._dialect.parse(body, Route(Ask.COMPLETION)))
        except BadRequest as error:
            raise invalid_field("body", str(error)) from error
        for what, given in (("stream", parsed.stream), ("tools", parsed.tools), ("logprobs", parsed.logprobs)):
            if given:
                raise invalid_field("body", f"{what}: a user has none")
        if not models.takes_name(rollout.spec, parsed.model):
            raise invalid_field("body", "model: there is no such model")
        return parsed

    async def _call(self, rollout: Rollout, body: bytes, parsed: ChatRequest) -> Call:
        identity = identify(self._dialect, {}, body)
        call = same_call(rollout, identity, lambda _: False)
        if call is not None:
            self._interceptor.rejoin(call)
            return call
        asked = CallRequest(
            dialect=self._dialect.dialect,
            body=body,
            body_sha256=identity.body_sha256,
            retry_key=identity.retry_key,
            stream=False,
            sampling=merged_sampling(parsed.sampling, rollout.spec.sampling_override),
            model_requested=parsed.model,
            normalisations=parsed.normalisations,
            body_bytes=len(body),
        )
        return await self._interceptor.begin(rollout, asked, parsed)


def _is_of_the_request(call: Call, problem: Problem) -> bool:
    """Whether the model refuses the request, or fails on it alone, so that another one could have an answer."""
    if call.state is not CallState.FAILED or call.failure is None or call.failure.reason in _OF_ITS_TERMS:
        return False
    return not problem.retry or call.failure.reason == "REQUEST_FAILS"
