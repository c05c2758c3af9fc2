"""Renders a model call: the new part of its prompt, and the answer, token by token if requested."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.analysis.readable_calls import MessagePart, answered, messages, news
from penstock.analysis.recordings import Recording, Turn
from penstock.analysis.token_text import Pieces
from penstock.cli.terminal.console import Indented, clean, columns, counted, quoted

_LINES: Final = 400
_WIDTH: Final = 4000
_TOKENS: Final = 20_000
"""Maximum tokens of an answer that are drawn one by one."""
_WORST: Final = 5
_ROLES: Final = {"system": "dim", "developer": "dim", "user": "green", "assistant": "cyan", "tool": "yellow"}
_SCALE: Final = ((0.9, ""), (0.5, "cyan"), (0.2, "yellow"), (0.05, "magenta underline"), (0.0, "bold red underline"))
"""Styles by minimum probability: by more than colour, which not everybody can distinguish."""


def title(turn: Turn) -> str:
    """Returns a one-line summary of a call."""
    prompt = "?" if turn.prompt is None else str(len(turn.prompt))
    sampled = "?" if turn.sampled is None else str(len(turn.sampled))
    return f"call {turn.index} ({turn.role}): {prompt} + {sampled} tokens, {turn.state}"


def draw(recording: Recording, turn: Turn, *, tokens: bool) -> Iterator[RenderableType]:
    """Renders a whole call."""
    yield _facts(turn)
    for line in _remarks(recording, turn):
        yield Text(clean(line), style="yellow")
    yield Text()
    yield from _prompt(recording, turn)
    yield Text()
    yield Text("answer", style="bold")
    yield Indented(_answer(recording, turn, tokens=tokens))
    if tokens and turn.sampled is not None and turn.logprobs is not None and len(turn.sampled):
        yield Text()
        yield from _doubts(recording.pieces, turn)


def _facts(turn: Turn) -> Text:
    facts = [turn.state, f"answered by {turn.answerer}" if turn.answerer else "", turn.finish_reason]
    facts.append(" ".join(filter(None, (turn.model, f"({turn.engine})" if turn.engine else ""))))
    facts.append(versions(turn))
    facts.append(f"{turn.seconds:.2f} s" if turn.seconds is not None else "")
    facts += [
        f"{name} {value}" for name, value in turn.sampling.items() if name in ("temperature", "top_p", "max_tokens")
    ]
    return Text(clean(", ".join(filter(None, facts))), style="dim")


def versions(turn: Turn) -> str:
    """Formats the policy, where the rollout has several, and its versions that sampled it."""
    numbers = sorted({span.policy_version for span in turn.versions})
    shown = [f"v{number}" for number in dict.fromkeys((numbers[0], numbers[-1]))] if numbers else []
    return " ".join(filter(None, (turn.policy_id, " to ".join(shown))))


def _remarks(recording: Recording, turn: Turn) -> Iterator[str]:
    branch = next((branch for branch in recording.branches if branch.branch_id == turn.branch_id), None)
    if branch is not None and branch.call_ids[:1] == (turn.call_id,) and branch.fork_call_id is not None:
        fork = next((item.index for item in recording.turns if item.call_id == branch.fork_call_id), None)
        where = "" if fork is None else f" after call {fork}"
        yield f"opens a branch ({branch.branch_class}){where}: {branch.reason or 'no reason'}"
    if turn.end_reason:
        yield f"no answer: {turn.end_reason}"
    if turn.injected:
        yield "injected: the agent got a message that was not sampled"
    if turn.untrained:
        yield f"not trained: {turn.untrained}"
    for line in turn.normalisations:
        yield f"the gate changed: {line}"


def _prompt(recording: Recording, turn: Turn) -> Iterator[RenderableType]:
    yield Text("new in the prompt", style="bold")
    if turn.body is not None:
        parent = next((item for item in recording.turns if item.call_id == turn.parent_call_id), None)
        same, fresh = news(turn.body, None if parent is None else parent.body)
        if same:
            yield Text(f"  after {counted(same, 'message part')} as before", style="dim")
        for item in fresh:
            yield message_part(item)
        if not messages(turn.body):
            yield Indented(quoted(str(turn.body), lines=_LINES, width=_WIDTH))
    elif turn.prompt is not None and recording.pieces is not None:
        fresh_ids = turn.prompt[turn.shared :]
        yield Indented(quoted(recording.pieces.whole(fresh_ids), lines=_LINES, width=_WIDTH))
    else:
        count = "" if turn.prompt is None else f"{len(turn.prompt) - turn.shared} tokens; "
        yield Text(f"  {count}the request was not kept: export with --bodies, or set --tokenizer", style="dim")


def message_part(item: MessagePart) -> RenderableType:
    """Renders a part of a message under its role."""
    style = _ROLES.get(item.role, "")
    what = {"reasoning": " thinks", "tool_call": " calls ", "tool_result": " result", "other": ""}.get(item.kind, "")
    head = Text.assemble("  ", (clean(item.role or "?"), f"bold {style}"), (what, style))
    if item.name:
        head.append(clean(item.name[:200]), style=f"bold {style}")
    body = quoted(item.text, "dim" if item.role == "system" else "", lines=_LINES, width=_WIDTH)
    return Group(head, Indented(body, 4))


def _answer(recording: Recording, turn: Turn, *, tokens: bool) -> Text:
    if turn.sampled is not None and recording.pieces is not None:
        if tokens:
            return coloured(recording.pieces, turn)
        return quoted(recording.pieces.whole(turn.sampled), lines=_LINES, width=_WIDTH)
    if turn.message is not None:
        return quoted(_message_text(turn.message), lines=_LINES, width=_WIDTH)
    if turn.sampled is None:
        return Text("no tokens were captured" if not turn.end_reason else "none", style="dim")
    return Text(f"{counted(len(turn.sampled), 'token')}; to read them set --tokenizer DIR", style="dim")


def answer_text(recording: Recording, turn: Turn) -> str | None:
    """Returns the answer as it was sampled, else its message's text; None if unknown."""
    if turn.sampled is not None and recording.pieces is not None:
        return recording.pieces.whole(turn.sampled)
    return None if turn.message is None else _message_text(turn.message)


