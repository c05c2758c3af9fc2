"""Completions of each family of models: read exactly, never guessed, the same in pieces as at once."""

# ruff: noqa: RUF001  (DeepSeek's tokens hold such characters)
from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import families
from tests.unit.codec import piecewise

from penstock_codec import Codec, CodecError, ParsedCompletion, TokenizerFiles, cache, tiny_tokenizer
from penstock_codec.chat import FinishReason, Message, ReasoningPart, Tool, ToolCallPart
from penstock_codec.parsers import GRAMMARS, ReasoningDelta, TextDelta, ToolCallDelta, choose_grammar
from penstock_interception.conformance.sampled_text import Speech

SCHEMA = {
    "command": {"type": "string"},
    "n": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "x": {"type": "array"},
    "o": {"type": "object"},
    "free": {},
}
TOOLS = [Tool("bash", "Run.", json.dumps({"type": "object", "properties": SCHEMA}))]
NAMES = ("chatml", "llama3", "llama3_bare", "mistral", "qwen3_coder", "kimi", "deepseek", "glm", "harmony", "granite")
SEP = "<｜tool▁sep｜>"


@functools.cache
def codec_of(name: str) -> Codec:
    """Of a family's tokenizer; made when a test asks, not when tests are collected."""
    return Codec.load(families.build(name))


def parse(name: str, text: str, *, finish_reason: FinishReason | None = None) -> ParsedCompletion:
    """`text` as sampled one byte a token; calls without an id are numbered."""
    numbers = iter(range(10_000))
    codec = codec_of(name)
    return codec.parse(
        codec.bytewise(text), tools=TOOLS, finish_reason=finish_reason, call_id=lambda: f"call_{next(numbers)}"
    )


def bash(arguments: str, call_id: str = "call_0") -> ToolCallPart:
    """A call of the one tool."""
    return ToolCallPart(call_id, "bash", arguments)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("llama3_bare", '{"name": "bash", "parameters": {"n" : 1.0}}', Message.assistant("", bash('{"n" : 1.0}'))),
        ("llama3_bare", '\n\n{"parameters":{} ,"name":"bash"}\n', Message.assistant("", bash("{}"))),
        ("llama3_bare", '{"type": "function", "name": "bash", "parameters": {}}', Message.assistant("", bash("{}"))),
        (
            "llama3_bare",
            '{"name": "bash", "parameters": {}}; {"name": "bash", "parameters": {"n": 2}}',
            Message.assistant("", bash("{}"), bash('{"n": 2}', "call_1")),
        ),
        (
            "llama3",
            'Look. <|python_tag|>{"name": "bash", "parameters": {"command": "<|python_tag|>"}}',
            Message.assistant("Look.", bash('{"command": "<|python_tag|>"}')),
        ),
        (
            "llama3_bare",
            '<think>\nhm\n</think>\n\n{"name": "bash", "parameters": {}}',
            Message.assistant("", bash("{}"), reasoning="hm"),
        ),
        (
            "mistral",
            'Look.[TOOL_CALLS]bash[ARGS]{"command": "a [ARGS] b"}[TOOL_CALLS]bash[ARGS]{"n":2 }',
            Message.assistant("Look.", bash('{"command": "a [ARGS] b"}'), bash('{"n":2 }', "call_1")),
        ),
        ("mistral", '[TOOL_CALLS]bash{"n": 1}', Message.assistant("", bash('{"n": 1}'))),
        (
            "mistral",
            '[TOOL_CALLS]bash[CALL_ID]aB3dE6gH9[ARGS]{"n": 1}',
            Message.assistant("", bash('{"n": 1}', "aB3dE6gH9")),
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "bash", "arguments": {"n": 1}, "id": "aB3dE6gH9"}, {"name":"bash","arguments":{}}]',
            Message.assistant("", bash('{"n": 1}', "aB3dE6gH9"), bash("{}")),
        ),
        ("mistral", "[THINK]hm[/THINK]Yes.", Message.assistant("Yes.", reasoning="hm")),
        (
            "qwen3_coder",
            "Look.\n<tool_call>\n<function=bash>\n<parameter=command>\necho '</parameter>'\n\n</parameter>\n"
            "<parameter=n>\n30\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>",
            Message.assistant("Look.", bash('{"command": "echo \'</parameter>\'\\n", "n": 30, "on": true}')),
        ),
        ("qwen3_coder", "<tool_call>\n<function=bash>\n</function>\n</tool_call>", Message.assistant("", bash("{}"))),
        (
            "glm",
            "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>30</arg_value>\n"
            "<arg_key>x</arg_key>\n<arg_value>[1e2]</arg_value>\n</tool_call>",
            Message.assistant("", bash('{"command": "30", "x": [1e2]}')),
        ),
        ("glm", "<tool_call>bash</tool_call>", Message.assistant("", bash("{}"))),
        (
            "deepseek",
            f"Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash{SEP}{{}}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>function{SEP}bash\n```json\n{{ }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            Message.assistant("Look.", bash("{}"), bash("{ }", "call_1")),
        ),
        (
            "kimi",
            "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            Message.assistant("Look.", bash("{}", "functions.bash:0")),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
            '{"n" : 1.0, "command": "<|call|"}<|call|>',
            Message.assistant("Look.", bash('{"n" : 1.0, "command": "<|call|"}'), reasoning="hm"),
        ),
        (
            "harmony",
            " to=functions.bash<|channel|>analysis json<|message|>{}<|call|>",
            Message.assistant("", bash("{}")),
        ),
        ("harmony", "<|channel|>final<|message|> Yes. \n<|return|>", Message.assistant(" Yes. \n")),
        ("harmony", "<|message|>Yes.<|return|>", Message.assistant("Yes.")),
        ("harmony", "Yes.", Message.assistant("Yes.")),
        (
            "granite",
            'Look.<|tool_call|>[{"name": "bash", "arguments": {"n" : 1}}, {"name":"bash","arguments":{}}]',
            Message.assistant("Look.", bash('{"n" : 1}'), bash("{}", "call_1")),
        ),
    ],
)
def test_calls_are_read_as_each_family_writes_them(name: str, text: str, message: Message) -> None:
    """Names, arguments and the ids that a model wrote are what it sampled; the markup's white space is not."""
    parsed = parse(name, text, finish_reason=FinishReason.STOP)
    assert parsed == ParsedCompletion(message, FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP)


