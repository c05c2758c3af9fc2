"""The token graph: what it refuses, what it keeps, and what comes back after a crash."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import numpy as np
import pytest

from penstock_chassis.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument
from penstock_codec import Codec, CodecError
from penstock_codec.chat import FinishReason, Message, Tool, ToolCallPart
from penstock_interception.graph import (
    CallClass,
    CallHints,
    GraphRecord,
    LogprobsMode,
    Sampled,
    SamplePolicy,
    TokenGraph,
    TopLogprobs,
    VersionSpan,
)
from penstock_interception.graph.fingerprint import Fingerprints

Sampler = Callable[..., Sampled]

BASH = Tool("bash", "Run a command.", '{"type": "object"}')
START = [Message.system("You are a shell agent."), Message.user("Read the note.")]
MORE = Message.user("List the files, please.")
ANSWER = "I will do that.<|im_end|>"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "cat note.txt"}}\n</tool_call><|im_end|>'


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """int32 ids."""
    return np.asarray(values, dtype=np.int32)


def logs(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """float32 logprobs."""
    return np.asarray(values, dtype=np.float32)


PLAIN = Sampled(
    message=Message.assistant("ab"),
    finish_reason=FinishReason.STOP,
    token_ids=ids(20, 21, 2),
    logprobs=logs(-0.1, -0.2, 0.0),
    logprobs_mode=LogprobsMode.PROCESSED,
    versions=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)),
)


@pytest.mark.requirement("R83")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": logs(-0.1, -0.2)}, "span.logprobs"),
        ({"logprobs": logs(-0.1, -0.2, 0.001)}, "span.logprobs"),
        ({"logprobs": logs(-0.1, float("nan"), -1)}, "span.logprobs"),
        ({"logprobs": logs(-0.1, float("-inf"), -1)}, "span.logprobs"),
        ({"logprobs": np.asarray([-0.1, -0.2, -0.3])}, "span.logprobs"),
        ({"logprobs_mode": None}, "span.logprobs_mode"),
        ({"token_ids": ids(20, 21, 10**6)}, "span.token_ids"),
        ({"token_ids": ids(20, 21, -1)}, "span.token_ids"),
        ({"token_ids": np.asarray([20, 21, 2])}, "span.token_ids"),
        ({"token_ids": ids(20, 21, 2).reshape(1, 3)}, "span.token_ids"),
        ({"token_ids": None}, "span.logprobs"),
        ({"versions": (VersionSpan(4, 0, 2),)}, "span.versions"),
        ({"versions": (VersionSpan(4, 0, 2), VersionSpan(5, 1, 3))}, "span.versions[1]"),
        ({"versions": (VersionSpan(4, 0, 4),)}, "span.versions"),
        ({"versions": (VersionSpan(4, 0, 0), VersionSpan(5, 0, 3))}, "span.versions[0]"),
        ({"message": Message.user("ab")}, "message.role"),
    ],
)
def test_a_completion_that_does_not_add_up_is_refused_and_changes_nothing(
    codec: Codec, change: dict[str, object], field: str
) -> None:
    """Equal lengths, ids in the vocabulary, logprobs finite and <= 0, versions without a gap; fields are named."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    head = graph.chain_head
    with pytest.raises(InvalidArgument) as caught:
        graph.commit("c", plan, replace(PLAIN, **change))  # type: ignore[arg-type]
    assert caught.value.reason == "COMPLETION_INVALID"
    assert field in [violation.field for violation in caught.value.violations]
    assert (len(graph.calls), graph.chain_head) == (0, head)
    graph.commit("c", plan, PLAIN)


@pytest.mark.requirement("R83")
def test_a_models_larger_vocabulary_is_heeded(codec: Codec) -> None:
    """Models pad their vocabulary beyond the tokenizer's."""
    graph = TokenGraph("r", codec, vocab_size=codec.vocab_size + 10)
    graph.commit("c", graph.plan(START), replace(PLAIN, token_ids=ids(20, 21, codec.vocab_size + 9)))


