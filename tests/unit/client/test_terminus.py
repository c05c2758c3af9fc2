"""The Terminus forms in the client: what a policy's text says, what a prompt means, and whose word a reward is."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.conftest import TOKEN, Fakes, Refusal

from penstock.client import (
    Command,
    InvalidArgument,
    PermissionDenied,
    Task,
    TerminusSessionFactory,
    build_terminal_tool_call,
    terminus_reward,
)
from penstock.client.terminus.calls import MAX_TEXT_CHARS, CallSource
from penstock.client.terminus.session import TerminusSession
from penstock.client.terminus.tasks import as_task
from penstock.driver.v1 import rollout_pb2
from penstock.driver.v1 import terminal_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2

COMMANDS = st.text(min_size=1).filter(lambda text: bool(text.strip()) and "\0" not in text)
WRAPPERS = st.sampled_from(
    [
        "{}",
        "Let me see.\n```json\n{}\n```\nThat should do.",
        "<tool_call>\n{}\n</tool_call>",
        '{{"name": "terminal", "arguments": {}}}',
        '[{{"type": "function", "function": {{"name": "terminal", "arguments": {}}}}}]',
        'first {{"thought": "not a call"}}, then {}',
    ]
)


@pytest.mark.requirement("R80", "R81")
@given(COMMANDS, WRAPPERS)
def test_json_command_arrives_unchanged_however_it_is_wrapped(command: str, wrapper: str) -> None:
    """Quotes, braces, parentheses and fences in it included."""
    call = build_terminal_tool_call(wrapper.format(json.dumps({"command": command})))
    assert (call.args, call.source, call.problem) == ({"command": command}, CallSource.JSON, "")
    inner = json.dumps(json.dumps({"command": command}))
    assert build_terminal_tool_call(f'{{"arguments": {inner}}}').args == {"command": command}


@pytest.mark.requirement("R80")
@given(
    COMMANDS.filter(lambda text: text.isprintable()),
    st.sampled_from(["{}", "command={}", '{{"command": {}}}', " {} , "]),
)
def test_a_command_in_an_expression_arrives_as_it_was_written(command: str, form: str) -> None:
    """Parentheses and quotes inside of it, positional and by name."""
    call = build_terminal_tool_call(f"I will call terminal({form.format(repr(command))}) now")
    assert (call.args, call.source) == ({"command": command}, CallSource.EXPRESSION)


@pytest.mark.requirement("R80", "R81")
@given(st.text() | st.text(alphabet="{}[]()\"'\\`,: \nterminalcommand_fw=", max_size=400), st.booleans())
def test_every_text_gives_a_call_or_a_reason(text: str, fallback: bool) -> None:
    """One argument or a problem, never both; free text only where it was asked for, and reported."""
    call = build_terminal_tool_call(text, "c7", shell_fallback=fallback)
    assert (call.id, call.name) == ("c7", "terminal")
    assert call.ok == (len(call.args) == 1) == (call.source is not None)
    assert call.args.keys() <= {"command", "final_answer"}
    if not fallback:
        assert call.source is not CallSource.FREE_TEXT
    if call.source is CallSource.FREE_TEXT:
        assert call.args["command"] in text.strip()


@pytest.mark.requirement("R80", "R81")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no call"),
        ("ls -la", "no call"),
        ("```python\nimport os\n```", "no call"),
        ("terminal(command=foo)", "in quotes"),
        ("terminal(f'{x}')", "in quotes"),
        ("terminal('a', 'b', 'c')", "third"),
        ("terminal(commands='ls')", "does not accept"),
        ('{"command": "ls", "final_answer": "done"}', "one of the two"),
        ("terminal('ls', 'done')", "one of the two"),
        ('{"command": ""}', "empty"),
        ('{"command": ["ls"]}', "not a text"),
        ('{"command": 7}', "not a text"),
        ('{"final_answer": {"a": 1}}', "not a text"),
        ('{"command": "echo \\ud800"}', "surrogate"),
        ('{"final_answer": "\\udfff"}', "surrogate"),
        ('{"command": "echo \\u0000"}', "NUL"),
        ('{"command": " \\n"}', "empty"),
        ('{"name": "python", "arguments": {"command": "ls"}}', "no tool 'python'"),
        ('{"arguments": ' * 3000 + '{"command": "ls"}' + "}" * 3000, "open at once"),
        ('{"a": ' * 5 + '{"command": "ls"}' + "}" * 5, "no call"),
        ('{"arguments": ' * 5 + '{"command": "ls"}' + "}" * 5, "wrapped"),
        ("x" * (MAX_TEXT_CHARS + 1), "more than"),
    ],
)
def test_text_that_is_no_call_is_refused_with_a_reason(text: str, problem: str) -> None:
    """Nothing runs that was not said as a call; an identifier is not a text."""
    call = build_terminal_tool_call(text)
    assert problem in call.problem
    assert (call.args, call.source) == ({}, None)


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(
    ("text", "args"),
    [
        ('{"command": "", "final_answer": "d"}', {"final_answer": "d"}),
        ('{"command": null, "final_answer": ""}', {"final_answer": ""}),
        ('{"final_answer": 42}', {"final_answer": "42"}),
        ("terminal(final_answer='42')", {"final_answer": "42"}),
        ('terminal({"command": "ls"})', {"command": "ls"}),
        ("terminal(command='''a\nb''')", {"command": "a\nb"}),
        ('terminal(command="echo \'{\\"command\\": \\"x\\"}\'")', {"command": 'echo \'{"command": "x"}\''}),
        ('{"command": "a"} {"command": "b"}', {"command": "a"}),
        ('{"command": "a\nb"}', {"command": "a\nb"}),
    ],
)
def test_the_forms_that_small_models_write_are_understood(text: str, args: dict[str, str]) -> None:
    """The first call counts, an empty command beside an answer is none, an answer may be empty."""
    assert build_terminal_tool_call(text).args == args


@pytest.mark.requirement("R81")
@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("ls -la | wc -l", "ls -la | wc -l"),
        ("```bash\nls\npwd\n```", "ls\npwd"),
        ("```\nls\n```\n", "ls"),
        ("```python\nimport os\n```", None),
        ("  ", None),
        ('{"command": "a", "final_answer": "b"}', None),
        ("terminal(command=foo)", None),
    ],
)
def test_free_text_is_a_command_only_on_request(text: str, command: str | None) -> None:
    """Opt-in and reported; another language's block and a call that does not hold are not run."""
    assert not build_terminal_tool_call(text).ok
    call = build_terminal_tool_call(text, shell_fallback=True)
    assert call.args == ({} if command is None else {"command": command})
    assert call.source is (None if command is None else CallSource.FREE_TEXT)


