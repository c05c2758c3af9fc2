"""What every backend owes a process: its bytes, its exit, and a death that is one."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import signal
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.conformance.sandbox.conftest import Box, MakeBox, command, failure
from tests.support.waiting import limits

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXITED, SIGNALED = ps.EXIT_REASON_EXITED, ps.EXIT_REASON_SIGNALED


@pytest.mark.requirement("R59")
async def test_stdout_and_stderr_come_apart_and_the_exit_code_is_the_programs(box: Box) -> None:
    result = await box.run(shell="echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert (result.exit.reason, result.exit.code) == (EXITED, 7)


@pytest.mark.requirement("R39")
async def test_death_by_signal_differs_from_an_exit_code(box: Box) -> None:
    """Killed is not exit 0."""
    result = await box.run(shell="kill -TERM $$")
    assert (result.exit.reason, result.exit.signal) == (SIGNALED, signal.SIGTERM)


@pytest.mark.requirement("R2", "R42")
@pytest.mark.parametrize(
    "argument",
    [
        "",
        " ",
        "a b",
        "'",
        '"',
        "$(leak)",
        "`leak`",
        "sk-test '$(leak)",
        "#c",
        "a\nb",
        "&&",
        "\\",
        "*",
        "-n",
        "é€𝄞",
        "\t",
    ],
)
async def test_an_argument_of_any_content_arrives_intact(box: Box, argument: str) -> None:
    """Argv, not shell strings."""
    result = await box.run("printf", "%s|", argument)
    assert result.stdout == argument.encode() + b"|"


@pytest.mark.requirement("R26")
async def test_ten_megabytes_of_output_come_back_whole_and_in_order(box: Box) -> None:
    """Nothing is dropped silently."""
    await box.start("ten", "bash", "-c", "yes 0123456789abcde | head -c 10485760; echo done >&2")
    stdout, stderr, ended = await box.finish("ten")
    assert hashlib.sha256(stdout).digest() == hashlib.sha256(b"0123456789abcde\n" * 655360).digest()
    assert stderr == b"done\n"
    assert (ended.stdout_bytes, ended.stdout_truncated) == (10485760, False)


@pytest.mark.requirement("R44")
async def test_bytes_that_are_not_utf8_come_back_as_they_were(box: Box) -> None:
    """Bytes, not text."""
    result = await box.run(shell=r"printf '\xff\xfe\x00\xc3\x28\xe2\x82'")
    assert result.stdout == b"\xff\xfe\x00\xc3\x28\xe2\x82"


@pytest.mark.requirement("R26")
async def test_output_over_its_limit_is_counted_as_a_gap(box: Box) -> None:
    await box.start("much", "bash", "-c", "head -c 300000 /dev/zero", output_limit_bytes=100_000)
    kept, gaps = 0, []
    async for event in box.watch("much"):
        kept += len(event.chunk.data)
        if event.HasField("gap"):
            gaps.append((event.gap.start, event.gap.end))
        if event.HasField("exit"):
            assert event.exit.stdout_truncated and event.exit.stdout_bytes == 300_000
    assert kept == 100_000
    # As many gaps as there were discards to tell, without a hole between them.
    assert gaps[0][0] == 100_000 and gaps[-1][1] == 300_000
    assert all(before[1] == after[0] for before, after in itertools.pairwise(gaps))


@pytest.mark.requirement("R26")
async def test_run_shows_both_ends_of_an_output_over_its_limit(box: Box) -> None:
    result = await box.run(shell="echo first; head -c 100000 /dev/zero; echo last", output_limit=2000)
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")
    assert len(result.stdout) == 2000 and result.exit.stdout_truncated


@pytest.mark.requirement("R67")
async def test_input_reaches_the_program_and_its_end_is_seen(box: Box) -> None:
    data = bytes(range(256)) * 4096
    result = await box.run("sha256sum", stdin=data)
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.requirement("R59")
async def test_a_command_that_does_not_read_its_input_may_succeed(box: Box) -> None:
    result = await box.run("true", stdin=b"x" * 1_000_000)
    assert (result.exit.reason, result.exit.code) == (EXITED, 0)


@pytest.mark.requirement("R38")
async def test_input_without_a_writer_is_empty(box: Box) -> None:
    """Nothing waits for input that cannot come."""
    assert (await box.run("cat")).exit.code == 0


@pytest.mark.requirement("R26")
async def test_input_is_resumed_at_its_offset_and_closed_only_by_an_end(box: Box) -> None:
    await box.start("cat", "cat", stdin=True)
    assert await box.write_stdin("cat", b"hello ") == 6
    # What was written already is skipped: a writer that does not know how far it came sends it again.
    assert await box.write_stdin("cat", b"lo world", offset=3) == 11
    gap = await failure(_write(box, "cat", b"x", 100))
    assert gap.reason == "OFFSET_GAP"
    assert await box.write_stdin("cat", None, offset=11) == 11
    stdout, _, ended = await box.finish("cat")
    assert stdout == b"hello world" and ended.code == 0
    assert (await failure(_write(box, "cat", b"more", 11))).reason == "STDIN_CLOSED"


def _watch(watch_id: int, sandbox_id: str, process_id: str, stdout: int = 0) -> ps.WatchProcessesRequest:
    start = ps.WatchProcessesRequest.WatchStart(
        watch_id=watch_id, sandbox_id=sandbox_id, process_id=process_id, stdout_offset=stdout, window_bytes=64 << 10
    )
    return ps.WatchProcessesRequest(start=start)


@pytest.mark.requirement("R26", "R59")
async def test_one_stream_watches_many_processes_and_refuses_what_is_unknown(make_box: MakeBox) -> None:
    one, other = await make_box(), await make_box()
    await one.start("first", "bash", "-c", "echo one; echo err >&2; exit 3")
    await other.start("second", "bash", "-c", "echo two")
    await one.finish("first")
    frames = [
        _watch(1, one.id, "first"),
        _watch(2, other.id, "second"),
        _watch(3, one.id, "unknown"),
        _watch(4, one.id, "first", stdout=1),
    ]
    outputs: dict[tuple[int, int], bytes] = {}
    ends: dict[int, str] = {}
    events = one.service.processes.WatchProcesses(iter(frames), timeout=120)
    assert (await anext(aiter(events))).HasField("opened")
    async for event in events:
        assert event.watch_id not in ends, "nothing follows the end of a watch"
        if event.HasField("chunk"):
            key = event.watch_id, event.chunk.stream
            outputs[key] = outputs.get(key, b"") + event.chunk.data
        elif event.HasField("exit"):
            ends[event.watch_id] = f"code {event.exit.code}"
        elif event.HasField("failure"):
            ends[event.watch_id] = event.failure.reason
    out, err = ps.OUTPUT_STREAM_STDOUT, ps.OUTPUT_STREAM_STDERR
    assert [outputs[watch_id, out] for watch_id in (1, 2, 4)] == [b"one\n", b"two\n", b"ne\n"]
    assert [outputs.get((watch_id, err)) for watch_id in (1, 2, 4)] == [b"err\n", None, b"err\n"]
    assert ends == {1: "code 3", 2: "code 0", 3: "PROCESS_UNKNOWN", 4: "code 3"}


@pytest.mark.requirement("R26")
async def test_a_watch_that_is_not_read_holds_up_no_other(box: Box) -> None:
    """Of the flood no more than the window comes before its credit, and then all of it."""
    await box.start("flood", "bash", "-c", "head -c 1000000 /dev/zero")
    await box.start("quiet", "bash", "-c", "echo heard")
    await box.finish("flood")
    frames: asyncio.Queue[ps.WatchProcessesRequest | None] = asyncio.Queue()

    async def requests() -> AsyncIterator[ps.WatchProcessesRequest]:
        while (frame := await frames.get()) is not None:
            yield frame

    frames.put_nowait(_watch(1, box.id, "flood"))
    frames.put_nowait(_watch(2, box.id, "quiet"))
    taken, cost = 0, 0
    quiet = b""
    events = aiter(box.service.processes.WatchProcesses(requests(), timeout=120))
    async for event in events:
        if event.watch_id == 1:
            taken += len(event.chunk.data)
            cost += len(event.chunk.data) + 256
        quiet += event.chunk.data if event.watch_id == 2 else b""
        if event.watch_id == 2 and event.HasField("exit"):
            break
    assert quiet == b"heard\n"
    assert cost <= 64 << 10
    while True:
        credit = ps.WatchProcessesRequest.WatchCredit(watch_id=1, bytes=cost)
        if cost:
            frames.put_nowait(ps.WatchProcessesRequest(credit=credit))
        event = await anext(events)
        cost = len(event.chunk.data) + 256 if event.HasField("chunk") else 0
        taken += len(event.chunk.data)
        if event.HasField("exit"):
            break
    assert taken == 1_000_000
    frames.put_nowait(None)
    assert await anext(events, None) is None


async def _write(box: Box, process_id: str, data: bytes, offset: int) -> int:
    return await box.write_stdin(process_id, data, offset=offset)


@pytest.mark.requirement("R26")
async def test_a_watcher_that_comes_back_gets_every_byte_from_its_offset(box: Box) -> None:
    """A broken stream loses neither a process nor a byte."""
    await box.start("p", "bash", "-c", "echo one; echo two >&2; read x; echo three", stdin=True)
    seen = b""
    stream = box.watch("p")
    async for event in stream:
        if event.HasField("chunk") and event.chunk.stream == ps.OUTPUT_STREAM_STDOUT:
            seen += event.chunk.data
        if seen == b"one\n":
            break
    stream.cancel()
    await box.write_stdin("p", b"go\n", None)
    stdout, stderr, ended = await box.finish("p", stdout=len(seen))
    assert (stdout, stderr, ended.code) == (b"three\n", b"two\n", 0)
    again, _, _ = await box.finish("p")
    assert again == b"one\nthree\n"


@pytest.mark.requirement("R25")
async def test_starting_the_same_process_again_joins_it_and_another_one_is_refused(box: Box) -> None:
    first = await box.start("id", "sh", "-c", "echo $$")
    second = await box.start("id", "sh", "-c", "echo $$")
    assert first.start_time == second.start_time
    assert isinstance(await failure(box.start("id", "sh", "-c", "echo other")), AlreadyExists)
    assert len((await box.finish("id"))[0].split()) == 1


@pytest.mark.requirement("R37")
async def test_missing_program_is_an_exit_not_an_error(box: Box) -> None:
    for argv in (["no-such-program"], ["/etc/passwd"], ["/nonexistent/x"]):
        result = await box.run(*argv)
        assert result.exit.reason == ps.EXIT_REASON_START_FAILED and result.exit.message
    result = await box.run("true", cwd="/nonexistent")
    assert result.exit.reason == ps.EXIT_REASON_START_FAILED and "working directory" in result.exit.message


@pytest.mark.requirement("R37", "R40")
async def test_a_timeout_kills_grandchildren_that_left_the_group_and_ignore_signals(box: Box) -> None:
    script = """
        trap '' TERM
        (trap '' TERM HUP; setsid sleep 4711 &) &
        setsid bash -c 'trap "" TERM; setsid sleep 4712 & exec sleep 4713' &
        echo partial
        sleep 4714
    """
    for limit in limits(0.5):
        result = await box.run(shell=script, timeout_s=limit)
        assert result.exit.reason == ps.EXIT_REASON_TIMED_OUT
        assert await processes_named(box, "sleep") == 0
        if result.stdout:
            break
    else:
        raise AssertionError("no limit was long enough")
    assert result.stdout == b"partial\n"


@pytest.mark.requirement("R40", "R60")
async def test_killing_a_process_kills_its_daemons_and_only_them(box: Box) -> None:
    await box.start("other", "sleep", "4721")
    await box.start("tree", "bash", "-c", "(setsid setsid sleep 4722 &); setsid sleep 4723 & echo up; sleep 4724")
    async for event in box.watch("tree"):
        if event.chunk.data == b"up\n":
            break
    ended = await box.kill("tree")
    assert (ended.reason, ended.signal) == (ps.EXIT_REASON_KILLED, signal.SIGKILL)
    assert await processes_named(box, "sleep") == 1
    await box.kill("other")
    assert await processes_named(box, "sleep") == 0


@pytest.mark.requirement("R40", "R60")
async def test_leftovers_of_an_ended_process_can_be_killed(box: Box) -> None:
    await box.start(
        "parent",
        "bash",
        "-c",
        "setsid sleep 4731 >/dev/null 2>&1 & until grep -qx sleep /proc/$!/comm; do :; done; exit 3",
    )
    _, _, ended = await box.finish("parent")
    assert ended.code == 3
    assert await processes_named(box, "sleep") == 1
    assert (await box.kill("parent")).code == 3
    assert await processes_named(box, "sleep") == 0


LEAVES = "setsid sleep 4751 >/dev/null 2>&1 & until grep -qx sleep /proc/$!/comm; do :; done; "


@pytest.mark.requirement("R40", "R60")
async def test_a_process_may_ask_that_all_others_end_with_it(box: Box) -> None:
    """Its exit comes when they are dead; another process that was started has been killed."""
    await box.start("ended", "sleep", "4752")
    await box.start("last", "bash", "-c", f"{LEAVES}exit 3", kill_all_after=True)
    _, _, ended = await box.finish("last")
    assert (ended.reason, ended.code, ended.all_killed) == (EXITED, 3, True)
    assert await processes_named(box, "sleep") == 0
    _, _, other = await box.finish("ended")
    assert (other.reason, other.all_killed) == (ps.EXIT_REASON_KILLED, False)


@pytest.mark.requirement("R60", "R74")
async def test_a_commands_result_is_read_after_all_others_are_dead(box: Box) -> None:
    """Of a longer file the beginning comes; a link and a file that is not there are no result."""
    result = await box.run(shell=f"{LEAVES}echo 12345 > r", kill_all_after=True, result_file="r")
    assert (result.exit.code, result.exit.all_killed) == (0, True)
    assert (result.result_file.content, result.result_file.size_bytes) == (b"1234", 6)
    assert await processes_named(box, "sleep") == 0
    for text in ("ln -sf /etc/hostname r", "rm r"):
        assert not (await box.run(shell=text, result_file="r")).HasField("result_file")


@pytest.mark.requirement("R40", "R44")
async def test_a_process_finds_the_files_that_came_with_it(box: Box) -> None:
    """They are part of what its id stands for, and if one cannot be written nothing is started."""
    assert box.sandbox.takes_files
    files = [ps.InitialFile(path="a/b", content=b"1"), ps.InitialFile(path="c", content=b"2", mode=0o700)]
    for _ in range(2):
        await box.start("reads", "sh", "-c", "cat a/b c; stat -c %a a/b c", files=files)
    assert (await box.finish("reads"))[0] == b"12644\n700\n"
    reused = await failure(box.start("reads", "sh", "-c", "cat a/b c; stat -c %a a/b c", files=files[:1]))
    assert reused.reason == "PROCESS_ID_REUSED"
    assert (await box.run(shell="cat d", files={"d": b"3"})).stdout == b"3"
    await failure(box.run(shell="touch ran", files={"a": b"in the place of a directory"}))
    assert isinstance(await failure(box.run(shell="touch ran", files={"e": bytes(1025 << 10)})), InvalidArgument)
    assert await box.out("ls") == "a\nc\nd"


@pytest.mark.requirement("R40", "R60")
async def test_a_process_whose_first_thread_has_ended_is_killed_with_the_rest(box: Box) -> None:
    program = """