@pytest.mark.requirement("R29")
def test_a_call_is_committed_once(codec: Codec) -> None:
    """A second commit of a call is an error."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("c", plan, PLAIN)
    with pytest.raises(AlreadyExists):
        graph.commit("c", plan, PLAIN)


@pytest.mark.requirement("R4")
def test_a_plan_of_another_rollout_is_refused(codec: Codec) -> None:
    """Rollouts do not mix."""
    plan = TokenGraph("other", codec).plan(START)
    with pytest.raises(FailedPrecondition):
        TokenGraph("r", codec).commit("c", plan, PLAIN)


@pytest.mark.requirement("R33")
def test_an_empty_conversation_is_refused(codec: Codec) -> None:
    """Typed, before anything is rendered."""
    with pytest.raises(InvalidArgument):
        TokenGraph("r", codec).plan([])


@pytest.mark.requirement("R33")
def test_a_conversation_that_the_template_cannot_take_is_refused_by_the_codec(codec: Codec) -> None:
    """The codec's error comes through with its reason."""
    with pytest.raises(CodecError):
        TokenGraph("r", codec).plan(START, [Tool("bash", "", "[]")])


@pytest.mark.requirement("R22")
def test_planning_changes_nothing_and_commits_may_come_in_any_order(codec: Codec, sample: Sampler) -> None:
    """Concurrent calls on several lines are safe."""
    graph = TokenGraph("r", codec)
    first = graph.plan(START, [BASH])
    side = graph.plan([Message.user("Title?")])
    graph.commit("side", side, sample(side, "Notes<|im_end|>"))
    graph.commit("first", first, sample(first, CALL))
    result = [*START, graph.calls["first"].sampled.message, Message.tool("x", "kiwi")]
    plans = [graph.plan(result, [BASH]) for _ in range(3)]
    assert len({plan.prompt_ids.tobytes() for plan in plans}) == 1
    for index, plan in enumerate(plans):
        graph.commit(f"same-{index}", plan, sample(plan, f"{index}" + ANSWER))
    nodes = [graph.calls[f"same-{index}"] for index in range(3)]
    assert len({node.branch_id for node in nodes}) == 3
    assert all(node.suffix is nodes[0].suffix for node in nodes)
    classes = graph.call_classes()
    assert [classes[node.call_id] for node in nodes] == [CallClass.RETRY, CallClass.RETRY, CallClass.MAIN]
    assert classes["side"] is CallClass.TITLE


@pytest.mark.requirement("R22", "R32")
def test_plans_may_be_made_in_threads_while_calls_are_committed(codec: Codec, sample: Sampler) -> None:
    """Tokenising off the loop sees a graph that grows meanwhile, and every prompt is still exact."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START, [BASH])
    graph.commit("0", plan, sample(plan, CALL))
    history = [*START, graph.calls["0"].sampled.message]
    with ThreadPoolExecutor(4) as pool:
        planning = [pool.submit(graph.plan, [*history, Message.tool("x", f"{n}")], [BASH]) for n in range(60)]
        for index, future in enumerate(as_completed(planning, timeout=60)):
            plan = future.result()
            graph.commit(f"n{index}", plan, sample(plan, ANSWER))
            assert plan.prompt_ids[: graph.calls["0"].total].tolist() == graph.path("0").tolist()
    assert len(graph.branches()) == 60


@pytest.mark.requirement("R85")
def test_two_calls_that_continue_one_turn_differently_are_two_branches(codec: Codec, sample: Sampler) -> None:
    """Whoever commits second opens the branch."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("a", plan, sample(plan, ANSWER))
    reply = graph.calls["a"].sampled.message
    left = graph.plan([*START, reply, Message.user("left")])
    right = graph.plan([*START, reply, Message.user("right")])
    assert left.branch_id == right.branch_id == graph.calls["a"].branch_id
    graph.commit("right", right, sample(right, ANSWER))
    graph.commit("left", left, sample(left, ANSWER))
    main, edit = graph.branches()
    assert (main.call_ids, edit.call_ids) == (("a", "right"), ("left",))
    assert (edit.call_class, edit.fork_call_id) == (CallClass.EDIT, "a")
    main_sample, edit_sample = graph.samples()
    assert [turn.untrained for turn in main_sample.turns] == ["", ""]
    assert [turn.untrained for turn in edit_sample.turns] == ["SHARED", ""]


