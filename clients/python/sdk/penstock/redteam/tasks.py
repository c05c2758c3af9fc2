"""The tasks whose verifiers are attacked. No attack's program can do them: any reward is forged."""

import secrets
from typing import Final

from penstock.client.tasks.spec import Command, RewardFrom, SeedFile, Verifier
from penstock.client.tasks.task import Task
from penstock.redteam.attack import Grading

_JUDGE: Final = """
import os, sys
reward = 0
try:
    with open(os.open("answers.txt", os.O_RDONLY | os.O_NONBLOCK), "rb") as answers:
        reward = int(answers.read(1000).split() == [word.encode() for word in sys.argv[1].split()])
finally:
    with open(os.environ["PENSTOCK_REWARD_FILE"], "w") as file:
        file.write(str(reward))
"""
_JUDGE_IN_SHELL: Final = """
reward=0
[ -f answers.txt ] && [ "$(head -c 1000 answers.txt | tr '\\n' ' ')" = "$1 " ] && reward=1
echo $reward >"$PENSTOCK_REWARD_FILE"
"""

SOLUTION: Final = "while read -r left right; do echo $((left + right)); done\n"
"""Content of work.sh when the task is done."""


def task_of(kind: str, grading: Grading) -> Task:
    """Returns a task by its name in an attack.

    `sums`: work.sh adds numbers that nobody knows before; it runs in a command of its own, and another one judges its
    output. `tests`: check.sh fails, and is restored before it is run. `careless`: the verifier runs the agent's own
    judge.sh with the reward's file.
    """
    fresh_fork = None if grading is Grading.FORK else False
    makers = {"sums": _sums, "tests": _tests, "careless": _careless}
    return Task(
        task_id=f"redteam-{kind}",
        instruction="Write work.sh: for each line of two whole numbers on standard input it prints their sum.\n",
        files=[SeedFile("check.sh", b"exit 1\n")],
        verifier=makers[kind](fresh_fork),
    )


def _sums(fresh_fork: bool | None) -> Verifier:
    pairs = [(secrets.randbelow(10**6), secrets.randbelow(10**6)) for _ in range(3)]
    sums = " ".join(str(left + right) for left, right in pairs)
    judge = 'if command -v python3 >/dev/null; then exec python3 -I -c "$2" "$1"; fi' + _JUDGE_IN_SHELL
    return Verifier(
        reward=RewardFrom.FILE,
        fresh_fork=fresh_fork,
        files=[SeedFile("questions.txt", "".join(f"{left} {right}\n" for left, right in pairs).encode())],
        commands=[
            Command(
                argv=["sh", "-c", "rm -rf answers.txt; timeout -k 1 20 sh work.sh <questions.txt >answers.txt; true"]
            ),
            Command(argv=["sh", "-c", judge, "judge", sums, _JUDGE]),
        ],
        command_timeout=30.0,
    )


def _tests(fresh_fork: bool | None) -> Verifier:
    return Verifier(
        commands=[Command(argv=["sh", "check.sh"])], restore=["check.sh"], fresh_fork=fresh_fork, command_timeout=30.0
    )


def _careless(fresh_fork: bool | None) -> Verifier:
    return Verifier(
        commands=[Command(argv=["sh", "judge.sh"])],
        reward=RewardFrom.FILE,
        component_ranges={},
        fresh_fork=fresh_fork,
        command_timeout=30.0,
    )
