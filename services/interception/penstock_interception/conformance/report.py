"""Runs all cases over all dialects for one model's files, and explains what prevents exactness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock_codec import Codec, CodecError, TokenizerFiles
from penstock_interception.conformance.cases import CASES, Case, Result, Setting, Verdict, run_case
from penstock_interception.conformance.dialects import DIALECTS

WIRES: Final[Sequence[str]] = tuple(name for name in DIALECTS if name != "domain")
"""The dialects that have a wire format."""

_FINE: Final = frozenset({Verdict.EXACT, Verdict.LABELLED, Verdict.NOT_APPLICABLE})
_ADVICE: Final[Mapping[str, str]] = {
    "TEMPLATE_REWRITES_HISTORY": (
        "the template changes earlier text when messages are added; the change is quoted. Rollouts work: such a "
        "turn opens a branch, and each branch is trained as the model saw it. To be exact, put a "
        "chat_template.jinja into the directory in which the text of a message does not depend on later ones"
    ),
    "TEMPLATE_HIDES_TURN": (
        "the template leaves an assistant's turn out or shows it twice: let it show the text and the arguments of each"
        " turn once, also of old turns"
    ),
    "NO_END_OF_TURN": (
        "the template has to close an assistant's turn with a special token of the tokenizer (tokenizer.json,"
        " added_tokens) or with a stop token of generation_config.json"
    ),
    "TEMPLATE_REFUSED": "the template raises an error for messages that clients send; the error is quoted",
    "PARENT_WITHOUT_TOKENS": "the engine must return token ids",
}
_MISREAD: Final = "check the parser: --parser NAME here, tool_call_parser of the inference service for rollouts"


@dataclass(frozen=True, slots=True)
class Line:
    """One case in one dialect."""

    case: Case
    dialect: str
    result: Result

    @property
    def holds(self) -> bool:
        """Whether the case came out as it should."""
        return self.result.verdict in _FINE

    @property
    def advice(self) -> str:
        """What to do about it; empty if nothing."""
        if self.holds:
            return ""
        if self.result.verdict is Verdict.MISREAD:
            return _MISREAD
        return _ADVICE.get(self.result.reason.partition(":")[0], "")


@dataclass(frozen=True, slots=True)
class Report:
    """The results for one model."""

    parser: str
    vocab_size: int
    tokenizer_sha256: str
    template_sha256: str
    lines: tuple[Line, ...]

    @property
    def exact(self) -> bool:
        """Whether the seven cases, if the model supports them, are exact in every dialect, and nothing is misread."""
        misread = any(line.result.verdict is Verdict.MISREAD for line in self.lines)
        return not misread and all(line.holds for line in self.lines if line.case.main)


def load(directory: Path, parser: str | None) -> Codec:
    """Loads the codec of a model directory. Raises CodecError, which names the missing file."""
    if not directory.is_dir():
        raise CodecError("FILES_INCOMPLETE", f"there is no directory {directory}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise CodecError("FILES_INCOMPLETE", f"{directory} has no {name}")
    return Codec.load(TokenizerFiles.from_directory(directory), parser=parser)


def examine(codec: Codec, dialects: Sequence[str] = WIRES) -> Report:
    """Runs every case in every dialect. CPU work of about a second."""
    settings = {name: Setting.of(codec, DIALECTS[name]) for name in dialects}
    lines = [Line(case, name, run_case(case, setting)) for case in CASES for name, setting in settings.items()]
    files = codec.files
    return Report(codec.parser, codec.vocab_size, files.tokenizer_sha256, files.template_sha256, tuple(lines))