@pytest.mark.requirement("R82")
def test_replies_with_equal_text_differ_by_their_reasoning(codec: Codec, sample: Sampler) -> None:
    """Of two attempts with the same visible answer the echoed reasoning picks the right one."""
    graph = TokenGraph("r", codec)
    for name, thought in (("a", "one"), ("b", "two")):
        plan = graph.plan(START)
        graph.commit(name, plan, sample(plan, f"<think>\n{thought}\n</think>\n\n{ANSWER}"))
    for name in ("a", "b"):
        plan = graph.plan([*START, graph.calls[name].sampled.message, MORE])
        assert plan.parent_call_id == name


@pytest.mark.requirement("R82", "R84")
def test_equal_continuations_of_different_reasoning_stay_apart(codec: Codec, sample: Sampler) -> None:
    """An agent continues both attempts alike: each goes on from its own tokens, and all four answers are trained."""
    graph, records = TokenGraph("r", codec), list[GraphRecord]()
    for name, thought in (("a", "one"), ("b", "two")):
        plan = graph.plan(START, [BASH])
        records.append(graph.commit(name, plan, sample(plan, f"<think>\n{thought}\n</think>\n\n{CALL}")))
    histories = {name: [*START, graph.calls[name].sampled.message, Message.tool("x", "kiwi")] for name in ("a", "b")}
    prompts = {}
    for name, history in histories.items():
        plan = graph.plan(history, [BASH])
        prompts[name] = plan.prompt_ids.tobytes()
        records.append(graph.commit(f"{name}2", plan, sample(plan, ANSWER)))
    for name, history in histories.items():
        node = graph.calls[f"{name}2"]
        assert node.parent is graph.calls[name] and node.continues_parent and node.branch_id == node.parent.branch_id
        again = graph.plan(history, [BASH])
        assert (again.call_class, again.parent_call_id) == (CallClass.RETRY, name)
        assert again.prompt_ids.tobytes() == prompts[name]
    restored = TokenGraph.restore("r", codec, records)
    for known in (graph, restored):
        assert CallClass.RETRY not in known.call_classes().values()
        assert [turn.untrained for item in known.samples() for turn in item.turns] == [""] * 4


@pytest.mark.requirement("R82", "R85")
@pytest.mark.parametrize("thought", ["", "another"])
def test_a_continuation_without_known_reasoning_is_a_retry(codec: Codec, sample: Sampler, thought: str) -> None:
    """Nothing tells the attempts apart: the same prompt again is what it looks like."""
    graph = TokenGraph("r", codec)
    for name in ("one", "two"):
        plan = graph.plan(START)
        graph.commit(name, plan, sample(plan, f"<think>\n{name}\n</think>\n\n{ANSWER}"))
    history = [*START, Message.assistant("I will do that.", reasoning=thought), MORE]
    first = graph.plan(history)
    graph.commit("first", first, sample(first, ANSWER))
    again = graph.plan(history)
    assert (again.call_class, again.parent_call_id) == (CallClass.RETRY, first.parent_call_id)


@pytest.mark.requirement("R82", "R84")
def test_equal_attempts_continued_alike_are_retries(codec: Codec, sample: Sampler) -> None:
    """Even if the attempt that was repeated last has no continuation yet: its reasoning is the same."""
    graph = TokenGraph("r", codec)
    for name, thought in (("a", "one"), ("other", "two")):
        plan = graph.plan(START)
        graph.commit(name, plan, sample(plan, f"<think>\n{thought}\n</think>\n\n{ANSWER}"))
    history = [*START, graph.calls["a"].sampled.message, MORE]
    plan = graph.plan(history)
    graph.commit("a2", plan, sample(plan, ANSWER))
    plan = graph.plan(START)
    graph.commit("again", plan, sample(plan, f"<think>\none\n</think>\n\n{ANSWER}"))
    again = graph.plan(history)
    assert (again.call_class, again.parent_call_id) == (CallClass.RETRY, "a")


