"""What calls are to each other: a changed history opens a branch with its label, and each token is trained once.

`test_cases.py` has what every family of models has to keep exact. The engine's tokens are never those that the
tokenizer would choose (one per byte), and its JSON has odd spacing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pytest

from penstock_codec import Codec
from penstock_codec.chat import FinishReason, Message, Tool
from penstock_interception.graph import CallClass, CallHints, CallNode, Plan, TokenGraph

START = [Message.system("You are a shell agent."), Message.user("Read the note.")]
MORE = Message.user("List the files, please.")
TEXT = "I will  do that.\n<|im_end|>"
THOUGHT = "<think>\nThe note first ,then the file.\n</think>\n\nI will  do that.<|im_end|>"
CALL = (
    'Reading.\n\n<tool_call>\n{"name" :"bash",  "arguments": '
    '{"n": 1.0,"command" : "cat  \\u00e9.txt","x":[1e2 ]}}\n</tool_call><|im_end|>'
)
TWO_CALLS = (
    '<tool_call>{"name": "bash","arguments":{ "command":"a"}}</tool_call>\n\n'
    '<tool_call>\n{ "arguments":{ "command":"b"}, "name": "bash"}\n</tool_call><|im_end|>'
)


class Conversation(Protocol):
    """The fixture of conftest.py: one rollout as its service sees it."""

    codec: Codec
    graph: TokenGraph

    def call(
        self,
        messages: Sequence[Message],
        completion: str,
        *,
        tools: Sequence[Tool] = ...,
        hints: CallHints | None = None,
        finish: FinishReason | None = None,
    ) -> CallNode: ...

    def commit(self, call_id: str, plan: Plan, completion: str, finish: FinishReason | None = None) -> CallNode: ...

    def prompt(self, node: CallNode) -> list[int]: ...

    def continues(self, later: CallNode, earlier: CallNode) -> bool: ...


def result_of(message: Message, text: str = "kiwi") -> Message:
    """A tool's answer to the message's first call."""
    return Message.tool(message.tool_calls[0].id, text)


@pytest.mark.requirement("R85")
def test_a_compacted_history_opens_a_labelled_branch(conversation: Conversation) -> None:
    """Compaction -> new labelled branch."""
    first = conversation.call(START, TEXT)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    summary = Message.user("So far: the note was read. Go on.")
    third = conversation.call([START[0], summary], TEXT)
    assert not conversation.continues(third, second)
    branches = conversation.graph.branches()
    assert [branch.call_class for branch in branches] == [CallClass.MAIN, CallClass.COMPACTION]
    assert branches[1].call_ids == (third.call_id,)
    assert branches[1].reason


@pytest.mark.requirement("R85")
def test_an_edited_history_opens_a_labelled_branch(conversation: Conversation) -> None:
    """Edited history -> new labelled branch, from the last turn that still holds."""
    first = conversation.call(START, TEXT)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    edited = conversation.call([*START, first.sampled.message, Message.user("Something else.")], TEXT)
    assert conversation.continues(edited, first)
    assert not conversation.continues(edited, second)
    main, branch = conversation.graph.branches()
    assert (main.call_class, branch.call_class) == (CallClass.MAIN, CallClass.EDIT)
    assert branch.fork_call_id == first.call_id
    assert branch.shared_count == first.total


@pytest.mark.requirement("R85")
def test_a_rewritten_reply_opens_a_labelled_branch(conversation: Conversation) -> None:
    """Words put into the model's mouth are not taken for what it sampled."""
    first = conversation.call(START, TEXT)
    forged = conversation.call([*START, Message.assistant("I never said that."), MORE], TEXT)
    assert not conversation.continues(forged, first)
    assert [branch.call_class for branch in conversation.graph.branches()] == [CallClass.MAIN, CallClass.EDIT]


@pytest.mark.requirement("R85")
def test_a_title_call_has_a_root_of_its_own(conversation: Conversation) -> None:
    """Title call -> own root, whether it comes first or the agent's spec names it."""
    named = CallHints(call_class=CallClass.TITLE)
    title = conversation.call([Message.user("Title?")], TEXT, tools=(), hints=named)
    first = conversation.call(START, TEXT)
    classes = conversation.graph.call_classes()
    assert classes == {title.call_id: CallClass.TITLE, first.call_id: CallClass.MAIN}
    assert title.parent is None
    assert first.parent is None


@pytest.mark.requirement("R85")
def test_a_title_call_that_comes_first_and_unnamed_is_found_out_later(conversation: Conversation) -> None:
    """What a call was for is settled once its neighbours are known."""
    title = conversation.call([Message.system("You name chats."), Message.user("Read the note.")], TEXT, tools=())
    first = conversation.call(START, CALL)
    conversation.call([*START, first.sampled.message, result_of(first.sampled.message)], TEXT)
    classes = conversation.graph.call_classes()
    assert classes[title.call_id] is CallClass.TITLE
    assert classes[first.call_id] is CallClass.MAIN