@pytest.mark.requirement("R80", "R81")
@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("llama3", '<|python_tag|>brave_search.call(query="x")', "NOT_JSON"),
        ("llama3", "<|python_tag|>", "EMPTY"),
        ("llama3", '<|python_tag|>{"name": "bash", "arguments": {}}', "NOT_A_CALL"),
        ("llama3", '<|python_tag|>{"name": "bash", "parameters": {}, "arguments": {}}', "NOT_A_CALL"),
        ("llama3", '<|python_tag|>{"name": "bash", "parameters": {"command": "l', "UNCLOSED"),
        ("llama3", '<|python_tag|>{"name": "bash", "parameters": {}} so', "NOT_JSON"),
        ("mistral", "[TOOL_CALLS]bash", "NOT_A_CALL"),
        ("mistral", "[TOOL_CALLS]bash[ARGS][1]", "NOT_A_CALL"),
        ("mistral", "[TOOL_CALLS]", "EMPTY"),
        ("mistral", '[TOOL_CALLS] [{"name": "bash", "arguments": {}}, {"name": "bash"}]', "NOT_A_CALL"),
        ("mistral", '[TOOL_CALLS] [{"name": "bash", "arguments": {}}', "UNCLOSED"),
        ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "ls', "UNCLOSED"),
        ("mistral", '[TOOL_CALLS] [{"name": "bash", "arguments": {}, "id": "\\udfff"}]', "NOT_JSON"),
        ("mistral", f'[TOOL_CALLS] [{{"name": "bash", "arguments": {{}}, "id": "{"a" * 257}"}}]', "NOT_A_CALL"),
        ("qwen3_coder", "<tool_call>\n<function=bash>\n<parameter=n>\n1\n</function>\n</tool_call>", "NOT_A_CALL"),
        ("qwen3_coder", '<tool_call>{"name": "bash", "arguments": {}}</tool_call>', "NOT_A_CALL"),
        ("qwen3_coder", "<tool_call>\n<function=bash>\n</function>\nmore</tool_call>", "NOT_A_CALL"),
        ("qwen3_coder", "<tool_call>\n<function=bash>\n", "UNCLOSED"),
        (
            "qwen3_coder",
            "<tool_call><function=bash>" + "<parameter=n>1</parameter>" * 2 + "</function></tool_call>",
            "NOT_A_CALL",
        ),
        ("glm", "<tool_call>bash\n<arg_key>n</arg_key></tool_call>", "NOT_A_CALL"),
        ("deepseek", "<｜tool▁call▁begin｜>bash {}<｜tool▁call▁end｜>", "NOT_A_CALL"),
        ("deepseek", f"<｜tool▁call▁begin｜>bash{SEP}{{<｜tool▁call▁end｜>", "NOT_JSON"),
        ("kimi", "<|tool_call_begin|>bash<|tool_call_argument_begin|>{}<|tool_call_end|>", "NOT_A_CALL"),
        ("kimi", f"<|tool_call_begin|>b:{'1' * 257}<|tool_call_argument_begin|>{{}}<|tool_call_end|>", "NOT_A_CALL"),
        ("harmony", '<|channel|>commentary to=functions.bash<|message|>{"a": 1<|call|>', "NOT_JSON"),
        ("harmony", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", "NOT_A_CALL"),
        ("harmony", " to=functions.<|channel|>commentary<|message|>{}<|call|>", "NOT_A_CALL"),
        ("harmony", "<|channel|>commentary to=functions.bash<|message|>{}<|end|>", "UNCLOSED"),
        ("harmony", '<|channel|>commentary to=functions.bash<|message|>{"command": "l', "UNCLOSED"),
        ("granite", '<|tool_call|>[{"name": "bash", "arguments": {}}', "UNCLOSED"),
        ("granite", "<|tool_call|>bash", "NOT_JSON"),
        ("kimi", "<|tool_call_begin|>" + "{" * 3000 + "<|tool_call_end|>", "NOT_A_CALL"),
        ("kimi", '<|tool_call_begin|>b:0<|tool_call_argument_begin|>{"a":' * 1 + '{"a":' * 3000, "UNCLOSED"),
    ],
    ids=lambda value: value[:40],
)
def test_invalid_call_stays_text_with_a_flag(name: str, text: str, reason: str) -> None:
    """Nothing is repaired, whatever the family."""
    parsed = parse(name, text, finish_reason=FinishReason.STOP)
    assert parsed.message == Message.assistant(text)
    assert [(item.text, item.reason) for item in parsed.malformed] == [(text.rstrip(), reason)]