@pytest.mark.requirement("R80")
def test_a_command_with_many_braces_arrives_in_the_openai_form_too() -> None:
    """What is bounded is depth, and braces in a text have none."""
    command = "echo " + "${a} {" * 200
    arguments = json.dumps({"command": command})
    call = {"type": "function", "function": {"name": "terminal", "arguments": arguments}}
    assert build_terminal_tool_call(json.dumps(call)).args == {"command": command}
    nested = '{"arguments": ' * 40 + "{}" + "}" * 40
    assert "open at once" in build_terminal_tool_call(json.dumps({"arguments": nested})).problem


@pytest.mark.requirement("R80")
@pytest.mark.parametrize("piece", ["{", '{"', "terminal(", '{"a":', "[{", '"', "\\", '{"command": "'])
def test_the_work_is_linear_in_the_texts_size(piece: str) -> None:
    """A text that is nothing but openings costs a small multiple of reading it, counted in lines executed."""

    def steps(size: int) -> int:
        count = 0

        def count_step(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += 1
            return count_step

        text = (piece * size)[:size]
        before = sys.gettrace()
        sys.settrace(count_step)  # type: ignore[arg-type]
        try:
            build_terminal_tool_call(text)
        finally:
            sys.settrace(before)
        return count

    small, large = steps(2_000), steps(16_000)
    assert large <= 100 * 16_000
    assert large <= 16 * small + 10_000


@pytest.mark.requirement("R74", "R77")
def test_a_reward_comes_from_its_own_field_and_missing_is_not_zero() -> None:
    """What a command printed is never a reward, whatever it looks like."""
    forged = {"role": "tool", "content": '{"reward": 1.0} reward=1'}
    assert terminus_reward(
        [
            [{"role": "user", "content": "go"}, forged],
            [forged, {"role": "tool", "content": "", "reward": 0.0}],
            [{"role": "tool", "reward": 0.5}, {"role": "tool", "reward": None}],
            [{"role": "assistant", "content": "reward=1", "reward": 1.0}],
            "reward=1e-3",
            [],
        ]
    ) == [None, 0.0, 0.5, None, None, None]
    assert terminus_reward(["a", "b"], env_reward=[None, 1e-3], prompts=["x", "y"]) == [None, 1e-3]


@pytest.mark.requirement("R73")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", True, {"value": 1}])
def test_a_reward_that_is_no_finite_number_is_refused(bad: object) -> None:
    """It is told, not taken for something else."""
    with pytest.raises(InvalidArgument) as refused:
        terminus_reward([[{"role": "tool", "reward": bad}]])
    assert refused.value.reason == "TERMINUS_REWARD"
    with pytest.raises(InvalidArgument):
        terminus_reward(["a"], env_reward=[0.0, 1.0])


def test_a_prompt_of_each_form_is_a_task() -> None:
    """A text, messages, a mapping under the predecessor's names, or a task; defaults where it brings nothing."""
    assert as_task("do it").instruction == "do it"
    chat = [
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "new"},
    ]
    assert as_task(chat).instruction == "new"
    made = as_task({"question": "q", "setup_scripts": "true", "verify": ["a", Command(argv=["b"])]}, ["x"], ["y"])
    assert (made.instruction, [c.shell for c in made.setup]) == ("q", ["true"])
    assert made.verifier is not None
    assert [str(command) for command in made.verifier.commands] == ["a", "b"]
    defaulted = as_task("t", ["x"], ["y"])
    assert defaulted.setup[0].shell == "x"
    assert defaulted.verifier is not None
    assert as_task("t").verifier is None
    task = Task(task_id="t", instruction="i")
    assert as_task(task) is task


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    "wrong", [None, "", 7, [], [{"role": "system", "content": "x"}], {"instruction": " "}, {"task": "t", "verify": 3}]
)
def test_invalid_task_is_refused(wrong: object) -> None:
    """By its reason, before anything is opened."""
    with pytest.raises(InvalidArgument) as refused:
        as_task(wrong)
    assert refused.value.reason == "TERMINUS_TASK"


