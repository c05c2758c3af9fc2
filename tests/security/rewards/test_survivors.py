"""Agents whose processes try to outlive the kill that comes before a grade.

PENSTOCK_TEST_KILLS says how often each kind of chain is killed (default 1): 11 makes 528 kills in all. These are kills
of a sandbox's processes; PENSTOCK_TEST_ROLLOUTS says how many whole rollouts with chains are graded in place (default
6): 500 is what R91 asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, MakeBox, capabilities, make_box
from tests.conformance.sandbox.services import SERVICES, Running, start
from tests.security.rewards.hopping import programs
from tests.support.copying import finish, training
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running as Stack

from penstock.client import Command, Phase, RewardFrom, SeedFile, Task, Verifier
from penstock.sandbox.v1 import process_service_pb2 as ps

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["capabilities", "make_box"]

KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "1"))
ROLLOUTS = int(os.environ.get("PENSTOCK_TEST_ROLLOUTS", "6"))
AT_ONCE = 4
CHAINS = (1, 4, 8)
UNREADABLE = "sleep-unreadable"
# What runs beside the look itself, and whether processes are being made: a chain may be in no listing at all.
LOOK = """
import os
def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid()))]
alive = [pid for pid in pids if state(pid) not in ("Z", "X", "gone")]
made = {open("/proc/loadavg").read().split()[-1] for _ in range(3000)}
print(len(alive), len(made))
"""
UNTIL_ONE_IS_MADE = """
def last():
    return open("/proc/loadavg").read().split()[-1]
first = last()
while last() == first:
    pass
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["local", "local-ordinary-user"])
async def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A service whose sandboxes see a program that may be executed and not read, as sudo is on many systems."""
    # Not in /tmp, of which sandboxes have one of their own.
    folder = (Path("/var/lib") if os.geteuid() == 0 else Path.home()) / f"penstock-unreadable-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o755)
    try:
        shutil.copy("/usr/bin/sleep", folder / UNREADABLE)
        (folder / UNREADABLE).chmod(0o711)
        assert request.param in SERVICES
        async with start(request.param, extra_read_only=f'["{folder}"]') as running:
            running.unreadable = str(folder / UNREADABLE)  # type: ignore[attr-defined]
            yield running
    finally:
        shutil.rmtree(folder)


async def begun(box: Box, process_id: str, shell: str) -> None:
    """Start a process that says when all of what it starts is there."""
    await box.start(process_id, shell=f"{shell}\necho begun; exec sleep 1000000")
    async for event in box.watch(process_id):
        if event.HasField("chunk"):
            return


async def left(box: Box) -> str:
    """How many processes are there, and how many numbers were given last meanwhile: "0 1" for a quiet sandbox."""
    return (await box.run("python3", "-I", "-c", LOOK)).stdout.decode().strip()


async def kill(box: Box, process_id: str, *, everything: bool = False) -> ps.Exit:
    """Kill a tree, or all."""
    request = ps.KillProcessRequest(sandbox_id=box.id, process_id=process_id, everything=everything)
    return (await box.service.processes.KillProcess(request, timeout=60)).exit


@pytest.mark.requirement("R91")
@pytest.mark.parametrize("everything", [False, True], ids=["its tree", "everything"])
async def test_no_chain_of_processes_outlives_the_kill(make_box: MakeBox, everything: bool) -> None:
    """By fork, vfork, clone with shared memory, and slowly; in one chain, in four and in eight."""
    box = await make_box()
    for name, content in programs().items():
        await box.write(f"hop-{name}", content, 0o755)
    survived = {}
    for number, (name, chains) in itertools.product(range(KILLS), itertools.product(programs(), CHAINS)):
        process_id = f"{name}-{chains}-{number}"
        # So that those whose end nobody asked for yet do not fill the machine, where nothing else limits them.
        await begun(box, process_id, f"ulimit -u 1500; for i in $(seq {chains}); do setsid ./hop-{name} & done")
        goes_on = await box.run("python3", "-I", "-c", UNTIL_ONE_IS_MADE, timeout_s=60)
        assert goes_on.exit.code == 0, "the chain goes on until it is killed"
        await kill(box, process_id, everything=everything)
        if (found := await left(box)) != "0 1":
            survived[process_id] = found
    assert survived == {}


@pytest.mark.requirement("R91")
async def test_no_process_hides_from_the_kill(make_box: MakeBox, service: Running) -> None:
    """Not by a program that cannot be read, stopped, traced, without its first thread, with signals blocked."""
    box = await make_box()
    hidden: str = service.unreadable  # type: ignore[attr-defined]
    assert stat.S_IMODE(Path(hidden).stat().st_mode) == 0o711
    assert (await box.run(hidden, "0")).exit.code == 0, "sandboxes see it"
    tricks = r"""
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None)
def child(what):
    if os.fork() == 0:
        os.setsid()
        what()
        while True:
            signal.pause()
def traced():
    libc.ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
def headless():
    threading.Thread(target=lambda: time.sleep(10**6)).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
child(lambda: os.kill(os.getpid(), signal.SIGSTOP))
child(traced)
child(headless)
child(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()))
print("begun", flush=True)
while True:
    signal.pause()
