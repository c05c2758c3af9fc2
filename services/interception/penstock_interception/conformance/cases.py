"""The cases: what clients change in a conversation between two calls, and whether the next prompt is still exact.

The first seven are the table of docs/trajectories.md; no earlier system was exact in all of them. A case returns if
everything holds, and raises `Deviation` with what does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock_codec import Codec, CodecError
from penstock_codec.chat import FinishReason, Message, ReasoningPart, Role, TextPart, Tool, ToolCallPart
from penstock_interception.conformance.dialects import Dialect
from penstock_interception.conformance.sampled_text import Speech
from penstock_interception.conformance.scripted_conversation import BASH, ScriptedConversation
from penstock_interception.graph import CallNode

START: Final = (Message.system("You are a shell agent."), Message.user("Read the note."))
MORE: Final = Message.user("List the files, please.")
TEXT: Final = "I will  do that.\n"
ARGUMENTS: Final = '{"n": 1.0,"command" : "cat  \\u00e9.txt","x":[1e2 ]}'
THOUGHT: Final = "The note first ,then the file."
REWRITTEN: Final = (
    '{"n":1,"command":"cat  é.txt","x":[100]}',
    '{"command": "cat  \\u00E9.txt", "n": 1.0, "x": [100.0]}',
    '{\n  "x": [\n    1E2\n  ],\n  "n": 1e0,\n  "command": "cat  é.txt"\n}',
)


class Verdict(StrEnum):
    """The outcome of a case."""

    EXACT = "EXACT"
    """The next prompt starts with exactly the tokens that were seen and sampled."""
    BRANCH = "BRANCH"
    """It does not: the conversation continued in a branch of its own, with the reason."""
    LABELLED = "LABELLED"
    """The history was really changed, and the branch is labelled so, as it should be."""
    MISREAD = "MISREAD"
    """The completion was parsed wrongly, or a changed history was mistaken for the sampled one."""
    REFUSED = "REFUSED"
    """The template or the codec raised."""
    NOT_APPLICABLE = "N/A"
    """The model lacks the feature: tools or reasoning."""


class Deviation(Exception):
    """A condition of a case does not hold."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Setting:
    """One model and one dialect; each conversation in it is fresh."""

    codec: Codec
    dialect: Dialect
    speech: Speech

    @classmethod
    def of(cls, codec: Codec, dialect: Dialect) -> Setting:
        """The setting of a codec and a dialect."""
        return cls(codec, dialect, Speech(codec))

    def conversation(self) -> ScriptedConversation:
        """Starts a rollout without calls."""
        return ScriptedConversation.start(self.codec, self.dialect)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. `main` marks the seven; `needs_*` are required features of the model."""

    name: str
    title: str
    run: Callable[[Setting], None]
    main: bool = False
    needs_tools: bool = False
    needs_reasoning: bool = False
    expects: Verdict = Verdict.EXACT


@dataclass(frozen=True, slots=True)
class Result:
    """A case's outcome as text; the reason is empty on success."""

    verdict: Verdict
    reason: str = ""


def run_case(case: Case, setting: Setting) -> Result:
    """Runs one case. Errors of the template or the codec become its result."""
    if case.needs_tools and not setting.speech.calls_tools:
        return Result(Verdict.NOT_APPLICABLE, "the template renders no tools, or the parser reads no calls")
    if case.needs_reasoning and not setting.speech.thinks:
        return Result(Verdict.NOT_APPLICABLE, "the parser reads no reasoning")
    try:
        case.run(setting)
    except Deviation as error:
        return Result(error.verdict, error.reason)
    except CodecError as error:
        return Result(Verdict.REFUSED, f"{error.reason}: {error}")
    return Result(case.expects)


