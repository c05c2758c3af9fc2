"""Completion ids to messages: exact about calls, never guessing, never raising, the same in pieces as at once."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.codec import piecewise

from penstock_codec import Codec, CodecError, ParsedCompletion, TokenizerFiles, tiny_tokenizer
from penstock_codec.chat import FinishReason, Message, ReasoningPart, TextPart, ToolCallPart
from penstock_codec.parsers import TextDelta
from penstock_codec.tool_json import (
    MAX_CALL_CHARS,
    MAX_DEPTH,
    CallText,
    Malformed,
    StringTracker,
    depths,
    parse_call,
    parse_calls,
    parse_value,
    read_arguments,
)

GOOD = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
END = "<|im_end|>"


def parse(codec: Codec, text: str, *, finish_reason: FinishReason | None = None) -> ParsedCompletion:
    """Parse `text` as sampled one byte a token; tool calls are numbered."""
    numbers = iter(range(10_000))
    return codec.parse(
        tiny_tokenizer.bytewise(text), finish_reason=finish_reason, call_id=lambda: f"call_{next(numbers)}"
    )


@pytest.mark.requirement("R82")
def test_text_stays_exactly_as_sampled(codec: Codec) -> None:
    """Nothing is trimmed from a plain answer; the stop token is no text."""
    parsed = parse(codec, " Hé €\n\n" + END)
    assert parsed == ParsedCompletion(Message.assistant(" Hé €\n\n"), FinishReason.STOP)


@pytest.mark.requirement("R82")
def test_a_tool_call_keeps_its_arguments_as_sampled(codec: Codec) -> None:
    """Spacing, key order and escapes of the arguments are the model's."""
    arguments = '{ "z":1.0 ,"a" :"\\u00e9<é>", "n": null}'
    parsed = parse(codec, f'Look:\n<tool_call>{{"arguments": {arguments}  , "name":"bash"}}</tool_call>{END}')
    assert parsed.message == Message.assistant("Look:", ToolCallPart("call_0", "bash", arguments))
    assert parsed.finish_reason is FinishReason.TOOL_CALLS
    assert parsed.malformed == ()


@pytest.mark.requirement("R82")
def test_reasoning_text_and_several_calls_come_apart(codec: Codec) -> None:
    """Parts stand in the order sampled, without the white space of the markup."""
    parsed = parse(codec, f"<think>\na\n\nb\n</think>\n\nText \n\n{GOOD}\n{GOOD}\n{END}")
    call = ToolCallPart("call_0", "bash", '{"command":  "ls"}')
    assert parsed.message.parts == (ReasoningPart("a\n\nb"), TextPart("Text"), call, replace(call, id="call_1"))


@pytest.mark.requirement("R80")
def test_markup_inside_an_argument_is_what_the_model_talks_about(codec: Codec) -> None:
    """Tags in a JSON string neither end nor start a call."""
    arguments = '{"command": "echo \\"</tool_call><tool_call><think>\\" "}'
    parsed = parse(codec, f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>{END}')
    assert parsed.message.tool_calls[0].arguments_json == arguments


@pytest.mark.requirement("R80", "R81")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "EMPTY"),
        ("bash ls", "NOT_JSON"),
        ("bash(command='ls')", "NOT_JSON"),
        ('```json\n{"name": "bash", "arguments": {}}\n```', "NOT_JSON"),
        ('{"name": bash, "arguments": {}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {command: "ls"}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {"n": NaN}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {}} trailing', "NOT_JSON"),
        ('{"name": "bash", "arguments": {},}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {}', "NOT_JSON"),
        ('{"name": "bash", "arguments": "ls"}', "NOT_A_CALL"),
        ('{"name": "bash", "arguments": ["ls"]}', "NOT_A_CALL"),
        ('{"name": "bash", "arguments": null}', "NOT_A_CALL"),
        ('{"name": "bash", "parameters": {}}', "NOT_A_CALL"),
        ('{"name": "bash", "arguments": {}, "parameters": {}}', "NOT_A_CALL"),
        ('{"name": "bash", "name": "sh", "arguments": {}}', "NOT_A_CALL"),
        ('{"name": 3, "arguments": {}}', "NOT_A_CALL"),
        ('{"name": " ", "arguments": {}}', "NOT_A_CALL"),
        ('{"name": "bash"}', "NOT_A_CALL"),
        ('{"name": "\\ud800", "arguments": {}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {"command": "\\ud83d"}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {"command": "\\uD83D\\uD83D\\uDE00"}}', "NOT_JSON"),
        ('{"name": "bash", "arguments": {"\\\\\\ude00": 1}}', "NOT_JSON"),
        ('["bash", {}]', "NOT_A_CALL"),
        ("{}", "NOT_A_CALL"),
        ("42", "NOT_A_CALL"),
        ('{"name": "b", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}", "TOO_DEEP"),
        ("[" * 100_000, "TOO_DEEP"),
    ],
    ids=lambda value: value[:48],
)
def test_invalid_call_stays_text_with_a_flag(codec: Codec, body: str, reason: str) -> None:
    """Nothing is repaired or guessed; no identifier becomes a string."""
    text = f"Well.\n<tool_call>{body}</tool_call>"
    parsed = parse(codec, text + END)
    assert parsed.message == Message.assistant(text)
    assert [(item.text, item.reason) for item in parsed.malformed] == [(f"<tool_call>{body}</tool_call>", reason)]
    assert parsed.finish_reason is FinishReason.STOP


