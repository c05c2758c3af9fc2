"""Chat templates as their models' makers published them: what Penstock makes of each file in a directory.

    python -m tests.support.published_templates DIR [--cases]

DIR is searched for `*.jinja`; packages that ship such files are `trl` (trl/chat_templates) and the source archive of
`llama-cpp-python` (models/templates). Each template gets a tokenizer made on the spot that has the control tokens which
the template writes. Nothing of them is kept here: their texts are their makers'.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.families import TEXTS

from penstock_codec import Codec, CodecError, tiny_tokenizer
from penstock_codec.parsers import GRAMMARS
from penstock_interception.conformance.cases import Verdict
from penstock_interception.conformance.report import Report, examine

_CONTROL: Final = re.compile(
    r"<\|[^|<>{}'\"\s]{1,40}\|>|<｜[^｜<>{}'\"\s]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|<sop>"  # noqa: RUF001
    r"|\[/?(?:gMASK|INST|BOS|EOS|UNK|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|SYSTEM_PROMPT|ARGS|CALL_ID|THINK)\]"
)
_ENDS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|return|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "</s>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "[EOS]"),  # noqa: RUF001
)
_SPELLED_OTHERWISE: Final = ("<|python_tag|>", "<|eom_id|>")  # Llama's, which its templates need not show


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one template: the codec's report, or why there is none."""

    name: str
    report: Report | None
    refused: str = ""

    @property
    def inexact(self) -> dict[str, str]:
        """The reasons of the cases with a star that do not hold in the first dialect, by case."""
        if self.report is None:
            return {}
        lines = [line for line in self.report.lines if not line.holds]
        wrong = [line for line in lines if line.case.main or line.result.verdict is Verdict.MISREAD]
        return {line.case.name: f"{line.result.verdict.value} {line.result.reason}".strip() for line in wrong}


def files_for(template: str) -> tiny_tokenizer.Family:
    """A small model whose tokenizer has the control tokens and the markup that a template writes."""
    markup = {text for grammar in GRAMMARS.values() for text in grammar.marks if text in template}
    controls = set(_CONTROL.findall(template)) - {text for text in markup if not text.startswith(("<|", "["))}
    if "<|start_header_id|>" in template:
        controls |= set(_SPELLED_OTHERWISE)
    if "<|im_start|>" in template:
        controls.add("<|im_end|>")
    end = next((text for text in _ENDS if text in controls), "")
    if not end:
        # The end is a variable of the template: its makers' tokenizer says which.
        end = "<｜end▁of▁sentence｜>" if "｜" in template else "</s>"  # noqa: RUF001
        controls.add(end)
    bos = next((text for text in ("<s>", "<|begin_of_text|>", "<bos>") if text in controls), "<s>")
    controls |= {bos, "</s>"} if bos == "<s>" else {bos}
    if "eos_token" in template and "[INST]" in template:
        end = "</s>"
    return tiny_tokenizer.Family(template, tuple(sorted(controls)), tuple(sorted(markup - controls)), end, (), bos)


def examine_template(name: str, template: str, dialects: Sequence[str] = ("chat_completions",)) -> Found:
    """All conformance cases on one template. CPU work of a tenth of a second or so."""
    try:
        return Found(name, examine(Codec.load(files_for(template).build(TEXTS, 512)), dialects))
    except CodecError as error:
        return Found(name, None, f"{error.reason}: {error}")


def templates_in(directory: Path) -> Iterator[tuple[str, str]]:
    """The name and text of each template below a directory, in order."""
    for path in sorted(directory.rglob("*.jinja")):
        yield str(path.relative_to(directory).with_suffix("")), path.read_text("utf-8")


def main() -> int:
    """Prints a line for each template; 1 where one is refused or inexact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", action="store_true", help="the reason of each case that does not hold")
    options = parser.parse_args()
    wrong = 0
    for name, text in templates_in(options.directory):
        found = examine_template(name, text)
        wrong += found.report is None or bool(found.inexact)
        parser_name = found.report.parser if found.report else "-"
        told = found.refused[:120] if found.report is None else ", ".join(found.inexact) or "exact"
        sys.stdout.write(f"{name:60} {parser_name:12} {told}\n")
        for case, reason in found.inexact.items() if options.cases else ():
            sys.stdout.write(f"    {case}: {reason[:300]}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
