"""`penstock conformance` on model directories as users have them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import families

from penstock_codec import tiny_tokenizer
from penstock_interception.conformance.cases import CASES
from penstock_interception.conformance.dialects import DIALECTS


async def conformance(*argv: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    program = (sys.executable, "-m", "penstock.cli.main", "conformance", *argv)
    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("family", ["chatml", "qwen3", "qwen3_coder", "llama3", "mistral", "kimi", "deepseek"])
async def test_a_model_of_every_family_is_found_exact(family: str, tmp_path: Path) -> None:
    """The seven cases and the rest, in every dialect, for a tokenizer directory of the family."""
    families.build(family).write(tmp_path)
    code, out, err = await conformance("--model", str(tmp_path), "--json")
    report = json.loads(out)
    assert (code, err, report["exact"]) == (0, "", True)
    assert len(report["cases"]) == len(CASES) * (len(DIALECTS) - 1)
    assert {case["verdict"] for case in report["cases"] if case["main"]} == {"EXACT"}
    assert {case["verdict"] for case in report["cases"]} == {"EXACT", "LABELLED"}


@pytest.mark.requirement("R82", "R85")
async def test_template_that_rewrites_history_is_reported_with_the_change(tmp_path: Path) -> None:
    """Exit code 1, BRANCH in the table, the reason and what to do in words."""
    families.build("mistral_v3").write(tmp_path)
    code, out, err = await conformance("--model", str(tmp_path))
    assert (code, err) == (1, "")
    lines = {line[2:40].rstrip(): line.split()[-1] for line in out.splitlines() if line.startswith(("* ", "  "))}
    assert lines["text comes back unchanged"] == "BRANCH"
    assert lines["a tool call comes back unchanged"] == "EXACT"
    assert "[AVAILABLE_TOOLS]" in out and "chat_template.jinja" in out
    assert "Not all of the cases with a star are exact" in out.splitlines()[-1]


@pytest.mark.requirement("R63")
async def test_a_parser_that_does_not_fit_is_seen(tmp_path: Path) -> None:
    """The parser may be said, and a wrong one is MISREAD, with what to check."""
    families.build("llama3").write(tmp_path)
    code, out, _ = await conformance("--model", str(tmp_path), "--parser", "hermes")
    assert code == 1
    assert "MISREAD: a call as the template writes it" in out and "--parser NAME" in out
    code, _, err = await conformance("--model", str(tmp_path), "--parser", "nope")
    assert code == 4 and "known parsers: deepseek" in err


@pytest.mark.requirement("R82")
async def test_a_model_without_tools_has_the_other_cases(tmp_path: Path) -> None:
    """What a model cannot do is not held against it."""
    family = tiny_tokenizer.Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    family.build(families.TEXTS).write(tmp_path)
    code, out, _ = await conformance("--model", str(tmp_path), "--json")
    verdicts: dict[str, Any] = {case["case"]: case["verdict"] for case in json.loads(out)["cases"]}
    assert code == 0
    assert verdicts["call_echo"] == verdicts["reasoning_echoed"] == "N/A"
    assert verdicts["text_echo"] == verdicts["many_turns"] == "EXACT"


@pytest.mark.requirement("R33")
async def test_a_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    """What the template raises is in the report, and no traceback."""
    family = tiny_tokenizer.Family("{{ raise_exception('no chats today') }}{{ tools }}")
    family.build(families.TEXTS).write(tmp_path)
    code, out, err = await conformance("--model", str(tmp_path), "--parser", "none")
    assert code == 1 and "REFUSED" in out and "no chats today" in out
    assert "Traceback" not in err


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
async def test_a_directory_that_lacks_a_file_is_refused_by_its_name(missing: str, tmp_path: Path) -> None:
    """Exit code 4, one line, the file that is missing."""
    families.build("chatml").write(tmp_path)
    (tmp_path / missing).unlink()
    code, out, err = await conformance("--model", str(tmp_path))
    assert (code, out) == (4, "")
    assert missing in err and len(err.splitlines()) == 1
    code, out, _ = await conformance("--model", str(tmp_path), "--json")
    assert code == 4 and json.loads(out)["error"] == "FILES_INCOMPLETE"


@pytest.mark.requirement("R33")
async def test_a_directory_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    """Exit code 2, as for any wrong command line."""
    code, _, err = await conformance("--model", str(tmp_path / "none"))
    assert code == 2 and "there is no directory" in err
