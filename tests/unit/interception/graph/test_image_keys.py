"""Images in the fingerprints of messages: which conversations are the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.support.vision import png, tokenizer_files

from penstock_codec import Codec
from penstock_codec.chat import FinishReason, ImagePart, Message, Part, Role, TextPart, ToolCallPart, ToolResultPart
from penstock_interception.graph import CallClass, LogprobsMode, Sampled, TokenGraph, VersionSpan
from penstock_interception.graph.fingerprint import Fingerprints, digest

LEFT, RIGHT = (ImagePart.inline(png(1, 1, shade), "image/png") for shade in (1, 2))


def message(role: Role, *parts: Part | str) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def result(text: str, *images: ImagePart) -> ToolResultPart:
    return ToolResultPart("call", text, images=images)


DIFFERENT = [
    message(Role.USER, "cat: ", LEFT, " dog: ", RIGHT),
    message(Role.USER, "cat: ", RIGHT, " dog: ", LEFT),
    message(Role.USER, "cat: ", " dog: ", LEFT, RIGHT),
    message(Role.USER, LEFT, "cat: ", " dog: ", RIGHT),
    message(Role.USER, "cat: ", LEFT, " dog: "),
    message(Role.USER, "cat:  dog: "),
    message(Role.ASSISTANT, "cat: ", LEFT),
    message(Role.ASSISTANT, "cat: ", RIGHT),
    message(Role.ASSISTANT, LEFT, "cat: "),
    message(Role.ASSISTANT, "cat: "),
    message(Role.ASSISTANT, "cat: ", ToolCallPart("image", LEFT.ref, "text")),
    message(Role.TOOL, result("cat: ", LEFT), result("cat: ")),
    message(Role.TOOL, result("cat: "), result("cat: ", LEFT)),
    message(Role.TOOL, result("cat: "), result("cat: "), LEFT),
    message(Role.TOOL, result("cat: "), result("cat: ", RIGHT)),
]


@pytest.mark.requirement("R137")
@pytest.mark.parametrize("with_call_ids", [True, False])
def test_messages_of_other_images_or_with_images_in_another_place_are_other_messages(with_call_ids: bool) -> None:
    """Of agents and models: their prompts differ."""
    keys = [Fingerprints(with_call_ids=with_call_ids).key(one) for one in DIFFERENT]
    same = [(one, other) for one, other in itertools.combinations(range(len(keys)), 2) if keys[one] == keys[other]]
    assert not same
    assert Fingerprints(with_call_ids=with_call_ids).key(DIFFERENT[0]) == keys[0]


def test_keys_of_messages_without_images_are_those_of_older_journals() -> None:
    """A conversation goes on after an update of the gate."""
    fingerprints = Fingerprints(with_call_ids=False)
    assert fingerprints.key(message(Role.USER, "a", "b")) == digest(b"user", b"", b"ab")
    tool = message(Role.TOOL, result("a"), result("b"))
    assert fingerprints.key(tool) == digest(b"tool", b"", b"", b"result", b"", b"a", b"result", b"", b"b")
    called = message(Role.ASSISTANT, " a ", ToolCallPart("x", "look", '{"n": 1}'))
    assert fingerprints.key(called) == digest(b"assistant", b"a", b"", b"look", b'{"n":1}')


@pytest.mark.requirement("R82", "R137")
def test_a_conversation_with_an_image_moved_has_a_prompt_of_its_own() -> None:
    """It was taken for a retry, and got the tokens of the first one."""
    codec = Codec.load(tokenizer_files())
    graph = TokenGraph("r", codec)
    first = graph.plan([DIFFERENT[0]])
    answer = codec.encode("ok<|im_end|>").astype(np.int32)
    sampled = Sampled(
        message=Message.assistant("ok"),
        finish_reason=FinishReason.STOP,
        token_ids=answer,
        logprobs=np.full(answer.size, -0.5, np.float32),
        logprobs_mode=LogprobsMode.RAW,
        versions=(VersionSpan(1, 0, answer.size),),
    )
    graph.commit("c", first, sampled)
    assert graph.plan([DIFFERENT[0]]).call_class is CallClass.RETRY
    moved = graph.plan([DIFFERENT[2]])
    assert moved.call_class is not CallClass.RETRY
    np.testing.assert_array_equal(moved.prompt_ids, codec.prompt([DIFFERENT[2]]).ids)
    # An image beside a sampled answer is none of that answer's line.
    shown = message(Role.ASSISTANT, "ok", LEFT)
    key = Fingerprints(with_call_ids=False).key
    assert key(shown) != key(Message.assistant("ok"))
