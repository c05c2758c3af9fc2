"""Terminal episodes in real sandboxes through the public client: the shell, its state, and every way to end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.driver.stack import TOKEN, Stack
from tests.support.waiting import limits

from penstock.client import (
    AlreadyExists,
    Command,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Penstock,
    ResourceExhausted,
    RewardFrom,
    SeedFile,
    Task,
    TerminalHandle,
    TerminusSessionFactory,
    Verifier,
    build_terminal_tool_call,
    terminus_reward,
)
from penstock.client.terminus.session import TerminusVerdict
from penstock.client.wire.specs import command as command_to_wire
from penstock.driver.v1 import terminal_service_pb2, terminal_service_pb2_grpc
from penstock_chassis.channel import connect, error_from_rpc

MARK = "the-verifier-has-this-mark"


def task(**changes: Any) -> Task:
    """Count the lines of a file; graded by the file and by the answer."""
    values: dict[str, Any] = {
        "task_id": "count",
        "instruction": "Write the number of lines of data.txt to count.txt and answer with it.",
        "files": [SeedFile("data.txt", b"a\nb\nc\n")],
        "setup": [Command(shell="echo $TOOL > tool.txt")],
        "env": {"TOOL": "wc"},
        "verifier": Verifier(
            commands=[
                Command(shell=f': {MARK}; test "$(cat count.txt)" = 3'),
                Command(shell='bash check.sh "$PENSTOCK_FINAL_ANSWER_FILE"'),
            ],
            files=[SeedFile("check.sh", f'# {MARK}\ntest "$(cat "$1")" = 3\n'.encode())],
        ),
    }
    return Task(**{**values, **changes})


async def output(terminal: TerminalHandle, command: str) -> str:
    """What a command that must succeed wrote."""
    seen = await terminal.run(command)
    assert seen.result is not None
    assert seen.ok, seen.result
    return seen.result.stdout.decode()


@pytest.mark.requirement("R57", "R74", "R77", "R79")
async def test_an_episode_of_several_steps_is_rewarded_by_its_verifier(penstock: Penstock) -> None:
    """Setup ran, commands see each other's work, the answer's reward comes in its own field."""
    async with await penstock.terminals.open(task(), labels={"run": "a"}) as terminal:
        (setup,) = terminal.info.setup
        assert setup.exit.ok
        assert await output(terminal, "cat tool.txt; echo $TOOL") == "wc\nwc\n"
        assert await output(terminal, "n=$(wc -l < data.txt); echo $n > count.txt") == ""
        seen = await terminal.run("cat count.txt missing.txt")
        assert seen.result is not None
        assert seen.result.exit.code == 1
        assert seen.text() == "3\ncat: missing.txt: No such file or directory\n[exit code 1]"
        end = await terminal.answer("3")
    assert end.ended
    assert end.failure is None
    assert end.reward is not None
    assert (end.reward.value, end.result) == (1.0, None)
    told = await terminal.refresh()
    assert (told.ended, told.reward, told.step_count, told.labels) == (True, end.reward, 4, {"run": "a"})
    assert [command.exit.code for command in told.verifier] == [0, 0]


async def test_the_shells_state_goes_from_command_to_command(penstock: Penstock) -> None:
    """Directory, environment, variables, functions, aliases, umask and `$?`; `exit` ends a command, and keeps them."""
    async with await penstock.terminals.open(task()) as terminal:
        await output(
            terminal,
            "mkdir -p deep/er; cd deep/er; export WORD=\"two 'words'\"; n=5; list=(x 'y z'); umask 027\n"
            'greet() { echo "hello $1"; }; alias shout="echo LOUD"; IFS=:; unset TOOL',
        )
        assert await output(
            terminal, 'printenv WORD; echo "$n ${list[1]}"; greet you; shout; umask; echo ${TOOL-none}'
        ) == ("two 'words'\n5 y z\nhello you\nLOUD\n0027\nnone\n")
        assert (await output(terminal, "pwd")).endswith("/deep/er\n")
        left = await terminal.run("cd ..; WORD=changed; exit 7")
        assert left.result is not None
        assert left.result.exit.code == 7
        went = await output(terminal, 'echo "$? $WORD"; cd -')
        assert went.startswith("7 changed\n")
        assert went.endswith("/deep/er\n")
        assert (await output(terminal, "pwd; rm -rf ../er; pwd")).count("/deep/er\n") == 2
        gone = await terminal.run("pwd")
        assert gone.result is not None
        assert b"any more" in gone.result.stderr


async def test_options_traps_and_jobs_are_a_commands_own(penstock: Penstock) -> None:
    """`set -e` ends its command and not the episode; a job in the background runs on."""
    async with await penstock.terminals.open(task()) as terminal:
        failed = await terminal.run("set -euo pipefail; a=1; false; echo never")
        assert failed.result is not None
        assert (failed.result.exit.code, failed.result.stdout) == (1, b"")
        assert await output(terminal, 'false; echo "on $a"; cat nothing 2>/dev/null | true; trap "echo bye" EXIT') == (
            "on 1\nbye\n"
        )
        assert await output(
            terminal, "(until [ -e go ]; do sleep 0.05; done; echo done > job) >/dev/null 2>&1 & echo $!"
        )
        assert await output(terminal, "touch go; until [ -s job ]; do sleep 0.05; done; cat job") == "done\n"


@pytest.mark.requirement("R44")
async def test_standard_input_is_empty_and_outputs_are_bytes(penstock: Penstock) -> None:
    """A command that reads gets the end at once; what is not text comes as it is."""
    async with await penstock.terminals.open(task()) as terminal:
        assert await output(terminal, "cat; read x; echo $?") == "1\n"
        seen = await terminal.run(r"printf '\377\000\n\376'; printf '\200' >&2")
        assert seen.result is not None
        assert (seen.result.stdout, seen.result.stderr) == (b"\xff\0\n\xfe", b"\x80")
        quoted = "printf %s $'it\\'s \"all\" `$here`\\n'; cat <<'EOF'\n$(not this)\nEOF"
        assert await output(terminal, quoted) == 'it\'s "all" `$here`\n$(not this)\n'
        unfinished = await terminal.run("echo 'never closed")
        assert unfinished.result is not None
        assert unfinished.result.exit.code not in (0, None)
        assert await output(terminal, "echo fine") == "fine\n"


@pytest.mark.requirement("R37")
async def test_a_timeout_kills_the_tree_and_keeps_the_state_before_it(penstock: Penstock) -> None:
    """Typed, with the output so far; what the command started is dead, and the shell is as it was before."""
    async with await penstock.terminals.open(task()) as terminal:
        await output(terminal, "word=before; cd /tmp")
        for limit in limits(1.0):
            seen = await terminal.run("word=after; cd /; echo begun; sleep 987 & sleep 987", timeout=limit)
            assert seen.result is not None
            if seen.result.stdout:
                break
        else:
            raise AssertionError("no limit was long enough")
        assert (seen.result.exit.reason, seen.result.stdout) == ("timed_out", b"begun\n")
        assert "timed out" in seen.text()
        assert await output(terminal, 'echo "$? $word $PWD"') == "124 before /tmp\n"
        assert await output(terminal, "grep -ls '^sleep' /proc/[0-9]*/comm | wc -l") == "0\n"


async def test_a_killed_or_replaced_shell_leaves_the_state_as_it_was(penstock: Penstock) -> None:
    """A signal is told as one; `exec` and an argument vector see the state and do not change it."""
    async with await penstock.terminals.open(task()) as terminal:
        await output(terminal, "word=before; export SHOWN=yes; cd /tmp")
        killed = await terminal.run("word=after; kill -9 $$")
        assert killed.result is not None
        assert (killed.result.exit.reason, killed.result.exit.signal) == ("signaled", 9)
        assert await output(terminal, "word=after; cd /; exec printf x") == "x"
        vector = await terminal.run(["sh", "-c", "echo $SHOWN; pwd; exit 3"])
        assert vector.result is not None
        assert (vector.result.stdout, vector.result.exit.code) == (b"yes\n/tmp\n", 3)
        assert await output(terminal, "echo $word $PWD") == "before /tmp\n"
        given = Command(shell="echo $A$SHOWN; pwd", cwd="/usr", env={"A": "it's $me ", "SHOWN": "now"})
        seen = await terminal.run(given)
        assert seen.result is not None
        assert seen.result.stdout == b"it's $me now\n/usr\n"
        assert await output(terminal, 'echo "$A$SHOWN" $PWD; cd -') == "it's $me now /usr\n/tmp\n"


@pytest.mark.requirement("R26")
async def test_an_observation_has_both_ends_of_a_flood(penstock: Penstock) -> None:
    """What is left out is counted; 100 MB of output neither fill anything nor hide the end."""
    async with await penstock.terminals.open(task(), output_limit_bytes=1001) as terminal:
        seen = await terminal.run("echo first; head -c 100000000 /dev/zero; echo last; echo small >&2")
        assert seen.result is not None
        assert len(seen.result.stdout) == 1001
        assert seen.result.stdout.startswith(b"first\n\0")
        assert seen.result.stdout.endswith(b"\0last\n")
        assert seen.result.exit.stdout_bytes == 100_000_011
        assert (seen.result.stderr, seen.result.exit.stderr_bytes) == (b"small\n", 6)
        assert "[99999010 bytes left out]" in seen.text()


@pytest.mark.requirement("R75")
async def test_a_hidden_verifier_is_nowhere_in_the_sandbox(penstock: Penstock) -> None:
    """No file, no process and no variable has anything of it before the answer."""
    async with await penstock.terminals.open(task()) as terminal:
        looked = await terminal.run(
            f'a={MARK[:8]}; a=$a{MARK[8:]}; grep -rIls -- "$a" . ~ /tmp /etc /opt 2>/dev/null | grep -v shell'
        )
        assert looked.result is not None
        assert looked.result.stdout == b""
        assert "PENSTOCK" not in await output(terminal, "export -p; ls -R . /tmp")
        assert "check.sh" not in await output(terminal, "ls -R . ~")


@pytest.mark.requirement("R78")
async def test_an_episode_ends_exactly_once(penstock: Penstock) -> None:
    """With verifier commands and without; no command and no second answer after it, closing is harmless."""
    for verifier in (task().verifier, None):
        terminal = await penstock.terminals.open(task(verifier=verifier))
        end = await terminal.answer("3")
        assert end.ended
        assert end.failure is None
        assert (end.reward is None) == (verifier is None)
        with pytest.raises(FailedPrecondition) as refused:
            await terminal.run("echo late")
        assert refused.value.reason == "EPISODE_ENDED"
        with pytest.raises(FailedPrecondition):
            await terminal.answer("other")
        await terminal.close()
        await terminal.close()
        told = await terminal.refresh()
        assert (told.ended, told.reward, told.failure) == (True, end.reward, None)


@pytest.mark.requirement("R70", "R74")
async def test_a_closed_episode_has_no_reward_and_no_sandbox(penstock: Penstock) -> None:
    """Closing unblocks a command that runs, runs no verifier and is not zero; an unknown one is closed."""
    terminal = await penstock.terminals.open(task())
    sandbox_id = terminal.info.sandbox_id
    waiting = asyncio.ensure_future(terminal.run("touch begun; sleep 600", step_id="long"))
    await begun(penstock, sandbox_id, "begun")
    await terminal.close()
    cut = await waiting
    assert cut.ended
    assert cut.failure is not None
    assert (cut.failure.cause, cut.failure.reason, cut.reward) == ("cancelled", "CLOSED", None)
    told = await terminal.refresh()
    assert (told.ended, told.reward, told.verifier, told.sandbox_id) == (True, None, (), "")
    with pytest.raises(NotFound):
        await penstock.sandboxes.attach(sandbox_id)
    assert await terminal.run("touch begun; sleep 600", step_id="long") == cut
    with pytest.raises(NotFound):
        await penstock.terminals.attach("no-such-terminal")


async def begun(penstock: Penstock, sandbox_id: str, path: str) -> None:
    """Waits until a command has made a file."""
    sandbox = await penstock.sandboxes.attach(sandbox_id)
    seen = await sandbox.run(["sh", "-c", f"until [ -e {path} ]; do sleep 0.05; done"])
    assert seen.ok


@pytest.mark.requirement("R29", "R34")
async def test_a_repeated_step_gets_its_first_answer_and_runs_once(penstock: Penstock) -> None:
    """While it runs, when it is done, and after the end; the same id for another action is an error."""
    async with await penstock.terminals.open(task()) as terminal:
        line = "echo once >> runs; until [ -e go ]; do sleep 0.05; done; wc -l < runs"
        first = asyncio.ensure_future(terminal.run(line, step_id="s1"))
        await begun(penstock, terminal.info.sandbox_id, "runs")
        joined = asyncio.ensure_future(terminal.run(line, step_id="s1"))
        lost = asyncio.ensure_future(terminal.run(line, step_id="s1"))
        await asyncio.sleep(0)
        lost.cancel()
        sandbox = await penstock.sandboxes.attach(terminal.info.sandbox_id)
        await sandbox.write_file("go", b"")
        assert await first == await joined == await terminal.run(line, step_id="s1")
        assert (await first).text() == "1"
        with pytest.raises(AlreadyExists) as refused:
            await terminal.run("another", step_id="s1")
        assert refused.value.reason == "STEP_ID_REUSED"
        end = await terminal.answer("3", step_id="s2")
    assert await terminal.answer("3", step_id="s2") == end
    assert await terminal.run(line, step_id="s1") == await first


async def test_steps_of_one_stream_are_answered_one_for_one_in_order(penstock: Penstock, stack: Stack) -> None:
    """The contract as any client meets it: a typed stream, the terminal named once, then half-closed."""
    async with await penstock.terminals.open(task()) as terminal, connect(stack.driver.address, TOKEN) as channel:
        stub = terminal_service_pb2_grpc.TerminalServiceStub(channel)
        request = terminal_service_pb2.StepRequest
        asked = [
            request(terminal_id=terminal.terminal_id, step_id="a", command=command_to_wire(Command(shell="x=1"))),
            request(step_id="b", command=command_to_wire(Command(shell="echo $((x + 1))"))),
            request(step_id="c", final_answer="3"),
        ]
        told = [answer async for answer in stub.Step(iter(asked))]
        assert [(answer.step_id, answer.result.stdout, answer.ended) for answer in told] == [
            ("a", b"", False), ("b", b"2\n", False), ("c", b"", True),
        ]  # fmt: skip
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [answer async for answer in stub.Step(iter([request(step_id="d", final_answer="")]))]
        assert error_from_rpc(refused.value).reason == "FIELD_INVALID"


@pytest.mark.requirement("R33", "R63")
async def test_impossible_terminals_are_refused_before_anything_is_made(penstock: Penstock) -> None:
    """Every wrong field is named; an accepted option takes effect."""
    with pytest.raises(InvalidArgument) as refused:
        await penstock.terminals.open(
            task(instruction=" "), wall_time=-1, output_limit_bytes=1 << 30, max_steps=1000, labels={"penstock_x": "y"}
        )
    assert refused.value.reason == "FIELD_INVALID"
    assert {violation.field for violation in refused.value.violations} == {
        "task.instruction", "wall_time", "output_limit_bytes", "max_steps", "labels.penstock_x",
    }  # fmt: skip
    async with await penstock.terminals.open(task(), max_steps=1) as terminal:
        for wrong in (Command(shell="id", user="root"), Command(shell="id", secret_env={"A": "b"})):
            with pytest.raises(InvalidArgument) as refused:
                await terminal.run(wrong)
            assert refused.value.reason == "FIELD_INVALID"
        await output(terminal, "true")
        with pytest.raises(ResourceExhausted) as full:
            await terminal.run("true")
        assert full.value.reason == "STEP_LIMIT"
        assert (await terminal.answer()).reward is not None


@pytest.mark.requirement("R58")
async def test_a_setup_that_fails_opens_nothing(penstock: Penstock) -> None:
    """The command, how it ended and what it said are in the error; no sandbox is left."""
    before = [item async for item in penstock.sandboxes.list()]
    with pytest.raises(FailedPrecondition) as refused:
        await penstock.terminals.open(task(setup=[Command(shell="true"), Command(shell="echo why >&2; exit 9")]))
    assert refused.value.reason == "SETUP_FAILED"
    assert refused.value.metadata == {"index": "1", "exit": "exit code 9", "output": "why\n"}
    assert [item async for item in penstock.sandboxes.list()] == before


@pytest.mark.requirement("R61", "R62")
async def test_an_episode_that_is_not_answered_in_time_ends_by_that_name(penstock: Penstock) -> None:
    """Its wall time cuts off the command that runs; the failure is the policy's, and there is no reward."""
    async with await penstock.terminals.open(task(), wall_time=1.5) as terminal:
        try:
            cut = await terminal.run("sleep 600")
        except FailedPrecondition as late:  # on a machine so slow that it came after the end
            assert late.reason == "EPISODE_ENDED"
        else:
            assert cut.ended
            assert cut.failure is not None
            assert cut.failure.reason == "EPISODE_TIMED_OUT"
        told = await terminal.refresh()
        assert told.failure is not None
        assert (told.failure.cause, told.failure.reason, told.reward) == ("timeout", "EPISODE_TIMED_OUT", None)


