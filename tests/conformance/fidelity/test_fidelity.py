"""Token fidelity: after any echo that real clients make, the next prompt starts with exactly what was seen and sampled.

The first seven cases are the table in which no system before this one was exact throughout. The engine's tokens are
never those that the tokenizer would choose (one per byte), and its JSON has odd spacing: whoever renders or tokenises
anything anew is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pytest

from penstock_codec import Codec
from penstock_codec.chat import FinishReason, Message, ReasoningPart, Role, TextPart, Tool, ToolCallPart
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


def reserialised(message: Message, arguments: str) -> Message:
    """The message with its first call's arguments written anew."""
    parts = [
        ToolCallPart(part.id, part.name, arguments) if isinstance(part, ToolCallPart) else part
        for part in message.parts
    ]
    return Message(message.role, tuple(parts))


def without_reasoning(message: Message) -> Message:
    """The message as clients that know no reasoning echo it."""
    return Message(message.role, tuple(part for part in message.parts if not isinstance(part, ReasoningPart)))


def with_text(message: Message, change: Callable[[str], str]) -> Message:
    """The message with its text changed."""
    parts = [TextPart(change(part.text)) if isinstance(part, TextPart) else part for part in message.parts]
    return Message(message.role, tuple(parts))


def result_of(message: Message, text: str = "kiwi") -> Message:
    """A tool's answer to the message's first call."""
    return Message.tool(message.tool_calls[0].id, text)


def test_text_that_comes_back_as_it_was_is_exact(conversation: Conversation) -> None:
    """R82, table case 1: text echo."""
    first = conversation.call(START, TEXT)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    assert conversation.continues(second, first)
    assert second.branch_id == first.branch_id


def test_a_tool_call_that_comes_back_as_it_was_is_exact(conversation: Conversation) -> None:
    """R82, table case 2: tool call echo."""
    first = conversation.call(START, CALL)
    reply = first.sampled.message
    assert [call.name for call in reply.tool_calls] == ["bash"]
    assert reply.tool_calls[0].arguments_json == '{"n": 1.0,"command" : "cat  \\u00e9.txt","x":[1e2 ]}'
    second = conversation.call([*START, reply, result_of(reply)], TEXT)
    assert conversation.continues(second, first)
    assert second.branch_id == first.branch_id


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n":1,"command":"cat  é.txt","x":[100]}',
        '{"command": "cat  \\u00E9.txt", "n": 1.0, "x": [100.0]}',
        '{\n  "x": [\n    1E2\n  ],\n  "n": 1e0,\n  "command": "cat  é.txt"\n}',
    ],
)
def test_arguments_that_the_client_wrote_anew_are_exact(conversation: Conversation, arguments: str) -> None:
    """R82, table case 3: tool arguments re-serialised by the client."""
    first = conversation.call(START, CALL)
    reply = reserialised(first.sampled.message, arguments)
    second = conversation.call([*START, reply, result_of(reply)], TEXT)
    assert conversation.continues(second, first)


@pytest.mark.parametrize("follow", ["user", "tool"])
def test_reasoning_that_comes_back_is_exact(conversation: Conversation, follow: str) -> None:
    """R82, table case 4: reasoning echoed."""
    completion = THOUGHT if follow == "user" else THOUGHT.replace("<|im_end|>", "\n" + CALL)
    first = conversation.call(START, completion)
    reply = first.sampled.message
    assert reply.reasoning == "The note first ,then the file."
    second = conversation.call([*START, reply, MORE if follow == "user" else result_of(reply)], TEXT)
    assert conversation.continues(second, first)


@pytest.mark.parametrize("follow", ["user", "tool"])
def test_reasoning_that_the_client_dropped_is_exact(conversation: Conversation, follow: str) -> None:
    """R82, table case 5: the client drops reasoning."""
    completion = THOUGHT if follow == "user" else THOUGHT.replace("<|im_end|>", "\n" + CALL)
    first = conversation.call(START, completion)
    reply = without_reasoning(first.sampled.message)
    second = conversation.call([*START, reply, MORE if follow == "user" else result_of(reply)], TEXT)
    assert conversation.continues(second, first)


@pytest.mark.parametrize("trim", [str.rstrip, str.strip, lambda text: text + "\n"], ids=["rstrip", "strip", "newline"])
def test_text_that_the_client_trimmed_is_exact(conversation: Conversation, trim: Callable[[str], str]) -> None:
    """R82, table case 6: the client strips text."""
    first = conversation.call(START, "  I will  do that. \n\n<|im_end|>")
    second = conversation.call([*START, with_text(first.sampled.message, trim), MORE], TEXT)
    assert conversation.continues(second, first)