@pytest.mark.requirement("R82")
def test_empty_reply_left_out_by_the_client_stays_in_the_line(codec: Codec, sample: Sampler) -> None:
    """A turn cut off inside its reasoning shows nothing, and clients drop it from the history."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("a", plan, sample(plan, "<think>\nhm", finish=FinishReason.LENGTH))
    follow = graph.plan([*START, MORE])
    assert (follow.parent_call_id, follow.new_branch) == ("a", False)
    assert graph.plan(START).call_class is CallClass.RETRY


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("written", [Message.assistant(""), Message.assistant("", reasoning="Say nothing.")])
def test_a_written_answer_that_shows_nothing_is_passed_over(codec: Codec, sample: Sampler, written: Message) -> None:
    """What continues it continues the line before it, as after any written answer: c1 is not tokenised anew."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("c1", plan, sample(plan, "<think>hm</think>one<|im_end|>"))
    history = [*START, graph.calls["c1"].sampled.message, MORE]
    graph.commit("c2", graph.plan(history), Sampled(written, FinishReason.STOP, injected=True))
    follow = graph.plan([*history, Message.user("And?")])
    assert (follow.parent_call_id, follow.new_branch, follow.reason) == ("c1", False, "")
    assert follow.prompt_ids[: graph.path("c1").size].tolist() == graph.path("c1").tolist()


@pytest.mark.requirement("R82")
def test_a_written_answer_that_shows_nothing_replaces_no_sampled_one(codec: Codec, sample: Sampler) -> None:
    """An answer that was cut off while thinking stays in the line, though the same prompt got a written one later."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("c1", plan, sample(plan, "<think>\nhm", finish=FinishReason.LENGTH))
    graph.commit("c2", graph.plan(START), Sampled(Message.assistant(""), FinishReason.STOP, injected=True))
    follow = graph.plan([*START, MORE])
    assert (follow.parent_call_id, follow.new_branch) == ("c1", False)


@pytest.mark.requirement("R85")
def test_other_tools_make_another_root(codec: Codec, sample: Sampler) -> None:
    """The tool list is part of the root's key."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START, [BASH])
    graph.commit("a", plan, sample(plan, ANSWER))
    history = [*START, graph.calls["a"].sampled.message, MORE]
    assert graph.plan(history, [BASH]).parent_call_id == "a"
    assert graph.plan(history, [replace(BASH, description="Run.")]).parent_call_id is None
    summary = graph.plan(history, [])
    assert (summary.parent_call_id, summary.call_class) == (None, CallClass.COMPACTION)


@pytest.mark.requirement("R85")
@pytest.mark.parametrize("call_class", list(CallClass))
def test_a_class_that_the_ingress_knows_is_believed(codec: Codec, sample: Sampler, call_class: CallClass) -> None:
    """Specs and headers know better than shapes."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START, [BASH], CallHints(call_class=call_class))
    graph.commit("a", plan, sample(plan, ANSWER))
    assert graph.call_classes() == {"a": call_class}
    assert bool(graph.samples()[0].loss_mask.any()) is (call_class in SamplePolicy().classes)


@pytest.mark.requirement("R85")
def test_a_probe_and_another_session_are_recognised(codec: Codec, sample: Sampler) -> None:
    """One token asked for is a probe; another session of the agent is a sub-agent."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START, [BASH], CallHints(session="s1"))
    graph.commit("a", plan, sample(plan, ANSWER))
    assert graph.plan([Message.user("hi")], (), CallHints(max_tokens=1)).call_class is CallClass.PROBE
    task = [START[0], Message.user("A part of it.")]
    assert graph.plan(task, [BASH], CallHints(session="s2")).call_class is CallClass.SUB_AGENT
    assert graph.plan(task, [BASH], CallHints(session="s1")).call_class is CallClass.COMPACTION