@pytest.mark.requirement("R73", "R74", "R135")
@pytest.mark.parametrize(
    ("content", "reason"),
    [("nan", "REWARD_OUT_OF_RANGE"), ('{"reward": 1, "turns": [{"call": 0, "reward": 1}]}', "REWARD_INVALID")],
    ids=["not finite", "of turns"],
)
async def test_a_bad_reward_is_a_failure_of_the_verifier(penstock: Penstock, content: str, reason: str) -> None:
    """The episode ends, with a typed failure instead of a reward. It has no calls of a model that could have one."""
    verifier = Verifier(commands=[Command(shell=f"echo '{content}' > $PENSTOCK_REWARD_FILE")], reward=RewardFrom.FILE)
    async with await penstock.terminals.open(task(verifier=verifier)) as terminal:
        end = await terminal.answer()
    assert end.ended
    assert end.reward is None
    assert end.failure is not None
    assert (end.failure.cause, end.failure.reason) == ("verifier", reason)


def policy(messages: list[dict[str, Any]]) -> str:
    """A policy that thinks aloud, errs once, and works in three forms of calls."""
    said: list[str] = [
        "I would look around first: ls",
        'Sure.\n```json\n{"command": "cat data.txt | wc -l"}\n```',
        "terminal(command=\"printf '%s' $(wc -l < data.txt) > count.txt\")",
        '<tool_call>{"name": "terminal", "arguments": {"final_answer": 3}}</tool_call>',
    ]
    return said[len([message for message in messages if message["role"] == "assistant"])]


