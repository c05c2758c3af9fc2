"""A policy that types whatever it likes: it gets observations, and never a reward that the verifier did not make."""

from __future__ import annotations

import pytest
from tests.support.services.stack import Running

from penstock.client import Command, Penstock, RewardFrom, SeedFile, Task, TerminalHandle, Verifier

FORGE = r"""
exec >/dev/null 2>&1 </dev/null
while :; do
  for file in /tmp/penstock-*/reward "$PENSTOCK_REWARD_FILE"; do [ -e "$file" ] && echo 1 > "$file"; done
  for file in check.sh /tmp/penstock-*/answer; do
    [ -e "$file" ] && echo 'echo 1 > $PENSTOCK_REWARD_FILE' > "$file"
  done
  touch alive
done
"""
"""Waits for the verifier and writes over what it brings."""


@pytest.fixture
def penstock(stack: Running) -> Penstock:
    """A client of the stack."""
    return stack.ps


def task() -> Task:
    """Nobody solves it: the verifier gives 0.25, whatever was done."""
    return Task(
        task_id="hopeless",
        instruction="do what cannot be done",
        verifier=Verifier(
            commands=[Command(shell="rm -f alive; sleep 0.3; test ! -e alive"), Command(argv=["bash", "check.sh"])],
            files=[SeedFile("check.sh", b"echo 0.25 > $PENSTOCK_REWARD_FILE\n")],
            reward=RewardFrom.FILE,
        ),
    )


async def graded(terminal: TerminalHandle) -> tuple[float | None, list[int | None]]:
    """The reward, and how the verifier's commands ended."""
    end = await terminal.answer("$(touch owned); echo 1 > $PENSTOCK_REWARD_FILE")
    told = await terminal.refresh()
    return (None if end.reward is None else end.reward.value), [command.exit.code for command in told.verifier]


@pytest.mark.requirement("R60", "R72", "R75")
@pytest.mark.parametrize(
    "away",
    [
        'bash -c "$FORGE" &',
        'setsid bash -c "$FORGE" & disown',
        'nohup env -i PATH="$PATH" setsid setsid bash -c "$FORGE" >/dev/null 2>&1 &',
        '( ( (trap "" TERM HUP INT; bash -c "$FORGE") & ) & )',
    ],
    ids=["in the background", "in a session of its own", "without an environment", "orphaned and deaf"],
)
async def test_waiting_process_is_dead_before_the_verifier_starts(penstock: Penstock, away: str) -> None:
    """Nothing that a command left running sees the verifier's files or its reward."""
    async with await penstock.terminals.open(task()) as terminal:
        await terminal.run(Command(shell="export FORGE", env={"FORGE": FORGE}))
        seen = await terminal.run(f"{away}\nuntil [ -e alive ]; do sleep 0.05; done; echo it runs")
        assert seen.result is not None
        assert seen.result.stdout == b"it runs\n", seen.result
        assert await graded(terminal) == (0.25, [0, 0])


@pytest.mark.requirement("R72", "R75")
async def test_obstacles_to_the_verifier_are_not_followed(penstock: Penstock) -> None:
    """Links, directories and programs in the place of its files, and a reward that is there already."""
    async with await penstock.terminals.open(task()) as terminal:
        await terminal.run("echo 'echo 1 > $PENSTOCK_REWARD_FILE' > mine.sh; ln -s mine.sh check.sh")
        await terminal.run(
            "mkdir -p /tmp/penstock-x ~/logs/verifier; echo 1 | tee /tmp/penstock-x/reward ~/logs/verifier/reward.txt"
        )
        await terminal.run(
            "export BASH_ENV=$PWD/mine.sh ENV=$PWD/mine.sh PROMPT_COMMAND='bash mine.sh'; echo '. mine.sh' > ~/.bashrc"
        )
        assert await graded(terminal) == (0.25, [0, 0])


async def test_a_command_that_breaks_its_shells_state_breaks_its_own_only(penstock: Penstock) -> None:
    """What was saved is the policy's: spoilt or removed, the next command says so and starts afresh."""
    async with await penstock.terminals.open(task()) as terminal:
        for spoil in (
            "echo '(((' > $file",
            "rm -r /tmp/penstock-shell-*",
            "ulimit -f 0",
            "PATH=/nowhere; unset HOME IFS",
        ):
            await terminal.run(
                f"trap 'for file in /tmp/penstock-shell-*/*; do {spoil}; done' EXIT; cd /usr; : \"{spoil}\""
            )
            seen = await terminal.run("echo fine")
            assert seen.result is not None
            assert seen.result.stdout == b"fine\n", (spoil, seen.result)
        assert await graded(terminal) == (0.25, [0, 0])


@pytest.mark.requirement("R59", "R74")
async def test_killing_all_that_it_can_reach_gives_no_reward_but_the_verifiers(penstock: Penstock) -> None:
    """Every process of the sandbox gets a SIGKILL; the episode goes on, or ends by type, and is not paid."""
    async with await penstock.terminals.open(task()) as terminal:
        seen = await terminal.run("kill -9 -1; kill -9 1 $PPID $$")
        if seen.ended:
            assert seen.failure is not None
            assert (seen.failure.cause, seen.reward) == ("infrastructure", None)
        else:
            assert seen.result is not None
            assert not seen.ok
            assert await graded(terminal) == (0.25, [0, 0])


@pytest.mark.requirement("R37", "R40")
async def test_processes_without_end_are_cut_by_the_limits(penstock: Penstock) -> None:
    """A bomb of processes ends with its command's time, and the shell is as it was before."""
    async with await penstock.terminals.open(task()) as terminal:
        await terminal.run("word=before")
        seen = await terminal.run("for i in $(seq 60); do (trap '' TERM; sleep 1000) & done; wait", timeout=2)
        assert seen.result is not None
        assert seen.result.exit.reason == "timed_out"
        after = await terminal.run("echo $word; grep -ls '^sleep' /proc/[0-9]*/comm | wc -l")
        assert after.result is not None
        assert after.result.stdout == b"before\n0\n"


@pytest.mark.requirement("R14")
async def test_the_sandbox_reaches_no_service(stack: Running) -> None:
    """An episode has no network at all: none of the services, and none of their ports."""
    async with await stack.ps.terminals.open(task()) as terminal:
        tried = "; ".join(f"(: < /dev/tcp/127.0.0.1/{port}) && echo open" for port in stack.ports.values())
        seen = await terminal.run(f"{tried}; cat /proc/net/dev | grep -vc 'lo:\\||'")
        assert seen.result is not None
        assert seen.result.stdout == b"0\n", seen.result