@pytest.mark.requirement("R81")
@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"name": "Bob", "age": 3}',
        '{"name": "bash", "parameters": {}} is what you asked for.',
        '{"name": "bash", "parameters": {"command": "l',
        "{",
        'Call: {"name": "bash", "parameters": {}}',
    ],
)
def test_json_that_is_no_call_is_an_answer(text: str) -> None:
    """A turn that starts with a brace and is no call is text, and no malformed call either."""
    assert parse("llama3_bare", text, finish_reason=FinishReason.STOP) == ParsedCompletion(
        Message.assistant(text), FinishReason.STOP
    )


@pytest.mark.requirement("R30")
def test_an_answer_in_json_is_streamed_once_it_cannot_be_a_call() -> None:
    """Only what may still become a call is held back."""
    codec = codec_of("llama3_bare")
    parser = codec.stream_parser()
    assert parser.feed(codec.bytewise('{"na').tolist()) == []
    assert parser.feed(codec.bytewise('tion": "x"').tolist()) == [TextDelta('{"nation": "x"')]


@pytest.mark.requirement("R81")
def test_value_of_another_type_is_passed_on_as_text() -> None:
    """The agent refuses it, and the model is told; nothing is made up, and text stays text."""
    values = {"n": "abc", "ratio": "None", "on": "maybe", "o": "{1}", "free": "30", "unknown": "true", "command": "30"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    parsed = parse("qwen3_coder", f"<tool_call>\n<function=bash>\n{body}</function>\n</tool_call>")
    assert json.loads(parsed.message.tool_calls[0].arguments_json) == {**values, "ratio": None}


@pytest.mark.requirement("R80")
def test_a_section_around_calls_shows_only_where_there_are_none() -> None:
    """Markup without a call is text, with one it is markup."""
    opening, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    assert parse("kimi", f"a {opening} b{closing}").message == Message.assistant(f"a {opening} b{closing}")
    call = "<|tool_call_begin|>functions.bash:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parsed = parse("kimi", f"a {opening}{call}\n{call}{closing}")
    assert parsed.message == Message.assistant("a", bash("{}", "functions.bash:3"), bash("{}"))


@pytest.mark.requirement("R81")
@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>secret<|message|>text",
        "<|start|>user<|message|>Do it.",
        "<|channel|>final and more of it<|message|>text",
        "<|channel|>analysis",
        "x" * 600 + "<|message|>",
    ],
)
def test_a_header_that_says_nothing_known_is_text(text: str) -> None:
    """A message in another's name, or in an unknown channel, is no answer, no thought and no call."""
    assert parse("harmony", text, finish_reason=FinishReason.STOP).message == Message.assistant(text)


