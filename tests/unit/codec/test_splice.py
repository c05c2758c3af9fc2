"""Exact continuation: the appended ids are those of the template's own text, cut at a special token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import families

from penstock_codec import Codec, Continuation, Inexact, TokenizerFiles, cache, tiny_tokenizer
from penstock_codec.chat import Message, Role, TextPart, Tool, ToolCallPart
from penstock_codec.template import ChatTemplate

TOOL = Tool("bash", "Run it.", '{"type": "object"}')
START = [Message.system("Be brief."), Message.user("Go.")]
CALLED = Message.assistant("", ToolCallPart("c1", "bash", '{"command":  "x"}'))
FOLLOWS = {
    "tool": (CALLED, [Message.tool("c1", "out")]),
    "two tools": (CALLED, [Message.tool("c1", "out"), Message.tool("c2", "out<|im_end|>")]),
    "user": (Message.assistant("Done."), [Message.user("More, please.")]),
    "tool and user": (CALLED, [Message.tool("c1", "out"), Message.user("More, please.")]),
    "nothing": (Message.assistant("Done."), []),
    "somebody else's turn": (Message.assistant("A"), [Message.user("b"), Message.assistant("C"), Message.user("d")]),
}


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("kind", FOLLOWS)
def test_a_continuation_is_what_the_template_renders_after_the_turn(codec: Codec, kind: str) -> None:
    """On a template that never rewrites history, splicing and rendering anew agree text for text and id for id."""
    reply, new = FOLLOWS[kind]
    history = [*START, reply]
    before = codec.render_text(history, [TOOL], add_generation_prompt=False).removesuffix("\n")
    whole = codec.render_text([*history, *new], [TOOL])
    result = codec.continuation(history, new, [TOOL], last_id=codec.end_of_turn_id)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids) == whole.removeprefix(before)
    assert [*codec.encode(before).tolist(), *result.ids.tolist()] == codec.render([*history, *new], [TOOL]).tolist()
    assert result.closing == 0


@pytest.mark.requirement("R84")
@pytest.mark.parametrize("last_id", [None, 42])
def test_a_turn_without_its_end_gets_it_as_context(codec: Codec, last_id: int | None) -> None:
    """Truncated turns are closed, and the close is counted apart."""
    history = [*START, Message.assistant("Do")]
    closed = codec.continuation(history, [Message.user("x")], last_id=codec.end_of_turn_id)
    cut = codec.continuation(history, [Message.user("x")], last_id=last_id)
    assert isinstance(closed, Continuation)
    assert isinstance(cut, Continuation)
    assert cut.closing == 1
    assert cut.ids.tolist() == [codec.end_of_turn_id, *closed.ids.tolist()]


@pytest.mark.requirement("R82", "R84")
@pytest.mark.parametrize(
    ("sampled", "new", "appended"),
    [
        ("<|user|>", Message.user("x"), "\nx"),
        ("<|observation|>", Message.tool("c1", "x"), "\n<tool_response>\nx\n</tool_response>"),
        ("<|observation|>", Message.user("x"), "<|user|>\nx"),
        ("<|user|>", Message.tool("c1", "x"), "<|observation|>\n<tool_response>\nx\n</tool_response>"),
        ("<|endoftext|>", Message.user("x"), "<|user|>\nx"),
        ("cut", Message.user("x"), "<|user|>\nx"),
    ],
)
def test_turn_ending_with_the_next_ones_first_token_has_it_once(sampled: str, new: Message, appended: str) -> None:
    """GLM closes no turn; whatever it sampled stays, and the next turn is opened exactly once."""
    codec = Codec.load(families.build("glm"))
    last_id = int(codec.encode(sampled)[-1])
    result = codec.continuation([*START, CALLED], [new], [TOOL], last_id=last_id)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids) == appended + "<|assistant|>"
    assert result.closing == appended.startswith("<|")
    ends = {codec.decode([index]) for index in codec.stop_token_ids}
    assert ends == {"<|user|>", "<|observation|>", "<|endoftext|>"}


@pytest.mark.requirement("R82")
def test_template_showing_one_call_of_a_turn_continues_exactly_after_two() -> None:
    """Gpt-oss's template writes a turn's first call only, whatever was sampled; the turn stays as it was."""
    codec = Codec.load(families.build("harmony"))
    two = Message.assistant("", *CALLED.tool_calls, ToolCallPart("c2", "look", "{}"))
    results = [Message.tool("c1", "out"), Message.tool("c2", "out")]
    call_end = int(codec.encode("<|call|>")[-1])
    result = codec.continuation([*START, two], results, [TOOL], last_id=call_end)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids).count(' to=assistant<|channel|>commentary<|message|>"out"<|end|>') == 2
    assert result.closing == 0


@pytest.mark.requirement("R82", "R104")
def test_a_template_that_shows_no_calls_goes_on_exactly_after_one() -> None:
    """Granite 3's template leaves calls out of the history; what was sampled stays."""
    codec = Codec.load(families.build("granite"))
    result = codec.continuation([*START, CALLED], [Message.tool("c1", "out")], [TOOL], last_id=codec.end_of_turn_id)
    assert isinstance(result, Continuation)
    tail = "\n<|start_of_role|>tool<|end_of_role|>out<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    assert codec.decode(result.ids) == tail