@pytest.mark.requirement("R70", "R77", "R80", "R81")
async def test_a_worker_without_await_plays_an_episode_through_the_terminus_names(stack: Stack) -> None:
    """Messages, tool, calls, verdict; the reward is beside the text, and free text is not run."""
    addresses = {
        "driver": stack.driver.address,
        "interception": stack.interception.address,
        "sandbox": stack.sandbox.address,
    }
    factory = TerminusSessionFactory(["true"], target=addresses, token=TOKEN)

    def play() -> tuple[list[dict[str, Any]], TerminusVerdict]:
        with factory.create(task(), episode_id="e1") as session:
            messages = session.initial_messages()
            assert MARK not in messages[0]["content"]
            assert [tool.name for tool in session.list_tools()] == ["terminal"]
            assert session.verify().env_reward is None
            while not session.done:
                messages.append({"role": "assistant", "content": policy(messages)})
                call = build_terminal_tool_call(messages[-1]["content"])
                messages.append(session.tool_message(call, session.call_tool(call.name, call.args)))
            assert session.call_tool("terminal", {"command": "ls"}).error
            assert session.call_tool("python", {"command": "ls"}).error
            return messages, session.verify()

    messages, verdict = await asyncio.to_thread(play)
    told = [message for message in messages if message["role"] == "tool"]
    assert [message["content"] for message in told][1:] == ["3", "[no output]", "The episode has ended."]
    assert "no call was found" in told[0]["content"]
    assert terminus_reward([messages, messages[:-1]]) == [1.0, None]
    assert (verdict.env_reward, verdict.done) == (1.0, True)
    assert verdict.metrics["commands"] == 2
    assert verdict.metrics["submitted_answer"] == "3"
    assert verdict.metrics["verify_passed"] == 2