@pytest.mark.requirement("R30")
def test_a_channel_is_streamed_as_soon_as_its_header_is_read() -> None:
    """Reasoning and answers arrive in pieces; only a header and a call are held back."""
    codec = codec_of("harmony")
    parser = codec.stream_parser(call_id=lambda: "c")
    assert parser.feed(codec.bytewise("<|channel|>ana").tolist()) == []
    assert parser.feed(codec.bytewise("lysis<|message|>hm").tolist()) == [ReasoningDelta("hm")]
    assert parser.feed(codec.bytewise("<|end|><|start|>assistant<|channel|>final<|message|>Y").tolist()) == [
        TextDelta("Y")
    ]
    assert parser.feed(codec.bytewise("es.<|end|><|start|>assistant to=functions.bash").tolist()) == [TextDelta("es.")]
    assert parser.feed(codec.bytewise("<|channel|>commentary<|message|>{}").tolist()) == []
    assert parser.feed(codec.bytewise("<|call|>").tolist()) == [ToolCallDelta(0, bash("{}", "c"))]


@pytest.mark.requirement("R82")
def test_control_tokens_of_one_family_are_no_text_in_another() -> None:
    """`<|end|>` is markup of gpt-oss; a model that has it for something else does not begin to show it."""
    family = tiny_tokenizer.Family(
        tiny_tokenizer.chat_template(), (*tiny_tokenizer.CONTROL_TOKENS, "<|end|>", "<|call|>")
    )
    codec = Codec.load(family.build(families.TEXTS))
    assert codec.parser == "hermes"
    assert codec.parse(codec.bytewise("a<|end|>b<|call|>")).message == Message.assistant("ab")


@pytest.mark.requirement("R25")
def test_ids_are_such_as_the_template_takes() -> None:
    """Nine letters and digits for Mistral; and an id from elsewhere is turned into such a one."""
    codec = codec_of("mistral")
    (call,) = codec.parse(codec.bytewise("[TOOL_CALLS]bash[ARGS]{}")).message.tool_calls
    assert len(call.id) == 9 and call.id.isalnum()
    moving = Codec.load(families.build("mistral_v3"))
    messages = [Message.user("q"), Message.assistant("", bash("{}", "toolu_" + "a" * 30)), Message.user("more")]
    messages.insert(2, Message.tool("toolu_" + "a" * 30, "r"))
    text = moving.render_text(messages)
    shown = text.split('"id": "')[1].split('"')[0]
    assert len(shown) == 9 and text.count(shown) == 2


@pytest.mark.requirement("R63", "R104")
@pytest.mark.parametrize(
    ("name", "parser"),
    [(name, name) for name in ("llama3", "mistral", "qwen3_coder", "kimi", "deepseek", "glm", "harmony")]
    + [
        ("chatml", "hermes"),
        ("qwen3", "hermes"),
        ("granite", "granite"),
        ("llama4", "llama3"),
        ("mistral_v3", "mistral"),
        ("strips_old_reasoning", "hermes"),
    ],
)
def test_template_identifies_the_family(name: str, parser: str) -> None:
    """Detected from what the template writes."""
    assert choose_grammar(None, families.template("qwen3" if name == "chatml" else name)).name == parser