import ctypes, os, threading, time
def live_on():
    while "State:\\tZ" not in open(f"/proc/{os.getpid()}/status").read():
        time.sleep(0.01)
    print("alone", flush=True)
    time.sleep(4751)
ctypes.CDLL(None).prctl(15, b"headless")  # its name, which the sandbox's own programs do not have
threading.Thread(target=live_on).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
    await box.start("threads", "python3", "-c", program)
    async for event in box.watch("threads"):
        if event.chunk.data == b"alone\n":
            break
    await box.kill("threads")
    alone = "grep -l '^Threads:.[2-9]' $(grep -lx 'Name:.headless' /proc/[0-9]*/status) /dev/null 2>/dev/null | wc -l"
    assert int(await box.out(alone)) == 0


@pytest.mark.requirement("R28", "R41")
async def test_exit_does_not_wait_for_holders_of_its_output(box: Box) -> None:
    await box.start("leaky", "bash", "-c", "setsid sleep 4741 & echo done")
    stdout, _, ended = await box.finish("leaky")
    assert (stdout, ended.code, ended.pipes_open) == (b"done\n", 0, True)
    await box.kill("leaky")


@pytest.mark.requirement("R40")
async def test_a_signal_goes_to_the_whole_group(box: Box) -> None:
    await box.start("group", "bash", "-c", "sleep 4751 & echo up; wait")
    async for event in box.watch("group"):
        if event.HasField("chunk"):
            break
    request = ps.SignalProcessRequest(sandbox_id=box.id, process_id="group", signal=signal.SIGINT)
    await box.service.processes.SignalProcess(request, timeout=30)
    _, _, ended = await box.finish("group")
    assert (ended.reason, ended.signal) == (SIGNALED, signal.SIGINT)