def test_a_conversation_on_the_side_does_not_disturb_the_main_one(conversation: Conversation) -> None:
    """R82, R85, table case 7: a side conversation in between."""
    first = conversation.call(START, CALL)
    side = conversation.call([Message.system("You name chats."), Message.user("Read the note.")], TEXT, tools=())
    reply = first.sampled.message
    second = conversation.call([*START, reply, result_of(reply)], TEXT)
    assert conversation.continues(second, first)
    assert second.branch_id == first.branch_id
    assert side.branch_id != first.branch_id
    assert conversation.graph.call_classes()[side.call_id] is CallClass.TITLE


def test_instructions_in_the_midst_of_a_conversation_are_exact(conversation: Conversation) -> None:
    """R82: after the user's words, and after a tool's result, whatever the template makes of them."""
    start = [*START, Message.system("The date is today.")]
    first = conversation.call(start, CALL)
    reply = first.sampled.message
    history = [*start, reply, result_of(reply), Message.system("Be brief.")]
    second = conversation.call(history, TEXT)
    assert conversation.continues(second, first)
    assert "Be brief." in conversation.codec.decode(second.suffix)
    third = conversation.call([*history, second.sampled.message, MORE, Message.system("Now stop.")], TEXT)
    assert conversation.continues(third, second)
    assert third.branch_id == first.branch_id


def test_two_results_of_one_turn_are_exact(conversation: Conversation) -> None:
    """R82: parallel tool calls and their results."""
    first = conversation.call(START, TWO_CALLS)
    reply = first.sampled.message
    assert [call.arguments_json for call in reply.tool_calls] == ['{ "command":"a"}', '{ "command":"b"}']
    results = [Message.tool(call.id, f"out {i}") for i, call in enumerate(reply.tool_calls)]
    second = conversation.call([*START, reply, *results], TEXT)
    assert conversation.continues(second, first)
    shown = conversation.codec.decode(second.suffix)
    assert "out 0" in shown
    assert "out 1" in shown


def test_a_turn_that_was_cut_off_is_closed_as_context(conversation: Conversation) -> None:
    """R82, R84: the close of a truncated turn is context, never trained."""
    first = conversation.call(START, "I will do th", finish=FinishReason.LENGTH)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    assert conversation.continues(second, first)
    end = conversation.codec.end_of_turn_id
    assert second.suffix[0] == end
    (sample,) = conversation.graph.samples()
    assert sample.input_ids[first.total] == end
    assert sample.loss_mask[first.total] == 0


def test_a_cut_off_tool_call_comes_back_as_the_text_it_is(conversation: Conversation) -> None:
    """R80, R82: a malformed call stays text for the agent and exact tokens for the engine."""
    first = conversation.call(START, 'x\n<tool_call>\n{"name": "ba', finish=FinishReason.LENGTH)
    assert first.sampled.message == Message.assistant('x\n<tool_call>\n{"name": "ba')
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    assert conversation.continues(second, first)


def test_a_reply_that_comes_back_in_several_messages_is_exact(conversation: Conversation) -> None:
    """R82: some clients echo text and tool calls as messages of their own."""
    first = conversation.call(START, CALL)
    reply = first.sampled.message
    pieces = [Message(Role.ASSISTANT, (part,)) for part in reply.parts]
    second = conversation.call([*START, *pieces, result_of(reply)], TEXT)
    assert conversation.continues(second, first)


def test_reasoning_that_comes_back_inside_the_text_is_exact(conversation: Conversation) -> None:
    """R82: some clients put reasoning back inline, in think tags."""
    first = conversation.call(START, THOUGHT)
    reply = first.sampled.message
    inline = Message.assistant(f"<think>\n{reply.reasoning}\n</think>\n\n{reply.text}")
    second = conversation.call([*START, inline, MORE], TEXT)
    assert conversation.continues(second, first)


def test_many_turns_stay_exact_throughout(conversation: Conversation) -> None:
    """R82: the property is kept over a long conversation with every kind of turn."""
    messages = list(START)
    before = None
    for turn, completion in enumerate([CALL, THOUGHT, TWO_CALLS, TEXT, CALL, "cut", THOUGHT, CALL] * 3):
        finish = FinishReason.LENGTH if completion == "cut" else None
        node = conversation.call(messages, completion, finish=finish)
        if before is not None:
            assert conversation.continues(node, before), turn
        before = node
        reply = without_reasoning(node.sampled.message)
        answers = [Message.tool(call.id, f"result {turn}") for call in reply.tool_calls]
        messages += [reply, *(answers or [MORE])]
    assert len(conversation.graph.branches()) == 1