@pytest.mark.requirement("R84")
def test_a_truncated_turn_is_context_unless_the_policy_says_otherwise(codec: Codec, sample: Sampler) -> None:
    """An unusable turn stays as context."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("a", plan, sample(plan, "I will", finish=FinishReason.LENGTH))
    (only,) = graph.samples()
    assert (int(only.loss_mask.sum()), only.weight, only.truncated) == (0, 0.0, True)
    assert only.turns[0].untrained == "TRUNCATED"
    (only,) = graph.samples(SamplePolicy(train_truncated=True))
    assert (int(only.loss_mask.sum()), only.weight) == (6, 1.0)


@pytest.mark.requirement("R21", "R84")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"injected": True}, "INJECTED"),
        ({"usable": False}, "UNUSABLE"),
        ({"logprobs": None, "logprobs_mode": None}, "NO_LOGPROBS"),
        ({"finish_reason": FinishReason.CONTENT_FILTER}, "UNUSABLE"),
    ],
)
def test_untrainable_calls_state_their_reason(codec: Codec, change: dict[str, object], why: str) -> None:
    """Injected and unusable turns are context, with the reason."""
    graph = TokenGraph("r", codec)
    graph.commit("a", graph.plan(START), replace(PLAIN, **change))  # type: ignore[arg-type]
    (only,) = graph.samples()
    assert not only.loss_mask.any()
    assert not only.logprobs.any()
    assert [turn.untrained for turn in only.turns] == [why]


@pytest.mark.requirement("R87")
def test_versions_follow_the_tokens_that_they_sampled(codec: Codec, sample: Sampler) -> None:
    """Version spans over a sample's tokens; context between turns belongs to no version."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("a", plan, replace(PLAIN, message=Message.assistant("x")))
    plan2 = graph.plan([*START, Message.assistant("x"), MORE])
    graph.commit("b", plan2, sample(plan2, "ok", version=5))
    (only,) = graph.samples()
    start, later = plan.prompt_ids.size, plan2.prompt_ids.size
    assert only.versions == (
        VersionSpan(4, start, start + 2),
        VersionSpan(5, start + 2, start + 3),
        VersionSpan(5, later, later + 2),
    )
    assert only.prompt_count == start


@pytest.mark.requirement("R85")
def test_a_source_without_tokens_still_has_calls_and_branches(codec: Codec) -> None:
    """Text-only capture keeps the shape, and gives no samples."""
    graph = TokenGraph("r", None)
    answer = Sampled(Message.assistant("ok", ToolCallPart("c", "bash", "{}")), FinishReason.TOOL_CALLS)
    plan = graph.plan(START, [BASH])
    assert (plan.exact, plan.prompt_ids.size) == (False, 0)
    graph.commit("a", plan, answer)
    plan = graph.plan([*START, answer.message, Message.tool("c", "x")], [BASH])
    assert (plan.parent_call_id, plan.new_branch) == ("a", False)
    graph.commit("b", plan, replace(answer, message=Message.assistant("done")))
    assert [branch.call_ids for branch in graph.branches()] == [("a", "b")]
    assert graph.samples() == ()


@pytest.mark.requirement("R83")
def test_a_turn_that_came_without_tokens_breaks_exactness_and_says_so(codec: Codec, sample: Sampler) -> None:
    """One text-only answer among exact ones opens a branch with the reason."""
    graph = TokenGraph("r", codec)
    graph.commit("a", graph.plan(START), Sampled(Message.assistant("ok"), FinishReason.STOP))
    plan = graph.plan([*START, Message.assistant("ok"), MORE])
    assert plan.new_branch
    assert plan.reason.startswith("PARENT_WITHOUT_TOKENS")
    assert plan.call_class is CallClass.MAIN
    graph.commit("b", plan, sample(plan, ANSWER))
    (only,) = graph.samples()
    assert int(only.loss_mask.sum()) == len(ANSWER) - len("<|im_end|>") + 1