@pytest.mark.requirement("R40")
async def test_killing_during_a_flood_of_output_ends_it(box: Box) -> None:
    await box.start("yes", "yes", output_limit_bytes=1_000_000)
    async for event in box.watch("yes"):
        if event.HasField("chunk"):
            break
    assert (await box.kill("yes")).reason == ps.EXIT_REASON_KILLED


@pytest.mark.requirement("R41")
async def test_waiting_answers_before_the_callers_deadline(box: Box) -> None:
    await box.start("long", "sleep", "4761")
    request = ps.WaitProcessRequest(sandbox_id=box.id, process_id="long")
    for limit in limits(2.0):
        try:
            answer = await box.service.processes.WaitProcess(request, timeout=limit)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error
            continue  # the answer took longer than what was left for it
        break
    else:
        raise AssertionError("no limit was long enough")
    assert not answer.process.HasField("exit")
    await box.kill("long")
    answer = await box.service.processes.WaitProcess(request, timeout=30)
    assert answer.process.exit.reason == ps.EXIT_REASON_KILLED


@pytest.mark.requirement("R32")
async def test_a_cancelled_run_is_killed(box: Box) -> None:
    call = box.service.processes.Run(
        ps.RunRequest(sandbox_id=box.id, command=command(shell="touch up; exec sleep 4771"), process_id="cancelled")
    )
    running = asyncio.ensure_future(call)
    await box.out("until [ -e up ]; do sleep 0.01; done")
    running.cancel()
    await asyncio.wait([running])
    request = ps.WaitProcessRequest(sandbox_id=box.id, process_id="cancelled")
    answer = await box.service.processes.WaitProcess(request, timeout=30)
    assert answer.process.exit.reason == ps.EXIT_REASON_KILLED
    assert await processes_named(box, "sleep") == 0