@pytest.mark.requirement("R70")
async def test_closing_a_session_from_another_thread_unblocks_its_command(penstock: Penstock, stack: Stack) -> None:
    """The command's call returns with a reason and no reward; afterwards the session says so, and can be asked."""
    addresses = {"driver": stack.driver.address, "sandbox": stack.sandbox.address, "interception": "127.0.0.1:1"}
    factory = TerminusSessionFactory(target=addresses, token=TOKEN, show_verifier=True)
    session = await asyncio.to_thread(factory.create, {"prompt": "wait", "verify": "test -e never"})
    assert "test -e never" in session.initial_messages()[0]["content"]
    before = await asyncio.to_thread(session.verify)
    waits = {"command": "touch begun; sleep 600"}
    running = asyncio.ensure_future(asyncio.to_thread(session.call_tool, "terminal", waits))
    await begun(penstock, before.metrics["sandbox_id"], "begun")
    await asyncio.to_thread(session.close)
    result = await running
    assert (result.done, result.reward) == (True, None)
    assert result.error is not None
    assert result.error.startswith("CLOSED")
    await asyncio.to_thread(session.close)
    assert (await asyncio.to_thread(session.call_tool, "terminal", {"command": "ls"})).error == "the session is closed"
    after = session.verify()
    assert (after.env_reward, after.done, after.metrics["failure"]) == (None, True, "CLOSED")