def test_a_compacted_history_opens_a_labelled_branch(conversation: Conversation) -> None:
    """R85: compaction -> new labelled branch."""
    first = conversation.call(START, TEXT)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    summary = Message.user("So far: the note was read. Go on.")
    third = conversation.call([START[0], summary], TEXT)
    assert not conversation.continues(third, second)
    branches = conversation.graph.branches()
    assert [branch.call_class for branch in branches] == [CallClass.MAIN, CallClass.COMPACTION]
    assert branches[1].call_ids == (third.call_id,)
    assert branches[1].reason


def test_an_edited_history_opens_a_labelled_branch(conversation: Conversation) -> None:
    """R85: edited history -> new labelled branch, from the last turn that still holds."""
    first = conversation.call(START, TEXT)
    second = conversation.call([*START, first.sampled.message, MORE], TEXT)
    edited = conversation.call([*START, first.sampled.message, Message.user("Something else.")], TEXT)
    assert conversation.continues(edited, first)
    assert not conversation.continues(edited, second)
    main, branch = conversation.graph.branches()
    assert (main.call_class, branch.call_class) == (CallClass.MAIN, CallClass.EDIT)
    assert branch.fork_call_id == first.call_id
    assert branch.shared_count == first.total


def test_a_rewritten_reply_opens_a_labelled_branch(conversation: Conversation) -> None:
    """R85: words put into the model's mouth are not taken for what it sampled."""
    first = conversation.call(START, TEXT)
    forged = conversation.call([*START, Message.assistant("I never said that."), MORE], TEXT)
    assert not conversation.continues(forged, first)
    assert [branch.call_class for branch in conversation.graph.branches()] == [CallClass.MAIN, CallClass.EDIT]


def test_a_title_call_has_a_root_of_its_own(conversation: Conversation) -> None:
    """R85: title call -> own root, whether it comes first or the agent's spec names it."""
    named = CallHints(call_class=CallClass.TITLE)
    title = conversation.call([Message.user("Title?")], TEXT, tools=(), hints=named)
    first = conversation.call(START, TEXT)
    classes = conversation.graph.call_classes()
    assert classes == {title.call_id: CallClass.TITLE, first.call_id: CallClass.MAIN}
    assert title.parent is None
    assert first.parent is None


def test_a_title_call_that_comes_first_and_unnamed_is_found_out_later(conversation: Conversation) -> None:
    """R85: what a call was for is settled once its neighbours are known."""
    title = conversation.call([Message.system("You name chats."), Message.user("Read the note.")], TEXT, tools=())
    first = conversation.call(START, CALL)
    conversation.call([*START, first.sampled.message, result_of(first.sampled.message)], TEXT)
    classes = conversation.graph.call_classes()
    assert classes[title.call_id] is CallClass.TITLE
    assert classes[first.call_id] is CallClass.MAIN


def test_a_title_asked_for_at_the_same_time_does_not_pass_for_the_main_line(conversation: Conversation) -> None:
    """R85: some agents ask for a title and the first turn at once; whichever is answered first, both are told apart."""
    system = Message.system("You name chats.")
    title = conversation.graph.plan([system, START[1]])
    first = conversation.call(START, CALL)
    conversation.commit("title", title, "Notes")
    sub = conversation.call([START[0], Message.user("Only look at the note.")], TEXT)
    classes = conversation.graph.call_classes()
    assert classes == {first.call_id: CallClass.MAIN, "title": CallClass.TITLE, sub.call_id: CallClass.SUB_AGENT}


def test_a_sub_agent_runs_beside_the_main_line(conversation: Conversation) -> None:
    """R85: a sub-agent's line is its own, and the main line goes on where it waited."""
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


def test_a_sub_agent_that_starts_as_the_main_line_did_is_told_apart_by_its_session(conversation: Conversation) -> None:
    """R85: Codex begins both with the same description of the machine; its header names the thread."""
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


def test_the_answer_that_the_agent_went_on_with_is_the_main_line_and_the_other_a_retry(
    conversation: Conversation,
) -> None:
    """R34, R85: the same prompt sampled twice keeps both answers; the one without a future is the retry."""
    first = conversation.call(START, "One answer.<|im_end|>")
    again = conversation.call(START, "Another answer.<|im_end|>")
    assert conversation.prompt(again) == conversation.prompt(first)
    assert again.suffix is first.suffix
    second = conversation.call([*START, again.sampled.message, MORE], TEXT)
    assert conversation.continues(second, again)
    classes = conversation.graph.call_classes()
    assert classes[first.call_id] is CallClass.RETRY
    assert classes[again.call_id] is classes[second.call_id] is CallClass.MAIN


def test_what_is_trained_is_what_was_sampled_once_each(conversation: Conversation) -> None:
    """R82, R84: over all samples each sampled token is trained once, with its own logprob and version."""
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