def _call_as_written(setting: Setting) -> None:
    codec = setting.codec
    call_id = "functions.bash:0" if codec.parser == "kimi" else "a1b2c3d4e"
    turn = Message.assistant("", ToolCallPart(call_id, "bash", REWRITTEN[0]))
    prompt = codec.render_text(START, (BASH,))
    text = codec.render_text([*START, turn], (BASH,), add_generation_prompt=False)
    if not text.startswith(prompt):
        raise Deviation(
            Verdict.NOT_APPLICABLE, "the template renders an old answer differently from one after its own prompt"
        )
    if "command" not in text[len(prompt) :]:
        raise Deviation(Verdict.NOT_APPLICABLE, "the template writes no calls")
    read = codec.parse(codec.encode(text[len(prompt) :]), prompt_ids=codec.encode(prompt), tools=(BASH,)).message
    if [call.name for call in read.tool_calls] != ["bash"]:
        raise Deviation(
            Verdict.MISREAD,
            f"the parser {codec.parser!r} does not read a call as the template writes it: {read.text!r}",
        )


def _text_echo(setting: Setting) -> None:
    conversation, first = _begun(setting, setting.speech.text(TEXT))
    _must_read(first, text=TEXT)
    _go_on(conversation, first, first.sampled.message, MORE)


def _call_echo(setting: Setting) -> None:
    conversation, first = _called(setting)
    _go_on(conversation, first, first.sampled.message, *_results(first))


def _arguments_rewritten(setting: Setting) -> None:
    for arguments in REWRITTEN:
        conversation, first = _called(setting)
        _go_on(conversation, first, _reserialised(first.sampled.message, arguments), *_results(first))


def _reasoning_echoed(setting: Setting) -> None:
    for conversation, first in _thoughts(setting):
        _go_on(conversation, first, first.sampled.message, *(_results(first) or [MORE]))


def _reasoning_dropped(setting: Setting) -> None:
    for conversation, first in _thoughts(setting):
        _go_on(conversation, first, _without_reasoning(first.sampled.message), *(_results(first) or [MORE]))


def _text_trimmed(setting: Setting) -> None:
    trims: Sequence[Callable[[str], str]] = (str.rstrip, str.strip, lambda text: text + "\n")
    for trim in trims:
        conversation, first = _begun(setting, setting.speech.text("  I will  do that. \n\n"))
        _go_on(conversation, first, _with_text(first.sampled.message, trim), MORE)


def _side_conversation(setting: Setting) -> None:
    speech = setting.speech
    if speech.calls_tools:
        conversation, first = _called(setting)
    else:
        conversation, first = _begun(setting, speech.text(TEXT))
    aside = [Message.system("You name chats."), Message.user("Read the note.")]
    side = conversation.call(aside, speech.text(TEXT), tools=())
    second = _go_on(conversation, first, first.sampled.message, *(_results(first) or [MORE]))
    if side.branch_id == first.branch_id or second.branch_id != first.branch_id:
        raise Deviation(Verdict.MISREAD, "the side conversation was mistaken for the main one")


def _late_instructions(setting: Setting) -> None:
    speech, tools = setting.speech, _tools(setting)
    conversation = setting.conversation()
    start = [*START, Message.system("The date is today.")]
    completion = speech.calls(ARGUMENTS) if speech.calls_tools else speech.text(TEXT)
    first = conversation.call(start, completion, tools=tools)
    history = [*start, first.sampled.message, *(_results(first) or [MORE]), Message.system("Be brief.")]
    second = conversation.call(history, speech.text(TEXT), tools=tools)
    _must_continue(conversation, second, first)
    if "Be brief." not in setting.codec.decode(second.suffix):
        raise Deviation(Verdict.MISREAD, "the next prompt does not show a late instruction")
    last = [*history, second.sampled.message, MORE, Message.system("Now stop.")]
    _must_continue(conversation, conversation.call(last, speech.text(TEXT), tools=tools), second)


def _several_results(setting: Setting) -> None:
    conversation, first = _begun(setting, setting.speech.calls('{ "command":"a"}', '{ "command":"b"}'))
    if len(first.sampled.message.tool_calls) != 2:
        raise Deviation(Verdict.MISREAD, "two calls in one turn were not read as two")
    second = _go_on(conversation, first, first.sampled.message, *_results(first))
    shown = setting.codec.decode(second.suffix)
    if "kiwi 0" not in shown or "kiwi 1" not in shown:
        raise Deviation(Verdict.MISREAD, "the next prompt does not show both results")


