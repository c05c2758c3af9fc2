"""What calls are taken for: no line that an agent goes on with is left out of training, and the reasons are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock_codec import Codec
from penstock_codec.chat import Message, Tool
from penstock_interception.graph import CallClass, CallHints, Sampled, TokenGraph

Sampler = Callable[..., Sampled]

BASH = Tool("bash", "Run a command.", '{"type": "object"}')
TODAY, TOMORROW = Message.system("Today is 22 Nov."), Message.system("Today is 23 Nov.")
TASK = Message.user("Read the note.")
CALL = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call><|im_end|>'


class Line:
    """A conversation of one graph, turn by turn."""

    def __init__(self, graph: TokenGraph, sample: Sampler, *messages: Message, tools: Sequence[Tool] = ()) -> None:
        self.graph = graph
        self.messages = list(messages)
        self.tools = tools
        self._sample = sample

    def turn(self, text: str, hints: CallHints | None = None) -> str:
        """One call, answered with `text`; the class that it was planned as."""
        plan = self.graph.plan(self.messages, self.tools, hints)
        call_id = f"c{len(self.graph.calls)}"
        self.graph.commit(call_id, plan, self._sample(plan, text))
        self.messages.append(self.graph.calls[call_id].sampled.message)
        return call_id

    def written(self, text: str) -> str:
        """One call that somebody answers with a text, without tokens, as a trainer may."""
        plan = self.graph.plan(self.messages, self.tools)
        call_id = f"c{len(self.graph.calls)}"
        sampled = replace(self._sample(plan, ""), message=Message.assistant(text), injected=True)
        self.graph.commit(call_id, plan, replace(sampled, token_ids=None, logprobs=None, logprobs_mode=None))
        self.messages.append(Message.assistant(text))
        return call_id

    def turns(self, count: int, *, of: str = "") -> list[str]:
        """Turns of text, each with another question of the user before the next."""
        made = []
        for index in range(count):
            made.append(self.turn(f"{of}{index}: I will do that.<|im_end|>"))
            self.messages.append(Message.user(f"And then, {of}{index}?"))
        return made


def trained(graph: TokenGraph) -> set[str]:
    """The calls whose tokens are trained in some sample."""
    return {turn.call_id for sample in graph.samples() for turn in sample.turns if not turn.untrained}


def reasons(graph: TokenGraph) -> list[tuple[CallClass, str]]:
    """Each branch's class and why it opened."""
    return [(branch.call_class, branch.reason) for branch in graph.branches()]


@pytest.fixture
def graph(codec: Codec) -> TokenGraph:
    """An empty graph."""
    return TokenGraph("r", codec)


@pytest.mark.requirement("R102")
@pytest.mark.parametrize("tools", [(), (BASH,)], ids=["text", "tools"])
def test_a_line_whose_system_prompt_changes_is_trained_on(
    graph: TokenGraph, sample: Sampler, tools: Sequence[Tool]
) -> None:
    """A date in the system prompt made the rest of a text agent's work a title, without a finding."""
    line = Line(graph, sample, TODAY, TASK, tools=tools)
    line.turns(3, of="a")
    line.messages[0] = TOMORROW
    line.turns(3, of="b")
    assert trained(graph) == set(graph.calls)
    assert reasons(graph) == [(CallClass.MAIN, ""), (CallClass.EDIT, "a known conversation with another system prompt")]


@pytest.mark.requirement("R102")
def test_a_text_only_sub_agent_of_several_turns_is_trained_on(graph: TokenGraph, sample: Sampler) -> None:
    """A root without tools that was gone on with is no title, whatever its system prompt."""
    main = Line(graph, sample, TODAY, TASK, tools=(BASH,))
    main.turn(CALL)
    aside = Line(graph, sample, Message.system("You review plans."), Message.user("Is this plan good?"))
    aside.turns(2)
    title = Line(graph, sample, Message.system("Find a title."), Message.user("Read the note."))
    title.turn("Notes<|im_end|>")
    found = [branch.call_class for branch in graph.branches()]
    assert found == [CallClass.MAIN, CallClass.SUB_AGENT, CallClass.TITLE]
    assert trained(graph) == {"c0", "c1", "c2"}


@pytest.mark.requirement("R102")
@pytest.mark.parametrize("tools", [(), (BASH,)], ids=["text", "tools"])
def test_edited_first_message_is_reported(graph: TokenGraph, sample: Sampler, tools: Sequence[Tool]) -> None:
    """It was called a compaction in which the main line starts anew."""
    line = Line(graph, sample, TODAY, TASK, tools=tools)
    line.turns(2)
    line.messages[1] = Message.user("Read the other note.")
    line.turn("Very well.<|im_end|>")
    assert trained(graph) == set(graph.calls)
    assert reasons(graph)[1] == (CallClass.EDIT, "a known conversation with another first message")