"""
    await box.write("tricks.py", tricks.encode())
    for everything in (False, True):
        process_id = f"hides-{everything}"
        await begun(
            box,
            process_id,
            f"setsid env LD_PRELOAD=/workspace/x.so {hidden} 1000000 & setsid python3 tricks.py | cat &",
        )
        ended = await kill(box, process_id, everything=everything)
        assert (ended.reason, await left(box)) == (ps.EXIT_REASON_KILLED, "0 1")


@pytest.mark.requirement("R91")
async def test_killing_one_tree_leaves_the_others_alone_and_killing_everything_does_not(make_box: MakeBox) -> None:
    """A server of the task's own stays when a command beside it is killed."""
    box = await make_box()
    await begun(box, "server", "setsid sleep 1000000 &")
    await begun(box, "agent", "setsid sleep 1000000 &")
    await kill(box, "agent")
    assert await left(box) == "2 1"
    await begun(box, "agent-again", ":")
    await kill(box, "agent-again", everything=True)
    assert await left(box) == "0 1"
    assert (await box.finish("server"))[2].reason == ps.EXIT_REASON_KILLED


@pytest.mark.requirement("R91")
async def test_an_agent_that_kills_whatever_it_sees_is_killed(make_box: MakeBox) -> None:
    """Also what the service sends into the sandbox to look for it."""
    box = await make_box()
    spinner = "import os\nwhile True:\n try: os.kill(-1, 19 if os.getpid() % 2 else 9)\n except OSError: pass\n"
    await begun(box, "kills", f"setsid python3 -c '{spinner}' &")
    await kill(box, "kills")
    assert await left(box) == "0 1"


FORGER = r"""
import glob, os, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        break
else:
    sys.exit()
while True:
    for path in glob.glob("/tmp/penstock-*/reward"):
        try:
            open(path, "w").write("1")
        except OSError:
            pass
    if os.fork():
        os._exit(0)
"""
SWAP = r"""
cp /usr/bin/true mine; rm -rf /lib64 /bin /lib; mkdir /lib64 /bin; cp mine /lib64/ld-linux-x86-64.so.2
cp mine /bin/bash
echo /workspace/p.so > /etc/ld.so.preload; mv /opt /opt2; mv /etc /etc2; rm -f /dev/null; mkfifo /dev/null
ls -ld /lib64 /bin /lib /etc /opt
"""


@pytest.mark.requirement("R90", "R91")
async def test_leftover_processes_and_replaced_files_make_no_reward_in_place(stack: Stack) -> None:
    """Chains that would write the reward file, a loader, a shell and a library of the agent's own."""
    task = Task(
        task_id="hop",
        instruction="Do it.",
        files=[SeedFile("forger.py", FORGER.encode()), SeedFile("swap.sh", SWAP.encode())],
        verifier=Verifier(
            commands=[Command(shell='for i in $(seq 300); do :; done; echo 0 > "$PENSTOCK_REWARD_FILE"')],
            reward=RewardFrom.FILE,
            fresh_fork=False,
        ),
    )
    for chains in CHAINS:
        label = secrets.token_hex(8)
        policy = in_turn(bash(f"bash swap.sh; python3 forger.py {chains}"), "Done.")
        async with training(stack, label, policy):
            handle = await stack.ps.rollouts.create(task, "shell", labels={"test": label})
            finished = await finish(handle)
        assert finished.reward == 0.0, finished.agent_said()
        assert finished.commands(Phase.VERIFYING)[0].exit.ok


@pytest.mark.requirement("R91")
@pytest.mark.timeout(300 + 2 * ROLLOUTS)
async def test_chained_processes_survive_no_in_place_grading_and_forge_nothing(
    stack: Stack,
) -> None:
    """Chains by fork, vfork and clone with shared memory beside some that write each reward file, in whole
    rollouts; the verifier looks for what still runs or is being made, before it judges."""
    label, hops = secrets.token_hex(8), sorted(programs())
    look = Command(["python3", "-I", "-c", LOOK])
    judge = Command(shell='for i in $(seq 300); do :; done; echo 0 > "$PENSTOCK_REWARD_FILE"; ls goes-on')
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[str, str, float | None]:
        # Its chains, what was found when they were to be dead, that they went on until the kill, and the reward.
        hop, chains = hops[number % len(hops)], CHAINS[number // len(hops) % len(CHAINS)]
        task = Task(
            task_id=f"hops-{number}",
            instruction="Do it.",
            files=[
                SeedFile("forger.py", FORGER.encode()),
                SeedFile("hop", programs()[hop], mode=0o755),
                SeedFile("last.py", UNTIL_ONE_IS_MADE.encode()),
                SeedFile("chains", f"{chains}\n".encode()),
            ],
            verifier=Verifier(
                commands=[look, judge],
                reward=RewardFrom.FILE,
                fresh_fork=False,
            ),
        )
        async with places:
            finished = await finish(await stack.ps.rollouts.create(task, "shell", labels={"test": label}))
        said = [command.stdout_tail.decode().strip() for command in finished.commands(Phase.VERIFYING)]
        return f"{hop} {chains}", " ".join(said) if said else finished.agent_said(), finished.reward

    # So that those that are not killed yet do not fill the machine, where nothing else limits them.
    attack = (
        "ulimit -u 1500; for i in $(seq $(cat chains)); do setsid ./hop & done >&- 2>&-;"
        " python3 forger.py 2; python3 -I last.py; >goes-on"
    )
    async with training(stack, label, in_turn(bash(attack), "Done.")):
        ended = await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))
    survived = [found for found in ended if found[1] != "0 1 goes-on"]
    forged = [found for found in ended if found[2] != 0.0]
    print(f"{len(ended)} rollouts graded in place, {len(survived)} with survivors, {len(forged)} forged")
    assert (survived, forged) == ([], [])