def _turn_cut_off(setting: Setting) -> None:
    conversation = setting.conversation()
    first = conversation.call(START, "I will do th", finish=FinishReason.LENGTH, tools=_tools(setting))
    second = _go_on(conversation, first, first.sampled.message, MORE)
    if second.suffix.size == 0 or second.suffix[0] not in setting.codec.turn_end_ids:
        raise Deviation(Verdict.MISREAD, "the turn that was cut off is not closed in the next prompt")


def _reasoning_cut_off(setting: Setting) -> None:
    conversation = setting.conversation()
    cut = setting.speech.thought(THOUGHT, "").rstrip()[:-12]
    first = conversation.call(START, cut, finish=FinishReason.LENGTH, tools=_tools(setting))
    _go_on(conversation, first, first.sampled.message, MORE)


def _call_cut_off(setting: Setting) -> None:
    conversation = setting.conversation()
    cut = setting.speech.calls('{"command": "ls -l"}', whole=False)
    first = conversation.call(START, cut, finish=FinishReason.LENGTH)
    if first.sampled.message.tool_calls:
        raise Deviation(Verdict.MISREAD, "a call that was cut off was read as a call")
    _go_on(conversation, first, first.sampled.message, MORE)


def _reply_in_pieces(setting: Setting) -> None:
    conversation, first = _called(setting)
    pieces = [Message(Role.ASSISTANT, (part,)) for part in first.sampled.message.parts]
    _go_on(conversation, first, *pieces, *_results(first))


def _reasoning_inlined(setting: Setting) -> None:
    conversation, first = _begun(setting, setting.speech.thought(THOUGHT, setting.speech.text(TEXT)))
    inline = setting.speech.inline(THOUGHT, first.sampled.message.text)
    _go_on(conversation, first, Message.assistant(inline), MORE)


def _many_turns(setting: Setting) -> None:
    speech = setting.speech
    turns = [speech.text(TEXT), "cut"]
    if speech.thinks:
        turns.insert(0, speech.thought(THOUGHT, speech.text(TEXT)))
    if speech.calls_tools:
        turns.insert(0, speech.calls(ARGUMENTS))
        turns.append(speech.calls('{ "command":"a"}', '{ "command":"b"}'))
    conversation = setting.conversation()
    messages: list[Message] = list(START)
    before: CallNode | None = None
    for completion in turns * 3:
        finish = FinishReason.LENGTH if completion == "cut" else None
        node = conversation.call(messages, completion, finish=finish, tools=_tools(setting))
        if before is not None:
            _must_continue(conversation, node, before)
        before = node
        messages += [_without_reasoning(node.sampled.message), *(_results(node) or [MORE])]
    if len(conversation.graph.branches()) != 1:
        raise Deviation(Verdict.BRANCH, "the conversation is not one line")


def _history_compacted(setting: Setting) -> None:
    speech, tools = setting.speech, _tools(setting)
    conversation, first = _begun(setting, speech.text(TEXT))
    second = conversation.call([*START, first.sampled.message, MORE], speech.text(TEXT), tools=tools)
    summary = [START[0], Message.user("So far: the note was read. Go on.")]
    _must_be_labelled(conversation, conversation.call(summary, speech.text(TEXT), tools=tools), second)


def _history_edited(setting: Setting) -> None:
    conversation, first = _begun(setting, setting.speech.text(TEXT))
    forged = [*START, Message.assistant("I never said that."), MORE]
    second = conversation.call(forged, setting.speech.text(TEXT), tools=_tools(setting))
    _must_be_labelled(conversation, second, first)


CASES: Final[Sequence[Case]] = (
    Case("text_echo", "text comes back unchanged", _text_echo, main=True),
    Case("call_echo", "a tool call comes back unchanged", _call_echo, main=True, needs_tools=True),
    Case("arguments", "its arguments are formatted differently", _arguments_rewritten, main=True, needs_tools=True),
    Case("reasoning_echoed", "reasoning comes back", _reasoning_echoed, main=True, needs_reasoning=True),
    Case("reasoning_dropped", "reasoning is dropped", _reasoning_dropped, main=True, needs_reasoning=True),
    Case("text_trimmed", "text is trimmed", _text_trimmed, main=True),
    Case("side", "another conversation in between", _side_conversation, main=True),
    Case("as_written", "a call as the template writes it", _call_as_written, needs_tools=True),
    Case("several_results", "several calls and results in a turn", _several_results, needs_tools=True),
    Case("instructions", "instructions in the middle", _late_instructions),
    Case("turn_cut", "a turn was cut off", _turn_cut_off),
    Case("reasoning_cut", "a turn was cut off while thinking", _reasoning_cut_off, needs_reasoning=True),
    Case("call_cut", "a tool call was cut off", _call_cut_off, needs_tools=True),
    Case("pieces", "a reply comes back in several messages", _reply_in_pieces, needs_tools=True),
    Case("inline", "reasoning comes back inside the text", _reasoning_inlined, needs_reasoning=True),
    Case("many_turns", "many turns of every kind", _many_turns),
    Case("compacted", "history was compacted", _history_compacted, expects=Verdict.LABELLED),
    Case("edited", "history was edited", _history_edited, expects=Verdict.LABELLED),
)
"""All cases, the seven first."""