@pytest.mark.requirement("R80", "R82")
@pytest.mark.parametrize("text", ['"\\ud83d\\ude00"', '"\\uD83D\\uDE00 \\u00e9"', '"\\\\ud83d"', '"\\\\\\\\ud83d"'])
def test_whole_surrogate_pairs_and_escaped_backslashes_are_text(text: str) -> None:
    """Only half of a pair is none."""
    arguments = f'{{"a": {text}}}'
    assert parse_call(f'{{"name": "b", "arguments": {arguments}}}') == CallText("b", arguments)
    assert read_arguments(arguments) == arguments


@pytest.mark.requirement("R80", "R81")
@pytest.mark.parametrize(
    "text", ['{"a": "\\ud83d"}', '{"a": ["\\\\\\ud83d"]}', '{"a": "\\ude00\\ud83d"}', '{"\\udE00x": 1}']
)
def test_half_a_surrogate_pair_makes_no_arguments(text: str) -> None:
    """Agents send calls back, and no strict reader of JSON, no message and no journal takes the half."""
    assert read_arguments(text) == Malformed("NOT_JSON")
    assert parse_calls(f'{{"name": "b", "parameters": {text}}}', arguments="parameters") == Malformed("NOT_JSON")
    assert parse_value(text) is None


@pytest.mark.requirement("R80")
def test_a_call_that_is_too_large_is_text(codec: Codec) -> None:
    """Bounded in size."""
    body = '{"name": "b", "arguments": {"a": "' + "x" * MAX_CALL_CHARS + '"}}'
    assert parse_call(body) == Malformed("TOO_LARGE")


@pytest.mark.requirement("R80")
def test_a_call_at_the_depth_limit_is_a_call() -> None:
    """The limit is where it says."""
    inner = '{"a":' * (MAX_DEPTH - 1) + "1" + "}" * (MAX_DEPTH - 1)
    assert parse_call('{"name": "b", "arguments": ' + inner + "}") == CallText("b", inner)
    assert parse_call('{"name": "b", "arguments": {"a":' + inner + "}}") == Malformed("TOO_DEEP")


@pytest.mark.requirement("R80")
def test_too_many_calls_end_as_text(codec: Codec) -> None:
    """Bounded in number."""
    parsed = parse(codec, GOOD * 130)
    assert len(parsed.message.tool_calls) == 128
    assert [item.reason for item in parsed.malformed] == ["TOO_MANY", "TOO_MANY"]


@pytest.mark.requirement("R80")
def test_truncated_call_is_text_and_the_one_before_it_a_call(codec: Codec) -> None:
    """An unclosed call is flagged; what came whole stays."""
    parsed = parse(codec, f'{GOOD}\n<tool_call>\n{{"name": "ba \n', finish_reason=FinishReason.LENGTH)
    assert len(parsed.message.tool_calls) == 1
    assert [(item.text, item.reason) for item in parsed.malformed] == [('<tool_call>\n{"name": "ba', "UNCLOSED")]
    assert parsed.message.text == '<tool_call>\n{"name": "ba \n'
    assert parsed.finish_reason is FinishReason.LENGTH


@pytest.mark.requirement("R80")
def test_reasoning_that_never_ends_is_reasoning(codec: Codec) -> None:
    """A stop inside thinking leaves no text, and no call."""
    parsed = parse(codec, f"<think>\nhm {GOOD}{END}")
    assert parsed.message == Message.assistant(reasoning=f"hm {GOOD}")
    assert parsed.finish_reason is FinishReason.STOP