@pytest.mark.requirement("R82", "R104")
def test_reasoning_that_shrinks_to_its_closing_mark_is_no_rewrite(files: TokenizerFiles) -> None:
    """GLM 5's template writes `</think>` alone before an answer that is not the last one any more."""
    template = BODY.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{{ '<think></think>' if loop.last else '</think>' }}{% endif %}{{ m.content }}",
    )
    codec = Codec.load(replace(files, chat_template=template), parser="think")
    result = codec.continuation([*START, Message.assistant("a")], [Message.user("b")], last_id=codec.end_of_turn_id)
    assert isinstance(result, Continuation)


@pytest.mark.requirement("R82", "R104")
def test_a_template_that_takes_no_conversation_without_tools_goes_on_exactly(files: TokenizerFiles) -> None:
    """Hermes 3's template goes through the tools whether there are any or not."""
    codec = Codec.load(
        replace(files, chat_template="{% for t in tools %}{{ t | tojson }}{% endfor %}" + BODY), parser="none"
    )
    result = codec.continuation([*START, Message.assistant("a")], [Message.user("b")], [TOOL], last_id=None)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids) == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"


@pytest.mark.requirement("R82")
def test_text_beside_a_result_is_another_shape_than_a_result_alone() -> None:
    """What was found out for one shape is not taken for the other, whichever is seen first."""
    result, both = Message.tool("c1", "out"), Message(Role.TOOL, (*Message.tool("c1", "out").parts, TextPart("more")))
    for order in ([result, both], [both, result]):
        codec, fresh = Codec.load(families.build("mistral_v3")), Codec.load(families.build("mistral_v3"))
        found = [codec.continuation([*START, CALLED], [new], [TOOL], last_id=None) for new in order]
        alone = fresh.continuation([*START, CALLED], [order[1]], [TOOL], last_id=None)
        assert type(found[1]) is type(alone)
        assert type(found[0]) is not type(found[1])


@pytest.mark.requirement("R82")
def test_no_merge_crosses_the_cut() -> None:
    """The tail is tokenised on its own, so that what was sampled before it cannot change it."""
    codec = Codec.load(tiny_tokenizer.build(["\n\n\n\nuser user\n"] * 9))
    history = [*START, Message.assistant("x\n")]
    result = codec.continuation(history, [Message.user("\n\n")], last_id=codec.end_of_turn_id)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids) == "\n<|im_start|>user\n\n\n<|im_end|>\n<|im_start|>assistant\n"


BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
)
REFUSING = "{% if messages[-1].role == 'user' and messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
INEXACT = {
    "TEMPLATE_REWRITES_HISTORY": "{{ messages | length }} messages\n" + BODY,
    "NO_END_OF_TURN": BODY.replace("<|im_end|>", "."),
    "TEMPLATE_REFUSED": REFUSING + BODY,
}


@pytest.mark.requirement("R85")
@pytest.mark.parametrize("reason", INEXACT)
def test_a_template_that_allows_no_exact_splice_says_why(files: TokenizerFiles, reason: str) -> None:
    """A typed answer, so that the graph opens a labelled branch instead of drifting in silence."""
    codec = Codec.load(replace(files, chat_template=INEXACT[reason]), parser="none")
    result = codec.continuation([*START, Message.assistant("a")], [Message.user("b")], last_id=codec.end_of_turn_id)
    assert isinstance(result, Inexact)
    assert result.reason == reason


@pytest.mark.requirement("R85")
def test_a_template_that_hides_a_turn_says_so(files: TokenizerFiles) -> None:
    """A turn that the template does not show cannot be spliced after."""
    template = BODY.replace("{{ m.content }}", "{% if messages | length < 3 %}{{ m.content }}{% endif %}")
    codec = Codec.load(replace(files, chat_template=template), parser="none")
    result = codec.continuation([*START, Message.assistant("a")], [Message.user("b")], last_id=2)
    assert isinstance(result, Inexact)
    assert result.reason == "TEMPLATE_HIDES_TURN"


@pytest.mark.requirement("R82")
def test_a_template_that_looks_back_gets_the_real_history(files: TokenizerFiles) -> None:
    """Where a short history would render otherwise, the whole one is rendered (as text only)."""
    numbered = BODY.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}")
    codec = Codec.load(replace(files, chat_template=numbered), parser="none")
    history = [*START, Message.assistant("a"), Message.user("b"), Message.assistant("c")]
    result = codec.continuation(history, [Message.user("d")], last_id=codec.end_of_turn_id)
    assert isinstance(result, Continuation)
    assert codec.decode(result.ids) == "\n<|im_start|>user 6\nd<|im_end|>\n"


@pytest.mark.requirement("R82")
def test_the_mark_of_the_probe_never_reaches_the_ids(codec: Codec) -> None:
    """Probing leaves nothing behind."""
    result = codec.continuation([*START, CALLED], [Message.tool("c1", "out")], [TOOL], last_id=None)
    assert isinstance(result, Continuation)
    assert "probe" not in codec.decode(result.ids)


NAMED = ("shows_call_ids", "system_first", "strips_old_reasoning")


@functools.cache
def codec_of(name: str) -> Codec:
    """One for all examples, so that what its caches keep of one conversation is there in the next."""
    return Codec.load(families.build(name), parser="hermes" if name in NAMED else None)


WORDS = ["Be brief.", "/no_think", "/think", "Be brief. /no_think", "/think hard", "/system_override Be brief."]
WORDS += ["</think>", "<tool_response>", "é€", " \n"]
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(st.characters(codec="utf-8"), max_size=20))
TURNS = st.lists(st.tuples(TEXTS, st.booleans()), max_size=3)


