"""Which requests are the same call."""

from __future__ import annotations

import pytest

from penstock_interception.cache import sha256
from penstock_interception.domain.calls import Dialect
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.ingress.retries import identify


@pytest.mark.requirement("R34")
def test_requests_are_recognised_by_key_or_by_body() -> None:
    """The key wins over the body; a retry count above 0 says that it is a retry."""
    plain = identify(ChatCompletions(), {}, b"body")
    assert plain == identify(ChatCompletions(), {"x-stainless-retry-count": "0"}, b"body")
    assert identify(ChatCompletions(), {"x-stainless-retry-count": "2"}, b"body").says_retry
    assert identify(ChatCompletions(), {"idempotency-key": "k"}, b"body").by_key
    assert plain.retry_key != identify(Responses(), {}, b"body").retry_key
    with pytest.raises(BadRequest):
        identify(ChatCompletions(), {"idempotency-key": "k" * 257}, b"body")


@pytest.mark.requirement("R34")
def test_rewritten_body_of_the_same_request_is_equal() -> None:
    """Codex orders its client_metadata differently each time; a body that is no JSON stands for itself."""
    one = b'{"input": "hi", "client_metadata": {"turn": "1", "thread": "2"}}'
    two = b'{"client_metadata": {"thread": "2", "turn": "1"}, "input": "hi"}'
    first, second = identify(Responses(), {}, one), identify(Responses(), {}, two)
    assert first.retry_key == second.retry_key and first.body_sha256 != second.body_sha256
    assert first.retry_key != identify(Responses(), {}, b'{"input": "ho"}').retry_key
    for odd in (b"{", b"[]", b'{"input": ' + b"[" * 1000 + b"]" * 1000 + b"}"):
        assert identify(Responses(), {}, odd).retry_key


@pytest.mark.requirement("R34")
def test_a_body_that_asks_another_model_is_another_request() -> None:
    """generateContent has the model in its path; a dialect that has it in the body is as it was."""
    one, other, again = (identify(GenerateContent(), {}, b"{}", model) for model in ("a", "b", "a"))
    assert one == again and one.retry_key != other.retry_key
    assert identify(ChatCompletions(), {}, b"{}").retry_key == f"body:{Dialect.CHAT_COMPLETIONS}:{sha256(b'{}').hex()}"
