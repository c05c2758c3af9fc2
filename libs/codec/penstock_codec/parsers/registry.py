"""All grammars, and the choice of one for a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock_codec.errors import CodecError
from penstock_codec.parsers.grammar import THINK, Grammar
from penstock_codec.parsers.harmony import HARMONY, HarmonyParser
from penstock_codec.parsers.json_calls import GRANITE, HERMES, LLAMA3
from penstock_codec.parsers.mistral import MISTRAL
from penstock_codec.parsers.sections import DEEPSEEK, KIMI
from penstock_codec.parsers.state_machine import CompletionParser
from penstock_codec.parsers.tagged import GLM, QWEN3_CODER

GRAMMARS: Final[Mapping[str, Grammar]] = {
    grammar.name: grammar
    for grammar in (
        HERMES,
        LLAMA3,
        MISTRAL,
        QWEN3_CODER,
        DEEPSEEK,
        KIMI,
        GLM,
        HARMONY,
        GRANITE,
        Grammar("think", THINK),  # reasoning and text
        Grammar("none", {}),  # text
    )
}


def parser_for(grammar: Grammar) -> type[CompletionParser]:
    """Returns the parser class for a grammar."""
    return HarmonyParser if grammar is HARMONY else CompletionParser


def choose_grammar(name: str | None, template: str, *, takes_tools: bool = True) -> Grammar:
    """Chooses the grammar by name or from the template; there is no silent default.

    A template that `takes_tools` shows how they are called. One that does not may still show calls (DeepSeek's);
    otherwise it has none.

    Raises CodecError PARSER_UNKNOWN or PARSER_UNDETECTED, which name what to set.
    """
    known = ", ".join(sorted(GRAMMARS))
    if name is not None:
        if name not in GRAMMARS:
            raise CodecError("PARSER_UNKNOWN", f"there is no parser {name!r}; known parsers: {known}")
        return GRAMMARS[name]
    shown = [grammar for grammar in GRAMMARS.values() if grammar.shown_by(template)]
    if len(shown) == 1:
        return shown[0]
    if not takes_tools:
        return GRAMMARS["think" if "<think>" in template else "none"]
    kinds = f"of several kinds ({', '.join(item.name for item in shown)})" if shown else "of no known kind"
    raise CodecError(
        "PARSER_UNDETECTED",
        f"the chat template's tool calls are {kinds}: set tool_call_parser, of the rollout's model source or of the"
        f" inference service, to one of {known}",
    )