@pytest.mark.requirement("R82")
def test_a_prompt_that_opened_the_reasoning_is_heeded(codec: Codec) -> None:
    """Templates that end in <think> make the completion start inside it."""
    prompt = codec.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n")
    ids = tiny_tokenizer.bytewise("so\n</think>\n\nyes<|im_end|>")
    assert codec.parse(ids, prompt_ids=prompt).message == Message.assistant("yes", reasoning="so")
    closed = codec.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert codec.parse(tiny_tokenizer.bytewise("yes"), prompt_ids=closed).message == Message.assistant("yes")
    quoted = codec.encode("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n")
    assert codec.parse(tiny_tokenizer.bytewise("yes"), prompt_ids=quoted).message == Message.assistant("yes")


@pytest.mark.requirement("R81")
def test_text_that_only_spells_the_markup_is_text(codec: Codec) -> None:
    """Where a vocabulary has the markup as tokens, only those tokens are markup."""
    ids = [index for char in GOOD for index in tiny_tokenizer.bytewise(char)]
    assert codec.parse(ids).message == Message.assistant(GOOD)


@pytest.mark.requirement("R80")
def test_markup_is_found_by_text_without_a_vocabulary_token(files: TokenizerFiles) -> None:
    """Split over tokens in any way, it is still found; what merely resembles it is text."""
    content = json.loads(files.tokenizer_json)
    markup = set(tiny_tokenizer.MARKUP_TOKENS)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in markup]
    for token in markup:
        content["model"]["vocab"][token.upper()] = content["model"]["vocab"].pop(token)
    codec = Codec.load(replace(files, tokenizer_json=json.dumps(content).encode()))
    text = f"<think>\na < b <thin>\n</think>\n\nx <tool {GOOD}"
    spelled = [index for char in text for index in tiny_tokenizer.bytewise(char)]
    parser = codec.stream_parser(call_id=lambda: "c")
    for index in spelled:
        parser.feed([index])
    _, parsed = parser.finish()
    call = ToolCallPart("c", "bash", '{"command":  "ls"}')
    assert parsed.message == Message.assistant("x <tool", call, reasoning="a < b <thin>")
    spelled = [index for char in "<think>\n" for index in tiny_tokenizer.bytewise(char)]
    opened = [*tiny_tokenizer.bytewise("<|im_end|>\n<|im_start|>assistant\n"), *spelled]
    assert codec.parse(tiny_tokenizer.bytewise("so"), prompt_ids=opened).message == Message.assistant(reasoning="so")
    assert codec.parse(tiny_tokenizer.bytewise("so"), prompt_ids=opened[:-9]).message == Message.assistant("so")


@pytest.mark.requirement("R87")
def test_a_completion_without_stop_token_or_reason_was_cut_off(codec: Codec) -> None:
    """The finish reason is what the tokens say."""
    assert parse(codec, "abc").finish_reason is FinishReason.LENGTH
    assert parse(codec, "abc" + END).finish_reason is FinishReason.STOP
    assert parse(codec, "", finish_reason=FinishReason.ABORT) == ParsedCompletion(
        Message.assistant(), FinishReason.ABORT
    )


@pytest.mark.requirement("R30")
def test_a_character_that_spans_tokens_appears_once_it_is_whole(codec: Codec) -> None:
    """A stream never carries half a character."""
    parser = codec.stream_parser()
    shown = [parser.feed([index]) for index in tiny_tokenizer.bytewise("€😀")]
    assert [delta for deltas in shown for delta in deltas] == [TextDelta("€"), TextDelta("😀")]
    assert parser.finish()[1].message == Message.assistant("€😀")


@pytest.mark.requirement("R80")
def test_bytes_that_are_no_text_become_replacement_characters(codec: Codec) -> None:
    """Any bytes may be sampled."""
    ids = tiny_tokenizer.bytewise("a€")[:-1]
    assert codec.parse(ids).message == Message.assistant("a\ufffd")


@pytest.mark.requirement("R25")
def test_every_call_gets_an_id_of_its_own(codec: Codec) -> None:
    """128 random bits."""
    calls = codec.parse(tiny_tokenizer.bytewise(GOOD * 50)).message.tool_calls
    assert len({call.id for call in calls}) == 50


