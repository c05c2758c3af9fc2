"""What a model of some family samples when it answers, thinks or calls tools: text in its own markup.

The JSON is never as the template writes it: spaces stand where none belong, numbers and escapes have unusual forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock_codec import Codec
from penstock_codec.parsers import Mark

_Write = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a family writes calls: `one` from a name and arguments, `between` two of them, what is around all.

    `turn_end` is the token after calls where the vocabulary has it, else the one after any answer; `lead` is how words
    before a call are said.
    """

    one: _Write
    between: str = "\n"
    before: str = ""
    after: str = ""
    turn_end: str = ""
    lead: str = "{text}\n\n"


_HARMONY_THOUGHT: Final = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def _json(arguments_key: str) -> _Write:
    return lambda name, arguments: f'{{"name" :"{name}",  "{arguments_key}": {arguments} }}'


def _tagged(opening: str, closing: str, write: Callable[[str, str], str]) -> _Write:
    def one(name: str, arguments: str) -> str:
        values = json.loads(arguments)
        written = [write(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]
        return opening.format(name=name) + "".join(written) + closing

    return one


_HERMES: Final = _Calls(lambda name, arguments: f"<tool_call>\n{_json('arguments')(name, arguments)}\n</tool_call>")
_FAMILIES: Final[Mapping[str, _Calls]] = {
    "hermes": _HERMES,
    "llama3": _Calls(_json("parameters"), "; "),
    "granite": _Calls(_json("arguments"), ", ", "<|tool_call|>[", "]"),
    "qwen3_coder": _Calls(
        _tagged(
            "<tool_call>\n<function={name}>\n",
            "</function>\n</tool_call>",
            lambda key, value: f"<parameter={key}>\n{value}\n</parameter>\n",
        )
    ),
    "glm": _Calls(
        _tagged(
            "<tool_call>{name}\n",
            "</tool_call>",
            lambda key, value: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
        turn_end="<|observation|>",
    ),
    "harmony": _Calls(
        lambda name, arguments: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        "<|call|><|start|>assistant",
        turn_end="<|call|>",
        lead="<|channel|>commentary<|message|>{text}<|end|><|start|>assistant",
    ),
    "deepseek": _Calls(
        lambda name, arguments: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",  # noqa: RUF001
        "",
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "kimi": _Calls(
        lambda name, arguments: (
            f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
}


class Speech:
    """How the model of a codec speaks."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        marks = codec.markup
        opening = [text for text in marks if marks[text] is Mark.OPEN_THINK]
        closing = [text for text in marks if marks[text] is Mark.CLOSE_THINK]
        pairs = list(zip(opening, closing, strict=True))
        if codec.parser == "harmony":
            pairs = [_HARMONY_THOUGHT]
        self._think = next((pair for pair in pairs if codec.has_token(pair[0])), pairs[0] if pairs else None)
        self._end = codec.decode([codec.end_of_turn_id]) if codec.end_of_turn_id is not None else ""
        self._calls = _calls_of(codec)

    @property
    def thinks(self) -> bool:
        """Whether the parser knows reasoning."""
        return self._think is not None

    @property
    def calls_tools(self) -> bool:
        """Whether the template takes tools and the parser knows calls."""
        return self._calls is not None and self._codec.template.supports_tools

    def text(self, text: str) -> str:
        """A plain answer."""
        if self._codec.parser == "harmony":
            text = f"<|channel|>final<|message|>{text}"
        return text + self._end

    def thought(self, reasoning: str, rest: str) -> str:
        """Reasoning, then what another method made."""
        if self._think is None:
            raise ValueError("the parser knows no reasoning")
        opening, closing = self._think
        return f"{opening}\n{reasoning}\n{closing}\n\n{rest}"

    def calls(self, *arguments: str, text: str = "", name: str = "bash", whole: bool = True) -> str:
        """Calls of a tool with these arguments, after some text where the family has room for it.

        Not `whole`: cut off in the last of them.
        """
        family = self._calls
        if family is None:
            raise ValueError("the parser knows no calls")
        written = [family.one(f"{name}{self._number(i)}", item) for i, item in enumerate(arguments)]
        if self._codec.parser == "llama3" and not family.before:
            text = ""  # without its tag, a call is a whole turn
        lead = family.lead.format(text=text) if text else ""
        if not whole:
            return lead + family.before + family.between.join(written)[:-12]
        end = family.turn_end if family.turn_end and self._codec.has_token(family.turn_end) else self._end
        return lead + family.before + family.between.join(written) + family.after + end

    def inline(self, reasoning: str, text: str) -> str:
        """Reasoning and answer in one text, as clients put it that know no reasoning."""
        return f"<think>\n{reasoning}\n</think>\n\n{text}"

    def opened(self, prompt: str, completion: str) -> str:
        """A completion for a prompt whose end is inside reasoning: without the opening, or with the close in front."""
        if self._think is None:
            return completion
        opening, closing = self._think
        begun = f"{opening}\n"
        if completion.startswith(begun):
            return completion.removeprefix(begun if prompt.endswith("\n") else opening)
        return f"\n{closing}\n\n{completion}"

    def _number(self, index: int) -> str:
        return f":{index}" if self._codec.parser == "kimi" else ""


def _calls_of(codec: Codec) -> _Calls | None:
    template = codec.template.text
    if codec.parser == "llama3" and codec.has_token("<|python_tag|>"):
        return _Calls(_json("parameters"), "; ", "<|python_tag|>", turn_end="<|eom_id|>")
    if codec.parser == "mistral":
        if "[ARGS]" in template:
            return _Calls(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}", "")
        return _Calls(_json("arguments"), ", ", "[TOOL_CALLS] [", "]")
    return _FAMILIES.get(codec.parser)