@pytest.mark.requirement("R85")
def test_concurrent_title_call_is_not_the_main_line(conversation: Conversation) -> None:
    """Some agents ask for a title and the first turn at once; whichever is answered first, both are told apart."""
    system = Message.system("You name chats.")
    title = conversation.graph.plan([system, START[1]])
    first = conversation.call(START, CALL)
    conversation.commit("title", title, "Notes")
    sub = conversation.call([START[0], Message.user("Only look at the note.")], TEXT)
    classes = conversation.graph.call_classes()
    assert classes == {first.call_id: CallClass.MAIN, "title": CallClass.TITLE, sub.call_id: CallClass.SUB_AGENT}


@pytest.mark.requirement("R85")
def test_a_sub_agent_runs_beside_the_main_line(conversation: Conversation) -> None:
    """A sub-agent's line is its own, and the main line goes on where it waited."""
    first = conversation.call(START, CALL)
    task = [Message.system("You are a shell agent."), Message.user("Only look at the note.")]
    sub = conversation.call(task, CALL)
    sub_end = conversation.call([*task, sub.sampled.message, result_of(sub.sampled.message)], TEXT)
    second = conversation.call([*START, first.sampled.message, result_of(first.sampled.message, "done")], TEXT)
    assert conversation.continues(sub_end, sub)
    assert conversation.continues(second, first)
    classes = conversation.graph.call_classes()
    assert classes[sub.call_id] is classes[sub_end.call_id] is CallClass.SUB_AGENT
    assert classes[first.call_id] is classes[second.call_id] is CallClass.MAIN


@pytest.mark.requirement("R85")
def test_sub_agent_is_separated_from_the_main_line_by_its_session(conversation: Conversation) -> None:
    """Codex begins both with the same description of the machine; its header names the thread."""
    main, other = CallHints(session="main"), CallHints(session="other")
    fewer = [Tool("look", "Look only.", '{"type": "object", "properties": {}}')]
    first = conversation.call(START, CALL, hints=main)
    sub = conversation.call(START, CALL, tools=fewer, hints=other)
    reply = sub.sampled.message
    last = conversation.call([*START, reply, result_of(reply)], TEXT, tools=fewer, hints=other)
    assert conversation.continues(last, sub)
    classes = conversation.graph.call_classes()
    assert classes[first.call_id] is CallClass.MAIN
    assert classes[sub.call_id] is classes[last.call_id] is CallClass.SUB_AGENT


@pytest.mark.requirement("R34", "R85")
def test_continued_answer_is_the_main_line_and_the_other_a_retry(
    conversation: Conversation,
) -> None:
    """The same prompt sampled twice keeps both answers; the one without a future is the retry."""
    first = conversation.call(START, "One answer.<|im_end|>")
    again = conversation.call(START, "Another answer.<|im_end|>")
    assert conversation.prompt(again) == conversation.prompt(first)
    assert again.suffix is first.suffix
    second = conversation.call([*START, again.sampled.message, MORE], TEXT)
    assert conversation.continues(second, again)
    classes = conversation.graph.call_classes()
    assert classes[first.call_id] is CallClass.RETRY
    assert classes[again.call_id] is classes[second.call_id] is CallClass.MAIN


@pytest.mark.requirement("R82", "R84")
def test_trained_tokens_are_the_sampled_ones_once_each(conversation: Conversation) -> None:
    """Over all samples each sampled token is trained once, with its own logprob and version."""
    first = conversation.call(START, CALL)
    reply = first.sampled.message
    second = conversation.call([*START, reply, result_of(reply)], TEXT)
    fork = conversation.call([*START, reply, result_of(reply, "melon")], TEXT)
    trained = 0
    for sample in conversation.graph.samples():
        assert sample.input_ids.shape == sample.loss_mask.shape == sample.logprobs.shape
        assert np.all(sample.logprobs[sample.loss_mask == 1] == np.float32(-0.25))
        assert np.all(sample.logprobs[sample.loss_mask == 0] == 0.0)
        trained += int(sample.loss_mask.sum())
        for turn in sample.turns:
            node = conversation.graph.calls[turn.call_id]
            assert node.sampled.token_ids is not None
            assert np.array_equal(sample.input_ids[turn.start : turn.end], node.sampled.token_ids)
    assert trained == first.sampled.count + second.sampled.count + fork.sampled.count
    assert sum(sample.weight for sample in conversation.graph.samples()) == pytest.approx(1.0)
