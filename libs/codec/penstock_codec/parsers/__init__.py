"""Parses completion ids to an assistant message, all at once or as they come.

`state_machine` has the parts that all families share, a grammar the differences; `registry` has the grammars.
"""

from penstock_codec.parsers.grammar import Grammar, Mark, new_call_id
from penstock_codec.parsers.registry import GRAMMARS, choose_grammar, parser_for
from penstock_codec.parsers.state_machine import (
    CompletionParser,
    Delta,
    MalformedCall,
    ParsedCompletion,
    Reading,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Vocabulary,
)

__all__ = [
    "GRAMMARS",
    "CompletionParser",
    "Delta",
    "Grammar",
    "MalformedCall",
    "Mark",
    "ParsedCompletion",
    "Reading",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallDelta",
    "Vocabulary",
    "choose_grammar",
    "new_call_id",
    "parser_for",
]