@pytest.mark.requirement("R44")
async def test_a_terminal_is_a_terminal_and_has_a_size(box: Box) -> None:
    script = "tty; stty size; read line; stty size; echo got $line"
    await box.start("pty", "bash", "-c", script, pty=ps.PtySize(rows=33, columns=77))
    stream = box.watch("pty")
    seen = b""
    async for event in stream:
        seen += event.chunk.data
        if b"33 77" in seen:
            break
    await box.service.processes.ResizePty(
        ps.ResizePtyRequest(sandbox_id=box.id, process_id="pty", size=ps.PtySize(rows=44, columns=88)), timeout=30
    )
    await box.write_stdin("pty", b"typed\n")
    stdout, _, ended = await box.finish("pty")
    assert ended.code == 0
    assert b"/dev/pts/" in stdout and b"44 88" in stdout and b"got typed" in stdout


@pytest.mark.requirement("R63")
async def test_resizing_what_has_no_terminal_is_refused(box: Box) -> None:
    await box.start("plain", "sleep", "0")
    size = ps.PtySize(rows=1, columns=1)
    call = box.service.processes.ResizePty(ps.ResizePtyRequest(sandbox_id=box.id, process_id="plain", size=size))
    assert (await failure(call)).reason == "NOT_A_PTY"


