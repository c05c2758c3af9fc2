"""Properties of the token graph under any conversation and any client that mangles what it echoes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec import Codec
from penstock_codec.chat import (
    FinishReason,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
)
from penstock_interception import cache
from penstock_interception.graph import CallClass, CallHints, GraphRecord, Plan, Sampled, SamplePolicy, TokenGraph
from penstock_interception.graph.fingerprint import Fingerprints, canonical_json

Sampler = Callable[..., Sampled]

BASH = Tool("bash", "Run a command.", '{"type": "object"}')
START = [Message.system("You are a shell agent."), Message.user("Read the note.")]

PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<" not in text)
NUMBERS = st.one_of(st.integers(-(2**53), 2**53), st.sampled_from([0.5, 1.0, 1e21]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, PLAIN_TEXT)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(PLAIN_TEXT, inner, max_size=2)),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(PLAIN_TEXT, VALUES, max_size=3)


@st.composite
def completions(draw: st.DrawFn) -> tuple[str, FinishReason | None]:
    """What a model samples: reasoning or none, text, calls with odd spacing, cut off or not."""
    text = ""
    if draw(st.booleans()):
        text += f"<think>\n{draw(PLAIN_TEXT)}\n</think>\n\n"
    text += draw(PLAIN_TEXT) or "x"
    for _ in range(draw(st.integers(0, 2))):
        body = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        text += f'\n<tool_call>\n{{"name":  "bash","arguments": {body} }}\n</tool_call>'
    if draw(st.integers(0, 4)) == 0:
        cut = draw(st.integers(1, len(text)))
        return text[:cut], FinishReason.LENGTH
    return text + "<|im_end|>", None


def mangled(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[Message]:
    """An assistant message as some client echoes it."""
    parts: list[Part] = []
    drop_reasoning = draw(st.booleans())
    for part in message.parts:
        if isinstance(part, ReasoningPart):
            if not drop_reasoning:
                parts.append(part)
        elif isinstance(part, TextPart) and len(message.parts) == 1:
            echoes = [part.text, part.text.strip(), part.text.rstrip(), part.text + " \n"]
            parts.append(TextPart(draw(st.sampled_from(echoes))))
        elif isinstance(part, ToolCallPart) and draw(st.booleans()):
            value = json.loads(part.arguments_json)
            items = list(value.items())
            again = dict(draw(st.permutations(items)))
            text = json.dumps(
                again, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([None, (",", ":")]))
            )
            parts.append(ToolCallPart("renamed", part.name, text))
        else:
            parts.append(part)
    if len(parts) > 1 and draw(st.booleans()):
        return [Message(message.role, (part,)) for part in parts]
    return [Message(message.role, tuple(parts))]


@pytest.mark.requirement("R82", "R84", "R85")
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_prompt_starts_with_what_was_seen_and_sampled(codec: Codec, sample: Sampler, data: st.DataObject) -> None:
    """For any conversation and any echo; and the records rebuild the graph, each token trained once."""
    graph = TokenGraph("r", codec)
    records: list[GraphRecord] = []
    messages = list(START)
    seen: list[int] = []
    for turn in range(data.draw(st.integers(1, 5))):
        if data.draw(st.integers(0, 3)) == 0:
            side = graph.plan([Message.system("You name chats."), Message.user(f"Title {turn}?")])
            records.append(graph.commit(f"side-{turn}", side, sample(side, "Notes<|im_end|>")))
        cache.PARSED_BODIES.keep("r", b"", [{}], messages)  # as the ingress does it
        if data.draw(st.booleans()):
            cache.PARSED_BODIES.forget("r")
        plan = graph.plan(messages, [BASH])
        afresh = TokenGraph.restore("r", codec, records).plan(messages, [BASH])
        assert (plan.key, plan.parent_call_id) == (afresh.key, afresh.parent_call_id)
        assert plan.prompt_sha256 == afresh.prompt_sha256
        assert plan.prompt_ids[: len(seen)].tolist() == seen
        text, finish = data.draw(completions())
        records.append(graph.commit(f"main-{turn}", plan, sample(plan, text, finish=finish, version=turn)))
        node = graph.calls[f"main-{turn}"]
        seen = graph.path(node.call_id).tolist()
        reply = node.sampled.message
        answers = [Message.tool(call.id, data.draw(PLAIN_TEXT)) for call in reply.tool_calls]
        messages += [*mangled(reply, data.draw), *(answers or [Message.user(data.draw(PLAIN_TEXT))])]
    main = {node.branch_id for name, node in graph.calls.items() if name.startswith("main")}
    assert len(main) == 1

    trained: dict[str, int] = {}
    for item in graph.samples():
        assert item.input_ids.size == item.loss_mask.size == item.logprobs.size
        assert np.all(item.logprobs[item.loss_mask == 0] == 0)
        assert np.all(np.isfinite(item.logprobs) & (item.logprobs <= 0))
        for span in item.turns:
            node = graph.calls[span.call_id]
            assert node.sampled.token_ids is not None
            assert item.input_ids[span.start : span.end].tolist() == node.sampled.token_ids.tolist()
            trained[span.call_id] = trained.get(span.call_id, 0) + int(item.loss_mask[span.start : span.end].sum())
    for name, node in graph.calls.items():
        untrained = node.sampled.finish_reason.truncated or name.startswith("side")
        assert trained.get(name, 0) == (0 if untrained else node.sampled.count)

    again = TokenGraph.restore("r", codec, [GraphRecord.from_bytes(record.to_bytes()) for record in records])
    assert again.chain_head == graph.chain_head
    assert again.branches() == graph.branches()


@pytest.mark.requirement("R22", "R85")
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_order_of_plans_and_commits_keeps_the_graph_whole(
    codec: Codec, sample: Sampler, data: st.DataObject
) -> None:
    """Interleaved lines, forks, repeats, titles and written answers: every call stays, in one branch, with one class.

    What a trained class sampled is trained in one sample, whatever came after it.
    """
    graph = TokenGraph("r", codec)
    histories = [START, [Message.user("Title?")]]
    open_plans: list[tuple[Plan, list[Message]]] = []
    for step in range(data.draw(st.integers(4, 12))):
        commit: bool = data.draw(st.booleans())
        if open_plans and commit:
            plan, messages = open_plans.pop(data.draw(st.integers(0, len(open_plans) - 1)))
            answer = sample(plan, f"{data.draw(st.integers(0, 2))}<|im_end|>")
            if data.draw(st.integers(0, 3)) == 0:
                answer = Sampled(answer.message, FinishReason.STOP, injected=True)
            graph.commit(str(step), plan, answer)
            assert graph.path(str(step))[: plan.prompt_ids.size].tolist() == plan.prompt_ids.tolist()
            follow = Message.user(f"{data.draw(st.integers(0, 1))}")
            histories.append([*messages, graph.calls[str(step)].sampled.message, follow])
        else:
            messages = data.draw(st.sampled_from(histories))
            hints = CallHints(call_class=data.draw(st.sampled_from([None, CallClass.TITLE])))
            open_plans.append((graph.plan(messages, [BASH], hints), messages))
    listed = [name for branch in graph.branches() for name in branch.call_ids]
    assert sorted(listed) == sorted(graph.calls)
    assert set(graph.call_classes()) == set(graph.calls)
    leaves = graph.samples()
    assert len({item.sample_id for item in leaves}) == len(leaves)
    masks = sum(int(item.loss_mask.sum()) for item in leaves)
    assert masks <= sum(node.sampled.count for node in graph.calls.values())
    trained = Counter(turn.call_id for item in leaves for turn in item.turns if turn.untrained == "")
    assert masks == sum(graph.calls[name].sampled.count for name in trained)
    assert all(times == 1 for times in trained.values())
    acting = {name for name, found in graph.call_classes().items() if found in SamplePolicy().classes}
    assert trained.keys() >= {name for name in acting if graph.calls[name].sampled.token_ids is not None}
    assert not leaves or abs(sum(item.weight for item in leaves) - (1.0 if masks else 0.0)) < 1e-9


@pytest.mark.requirement("R82")
@given(value=VALUES, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_arguments_are_compared_as_values(value: object, indent: int | None, ascii_only: bool) -> None:
    """Spacing and escapes do not matter."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert canonical_json(text) == canonical_json(json.dumps(value, sort_keys=True, separators=(",", ":")))


@pytest.mark.requirement("R80")
@given(text=st.text(max_size=60))
def test_any_text_has_a_key(text: str) -> None:
    """Arguments that are no JSON, and text that is no Unicode, stand for themselves."""
    call = Message.assistant(text, ToolCallPart(text, text, text))
    keys = Fingerprints(with_call_ids=True)
    assert keys.key(call) == keys.key(call)
    assert canonical_json("[" * 100_000 + text) == canonical_json("[" * 100_000 + text)