def _begun(setting: Setting, completion: str) -> tuple[ScriptedConversation, CallNode]:
    conversation = setting.conversation()
    return conversation, conversation.call(START, completion, tools=_tools(setting))


def _called(setting: Setting) -> tuple[ScriptedConversation, CallNode]:
    conversation, first = _begun(setting, setting.speech.calls(ARGUMENTS, text="Reading."))
    calls = first.sampled.message.tool_calls
    if [call.name for call in calls] != ["bash"] or "cat  " not in calls[0].arguments_json:
        raise Deviation(Verdict.MISREAD, f"a tool call was not recognised; the parser is {setting.codec.parser!r}")
    return conversation, first


def _thoughts(setting: Setting) -> list[tuple[ScriptedConversation, CallNode]]:
    speech = setting.speech
    rests = [speech.text(TEXT)] + ([speech.calls(ARGUMENTS)] if speech.calls_tools else [])
    found = []
    for rest in rests:
        conversation, first = _begun(setting, speech.thought(THOUGHT, rest))
        if first.sampled.message.reasoning != THOUGHT:
            raise Deviation(Verdict.MISREAD, f"reasoning was not recognised; the parser is {setting.codec.parser!r}")
        found.append((conversation, first))
    return found


def _tools(setting: Setting) -> Sequence[Tool]:
    return (BASH,) if setting.speech.calls_tools else ()


def _go_on(conversation: ScriptedConversation, first: CallNode, *new: Message) -> CallNode:
    """Sends the conversation back as the client does, and checks that it is exact."""
    tools = (BASH,) if first.key.has_tools else ()
    second = conversation.call([*START, *new], Speech(conversation.codec).text(TEXT), tools=tools)
    _must_continue(conversation, second, first)
    return second


def _must_continue(conversation: ScriptedConversation, later: CallNode, earlier: CallNode) -> None:
    if not conversation.continues(later, earlier):
        raise Deviation(Verdict.BRANCH, conversation.plans[later.call_id].reason)


def _must_be_labelled(conversation: ScriptedConversation, later: CallNode, earlier: CallNode) -> None:
    branches = conversation.graph.branches()
    if conversation.continues(later, earlier) or len(branches) < 2 or not branches[-1].reason:
        raise Deviation(Verdict.MISREAD, "a changed history was mistaken for the sampled one")


def _must_read(node: CallNode, *, text: str) -> None:
    read = node.sampled.message
    if read.text != text or read.tool_calls or read.reasoning:
        raise Deviation(Verdict.MISREAD, f"plain text was read as {read.text!r}")


def _results(node: CallNode) -> list[Message]:
    return [Message.tool(call.id, f"kiwi {i}") for i, call in enumerate(node.sampled.message.tool_calls)]


def _reserialised(message: Message, arguments: str) -> Message:
    parts = [
        ToolCallPart(part.id, part.name, arguments) if isinstance(part, ToolCallPart) else part
        for part in message.parts
    ]
    return Message(message.role, tuple(parts))


def _without_reasoning(message: Message) -> Message:
    return Message(message.role, tuple(part for part in message.parts if not isinstance(part, ReasoningPart)))


def _with_text(message: Message, change: Callable[[str], str]) -> Message:
    parts = [TextPart(change(part.text)) if isinstance(part, TextPart) else part for part in message.parts]
    return Message(message.role, tuple(parts))