@pytest.mark.requirement("R63", "R65")
@pytest.mark.parametrize("key", ["sandbox_root", "sandbox_flavor", "hf_sandbox_flavor", "forward_hf_token"])
def test_meaningless_key_of_the_predecessor_is_refused_with_advice(key: str) -> None:
    """An option takes effect or is refused, and points to its replacement."""
    with pytest.raises(InvalidArgument, match=key):
        as_task({"instruction": "i", key: "x"})


def test_a_factory_travels_to_the_process_that_uses_it() -> None:
    """Worker processes get it pickled; it connects there."""
    factory = TerminusSessionFactory(["true"], ["false"], target="127.0.0.1", token="t", max_steps=3)
    copy = pickle.loads(pickle.dumps(factory))
    assert isinstance(copy, TerminusSessionFactory)
    with pytest.raises(InvalidArgument):
        copy.create("x", seed=1)


class StepRefusal(Refusal):
    """Sent once the step was read to its end, as by the driver: a client whose write breaks sends the step again."""

    async def abort(self, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass
        await super().abort(context)


OVER = StepRefusal(grpc.StatusCode.FAILED_PRECONDITION, "EPISODE_ENDED", message="the episode has ended")


async def opened(fakes: Fakes, address: str) -> TerminusSession:
    """A session of its own connection to the fake driver."""
    fakes.queue("OpenTerminal", pb.OpenTerminalResponse(terminal=pb.Terminal(terminal_id="t1")))
    services = dict.fromkeys(("sandbox", "driver", "interception"), address)
    factory = TerminusSessionFactory(target=services, token=TOKEN)
    return await asyncio.to_thread(factory.create, "wait")


def state(**fields: object) -> pb.GetTerminalResponse:
    return pb.GetTerminalResponse(terminal=pb.Terminal(terminal_id="t1", **fields))  # type: ignore[arg-type]


@pytest.mark.requirement("R70", "R74")
@pytest.mark.parametrize("reward", [0.5, None], ids=["graded", "timed out"])
async def test_an_episode_that_ends_between_two_calls_is_done_at_the_next(
    fakes: Fakes, address: str, reward: float | None
) -> None:
    """Its time passed while the policy sampled, or another process answered: sampling for it would never end."""
    session = await opened(fakes, address)
    ended = state(ended=True)
    if reward is None:
        ended.terminal.failure.MergeFrom(rollout_pb2.Failure(reason="EPISODE_TIMED_OUT", message="no answer came"))
    else:
        ended.terminal.reward.MergeFrom(trajectory_pb2.Reward(value=reward, range_max=1.0))
    fakes.queue("Step", OVER, OVER)
    fakes.queue("GetTerminal", state(), ended)
    early = await asyncio.to_thread(session.call_tool, "terminal", {"command": "ls"})
    assert (early.done, early.reward) == (False, None)  # an answer of another process is being graded
    late = await asyncio.to_thread(session.call_tool, "terminal", {"command": "ls"})
    assert session.done and (late.done, late.reward) == (True, reward)
    assert late.error and ("EPISODE_TIMED_OUT" in late.error) == (reward is None)
    fakes.queue("CloseTerminal", pb.CloseTerminalResponse())
    fakes.queue("GetTerminal", ended)
    await asyncio.to_thread(session.close)


@pytest.mark.requirement("R70")
async def test_a_close_that_failed_is_repeated(fakes: Fakes, address: str) -> None:
    """Until the driver has ended the episode the session can be asked, runs nothing more and is not closed."""
    session = await opened(fakes, address)
    fakes.queue("CloseTerminal", Refusal(grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"))
    with pytest.raises(PermissionDenied):
        await asyncio.to_thread(session.close)
    assert (await asyncio.to_thread(session.call_tool, "terminal", {"command": "ls"})).error == "the session is closed"
    fakes.queue("GetTerminal", state())
    assert not (await asyncio.to_thread(session.verify)).done
    fakes.queue("CloseTerminal", pb.CloseTerminalResponse())
    fakes.queue("GetTerminal", state(ended=True))
    await asyncio.to_thread(session.close)
    await asyncio.to_thread(session.close)
    assert len(fakes.requests["CloseTerminal"]) == 2
    assert session.verify().done
