"""The text that a model family samples to answer, think or call tools, in its own markup.

The JSON never looks as the template writes it: it has extra spaces and unusual forms of numbers and escapes.
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
    """A family's call syntax: `one` formats a name and arguments, `between` separates calls, and the text around them.

    `turn_end` is the token after calls if the vocabulary has it, else the one after any answer; `lead` formats text
    before a call.
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
    """Writes completions in the markup of a codec's model."""

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
        """Whether the parser supports reasoning."""
        return self._think is not None

    @property
    def calls_tools(self) -> bool:
        """Whether the template accepts tools and the parser supports calls."""
        return self._calls is not None and self._codec.template.supports_tools

    def text(self, text: str) -> str:
        """Returns a plain answer."""
        if self._codec.parser == "harmony":
            text = f"<|channel|>final<|message|>{text}"
        return text + self._end

    def thought(self, reasoning: str, rest: str) -> str:
        """Returns reasoning, followed by the output of another method."""
        if self._think is None:
            raise ValueError("the parser knows no reasoning")
        opening, closing = self._think
        return f"{opening}\n{reasoning}\n{closing}\n\n{rest}"

    def calls(self, *arguments: str, text: str = "", name: str = "bash", whole: bool = True) -> str:
        """Returns calls of a tool with these arguments, after some text if the family allows that.

        With `whole` False the last call is cut off.
        """
        family = self._calls
        if family is None:
            raise ValueError("the parser knows no calls")
        written = [family.one(f"{name}{self._number(i)}", item) for i, item in enumerate(arguments)]
        if self._codec.parser == "llama3" and not family.before:
            text = ""  # without its tag, a call takes the whole turn
        lead = family.lead.format(text=text) if text else ""
        if not whole:
            return lead + family.before + family.between.join(written)[:-12]
        end = family.turn_end if family.turn_end and self._codec.has_token(family.turn_end) else self._end
        return lead + family.before + family.between.join(written) + family.after + end

    def inline(self, reasoning: str, text: str) -> str:
        """Returns reasoning and answer in one text, as clients without reasoning support send them."""
        return f"<think>\n{reasoning}\n</think>\n\n{text}"

    def opened(self, prompt: str, completion: str) -> str:
        """Adapts a completion to a prompt that ends inside reasoning: omits the opening, or prepends the close."""
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
