"""Templates as their makers published them: in `PENSTOCK_PUBLISHED_TEMPLATES`, and in TRL where `.venv-vllm` has it.

Their texts are not ours to keep. The facts on which detection depends are in `chat_templates/` and `test_families.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.support.published_templates import examine_template, templates_in

PARSERS = {
    r"qwen-?qwen2.5-7b|^qwen2_5$|qwq": "hermes",
    r"qwen3-0|^qwen3$|qwen3_instruct_2507": "hermes",
    r"qwen3-coder": "qwen3_coder",
    r"hermes-[23]": "hermes",
    r"llama-3[._][123]-|^llama3_[12]$": "llama3",
    r"nemo-instruct|devstral-small|mistral-small-3": "mistral",
    r"deepseek-r1|deepseek-v3\.1|^deepseekv3$|deepseek_r1": "deepseek",
    r"kimi-k2": "kimi",
    r"glm-4|^glm4moe$": "glm",
    r"gpt-?oss": "harmony",
    r"granite-3": "granite",
    r"granite-4": "hermes",
    r"phi-4-mini|phi4-mini-3|^gemma3$|gemma3-270m": "none",
}
MOVES_TOOLS = re.compile(r"mistral", re.IGNORECASE)
BEYOND_TRANSFORMERS = re.compile(r"llama-cpp-|kimi-k2-(?:instruct|thinking)|gemma-?2|hermes-[23]", re.IGNORECASE)
"""Rewritten for llama.cpp, with calls that the sandbox of transformers refuses as ours does; without a system role; or
only for conversations with tools."""
ENVIRONMENTS = Path(__file__).parents[3]
"""`.venv-vllm` lies here where `make test-trl` was run: it has TRL, and this environment does not."""


def _directories() -> list[Path]:
    named = os.environ.get("PENSTOCK_PUBLISHED_TEMPLATES")
    found = [Path(named)] if named else []
    if (ENVIRONMENTS / ".venv-vllm/.installed").is_file():  # and not half of it
        found += sorted(ENVIRONMENTS.glob(".venv-vllm/lib/python3*/site-packages/trl/chat_templates"))
    return [path for path in found if path.is_dir()]


def _cases() -> list[tuple[str, str, str]]:
    """Templates of the families of PARSERS: name, text, parser."""
    cases = []
    for directory in _directories():
        for name, text in templates_in(directory):
            short = name.rpartition("/")[2].lower()
            parser = next((parser for kind, parser in PARSERS.items() if re.search(kind, short)), None)
            if parser is not None and not short.endswith("_training"):
                cases.append((name, text, parser))
    return cases


@pytest.mark.requirement("R104")
@pytest.mark.skipif(
    not _directories(),
    reason="no published templates here: run `make .venv-vllm/.installed`, or set PENSTOCK_PUBLISHED_TEMPLATES",
)
def test_published_templates_are_detected_and_go_on_exactly() -> None:
    """Each template of a family that we name has its parser, and is exact but where it moves its tools."""
    cases = _cases()
    assert cases
    wrong = []
    for name, text, parser in cases:
        found = examine_template(name, text)
        seen = found.report.parser if found.report is not None else found.refused
        moves = MOVES_TOOLS.search(name) and all("REWRITES" in reason for reason in found.inexact.values())
        if seen != parser or (found.inexact and not moves and not BEYOND_TRANSFORMERS.search(name)):
            wrong.append((name, seen, found.inexact))
    assert wrong == []
