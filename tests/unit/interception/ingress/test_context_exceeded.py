"""What agents see of a context that is exceeded: the words by which their clients know it."""

from __future__ import annotations

import pytest

from penstock_interception.ingress.dialects.base import CONTEXT_EXCEEDED, DialectCodec, Problem
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses

# LiteLLM looks for the first in lower case, pi for the second.
OF_OPENAI = ("this model's maximum context length is", "exceeds the context window")


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (ChatCompletions(), OF_OPENAI),
        (Responses(), OF_OPENAI),
        (Messages(), ("prompt is too long",)),
        (GenerateContent(), ("input token count exceeds the maximum number of tokens allowed",)),
    ],
)
def test_an_exceeded_context_is_said_in_the_vendors_words(codec: DialectCodec, words: tuple[str, ...]) -> None:
    """Whoever refuses it, the gate or a trainer; and no other refusal is."""
    shown = codec.problem(Problem(400, CONTEXT_EXCEEDED, "It has 9 tokens of 8.", "messages")).decode()
    assert all(each in shown.lower() for each in words) and "It has 9 tokens of 8." in shown
    other = codec.problem(Problem(400, "model_refused", "It has 9 tokens of 8.")).decode()
    assert not any(each in other.lower() for each in words)