@pytest.mark.requirement("R104")
@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ("{{ tools }}<tool_call>{'name': <function-name>, 'arguments': <args>}</tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=name><parameter=a></tool_call>arguments", "qwen3_coder"),
        ("{% for m in messages %}{{ m.tool_calls }}<｜tool▁call▁begin｜><think>{% endfor %}", "deepseek"),
        ("{{ messages[0]['tools'] }}<think>", "think"),
        ("{{ messages[0]['tools'] }}", "none"),
    ],
)
def test_text_beside_calls_in_published_templates_hides_no_parser(
    files: TokenizerFiles, text: str, parser: str
) -> None:
    """Qwen's and Granite's instructions, DeepSeek's calls without tools, Phi's tools inside of a message."""
    assert Codec.load(replace(files, chat_template=text)).parser == parser


@pytest.mark.requirement("R104")
def test_tools_that_a_template_reads_elsewhere_are_refused(files: TokenizerFiles) -> None:
    """A template that reads `message.tools` would drop a request's tools without a word."""
    codec = Codec.load(replace(files, chat_template="{% for m in messages %}{{ m.content }}{{ m.tools }}{% endfor %}"))
    with pytest.raises(CodecError) as caught:
        codec.render([Message.user("q")], TOOLS)
    assert caught.value.reason == "TEMPLATE_WITHOUT_TOOLS"


@pytest.mark.requirement("R63")
def test_a_template_of_two_kinds_asks_for_a_parser() -> None:
    """Never a silent choice."""
    both = families.template("mistral") + families.template("qwen3")
    with pytest.raises(CodecError, match=r"several kinds \(hermes, mistral\)") as caught:
        choose_grammar(None, both)
    assert caught.value.reason == "PARSER_UNDETECTED"