@pytest.mark.requirement("R1", "R2")
async def test_secrets_are_in_the_environment_and_in_no_argv_and_no_answer(box: Box) -> None:
    secret = "sk-test '$(leak)"
    await box.start("keeper", "bash", "-c", 'printf %s "$KEY"; read x', secret_env={"KEY": secret}, stdin=True)
    async for event in box.watch("keeper"):
        if event.HasField("chunk"):
            assert event.chunk.data.decode() == secret
            break
    seen = await box.run(shell="cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert secret.encode() not in seen.stdout
    listed = await box.service.processes.ListProcesses(ps.ListProcessesRequest(sandbox_id=box.id), timeout=30)
    assert secret not in str(listed)
    await box.kill("keeper")


@pytest.mark.requirement("R12")
async def test_the_environment_is_the_sandboxs_own(box: Box) -> None:
    """An allow-list."""
    names = {line.partition("=")[0] for line in (await box.out("env")).splitlines()}
    assert names <= {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TERM",
        "TMPDIR",
        "PWD",
        "SHLVL",
        "_",
        "OLDPWD",
    }
    assert "sk-host-secret" not in await box.out("env; cat /proc/1/environ 2>/dev/null | tr '\\0' '\\n'; true")


@pytest.mark.requirement("R63")
async def test_the_commands_environment_wins_over_the_sandboxs(make_box: MakeBox) -> None:
    box = await make_box(env={"A": "sandbox", "B": "sandbox"})
    assert (await box.run(shell="echo $A $B", env={"B": "command"})).stdout == b"sandbox command\n"


@pytest.mark.requirement("R64")
async def test_malformed_commands_are_refused_by_field(box: Box) -> None:
    for request in (
        ps.Command(),
        ps.Command(argv=ps.Argv()),
        command("a\0b"),
        command("true", env={"A=B": "x"}),
        command("true", timeout_s=-1),
    ):
        error = await failure(box.service.processes.Run(ps.RunRequest(sandbox_id=box.id, command=request)))
        assert isinstance(error, InvalidArgument) and error.violations
    error = await failure(box.service.processes.GetProcess(ps.GetProcessRequest(sandbox_id=box.id, process_id="?")))
    assert isinstance(error, NotFound) and error.reason == "PROCESS_UNKNOWN"


@pytest.mark.requirement("R46")
async def test_another_account_is_refused_where_there_is_none(box: Box) -> None:
    request = command("true")
    request.user = "root"
    error = await failure(box.service.processes.Run(ps.RunRequest(sandbox_id=box.id, command=request)))
    assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R45")
async def test_home_and_working_directory_are_the_users(fresh_box: Box) -> None:
    assert await fresh_box.out('echo "$HOME"; pwd') == f"{fresh_box.sandbox.home}\n{fresh_box.sandbox.workdir}"
    assert await fresh_box.out('touch "$HOME/a" b && stat -c %U "$HOME/a" b | sort -u') == await fresh_box.out("id -un")


@pytest.mark.requirement("R43")
async def test_a_process_that_kills_all_it_sees_kills_only_its_own(fresh_box: Box) -> None:
    """The sandbox outlives what runs in it."""
    await fresh_box.run(shell="kill -9 -1; true")
    assert await fresh_box.out("echo alive") == "alive"


@pytest.mark.requirement("R23")
async def test_zombies_of_daemons_are_reaped(box: Box) -> None:
    await box.run(shell="for i in 1 2 3 4 5; do (setsid true &) ; done")
    gone = "for i in $(seq 500); do grep -ls 'State:.Z' /proc/[0-9]*/status || exit 0; sleep 0.01; done; exit 1"
    assert (await box.run(shell=gone)).exit.code == 0


async def processes_named(box: Box, name: str) -> int:
    """How many processes of this name run in the sandbox; one that is dead and not yet reaped does not."""
    named = f"grep -lx 'Name:.{name}' /proc/[0-9]*/status 2>/dev/null"
    return int(await box.out(f"{named} | xargs -r grep -L '^State:.[ZX]' 2>/dev/null | wc -l"))