@pytest.mark.requirement("R84")
def test_turns_before_a_text_only_answer_are_still_trained(codec: Codec, sample: Sampler) -> None:
    """An answer without tokens takes nothing away from those before it."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("a", plan, sample(plan, ANSWER))
    plan = graph.plan([*START, graph.calls["a"].sampled.message, MORE])
    graph.commit("b", plan, Sampled(Message.assistant("ok"), FinishReason.STOP))
    (only,) = graph.samples()
    assert [turn.call_id for turn in only.turns] == ["a"]
    assert int(only.loss_mask.sum()) == graph.calls["a"].sampled.count


@pytest.mark.requirement("R84", "R85")
def test_a_call_that_is_not_trained_leaves_the_line_before_it_its_own_sample(codec: Codec, sample: Sampler) -> None:
    """The agent asks twice, the answer that it got is a written one: the sampled one is a retry, and the last call."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START)
    graph.commit("c1", plan, sample(plan, ANSWER))
    history = [*START, graph.calls["c1"].sampled.message, MORE]
    first, second = graph.plan(history), graph.plan(history)
    graph.commit("c2a", first, sample(first, ANSWER))
    graph.commit("c2b", second, Sampled(Message.assistant("stop"), FinishReason.STOP, injected=True))
    assert graph.call_classes()["c2a"] is CallClass.RETRY
    line, retry = graph.samples()
    assert (line.call_class, line.weight, retry.call_class, retry.weight) == (CallClass.MAIN, 1.0, CallClass.RETRY, 0.0)
    assert [(turn.call_id, turn.untrained) for turn in line.turns] == [("c1", "")]
    assert [(turn.call_id, turn.untrained) for turn in retry.turns] == [("c1", "SHARED"), ("c2a", "CLASS_RETRY")]
    assert int(line.loss_mask.sum()) == graph.calls["c1"].sampled.count


@pytest.mark.requirement("R84", "R85")
def test_a_last_call_that_the_agent_names_a_title_masks_no_turn_before_it(codec: Codec, sample: Sampler) -> None:
    """Titles at the end of a line are not trained, however many; a turn after one keeps the line one sample."""
    graph = TokenGraph("r", codec)
    history = list(START)

    def call(name: str, call_class: CallClass | None) -> None:
        plan = graph.plan(history, (), CallHints(call_class=call_class))
        graph.commit(name, plan, sample(plan, ANSWER))
        history.extend([graph.calls[name].sampled.message, MORE])

    call("c1", None)
    for name in ("t1", "t2"):
        call(name, CallClass.TITLE)
    line, titles = graph.samples()
    assert [(turn.call_id, turn.untrained) for turn in line.turns] == [("c1", "")]
    assert [turn.untrained for turn in titles.turns] == ["SHARED", "CLASS_TITLE", "CLASS_TITLE"]
    call("c2", CallClass.MAIN)
    (whole,) = graph.samples()
    assert [(turn.call_id, turn.untrained) for turn in whole.turns] == [(name, "") for name in ("c1", "t1", "t2", "c2")]


@pytest.mark.requirement("R23", "R85")
def test_a_long_history_that_was_edited_is_stored_once(codec: Codec, sample: Sampler) -> None:
    """A new root shares the tokens that it has in common with another line."""
    graph = TokenGraph("r", codec)
    long = [Message.system("You are a shell agent. " * 200), Message.user("Read the note.")]
    plan = graph.plan(long, [BASH])
    graph.commit("a", plan, sample(plan, ANSWER))
    edited = graph.plan([long[0], Message.user("Something else.")], [BASH])
    assert edited.parent_call_id == "a"
    assert edited.new_branch
    assert edited.shared_prefix_len > 1000
    assert edited.suffix_ids.size < 50
    assert edited.prompt_ids.tolist() == codec.render([long[0], Message.user("Something else.")], [BASH]).tolist()
    graph.commit("b", edited, sample(edited, ANSWER))
    assert graph.path("b").tolist()[: edited.prompt_ids.size] == edited.prompt_ids.tolist()
    first, second = graph.samples()
    assert [turn.call_id for turn in first.turns] == ["a"]
    assert [turn.call_id for turn in second.turns] == ["b"]