async def test_the_command_line_plays_an_episode_from_its_input(stack: Stack, tmp_path: Path) -> None:
    """Each line a command, the end of the input the answer; what was seen on stdout, and the exit code says how."""
    file = tmp_path / "task.yaml"
    file.write_text(
        'instruction: count\nfiles: [{path: data.txt, content: "a\\nb\\n"}]\n'
        "verifier: {commands: ['test \"$(cat n)\" = 2', 'test \"$(cat $PENSTOCK_FINAL_ANSWER_FILE)\" = done']}\n"
    )
    out = b""
    for given, shown, code in (
        ("cd .\nwc -l < data.txt > n; cat n\n", "reward 1 after", 0),
        ("exit 3\n", "reward 0.5", 0),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "terminal", str(file), "--answer", "done"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(stack, tmp_path),
        )
        out, err = await process.communicate(given.encode())
        assert process.returncode == code, err.decode()
        assert shown in out.decode(), (out, err)
    assert "[exit code 3]" in out.decode()


@pytest.mark.requirement("R70")
async def test_an_interrupt_ends_the_command_line_while_its_input_is_open(stack: Stack, tmp_path: Path) -> None:
    """Nothing waits for the line that is not typed; the episode is closed."""
    file = tmp_path / "task.yaml"
    file.write_text("instruction: wait\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "terminal", str(file)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(stack, tmp_path),
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(b"echo ready\n")
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    err = await process.stderr.read()  # to its end: the program's, whose input is still open
    await process.communicate()
    assert (process.returncode, err.decode().splitlines()[-1]) == (130, "interrupted")


@pytest.mark.requirement("R33", "R80")
async def test_policys_own_mistakes_are_answered_and_raise_in_no_trainer(stack: Stack) -> None:
    """Texts that no shell takes, answers that are too long, and the command after the last one."""
    addresses = {"driver": stack.driver.address, "sandbox": stack.sandbox.address, "interception": "127.0.0.1:1"}
    factory = TerminusSessionFactory(target=addresses, token=TOKEN, max_steps=1)

    def play() -> list[tuple[str | None, str]]:
        with factory.create("go") as session:
            calls = [
                {"command": "echo \ud800"},
                {"command": " "},
                {"command": "echo \0"},
                {"final_answer": "x" * 2_000_000},
                {"command": "echo fine"},
                {"command": "echo more"},
                {"final_answer": "done"},
                {"final_answer": "again"},
            ]
            told = [session.call_tool("terminal", arguments) for arguments in calls]
            return [(result.error, result.output) for result in told]

    told = await asyncio.to_thread(play)
    for (error, output), said in zip(
        told, ["surrogate", "empty", "NUL", "at most", "", "1 commands", "", "ended"], strict=True
    ):
        assert bool(error) == bool(said), (error, output)
        assert said in (error or "")
    assert told[4][1] == "fine"


async def test_the_guides_program_does_what_it_says(stack: Stack, tmp_path: Path) -> None:
    """docs/guides/terminal.md: its first program, as it stands there."""
    page = (Path(__file__).parents[3] / "docs/guides/terminal.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(stack, tmp_path),
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    shown = ["2", "cat: missing: No such file or directory", "[exit code 1]"]
    reward = "Reward(value=1.0, range_min=0.0, range_max=1.0, components={}, turns=())"
    assert out.decode().splitlines() == [*shown, reward]


def environment(stack: Stack, home: Path) -> dict[str, str]:
    """Where a program finds the stack."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PENSTOCK_DRIVER_ADDRESS": stack.driver.address,
        "PENSTOCK_SANDBOX_ADDRESS": stack.sandbox.address,
        "PENSTOCK_INTERCEPTION_ADDRESS": stack.interception.address,
        "PENSTOCK_TOKEN": TOKEN,
    }