@pytest.mark.requirement("R102")
def test_text_agents_edited_answer_is_no_history_without_its_tools(graph: TokenGraph, sample: Sampler) -> None:
    """There were no tools that could have been left out."""
    line = Line(graph, sample, TODAY, TASK)
    line.turns(2)
    line.messages[2] = Message.assistant("I said something else.")
    line.turn("Very well.<|im_end|>")
    assert trained(graph) == set(graph.calls)
    assert reasons(graph)[1] == (CallClass.EDIT, "the same task with an edited history")


@pytest.mark.requirement("R85", "R102")
@pytest.mark.parametrize("system", [TODAY, Message.system("You write summaries.")], ids=["same", "another"])
def test_a_summary_of_a_line_with_tools_is_a_compaction(graph: TokenGraph, sample: Sampler, system: Message) -> None:
    """The history without its tools, under the same system prompt or one of its own: trained."""
    main = Line(graph, sample, TODAY, TASK, tools=(BASH,))
    main.turn("I read it.<|im_end|>")
    summary = Line(graph, sample, system, *main.messages[1:], Message.user("Summarise."))
    summary.turn("A note was read.<|im_end|>")
    assert reasons(graph)[1] == (CallClass.COMPACTION, "the history again, without its tools")
    assert trained(graph) == {"c0", "c1"}


@pytest.mark.requirement("R85", "R102")
def test_the_end_of_a_line_under_a_summary_is_a_compaction(graph: TokenGraph, sample: Sampler) -> None:
    """Fewer messages than before, with the last replies kept as they were."""
    line = Line(graph, sample, TODAY, TASK, tools=(BASH,))
    line.turns(4)
    line.messages[1:-4] = [Message.user("Here is what happened so far.")]
    line.turn("Very well.<|im_end|>")
    assert reasons(graph)[1] == (CallClass.COMPACTION, "a known conversation with a shortened history")


@pytest.mark.requirement("R21", "R102")
def test_line_taken_for_a_title_is_none_after_a_restart(graph: TokenGraph, codec: Codec, sample: Sampler) -> None:
    """What is known of replies comes back with the records."""
    main = Line(graph, sample, TODAY, TASK, tools=(BASH,))
    records = []
    plan = graph.plan(main.messages, main.tools)
    records.append(graph.commit("c0", plan, sample(plan, "I read it.<|im_end|>")))
    again = TokenGraph.restore("r", codec, records)
    history = [TOMORROW, TASK, again.calls["c0"].sampled.message, Message.user("And then?")]
    assert again.plan(history, [BASH]).call_class is CallClass.EDIT
    assert again.plan(history).call_class is CallClass.COMPACTION


@pytest.mark.requirement("R85")
def test_a_probe_is_one_even_with_a_known_history(graph: TokenGraph, sample: Sampler) -> None:
    """Whoever asks for one token wants to know whether anybody answers."""
    line = Line(graph, sample, TODAY, TASK)
    line.turn("I read it.<|im_end|>")
    probe = [TOMORROW, *line.messages[1:], Message.user("hi")]
    assert graph.plan(probe, (), CallHints(max_tokens=1)).call_class is CallClass.PROBE


@pytest.mark.requirement("R85", "R102")
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_line_goes_on_as_itself_after_an_answer_that_somebody_wrote(
    graph: TokenGraph, sample: Sampler, again: bool
) -> None:
    """What was sampled after it continues what was sampled before it: no edit of a history."""
    line = Line(graph, sample, TODAY, TASK, tools=(BASH,))
    line.turns(1)
    for _ in range(2 if again else 1):
        line.written("Here is the answer.")
        line.messages.append(Message.user("And now?"))
    line.turns(2, of="b")
    assert set(graph.call_classes().values()) == {CallClass.MAIN}
    assert [sample.call_class for sample in graph.samples()] == [CallClass.MAIN]
    assert reasons(graph) == [(CallClass.MAIN, "")]


@pytest.mark.requirement("R85", "R102")
def test_an_edit_beside_a_written_answer_is_still_one(graph: TokenGraph, sample: Sampler) -> None:
    """The line that goes on first is the main one, written answers aside; what leaves it later is an edit."""
    line = Line(graph, sample, TODAY, TASK)
    line.turns(1)
    before = list(line.messages)
    line.written("Here is the answer.")
    line.messages.append(Message.user("And now?"))
    main = line.turn("I go on.<|im_end|>")
    line.messages = [*before[:-1], Message.user("Something else?")]
    aside = line.turn("Very well.<|im_end|>")
    classes = graph.call_classes()
    assert (classes[main], classes[aside]) == (CallClass.MAIN, CallClass.EDIT)