def _message_text(message: Mapping[str, Any]) -> str:
    """Returns a message as text: its texts, and its tool calls by name and arguments."""
    return "\n".join(" ".join(filter(None, (item.name, item.text))) for item in answered(message))


def coloured(pieces: Pieces, turn: Turn) -> Text:
    """Renders the sampled tokens, each styled by its probability."""
    drawn = Text()
    ids = turn.sampled if turn.sampled is not None else np.empty(0, np.int32)
    chances = None if turn.logprobs is None else np.exp(turn.logprobs.astype(np.float64))
    for position, token_id in enumerate(ids[:_TOKENS]):
        shown = clean(pieces.text(int(token_id))).replace("\n", "\N{RETURN SYMBOL}\n").expandtabs(4)
        drawn.append(shown, style="" if chances is None else style_of(float(chances[position])))
    if len(ids) > _TOKENS:
        drawn.append(f" ... {len(ids) - _TOKENS} more tokens", style="dim")
    return drawn


def style_of(chance: float) -> str:
    """Returns the style for a token of this probability."""
    return next((style for least, style in _SCALE if chance >= least), _SCALE[-1][1])


def legend() -> Text:
    """Returns a legend of the token styles."""
    drawn = Text("probability of a token: ", style="dim")
    for least, style in _SCALE:
        drawn.append(f"{least:.0%} and more" if least == _SCALE[0][0] else f"{least:.0%}+" if least else "less", style)
        drawn.append("  ")
    return drawn


def _doubts(pieces: Pieces | None, turn: Turn) -> Iterator[RenderableType]:
    """Yields the scale, the mean, and the least probable tokens."""
    yield legend()
    assert turn.logprobs is not None and turn.sampled is not None
    mean = float(turn.logprobs.astype(np.float64).mean())
    yield Text(
        f"mean logprob {mean:.3f} nats over {counted(len(turn.sampled), 'token')}; the least likely:", style="dim"
    )
    table = columns(("position", "right"), ("token", "right"), "text", ("logprob", "right"), ("probability", "right"))
    for position in np.argsort(turn.logprobs, kind="stable")[:_WORST]:
        value, token_id = float(turn.logprobs[position]), int(turn.sampled[position])
        shown = "" if pieces is None else repr(pieces.text(token_id))[1:-1]
        table.add_row(
            str(position),
            str(token_id),
            Text(clean(shown), style=style_of(float(np.exp(value)))),
            f"{value:.3f}",
            f"{np.exp(value):.2%}",
        )
    yield table
