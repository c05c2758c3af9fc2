"""A chat template's work is bounded: what never ends, or grows without end, is refused with a typed error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_codec import Codec, CodecError, TokenizerFiles, template_sandbox
from penstock_codec.chat import Message, ToolCallPart
from penstock_codec.template import ChatTemplate

NINE = "{% for a in range(99999) %}"
ENDLESS = {
    "nested loops": NINE * 4 + "{% endfor %}" * 4,
    "loops over what a filter gives": (
        "{% for a in range(99999) | select %}{% for b in range(99999) | select %}{% endfor %}{% endfor %}"
    ),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{% if messages | length %}{{ f(60) }}{% endif %}"
    ),
    "doubling": ("{% set n = namespace(s='x' * 1000) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"),
    "joining": "{% set n = namespace(s='x' * 1000) %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "blocks that double": (
        "{% set n = namespace(s='x' * 1000) %}"
        "{% for a in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}"
    ),
    "macros that double": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
        "{% set n = namespace(s='x' * 1000) %}{% for a in range(60) %}{% set n.s = f(n.s) %}{% endfor %}"
    ),
    "times": "{{ 'x' * 10000000000 }}",
    "power": "{{ (9 ** 9999999999) }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "filled up": "{{ 'x'.ljust(9999999999) }}",
    "centred": "{{ 'x' | center(9999999999) }}",
    "indented": "{{ messages | tojson(indent=9999999999) }}",
    "replacing": "{% set x = 'x' * 9000 %}{{ x.replace('x', x) | length }}",
    "the filter replace": "{% set x = 'x' * 9000 %}{{ x | replace('x', x) | length }}",
    "the filter join": "{% set x = 'x' * 1000000 %}{{ ([x] * 99) | join | length }}",
    "the method join": "{% set x = 'x' * 1000000 %}{{ x.join(['a'] * 99) | length }}",
    "tabs": "{{ '\\t'.expandtabs(tabsize=99999999) | length }}",
    "a format's width": "{{ '{:>9999999}'.format(1) }}",
    "a format's width from a value": "{{ '{:>{}}'.format(1, 9999999) }}",
    "translating": "{{ 'xxx'.translate({120: 'x' * 60000000}) | length }}",
    "a time": "{{ strftime_now('%A' * 5000000) }}",
    "output": "{% set s = 'x' * 60000000 %}{{ s }}{{ s }}",
}


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_that_does_too_much_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile model directory hangs nobody and fills no memory."""
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 200_000)
    template = ChatTemplate(ENDLESS[kind], {})
    with pytest.raises(CodecError) as caught:
        template.render([Message.user("q")])
    assert caught.value.reason == "TEMPLATE_REFUSED"


@pytest.mark.requirement("R145")
@pytest.mark.parametrize(
    "text", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000, "x" * (2 << 20)]
)
def test_a_template_that_nests_too_deeply_or_is_too_long_is_refused(text: str) -> None:
    """The compiler's own limits come as our error."""
    with pytest.raises(CodecError) as caught:
        ChatTemplate(text, {})
    assert caught.value.reason == "TEMPLATE_INVALID"


@pytest.mark.requirement("R145")
def test_the_bounds_change_nothing_of_what_a_template_writes() -> None:
    """Loops keep their counts, joined texts their order, whatever they go through."""
    text = (
        "{% for m in messages | reverse %}{{ loop.index ~ '/' ~ loop.length ~ loop.last }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}{{ 3 % 2 }}{{ '%02d' % 7 }}{{ '-' * 3 }}{{ 2 ** 3 }}"
        "{% for c in 'ab' %}{{ loop.previtem }}{{ c }}{% endfor %}{{ 'a' | center(3) }}{{ [1] + [2] }}{{ 1 ~ none }}"
        "{% set s = 'a' + 'b' + messages[0].content %}{{ s }}{{ 1 + 2 + 3 }}{{ 'p' + s + 'q' }}{{ s + s + s + 'r' }}"
        "{{ '{:>3}'.format(1) ~ 'a b'.replace(' ', '--') ~ ['x', 1] | join(',') }}"
    )
    rendered = ChatTemplate(text, {}).render([Message.user("q"), Message.user("r")])
    assert rendered == "1/2False2/2Truea1107---8aab a [1, 2]1Noneabq6pabqqabqabqabqr  1a--bx,1"


@pytest.mark.requirement("R145")
def test_a_long_conversation_is_within_the_bounds(codec: Codec) -> None:
    """20,000 messages are."""
    messages = [Message.user("q"), Message.assistant("a")] * 10_000
    assert codec.render_text(messages).count("<|im_start|>") == 20_001


@pytest.mark.requirement("R82")
def test_no_arguments_at_all_are_none(files: TokenizerFiles) -> None:
    """Clients write nothing where the model wrote `{}`; the template is shown an object all the same."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    codec = Codec.load(replace(files, chat_template=template), parser="none")
    for text in ("", "{}", " \n"):
        assert codec.render_text([Message.assistant("", ToolCallPart("c", "f", text))]) == "{}"
    assert codec.render_text([Message.assistant("", ToolCallPart("c", "f", "["))]) == '"["'