@pytest.mark.requirement("R80", "R83")
def test_ids_outside_the_vocabulary_are_refused_by_decode_and_skipped_by_parse(codec: Codec) -> None:
    """The parser never raises; decoding says which ids there are."""
    with pytest.raises(CodecError) as caught:
        codec.decode([10**6])
    assert caught.value.reason == "TOKEN_ID_INVALID"
    assert codec.parse([-1, 10**6, *tiny_tokenizer.bytewise("a")]).message == Message.assistant("a")


PIECES = st.sampled_from(
    [*tiny_tokenizer.SPECIAL_TOKENS, GOOD, '{"name": "b"', '"', "\\", "{", "}", "\n", " ", "é€😀", "text"]
)
COMPLETIONS = st.one_of(
    st.lists(PIECES, max_size=24).map(lambda pieces: tiny_tokenizer.bytewise("".join(pieces))),
    st.lists(st.integers(0, 300), max_size=64),
    st.lists(st.integers(-5, 2**31 - 1), max_size=8),
)


@pytest.mark.requirement("R80")
@settings(max_examples=300, deadline=None)
@given(ids=COMPLETIONS, data=st.data())
def test_any_ids_parse_and_the_pieces_add_up_to_the_whole(codec: Codec, ids: list[int], data: st.DataObject) -> None:
    """No ids make the parser raise, and a stream says what the whole says, however it was cut."""
    piecewise.check(codec, ids, data)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.requirement("R82")
@given(
    name=st.text(min_size=1, max_size=20),
    arguments=st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    indent=st.sampled_from([None, 1]),
)
def test_every_json_object_is_read_back_as_it_was_written(
    name: str, arguments: dict[str, object], indent: int | None
) -> None:
    """The arguments are a slice of what was sampled, for any JSON at all."""
    text = json.dumps(arguments, ensure_ascii=False, indent=indent)
    parsed = parse_call(f'{{ "name" : {json.dumps(name)},\n"arguments": {text} }}')
    assert parsed == (CallText(name, text) if name.strip() else Malformed("NOT_A_CALL"))


def followed(text: str) -> tuple[bool, int, int]:
    """JSON text read one character after the other: is its end inside a string, how deep is that, and how deep at most.

    What the parser finds with a few searches.
    """
    inside = escaped = False
    depth = deepest = 0
    for char in text:
        if inside:
            inside = escaped or char != '"'
            escaped = not escaped and char == "\\"
        elif char == '"':
            inside = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return inside, depth, deepest


@pytest.mark.requirement("R80")
@given(
    text=st.text(alphabet='a"\\{}[]\n', max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    asked=st.booleans(),
)
def test_json_is_followed_in_pieces_as_it_is_whole(text: str, cuts: list[int], asked: bool) -> None:
    """An escape or a string may be cut anywhere, and it may be asked for at any time."""
    strings = StringTracker()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(edges):
        strings.feed(text[start:end])
        if asked:
            assert strings.in_string == followed(text[:end])[0]
    assert (strings.in_string, *depths(text)) == followed(text)


@pytest.mark.requirement("R80")
def test_text_that_means_to_take_long_is_followed_in_one_pass() -> None:
    """A model, or who speaks through it, may write a million escaped quotes in a string that it never closes."""
    text = '{"a": "' + '\\"' * 500_000
    strings = StringTracker()
    strings.feed(text)
    assert strings.in_string
    assert depths(text) == (1, 1)


@pytest.mark.requirement("R80")
@given(text=st.text(max_size=80))
def test_any_text_is_a_call_or_malformed(text: str) -> None:
    """The reader of calls never raises."""
    assert isinstance(parse_call(text), (CallText, Malformed))


PIECES = st.sampled_from(
    [
        *('{"name": ', '"arguments": ', '"id": "x"', '"name": "c"', '"b"', '""', '" "', '"\\u0041"', "[]", "1"),
        *("{}", '{"a": 1}', '{"a": {"b": "}"}}', '{"a": NaN}', '{"a": "\t"}', "NaN", "9" * 5000),
        *(", ", ",", "}", "} ", "}\n}", "\xa0"),
    ]
)


@pytest.mark.requirement("R82")
@given(st.lists(PIECES, max_size=8).map("".join))
def test_the_usual_call_is_read_as_any_other(text: str) -> None:
    """The short way to a call's name and arguments finds what the long one finds, and nothing else."""
    for body in (text, f'{{"name": "b", "arguments": {text}}}', f' {{ "name":"b" ,"arguments":{{}}{text}}}\n'):
        read = parse_calls(body)
        assert parse_call(body) == (read if isinstance(read, Malformed) else read[0])
