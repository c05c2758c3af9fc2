"""Agents' output lines as events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_driver.agents.output_events import (
    MAX_LINE_BYTES,
    MAX_RAW_BYTES,
    AgentEvent,
    EventKind,
    EventParser,
    EventRule,
    compiled,
    evaluator,
    search,
)
from penstock_driver.agents.registry import built_in_specs

SPECS = {spec.name: spec for spec in built_in_specs()}
RULES = (
    EventRule(when="type == 'say'", kind=EventKind.ASSISTANT, fields={"text": "text"}),
    EventRule(when="type == 'end'", kind=EventKind.DONE, fields={"reason": "why.what", "failed": "failed"}),
    EventRule(when="type == 'noise'", kind=EventKind.IGNORED),
)


def parse(data: bytes, size: int = 1 << 20) -> list[AgentEvent]:
    parser = EventParser(RULES)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return [event for piece in pieces for event in parser.feed(piece)] + list(parser.finish())


@pytest.mark.requirement("R71")
def test_a_line_becomes_the_event_of_the_first_rule_that_holds() -> None:
    events = parse(b'{"type":"say","text":"hi"}\r\n{"type":"noise"}\n\n{"type":"end","why":{"what":"ok"}}')
    assert [(event.kind, dict(event.data)) for event in events] == [
        (EventKind.ASSISTANT, {"text": "hi"}),
        (EventKind.DONE, {"reason": "ok"}),
    ]
    assert events[0].raw_line == b'{"type":"say","text":"hi"}'


@pytest.mark.requirement("R71")
@given(
    lines=st.lists(st.one_of(st.binary(), st.sampled_from([b'{"type":"say","text":"\xc3\xa9"}', b"[1]", b"{" * 3000]))),
    size=st.integers(1, 50),
)
def test_how_the_output_is_cut_into_chunks_changes_nothing(lines: list[bytes], size: int) -> None:
    """Any bytes, any chunks; nothing raises and no line is lost."""
    data = b"\n".join(lines)
    assert parse(data, size) == parse(data)
    visible = [line for line in data.split(b"\n") if line.rstrip(b"\r").strip()]
    assert len(parse(data)) == len(visible)


@pytest.mark.requirement("R71", "R80")
def test_endless_line_costs_bounded_memory_and_is_marked_as_cut() -> None:
    parser = EventParser(RULES)
    for _ in range(MAX_LINE_BYTES // 4096 + 10):
        assert not list(parser.feed(b"x" * 4096))
    (event,) = parser.feed(b"\n")
    assert (event.kind, dict(event.data), len(event.raw_line)) == (EventKind.OTHER, {"truncated": True}, MAX_RAW_BYTES)
    (after,) = parser.feed(b'{"type":"say","text":"still here"}\n')
    assert after.kind is EventKind.ASSISTANT


@pytest.mark.requirement("R71")
def test_a_rule_that_does_not_fit_the_line_is_no_error() -> None:
    """JMESPath functions on values of another type."""
    rule = EventRule(when="contains(a, 'x')", kind=EventKind.DONE)
    parser = EventParser((rule,))
    assert [event.kind for event in parser.feed(b'{"a": 3}\n{"a": "x"}\n')] == [EventKind.OTHER, EventKind.DONE]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just("say")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["type", "a"]), inner)),
)


@pytest.mark.requirement("R71")
@settings(max_examples=40)
@given(value=JSON)
def test_the_direct_evaluation_of_an_expression_is_jmespaths_own(value: object) -> None:
    """The short cut for plain rules changes no result."""
    for expression in ("type", "type == 'say'", "a.type", "type == a", "a == 'say' && type == 'say'", "a == `1`"):
        assert evaluator(expression)(value) == search(compiled(expression), value)


@pytest.mark.requirement("R71")
def test_the_lines_of_the_real_agents_are_understood() -> None:
    """As OpenCode 1.18.33, Pi 0.74.2, Codex 0.169.0, Gemini CLI 0.61.0 and Qwen Code 0.15.10 wrote them, cut."""

    def kinds(agent: str, *lines: object) -> list[tuple[str, object]]:
        parser = EventParser(SPECS[agent].events.rules)
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return [(event.kind.value, event.data.get("text") or event.data.get("output")) for event in parser.feed(data)]

    assert kinds(
        "opencode",
        {"type": "step_start", "part": {"type": "step-start"}},
        {"type": "text", "part": {"text": "let me"}},
        {"type": "tool_use", "part": {"tool": "bash", "callID": "c", "state": {"status": "completed", "output": "o"}}},
        {"type": "step_finish", "part": {"reason": "tool-calls"}},
        {"type": "step_finish", "part": {"reason": "stop"}},
    ) == [("assistant", "let me"), ("tool_result", "o"), ("done", None)]
    text_end = {"type": "message_update", "assistantMessageEvent": {"type": "text_end", "content": "let me"}}
    assert kinds(
        "pi",
        {"type": "session"},
        text_end,
        {"type": "tool_execution_start", "toolCallId": "c", "toolName": "bash", "args": {}},
        {"type": "tool_execution_end", "result": {"content": [{"type": "text", "text": "o"}]}, "isError": False},
        {"type": "agent_end", "messages": [{"stopReason": "stop"}]},
    ) == [("assistant", "let me"), ("tool_call", None), ("tool_result", "o"), ("done", None)]
    assert kinds(
        "gemini-cli",
        {"type": "init", "model": "m"},
        {"type": "message", "role": "user", "content": "do it"},
        {"type": "message", "role": "assistant", "content": "let me", "delta": True},
        {"type": "tool_use", "tool_name": "run_shell_command", "tool_id": "c", "parameters": {"command": "ls"}},
        {"type": "tool_result", "tool_id": "c", "status": "success", "output": "o"},
        {"type": "tool_result", "tool_id": "c", "status": "error", "error": {"message": "no"}},
        {"type": "result", "status": "success", "stats": {}},
    ) == [("assistant", "let me"), ("tool_call", None), ("tool_result", "o"), ("tool_result", "no"), ("done", None)]

    def said(content: object, kind: str = "assistant") -> object:
        return {"type": kind, "message": {"content": [content]}}

    assert kinds(
        "qwen-code",
        {"type": "system", "subtype": "init"},
        said({"type": "thinking", "thinking": "hm"}),
        said({"type": "text", "text": "let me"}),
        said({"type": "tool_use", "id": "c", "name": "run_shell_command", "input": {}}),
        said({"type": "tool_result", "tool_use_id": "c", "is_error": False, "content": "o"}, "user"),
        {"type": "result", "subtype": "success", "is_error": False},
    ) == [("reasoning", "hm"), ("assistant", "let me"), ("tool_call", None), ("tool_result", "o"), ("done", None)]
    command = {"id": "item_3", "type": "command_execution", "command": "/bin/bash -lc ls"}
    tool = {"id": "item_4", "type": "mcp_tool_call", "server": "notes", "tool": "read", "arguments": {"which": "a"}}
    content = [{"type": "text", "text": "kiwi"}, {"type": "image", "data": "AA=="}]
    assert kinds(
        "codex",
        {"type": "thread.started", "thread_id": "t"},
        {"type": "item.completed", "item": {"type": "error", "message": "Model metadata for `m` not found."}},
        {"type": "turn.started"},
        {"type": "item.completed", "item": {"id": "item_1", "type": "reasoning", "text": "hm"}},
        {"type": "item.completed", "item": {"id": "item_2", "type": "agent_message", "text": "let me"}},
        {"type": "item.started", "item": {**command, "aggregated_output": "", "status": "in_progress"}},
        {
            "type": "item.completed",
            "item": {**command, "aggregated_output": "o", "exit_code": 0, "status": "completed"},
        },
        {"type": "item.started", "item": {**tool, "result": None, "error": None}},
        {"type": "item.completed", "item": {**tool, "result": {"content": content}, "error": None}},
        {"type": "error", "message": "Reconnecting... 1/5"},
        {"type": "turn.completed", "usage": {}},
    ) == [
        ("reasoning", "hm"),
        ("assistant", "let me"),
        ("tool_call", None),
        ("tool_result", "o"),
        ("tool_call", None),
        ("tool_result", "kiwi"),
        ("error", None),
        ("done", None),
    ]


@pytest.mark.requirement("R59", "R71")
def test_the_lines_of_claude_code_are_understood() -> None:
    """As 2.1.329 wrote them, shortened; it also says itself when it failed."""

    def block(kind: str, **block: object) -> dict[str, object]:
        return {"type": kind, "message": {"content": [block]}}

    lines: list[dict[str, object]] = [
        {"type": "system", "subtype": "init"},
        {"type": "system", "subtype": "thinking_tokens", "estimated_tokens": 3},
        block("assistant", type="thinking", thinking="hm", signature="s"),
        block("assistant", type="text", text="let me"),
        block("assistant", type="tool_use", id="t1", name="Bash", input={"command": "ls"}),
        block("user", type="tool_result", tool_use_id="t1", content="Exit code 1", is_error=True),
        {"type": "system", "subtype": "api_retry", "attempt": 1, "error": "overloaded"},
        {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 402"},
    ]
    parser = EventParser(SPECS["claude-code"].events.rules)
    events = list(parser.feed("".join(json.dumps(line) + "\n" for line in lines).encode()))
    assert [(event.kind.value, event.data) for event in events] == [
        ("reasoning", {"text": "hm"}),
        ("assistant", {"text": "let me"}),
        ("tool_call", {"id": "t1", "name": "Bash", "arguments": {"command": "ls"}}),
        ("tool_result", {"id": "t1", "output": "Exit code 1", "is_error": True}),
        ("error", {"message": "a model call is tried again: overloaded"}),
        ("done", {"reason": "API Error: 402", "failed": True}),
    ]


@pytest.mark.requirement("R59")
def test_pi_says_that_it_failed_although_it_exits_with_0() -> None:
    """Seen with an endpoint that refuses connections."""
    parser = EventParser(SPECS["pi"].events.rules)
    line = {"type": "agent_end", "messages": [{"role": "user"}, {"stopReason": "error", "errorMessage": "no"}]}
    (event,) = parser.feed(json.dumps(line).encode() + b"\n")
    assert event.data == {"reason": "error", "failed": True}


@pytest.mark.requirement("R59")
def test_pi_says_that_it_failed_in_a_run_whose_last_line_is_too_long_to_be_read() -> None:
    """That line has all messages. What comes after a failed call, Pi's own retry, says that the run went on."""

    def said(role: str, **fields: object) -> dict[str, object]:
        return {"type": "message_end", "message": {"role": role, **fields}}

    def last_done(*lines: object) -> object:
        parser = EventParser(SPECS["pi"].events.rules)
        end = {"type": "agent_end", "messages": [{"content": "x" * MAX_LINE_BYTES}, {"stopReason": "error"}]}
        data = "".join(json.dumps(line) + "\n" for line in (*lines, end)).encode()
        return [dict(event.data) for event in parser.feed(data) if event.kind is EventKind.DONE][-1]

    user, failed = said("user"), said("assistant", stopReason="error", errorMessage="no")
    aborted, answered = said("assistant", stopReason="aborted"), said("assistant", stopReason="toolUse")
    assert last_done(user, answered, failed) == {"reason": "error", "failed": True}
    assert last_done(answered, aborted, user) == {"reason": "aborted", "failed": True}
    assert last_done(failed, answered, said("toolResult")) == {"reason": "toolUse", "failed": False}
    ended = {"type": "turn_end", "message": {"stopReason": "error", "errorMessage": "no"}, "toolResults": []}
    [event] = EventParser(SPECS["pi"].events.rules).feed(json.dumps(ended).encode() + b"\n")
    assert (event.kind, event.data) == (EventKind.ERROR, {"message": "no"})


@pytest.mark.requirement("R71")
def test_lines_of_text_are_matched_without_what_is_meant_for_a_terminal() -> None:
    """An agent that prints no JSON is understood by its lines."""
    rules = (
        EventRule(when="starts_with(line, 'Applied ')", kind=EventKind.TOOL_RESULT, fields={"output": "line"}),
        EventRule(when="line", kind=EventKind.ASSISTANT, fields={"text": "line"}),
    )
    parser = EventParser(rules, text=True)
    events = [*parser.feed(b'\x1b[1;32mApplied it\x1b[0m\n{"a": 1}\n\n'), *parser.finish()]
    assert [(event.kind, dict(event.data)) for event in events] == [
        (EventKind.TOOL_RESULT, {"output": "Applied it"}),
        (EventKind.ASSISTANT, {"text": '{"a": 1}'}),
    ]