@pytest.mark.requirement("R80")
def test_very_long_nonsense_is_read_in_linear_work() -> None:
    """Whatever is repeated, openings, braces or half tags, it ends."""
    for name, codec in ((name, codec_of(name)) for name in NAMES):
        for mark in [*codec.markup, "{", '"', "<parameter=a>", "</parameter>\n", "; ", "\n"]:
            text = mark * (50_000 // len(mark))
            parsed = codec.parse(codec.bytewise(text), finish_reason=FinishReason.LENGTH)
            assert parsed.finish_reason is FinishReason.LENGTH, (name, mark)


@pytest.mark.requirement("R80", "R96")
@pytest.mark.parametrize("head", ["a" + " " * 480, "a" * 240 + " " * 240, "a to=" + "b" * 240 + " " * 240])
def test_many_headers_that_are_none_are_read_in_linear_work(head: str) -> None:
    """A header's fields are not tried at every place; half a second for each would stop the gate."""
    codec = codec_of("harmony")
    text = f"<|channel|>{head}!<|message|>" * 2000
    parsed = codec.parse(codec.bytewise(text), finish_reason=FinishReason.LENGTH)
    assert parsed.message.text == text.rstrip()


@pytest.mark.requirement("R80", "R96")
@pytest.mark.parametrize(
    ("name", "mark"), [("deepseek", "<｜tool▁calls▁begin｜>"), ("kimi", "<|tool_calls_section_begin|>")]
)
def test_sections_without_calls_are_read_in_linear_work(name: str, mark: str) -> None:
    """What may still turn out to be text is kept in pieces, not copied for each."""
    codec = codec_of(name)
    parsed = codec.parse(list(codec.bytewise(mark)) * 300_000, finish_reason=FinishReason.LENGTH)
    assert len(parsed.message.text) == len(mark) * 300_000


@pytest.mark.requirement("R96")
def test_a_schema_of_megabytes_is_not_kept() -> None:
    """An agent may send another one with each call."""
    codec = codec_of("qwen3_coder")
    kept = len(cache.ARGUMENT_TYPES)
    properties = {"n": {"type": "integer", "description": "x" * 100_000}}
    tools = [Tool("bash", "", json.dumps({"type": "object", "properties": properties}))]
    text = "<tool_call><function=bash><parameter=n>1</parameter></function></tool_call>"
    parsed = codec.parse(codec.bytewise(text), tools=tools)
    assert parsed.message.tool_calls[0].arguments_json == '{"n": 1}'
    assert len(cache.ARGUMENT_TYPES) == kept


def _pieces(codec: Codec) -> st.SearchStrategy[str]:
    written = [
        *codec.markup,
        '{"name": "b", "parameters": {}}',
        "b:0",
        '"',
        "\\",
        "{",
        "}",
        "[",
        "; ",
        "\n",
        " ",
        "é€😀",
    ]
    written += [Speech(codec).calls('{"command": "ls"}'), Speech(codec).calls('{"n": 1}', "{}"), SEP]
    written += ["<function=bash>", "</function>", "<parameter=n>", "</parameter>", "<tool_ca", "[TOOL", "text"]
    return st.sampled_from(written)


@pytest.mark.requirement("R80")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_parse_and_the_pieces_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    """No ids make the parser raise, and a stream says what the whole says, however it was cut."""
    codec = codec_of(name)
    text = "".join(data.draw(st.lists(_pieces(codec), max_size=12)))
    noise = data.draw(st.lists(st.integers(-2, codec.vocab_size + 2), max_size=8))
    ids = [*codec.bytewise(text).tolist(), *noise]
    piecewise.check(codec, ids, data, TOOLS)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>｜|[]"), max_size=20)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "command": WORDS,
        "n": st.integers(),
        "ratio": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        "on": st.booleans(),
        "x": st.lists(WORDS, max_size=3),
        "o": st.dictionaries(WORDS, st.integers(), max_size=3),
    },
)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(arguments=VALUES, thought=WORDS, indent=st.sampled_from([None, 1]))
def test_written_calls_of_each_family_are_read_back(
    name: str, arguments: dict[str, Any], thought: str, indent: int | None
) -> None:
    """Any arguments survive; where they are JSON, as the very text that was sampled."""
    codec, speech = codec_of(name), Speech(codec_of(name))
    text = json.dumps(arguments, ensure_ascii=False, indent=indent)
    written = speech.thought(thought, speech.calls(text))
    (*thoughts, call) = codec.parse(codec.bytewise(written), tools=TOOLS).message.parts
    assert isinstance(call, ToolCallPart)
    assert call.name == "bash"
    assert json.loads(call.arguments_json) == arguments
    if name not in ("qwen3_coder", "glm"):
        assert call.arguments_json == text
    assert all(isinstance(part, ReasoningPart) for part in thoughts)


@pytest.mark.requirement("R81", "R82")
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_an_answer_that_may_have_none_stay_text(name: str) -> None:
    """Its reasoning is still reasoning, and no character of the rest is lost."""
    codec, speech = codec_of(name), Speech(codec_of(name))
    written = speech.thought("hm", speech.calls('{"command": "ls"}', '{"command": "pwd"}'))
    parsed = codec.parse(codec.bytewise(written), tools=TOOLS, calls=False)
    assert (parsed.message.reasoning, parsed.message.tool_calls) == ("hm", ())
    # Harmony's header and end of a message stay, too: they say which tool it is for.
    ends = {codec.decode([index]) for index in codec.stop_token_ids if name != "harmony"}
    shown = written.partition("\n\n")[2]
    assert parsed.message.text.endswith(next((shown.removesuffix(end) for end in ends if shown.endswith(end)), shown))
    assert parsed.finish_reason is FinishReason.STOP


@pytest.mark.requirement("R82")
def test_every_family_with_calls_can_be_spoken() -> None:
    """The suite that users run knows how each parser's calls are written."""
    for name in GRAMMARS.keys() - {"think", "none"}:
        codec = next(codec for codec in map(codec_of, NAMES) if codec.parser == name)
        assert codec.parse(codec.bytewise(Speech(codec).calls("{}")), tools=TOOLS).message.tool_calls