@pytest.mark.requirement("R23")
def test_a_graph_keeps_eight_bytes_for_a_token(codec: Codec, sample: Sampler) -> None:
    """Each id and each logprob is kept once, however long the conversation grows."""
    graph = TokenGraph("r", codec)
    messages = list(START)
    for turn in range(40):
        plan = graph.plan(messages, [BASH])
        graph.commit(str(turn), plan, sample(plan, CALL))
        messages += [graph.calls[str(turn)].sampled.message, Message.tool("x", "kiwi " * 50)]
    kept = 0
    for node in graph.calls.values():
        assert node.sampled.token_ids is not None
        assert node.sampled.logprobs is not None
        kept += node.suffix.nbytes + node.sampled.token_ids.nbytes + node.sampled.logprobs.nbytes
    assert kept <= 8 * graph.path("39").size


def build(codec: Codec, sample: Sampler) -> tuple[TokenGraph, list[GraphRecord]]:
    """A graph with turns, a side line, a retry and an edit, and its records."""
    graph = TokenGraph("r", codec)
    records: list[GraphRecord] = []

    def call(name: str, messages: list[Message], text: str, tools: tuple[Tool, ...] = (BASH,)) -> Message:
        plan = graph.plan(messages, tools, CallHints(session="s"))
        records.append(graph.commit(name, plan, sample(plan, text, version=len(records))))
        return graph.calls[name].sampled.message

    reply = call("a", START, f"<think>\nhé\n</think>\n\n{CALL}")
    call("t", [Message.user("Title?")], ANSWER, ())
    history = [*START, reply, Message.tool("x", "kiwi")]
    call("b", history, "cut")
    again = call("b2", history, ANSWER)
    call("c", [*history, again, MORE], CALL)
    call("e", [*START, reply, Message.tool("x", "melon")], ANSWER)
    return graph, records


@pytest.mark.requirement("R85")
def test_a_graph_comes_back_from_its_records(codec: Codec, sample: Sampler) -> None:
    """Decision 7, R85: after a crash the same graph: calls, branches, samples, chain, and the next plan."""
    graph, records = build(codec, sample)
    again = TokenGraph.restore("r", codec, [GraphRecord.from_bytes(record.to_bytes()) for record in records])
    assert again.chain_head == graph.chain_head
    assert again.branches() == graph.branches()
    assert again.call_classes() == graph.call_classes()
    for mine, theirs in zip(graph.samples(), again.samples(), strict=True):
        assert (mine.sample_id, mine.turns, mine.versions, mine.weight) == (
            theirs.sample_id,
            theirs.turns,
            theirs.versions,
            theirs.weight,
        )
        assert mine.input_ids.tobytes() == theirs.input_ids.tobytes()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert mine.loss_mask.tobytes() == theirs.loss_mask.tobytes()
    for name, node in graph.calls.items():
        assert again.calls[name].sampled.message == node.sampled.message
        assert again.calls[name].sampled.sampling_used == node.sampled.sampling_used
    follow = [*START, graph.calls["a"].sampled.message, Message.tool("x", "melon"), Message.assistant("?"), MORE]
    assert graph.plan(follow, [BASH]).prompt_ids.tolist() == again.plan(follow, [BASH]).prompt_ids.tolist()


