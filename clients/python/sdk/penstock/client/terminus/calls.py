"""Parses a policy's text into a call of the tool `terminal`: one command, or the final answer.

Invariants: the work is bounded in the text's size and in depth, whatever the text (R80); a command runs only if the
text contains it verbatim as a call, and free text runs only if the caller enabled that, which is reported (R81); a
value that is not written as a text is refused and not guessed at.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

TOOL_NAME: Final = "terminal"
MAX_TEXT_CHARS: Final = 1 << 18
MAX_DEPTH: Final = 32
"""Maximum depth of brackets within a call."""
_MAX_CANDIDATES: Final = 64
_MAX_SCANNED_CHARS: Final = 2 * MAX_TEXT_CHARS
"""Characters scanned in total: each candidate may reach to the end of the text."""
_MAX_WRAPPERS: Final = 4

_START: Final = re.compile(r"\{|(?<![\w.])terminal\s*\(")
_JSON_MARK: Final = re.compile(r'["{}\[\]\\]')
_PYTHON_MARK: Final = re.compile(r'"""|\'\'\'|["\'(){}\[\]\\]')
_FENCE: Final = re.compile(r"\A```([\w+-]*)[^\S\n]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_SHELLS: Final = frozenset({"", "sh", "bash", "shell", "console", "zsh"})
_WRAPPERS: Final = ("arguments", "parameters", "input", "function")
_VALUES: Final = ("command", "final_answer")


class CallSource(StrEnum):
    """The form of a call: a JSON object, `terminal(...)`, or free text that is the command."""

    JSON = "json"
    EXPRESSION = "expression"
    FREE_TEXT = "free_text"


@dataclass(frozen=True, slots=True)
class TerminalToolCall:
    """A call of the tool `terminal`.

    `args` has `command` or `final_answer`, one of the two; or neither, and then `problem` is what is wrong with the
    text, for the policy. `source` is the form of the call, None with a problem.
    """

    id: str
    args: Mapping[str, str] = field(default_factory=dict)
    source: CallSource | None = None
    problem: str = ""
    name: str = TOOL_NAME

    @property
    def ok(self) -> bool:
        """Whether there is something to do."""
        return not self.problem


class _Unusable(Exception):
    """The candidate is meant as a call but is invalid."""


class _NotACall(Exception):
    """The candidate is not meant as a call of this tool."""


def build_terminal_tool_call(
    text: str, call_id: str = "terminal-0", *, shell_fallback: bool = False
) -> TerminalToolCall:
    """Returns the first call in a policy's text, anywhere in it, also in a code fence or between tags.

    Accepts JSON objects (`{"command": "ls"}`, `{"final_answer": "42"}`, the same below `arguments`, which may be a text
    with JSON, and in an OpenAI tool call) and `terminal("ls")`, `terminal(command="ls")`, `terminal(final_answer="42")`
    with quoted values. An empty command beside an answer is ignored.

    Args:
        text: the policy's text, without its reasoning; more than 262,144 characters are refused.
        call_id: of the call.
        shell_fallback: run a text without a call as a shell command (of one fenced block, its content; not if it is
            fenced as another language). Reported as `CallSource.FREE_TEXT`.
    """
    if len(text) > MAX_TEXT_CHARS:
        return TerminalToolCall(call_id, problem=f"the text has more than {MAX_TEXT_CHARS} characters")
    try:
        for source, found in _candidates(text):
            try:
                return TerminalToolCall(call_id, _arguments(found), source)
            except _NotACall:
                continue
        if shell_fallback:
            return TerminalToolCall(call_id, {"command": _free_text(text)}, CallSource.FREE_TEXT)
    except _Unusable as error:
        return TerminalToolCall(call_id, problem=str(error))
    return TerminalToolCall(
        call_id, problem=f'no call was found: write {{"command": "..."}} or {{"final_answer": "..."}} for {TOOL_NAME}'
    )


def _candidates(text: str) -> Iterator[tuple[CallSource, Any]]:
    """Yields possible calls, in the order of the text, as plain values."""
    position, scanned = 0, 0
    for _ in range(_MAX_CANDIDATES):
        start = _START.search(text, position)
        if start is None:
            return
        is_json = start.group() == "{"
        end = _end(text, start.start() if is_json else start.end() - 1, _JSON_MARK if is_json else _PYTHON_MARK)
        scanned += (end or len(text)) - start.start()
        if scanned > _MAX_SCANNED_CHARS:
            raise _Unusable("the text has too many brackets to find a call in it")
        position = start.end()
        if end is None:
            continue
        value = _json(text[start.start() : end]) if is_json else _expression(text[start.start() : end])
        if value is not None:
            yield (CallSource.JSON if is_json else CallSource.EXPRESSION), value
            position = end


def _end(text: str, start: int, marks: re.Pattern[str]) -> int | None:
    """Returns the position of the bracket that closes the one at `start`, None if there is none."""
    depth = 0
    position = start
    while mark := marks.search(text, position):
        position = mark.end()
        match mark.group():
            case "(" | "{" | "[":
                depth += 1
                if depth > MAX_DEPTH:
                    raise _Unusable(f"more than {MAX_DEPTH} brackets are open at once")
            case ")" | "}" | "]":
                depth -= 1
                if depth == 0:
                    return position
            case "\\":
                position += 1
            case quote:
                closed = _string_end(text, position, quote)
                if closed is None:
                    return None
                position = closed
    return None


def _string_end(text: str, position: int, quote: str) -> int | None:
    """Returns the end of a string whose opening quote was before `position`."""
    while (closing := text.find(quote, position)) >= 0:
        backslashes = 0
        while text[closing - 1 - backslashes] == "\\" and closing - backslashes > position:
            backslashes += 1
        if backslashes % 2 == 0:
            return closing + len(quote)
        position = closing + 1
    return None


def _json(text: str) -> Any:
    """Returns the value, None for invalid JSON. Raw line breaks and tabs are allowed in strings."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _expression(text: str) -> Any:
    """Returns the arguments of `terminal(...)` by name; None if it does not parse."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    if len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Dict):
        return {
            _literal(key): _literal(value) for key, value in zip(call.args[0].keys, call.args[0].values, strict=True)
        }
    if len(call.args) > len(_VALUES):
        raise _Unusable("terminal(...) accepts a command and a final answer, and no third argument")
    found = {name: _literal(value) for name, value in zip(_VALUES, call.args, strict=False)}
    for keyword in call.keywords:
        if keyword.arg not in _VALUES or keyword.arg in found:
            raise _Unusable(f"terminal(...) does not accept {keyword.arg or '**'!r} here")
        found[keyword.arg] = _literal(keyword.value)
    return found


def _literal(node: ast.expr | None) -> Any:
    if not isinstance(node, ast.Constant):
        raise _Unusable(
            "the arguments of terminal(...) must be texts in quotes; a name or an expression is not evaluated"
        )
    return node.value


def _arguments(found: Any) -> dict[str, str]:
    """Returns the one argument of a call."""
    for _ in range(_MAX_WRAPPERS):
        if isinstance(found, str):
            start = len(found) - len(found.lstrip())
            is_object = found[start : start + 1] == "{" and _end(found, start, _JSON_MARK) is not None
            found = _json(found) if is_object else None
        if not isinstance(found, dict):
            raise _NotACall
        name = found.get("name", TOOL_NAME)
        if name != TOOL_NAME and any(wrapper in found for wrapper in _WRAPPERS):
            raise _Unusable(f"there is no tool {str(name)[:80]!r}: the tool is {TOOL_NAME}")
        if any(found.get(value) is not None for value in _VALUES):
            return _one_of(found)
        wrapped = next((found[wrapper] for wrapper in _WRAPPERS if wrapper in found), None)
        if wrapped is None:
            raise _NotACall
        found = wrapped
    raise _Unusable(f"the call is wrapped more than {_MAX_WRAPPERS} times")


def _one_of(found: Mapping[str, Any]) -> dict[str, str]:
    command, answer = found.get("command"), found.get("final_answer")
    if command is not None and not isinstance(command, str):
        raise _Unusable("the command is not a text")
    if isinstance(answer, bool | int | float):
        answer = json.dumps(answer)
    if answer is not None and not isinstance(answer, str):
        raise _Unusable("the final answer is not a text")
    if command and command.strip():
        if answer:
            raise _Unusable("there are a command and a final answer: send one of the two")
        return {"command": _usable(command)}
    if answer is None:
        raise _Unusable("the command is empty")
    if problem := answer_problem(answer):
        raise _Unusable(problem)
    return {"final_answer": answer}


def call_problem(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns what is wrong with a call of the tool; empty = nothing."""
    command, answer = arguments.get("command"), arguments.get("final_answer")
    if name != TOOL_NAME:
        return f"there is no tool {name!r}: the tool is {TOOL_NAME}"
    if unknown := sorted(set(arguments) - {"command", "final_answer"}):
        return f"{TOOL_NAME} does not accept {', '.join(unknown)}"
    if any(value is not None and not isinstance(value, str) for value in (command, answer)):
        return "command and final_answer must be texts"
    if command and answer:
        return "there are a command and a final answer: send one of the two"
    if not command and answer is None:
        return "send a command or a final answer"
    return command_problem(command) if command else answer_problem(answer or "")


def command_problem(command: str) -> str:
    """Returns why a text cannot be passed to a shell; empty = it can."""
    if not command.strip():
        return "the command is empty"
    if "\0" in command:
        return "the command has a NUL character: no shell accepts one"
    return "the command has a lone surrogate, which is not a character" if _has_surrogate(command) else ""


def answer_problem(answer: str) -> str:
    """Returns why a text cannot be an answer; empty = it can."""
    return "the final answer has a lone surrogate, which is not a character" if _has_surrogate(answer) else ""


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _usable(command: str) -> str:
    if problem := command_problem(command):
        raise _Unusable(problem)
    return command


def _free_text(text: str) -> str:
    fenced = _FENCE.match(text.strip())
    if fenced:
        if fenced[1].lower() not in _SHELLS:
            raise _Unusable(f"the text is {fenced[1]}, not a command")
        text = fenced[2]
    if not text.strip():
        raise _Unusable("the text is empty")
    return _usable(text.strip())