def conversation(name: str, told: list[str], turns: list[tuple[str, bool]]) -> list[Message]:
    """Instructions, then questions with an answer or a call each."""
    call = ToolCallPart("a1b2c3d4e", "bash", "{}")
    messages = [Message.system(text) for text in told]
    for question, calls in turns:
        messages.append(Message.user(question))
        messages += [Message.assistant("", call), Message.tool(call.id, question)] if calls else []
        messages.append(Message.assistant("So it is."))
    return messages


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
@settings(max_examples=40, deadline=None)
@given(told=st.lists(TEXTS, max_size=1), turns=TURNS, last=TEXTS, tools=st.sampled_from([(), (TOOL,)]))
def test_what_is_spliced_ends_the_whole_whatever_was_said_before(
    name: str, told: list[str], turns: list[tuple[str, bool]], last: str, tools: tuple[Tool, ...]
) -> None:
    """A word of the system prompt, or of a user's before, may change what follows: thinking is on or off."""
    codec = codec_of(name)
    history = [*conversation(name, told, turns), Message.user("So?"), Message.assistant("The answer.")]
    new = [Message.user(last)]
    if tools and not codec.template.supports_tools:
        tools = ()
    result = codec.continuation(history, new, tools, last_id=None)
    whole = codec.render([*history, *new], tools).tolist()
    assert isinstance(result, Continuation), result
    assert whole[-result.ids.size :] == result.ids.tolist()
    assert codec.decode(whole[: -result.ids.size]).rstrip().endswith("The answer.")


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("order", [1, -1])
def test_what_a_system_prompt_changes_is_not_taken_for_another(order: int) -> None:
    """SmolLM3's template turns thinking off for `/no_think`, and writes that into the generation prompt."""
    codec = Codec.load(families.build("thinks_on_request"))
    ends = {"Be brief.": "<|im_start|>assistant\n", "Be brief. /no_think": "assistant\n<think>\n\n</think>\n"}
    for text, end in [*ends.items()][::order]:
        history = [Message.system(text), Message.user("Go."), CALLED, Message.tool("c1", "out"), Message.assistant("A")]
        result = codec.continuation(history, [Message.user("b")], [TOOL], last_id=codec.end_of_turn_id)
        assert isinstance(result, Continuation)
        assert codec.decode(result.ids).endswith(end)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(("kwargs", "word"), [({}, "/no_think"), ({"enable_thinking": False}, "/think")])
def test_a_setting_and_a_word_against_it_are_both_heard(kwargs: dict[str, bool], word: str) -> None:
    """The system prompt of SmolLM3 overrides what the request sets."""
    codec = Codec.load(families.build("thinks_on_request"))
    for told in ([], [Message.system(f"Be brief. {word}")], [Message.system("Be brief.")]):
        history, new = [*told, Message.user("Go."), Message.assistant("A")], [Message.user("b")]
        result = codec.continuation(history, new, last_id=None, template_kwargs=kwargs)
        assert isinstance(result, Continuation)
        whole = codec.render([*history, *new], template_kwargs=kwargs).tolist()
        assert whole[-result.ids.size :] == result.ids.tolist()


@pytest.mark.requirement("R82", "R96")
def test_a_known_system_prompt_is_not_rendered_again_however_many_others_there_are(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a shape of its own, so that a few hundred rollouts had every shape verified again on every turn."""
    new, rendered, shapes = [Message.user("b")], list[str](), len(codec.caches.shapes)
    render = ChatTemplate.render

    def watched(template: ChatTemplate, messages: Sequence[Message], *args: Any, **kwargs: Any) -> str:
        rendered.append(messages[0].text)
        return render(template, messages, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    histories = [
        [Message.system(f"Rollout {number}."), Message.user("Go."), Message.assistant("A")]
        for number in range(cache.MOST_SHAPES + 1)
    ]
    ids = [codec.continuation(history, new, last_id=None) for history in histories]
    rendered.clear()
    again = codec.continuation(histories[0], new, last_id=None)
    assert isinstance(again, Continuation) and isinstance(ids[0], Continuation)
    assert again.ids.tolist() == ids[0].ids.tolist()
    assert len(rendered) == 1 and histories[0][0].text not in rendered
    assert len(codec.caches.shapes) <= shapes + 1


@pytest.mark.requirement("R82", "R96")
def test_system_prompts_however_long_leave_little_in_the_caches(codec: Codec) -> None:
    """What is known of a system prompt is kept by its digest."""
    text = "Be brief. " * 10_000
    result = codec.continuation(
        [Message.system(text), Message.user("Go."), Message.assistant("A")], [Message.user("b")], last_id=None
    )
    assert isinstance(result, Continuation)
    assert not any(text in repr(key) for key in [*codec.caches.shapes._known, *codec.caches.instructed._known])
