"""Token fidelity: after any echo that real clients make, the next prompt starts with exactly what was seen and sampled.

Every case of `penstock conformance`, for a model of every family, over every dialect. The first seven cases are the
table in which no system before this one was exact throughout.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.support import families

from penstock_codec import Codec
from penstock_codec.chat import Message
from penstock_interception.conformance.cases import CASES, MORE, START, TEXT, Case, Result, Setting, Verdict, run_case
from penstock_interception.conformance.dialects import DIALECTS

PARSERS = {
    "llama3_bare": "llama3",
    "llama4": "llama3",
    "mistral_v3": "mistral",
    **dict.fromkeys(("chatml", "qwen3", "thinks_on_request", "hears_users"), "hermes"),
}
NAMED = ("shows_call_ids", "system_first", "strips_old_reasoning")  # no family's: the parser is said


@pytest.fixture(scope="module")
def codecs() -> Mapping[str, Codec]:
    names = (*families.FAMILIES, *families.MOVING)
    return {name: Codec.load(families.build(name), parser="hermes" if name in NAMED else None) for name in names}


@pytest.mark.requirement("R82", "R84", "R85")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_case_holds(codecs: Mapping[str, Codec], family: str, dialect: str, case: Case) -> None:
    """Exact, or a branch with its label where the history was really changed."""
    codec = codecs[family]
    assert codec.parser == ("hermes" if family in NAMED else PARSERS.get(family, family))
    result = run_case(case, Setting.of(codec, DIALECTS[dialect]))
    if family == "granite" and case.name == "as_written":
        assert result == Result(Verdict.NOT_APPLICABLE, "the template writes no calls")
    else:
        assert result == Result(case.expects)


@pytest.mark.requirement("R82", "R85")
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_moving_tools_end_the_exact_line_at_the_last_question(codecs: Mapping[str, Codec], dialect: str) -> None:
    """A tool's result goes on exactly; a new question moves the tools, and the branch shows what moved."""
    setting = Setting.of(codecs["mistral_v3"], DIALECTS[dialect])
    verdicts = {case.name: run_case(case, setting) for case in CASES if case.main}
    exact = {name for name, result in verdicts.items() if result.verdict is Verdict.EXACT}
    assert exact == {"call_echo", "arguments", "side"}
    for name in verdicts.keys() - exact:
        assert verdicts[name].verdict is Verdict.BRANCH
        assert "TEMPLATE_REWRITES_HISTORY" in verdicts[name].reason
        assert "[AVAILABLE_TOOLS]" in verdicts[name].reason


@pytest.mark.requirement("R85")
def test_a_template_that_rewrites_everything_is_never_exact(codecs: Mapping[str, Codec]) -> None:
    """No splice where new messages change what stands before them."""
    setting = Setting.of(codecs["rewrites_history"], DIALECTS["chat_completions"])
    verdicts = {case.name: run_case(case, setting).verdict for case in CASES}
    assert verdicts.pop("as_written") is Verdict.NOT_APPLICABLE
    assert verdicts.pop("compacted") is verdicts.pop("edited") is Verdict.LABELLED
    assert set(verdicts.values()) == {Verdict.BRANCH}


@pytest.mark.requirement("R82")
def test_a_turn_that_ends_in_another_token_than_usual_is_closed_already(codecs: Mapping[str, Codec]) -> None:
    """Llama ends calls of built-in tools with <|eom_id|>; no second end of turn is put behind it."""
    codec = codecs["llama3"]
    setting = Setting.of(codec, DIALECTS["domain"])
    conversation = setting.conversation()
    first = conversation.call(START, '<|python_tag|>{"name": "bash", "parameters": {}}<|eom_id|>')
    reply = first.sampled.message
    second = conversation.call([*START, reply, Message.tool(reply.tool_calls[0].id, "kiwi"), MORE], TEXT)
    assert conversation.continues(second, first)
    assert codec.decode(second.suffix).startswith("<|start_header_id|>ipython<|end_header_id|>")


@pytest.mark.requirement("R82")
def test_built_in_tools_whose_calls_the_template_closes_otherwise_stay_exact(codecs: Mapping[str, Codec]) -> None:
    """Where the template itself writes <|eom_id|>, the new messages are cut behind it, results and all."""
    codec = codecs["llama3"]
    conversation = Setting.of(codec, DIALECTS["domain"]).conversation()
    options = {"builtin_tools": ["code_interpreter"]}
    first = conversation.commit("1", conversation.graph.plan(START, template_kwargs=options), setting_call())
    reply = first.sampled.message
    history = [*START, reply, Message.tool(reply.tool_calls[0].id, "kiwi")]
    second = conversation.commit("2", conversation.graph.plan(history, template_kwargs=options), TEXT)
    assert conversation.continues(second, first)
    assert "kiwi" in codec.decode(second.suffix)


def setting_call() -> str:
    """A call as Llama writes it where built-in tools are on."""
    return '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}<|eom_id|>'