@pytest.mark.requirement("R85", "R106")
def test_alternatives_come_back_from_a_record_that_the_chain_covers(codec: Codec, sample: Sampler) -> None:
    """Once in memory, 8 * k bytes for a token; another alternative is another chain."""
    graph = TokenGraph("r", codec)
    plan = graph.plan(START, [BASH])
    plain = sample(plan, CALL)
    ids = np.arange(plain.count * 5, dtype=np.int32).reshape(-1, 5)
    top = TopLogprobs(ids % codec.vocab_size, np.tile(-np.arange(5, dtype=np.float32), (plain.count, 1)))
    record = graph.commit("a", plan, replace(plain, top=top))
    assert graph.calls["a"].sampled.top is top
    assert top.token_ids.nbytes + top.logprobs.nbytes == 8 * 5 * plain.count
    again = TokenGraph.restore("r", codec, [GraphRecord.from_bytes(record.to_bytes())])
    kept = again.calls["a"].sampled.top
    assert kept is not None and kept.sha256 == top.sha256 and again.chain_head == graph.chain_head
    assert (kept.token_ids.tolist(), kept.logprobs.tolist()) == (top.token_ids.tolist(), top.logprobs.tolist())
    (wanted,), (bare,) = again.samples(include_top=True), again.samples()
    assert wanted.top is not None and wanted.top.sha256 == top.sha256 and bare.top is None
    for other in (None, TopLogprobs(ids[:, ::-1].copy() % codec.vocab_size, top.logprobs)):
        with pytest.raises(DataLoss, match="unbroken"):
            TokenGraph.restore("r", codec, [replace(record, sampled=replace(plain, top=other))])


@pytest.mark.requirement("R82", "R83")
@pytest.mark.parametrize("kind", ["missing", "swapped", "twice", "token", "logprob", "version", "rollout"])
def test_a_chain_that_was_tampered_with_is_found_out(codec: Codec, sample: Sampler, kind: str) -> None:
    """Every trained token was sampled under exactly that context, or the chain does not hold."""
    _, records = build(codec, sample)
    sampled = records[0].sampled
    tokens, logprobs = sampled.token_ids, sampled.logprobs
    assert tokens is not None
    assert logprobs is not None
    changes: dict[str, Callable[[], Sampled]] = {
        "token": lambda: replace(sampled, token_ids=np.concatenate([tokens[:-1], ids(7)])),
        "logprob": lambda: replace(sampled, logprobs=np.minimum(logprobs, np.float32(-1))),
        "version": lambda: replace(sampled, versions=(VersionSpan(9, 0, sampled.count),)),
    }
    if kind == "missing":
        del records[1]
    elif kind == "swapped":
        records[1:3] = records[2:0:-1]
    elif kind == "twice":
        records.append(records[-1])
    elif kind in changes:
        records[0] = replace(records[0], sampled=changes[kind]())
    with pytest.raises(DataLoss) as caught:
        TokenGraph.restore("another" if kind == "rollout" else "r", codec, records)
    assert caught.value.reason == "GRAPH_CHAIN_BROKEN"


@pytest.mark.requirement("R83")
def test_a_damaged_record_is_refused(codec: Codec, sample: Sampler) -> None:
    """Whatever a disk returns, the error is typed."""
    _, records = build(codec, sample)
    data = records[0].to_bytes()
    renamed = data.replace(b'"keep"', b'"kept"')
    for damaged in (b"", data[:3], data[:20], data[:-1], data + b"\0", b"XXXX" + data[4:], renamed):
        with pytest.raises(DataLoss) as caught:
            GraphRecord.from_bytes(damaged)
        assert caught.value.reason == "GRAPH_RECORD_DAMAGED"


@pytest.mark.requirement("R82")
def test_a_call_sent_back_with_no_arguments_at_all_is_no_edit(codec: Codec) -> None:
    """Some clients write an empty string where the model wrote `{}`."""
    fingerprints = Fingerprints(with_call_ids=False)
    keys = {fingerprints.key(Message.assistant("", ToolCallPart("c", "f", text))) for text in ("{}", "", " ", "{ }")}
    assert len(keys) == 1
    assert fingerprints.key(Message.assistant("", ToolCallPart("c", "f", "[]"))) not in keys
