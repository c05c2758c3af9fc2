"""Chat templates: golden texts reasoned out by hand, the helpers that templates use, and refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from penstock_codec import Codec, CodecError, TokenizerFiles
from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_codec.template import ChatTemplate

SCHEMA = '{"type":"object","properties":{"z":{"type":"string"},"a":{"enum":["<é>",1.50]}}}'
TOOL = Tool("bash", "Run it.", SCHEMA)
CALL = ToolCallPart("call_1", "bash", '{"z":"<b> & é", "a":  1.0}')

GOLDEN = """\
<|im_start|>system
Be brief.

Tools:
bash: Run it. {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": ["<é>", 1.5]}}}
Call: <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
<|im_start|>user
Go.<|im_end|>
<|im_start|>assistant
<think>
hm
</think>

So:
<tool_call>
{"name": "bash", "arguments": {"z": "<b> & é", "a": 1.0}}
</tool_call>
<tool_call>
{"name": "bash", "arguments": {"z": "<b> & é", "a": 1.0}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
one
</tool_response>
<tool_response>
two
</tool_response><|im_end|>
<|im_start|>assistant
"""


def conversation() -> list[Message]:
    """A conversation with every kind of message."""
    return [
        Message.system("Be brief."),
        Message.user("Go."),
        Message.assistant("So:", CALL, CALL, reasoning="hm"),
        Message.tool("call_1", "one"),
        Message.tool("call_1", "two"),
    ]


def render(text: str, messages: Sequence[Message] = (), **special: str) -> str:
    """Render `text` as a template."""
    return ChatTemplate(text, special, now=lambda: datetime(2026, 3, 4, tzinfo=UTC)).render(messages)


@pytest.mark.requirement("R82")
def test_our_template_renders_tools_calls_results_and_reasoning(codec: Codec) -> None:
    """JSON keeps key order, spacing as json.dumps writes it, and text without HTML escapes."""
    assert codec.render_text(conversation(), [TOOL]) == GOLDEN


@pytest.mark.requirement("R82")
def test_the_ids_of_a_rendered_conversation_are_those_of_its_text(codec: Codec) -> None:
    """Int32 ids, special tokens as one id each."""
    ids = codec.render(conversation(), [TOOL])
    assert ids.dtype == "int32"
    assert codec.decode(ids) == GOLDEN
    assert ids.tolist() == codec.encode(GOLDEN).tolist()
    assert ids[0] == codec.encode("<|im_start|>")[0]


@pytest.mark.requirement("R63")
def test_thinking_can_be_switched_off_by_the_template_argument(codec: Codec) -> None:
    """An accepted option takes effect."""
    text = codec.render_text([Message.user("x")], template_kwargs={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.requirement("R82")
def test_the_usual_helpers_are_there() -> None:
    """Raise_exception, strftime_now, tojson with indent, loop controls, generation blocks, special tokens."""
    assert render("{{ strftime_now('%d %b %Y') }}") == "04 Mar 2026"
    assert render("{{ {'b': '<é>', 'a': [1]} | tojson(indent=1) }}") == '{\n "b": "<é>",\n "a": [\n  1\n ]\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}\n{% set x = 1 %}a{{ eos_token }}\n{% endgeneration %}\nb", eos_token="E") == "aE\nb"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.requirement("R14")
def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    """A template is a program of somebody else."""
    with pytest.raises(CodecError) as caught:
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    assert caught.value.reason == "TEMPLATE_REFUSED"


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% if %}", "TEMPLATE_INVALID"),
        ("{{ raise_exception('no') }}", "TEMPLATE_REFUSED"),
        ("{{ 1/0 }}", "TEMPLATE_REFUSED"),
    ],
)
def test_a_template_that_fails_says_so_by_name(text: str, reason: str) -> None:
    """A typed error, not a stray exception."""
    with pytest.raises(CodecError) as caught:
        render(text)
    assert caught.value.reason == reason


@pytest.mark.requirement("R63")
def test_tools_are_refused_where_the_template_would_drop_them() -> None:
    """Nothing that was asked for is dropped in silence."""
    with pytest.raises(CodecError) as caught:
        ChatTemplate("{{ messages }}", {}).render([], [TOOL])
    assert caught.value.reason == "TEMPLATE_WITHOUT_TOOLS"


@pytest.mark.requirement("R15", "R33")
@pytest.mark.parametrize("schema", ["", "[1]", "nope", "[" * 100_000])
def test_a_tool_whose_schema_is_no_object_is_refused(codec: Codec, schema: str) -> None:
    """The tool is named."""
    with pytest.raises(CodecError, match="'bash'") as caught:
        codec.render([Message.user("x")], [Tool("bash", "", schema)])
    assert caught.value.reason == "TOOL_INVALID"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    "message",
    [
        Message(Role.USER, (TextPart("look"), ImagePart("data:image/png;base64,AA=="))),
        Message(Role.TOOL, (ToolResultPart("c", "", images=(ImagePart("https://x/y.png"),)),)),
    ],
)
def test_an_image_is_refused_by_name(codec: Codec, message: Message) -> None:
    """A text model's codec does not pretend to show images."""
    with pytest.raises(CodecError) as caught:
        codec.render([message])
    assert caught.value.reason == "IMAGE_UNSUPPORTED"


@pytest.mark.requirement("R33")
def test_half_a_surrogate_pair_is_refused(codec: Codec) -> None:
    """Text that is no Unicode gets a typed error."""
    with pytest.raises(CodecError) as caught:
        codec.render([Message.user("\ud83d")])
    assert caught.value.reason == "TEXT_NOT_UNICODE"


@pytest.mark.requirement("R33")
def test_template_arguments_cannot_replace_the_conversation(codec: Codec) -> None:
    """Reserved names are refused."""
    with pytest.raises(CodecError, match="messages"):
        codec.render([Message.user("x")], template_kwargs={"messages": []})


@pytest.mark.requirement("R67")
def test_a_developer_message_becomes_a_system_message_where_the_template_knows_none(codec: Codec) -> None:
    """An instruction reaches the model under the name that its template knows."""
    text = codec.render_text([Message(Role.DEVELOPER, (TextPart("rules"),)), Message.user("x")])
    assert text.startswith("<|im_start|>system\nrules<|im_end|>")


@pytest.mark.requirement("R82")
def test_results_and_text_in_one_message_are_rendered_as_results_then_text(codec: Codec) -> None:
    """Dialects that put tool results into a user message lose nothing."""
    message = Message(Role.USER, (ToolResultPart("a", "one"), ToolResultPart("b", "two"), TextPart("go on")))
    apart = [Message.tool("a", "one"), Message.tool("b", "two"), Message.user("go on")]
    assert codec.render_text([message]) == codec.render_text(apart)


@pytest.mark.requirement("R87")
def test_files_come_back_from_a_directory_as_they_were_written(
    files: TokenizerFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The hashes name the tokenizer and the template."""
    directory = tmp_path_factory.mktemp("model")
    files.write(directory)
    again = TokenizerFiles.from_directory(directory)
    assert again == files
    assert len(again.tokenizer_sha256) == len(again.template_sha256) == 64


@pytest.mark.requirement("R48")
def test_a_directory_without_a_template_says_what_is_missing(
    files: TokenizerFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The error names what to add."""
    directory = tmp_path_factory.mktemp("model")
    files.write(directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(CodecError, match=r"add chat_template\.jinja"):
        TokenizerFiles.from_directory(directory)


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("broken", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_broken_tokenizer_is_refused(files: TokenizerFiles, broken: bytes) -> None:
    """Whatever the binding raises, the error is ours."""
    with pytest.raises(CodecError) as caught:
        Codec.load(replace(files, tokenizer_json=broken))
    assert caught.value.reason == "TOKENIZER_INVALID"


@pytest.mark.requirement("R63")
def test_an_unknown_kind_of_template_asks_for_a_parser(files: TokenizerFiles) -> None:
    """No silent default; the error lists what can be set."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<function=x>"
    with pytest.raises(CodecError, match=r"set tool_call_parser, .* glm, granite, harmony, hermes, kimi") as caught:
        Codec.load(replace(files, chat_template=template))
    assert caught.value.reason == "PARSER_UNDETECTED"
    assert Codec.load(replace(files, chat_template=template), parser="none").parser == "none"
    with pytest.raises(CodecError) as caught:
        Codec.load(files, parser="nope")
    assert caught.value.reason == "PARSER_UNKNOWN"


@pytest.mark.requirement("R83")
def test_a_stop_id_outside_the_vocabulary_is_refused(files: TokenizerFiles) -> None:
    """Ids are in the vocabulary."""
    with pytest.raises(CodecError) as caught:
        Codec.load(replace(files, stop_token_ids=(10**6,)))
    assert caught.value.reason == "TOKEN_ID_INVALID"


STRICT = """\
{%- for m in messages -%}
{%- if m.role == "system" and not loop.first -%}{{ raise_exception("system first") }}{%- endif -%}
{%- if m.role == "user" and not loop.first and messages[loop.index0 - 1].role == "user" -%}
{{ raise_exception("roles alternate") }}{%- endif -%}
<{{ m.role }}>{{ m.content }}
{%- endfor -%}"""


@pytest.mark.requirement("R33")
def test_later_instructions_become_user_text_where_the_template_needs_it() -> None:
    """Agents send them; they are neither refused nor lost, and where they are taken they stay what they are."""
    messages = [
        Message.system("rules"),
        Message.user("go"),
        Message.system("and so"),
        Message.assistant("yes"),
        Message.system("stop"),
    ]
    strict = ChatTemplate(STRICT, {})
    assert strict.render(messages) == "<system>rules<user>go\n\nand so<assistant>yes<user>stop"
    silent = ChatTemplate(STRICT.replace('{{ raise_exception("system first") }}', "{%- continue -%}"), {})
    assert silent.render(messages) == strict.render(messages)
    free = ChatTemplate("{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}", {})
    assert free.render(messages) == "<system>rules<user>go<system>and so<assistant>yes<system>stop"


@pytest.mark.requirement("R33")
def test_two_user_messages_merge_where_the_template_alternates_roles() -> None:
    """Agents send them; only a template that refuses them gets them joined."""
    messages = [Message.user("go"), Message.user("on"), Message.assistant("yes"), Message.user("stop")]
    assert ChatTemplate(STRICT, {}).render(messages) == "<user>go\n\non<assistant>yes<user>stop"
    free = ChatTemplate("{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}", {})
    assert free.render(messages) == "<user>go<user>on<assistant>yes<user>stop"


def test_items_and_attributes_are_found_as_the_sandbox_finds_them() -> None:
    """The short way to a message's items changes nothing: an attribute goes first, what is not there is undefined."""
    text = (
        "{{ tools[0].items is callable }} {{ tools[0].function.name }} {{ tools[0].written is defined }}"
        " {{ messages[0].role }} {{ messages[0].missing is defined }} {{ messages[0].keys is callable }}"
        "{% for m in messages %} {{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
    )
    tool = Tool("name", "", '{"type": "object"}')
    rendered = ChatTemplate(text, {}).render([Message.user("a"), Message.user("b")], [tool])
    assert rendered == "True name False user False True 1/2False 2/2True"


def test_a_tools_json_is_the_same_however_often_it_is_asked_for() -> None:
    """Also with other options, and after a template tried to change the tool."""
    tool = Tool("é", "d", '{"type": "object", "properties": {"a": {"type": "string"}}}')
    plain = ChatTemplate("{{ tools[0] | tojson }}|{{ tools[0].function | tojson }}", {})
    expected = (
        '{"type": "function", "function": {"name": "é", "description": "d", "parameters":'
        ' {"type": "object", "properties": {"a": {"type": "string"}}}}}'
    )
    inner = expected.removeprefix('{"type": "function", "function": ').removesuffix("}")
    assert plain.render([Message.user("q")], [tool]) == f"{expected}|{inner}"
    spiteful = ChatTemplate("{{ tools and tools[0].update({'type': 'other'}) }}", {})
    with pytest.raises(CodecError, match="unsafe"):
        spiteful.render([Message.user("q")], [tool])
    assert plain.render([Message.user("q")], [tool]) == f"{expected}|{inner}"
    indented = ChatTemplate("{{ tools[0] | tojson(indent=1) }}", {}).render([Message.user("q")], [tool])
    assert indented.startswith('{\n "type": "function"')
