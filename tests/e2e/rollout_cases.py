"""Rollouts worth looking at: a group whose members earned differently, and an agent that is hostile to whoever looks.

Real ones, of the shell agent, whose calls a trainer answers by a script; for the pages that show rollouts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
from tests.support.policy import bash, sampled

from penstock.client import Command, Completion, LogprobsMode, ModelCall, Penstock, SeedFile, Task, Verifier

BROKEN: Final = b'''"""Figures over a list of numbers."""


def mean(values):
    return sum(values) / (len(values) - 1)


def spread(values):
    return max(values) - min(values)


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
'''
CHECK: Final = b"""import sys, stats
cases = {
    "mean": (stats.mean, [([1, 2, 3], 2), ([4], 4)]),
    "spread": (stats.spread, [([3, 1, 2], 2)]),
    "median": (stats.median, [([1, 2, 3, 4], 2.5), ([5, 1, 3], 3)]),
}
function, pairs = cases[sys.argv[1]]
for given, wanted in pairs:
    got = function(given)
    mark = "\x1b[32mok\x1b[0m" if got == wanted else "\x1b[31mWRONG\x1b[0m"
    print(f"{sys.argv[1]}({given}) = {got}, expected {wanted}: {mark}")
    if got != wanted:
        sys.exit(1)
"""
LOOK: Final = "cat stats.py"
MEAN: Final = "sed -i 's/(len(values) - 1)/len(values)/' stats.py"
MEDIAN: Final = (
    "python3 - <<'END'\nimport re\ntext = open('stats.py').read()\n"
    "new = '    middle = len(ordered) // 2\\n    if len(ordered) % 2:\\n        return ordered[middle]\\n"
    "    return (ordered[middle - 1] + ordered[middle]) / 2\\n'\n"
    "open('stats.py', 'w').write(text.replace('    return ordered[len(ordered) // 2]\\n', new))\nEND"
)
HOSTILE_WORDS: Final = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>click</a>"
    " \x1b[31mred\x1b[0m \x1b]8;;http://evil.example/\x07link\x1b]8;;\x07 \x1b[2J"
    " \u202etxt.exe\u202c \u2066isolated\u2069 zero\u200bwidth \U000e0041\U000e0042 \ufeffend\x00"
)
HOSTILE_WORK: Final = (
    "printf 'plain \\033[31mred\\033[0m <b>bold</b>\\n'; head -c 400000 /dev/zero | tr '\\0' x; echo;"
    " printf '<script>alert(9)</script>\\n\\342\\200\\256txt' > '<img src=x onerror=alert(5)>.html'"
)
HOSTILE_LINE: Final = "<img src=x onerror=alert(6)>" + "y" * 10_000_000
"""A line of 10 MB, which the trainer makes the model say."""

Script = Callable[[ModelCall], str]


def thought(reasoning: str, answer: str) -> str:
    """An answer after reasoning, as the template has it."""
    return f"<think>\n{reasoning}\n</think>\n\n{answer}"


def stats_task(**changes: object) -> Task:
    """A module with two faults; a third of the reward for each function that works."""
    return Task(
        task_id="repair-stats",
        instruction="stats.py has faults: mean and median give wrong figures. Find them and repair them.",
        files=[SeedFile(path="stats.py", content=BROKEN)],
        setup=[Command(argv=["python3", "-m", "py_compile", "stats.py"])],
        verifier=Verifier(
            commands=[Command(argv=["python3", "check.py", name]) for name in ("mean", "spread", "median")],
            files=[SeedFile(path="check.py", content=CHECK)],
        ),
        keep_diff=True,
        **changes,  # type: ignore[arg-type]
    )


def by_index(turns: Sequence[Sequence[str]]) -> Script:
    """Each member of a group says its own turns, and its last one for ever."""

    def script(call: ModelCall) -> str:
        mine = turns[(call.group_index or 0) % len(turns)]
        return mine[min(call.index, len(mine) - 1)]

    return script


STATS_TURNS: Final = (
    [
        thought("First I look at the file.", "I'll read the module before I change anything.\n" + bash(LOOK)),
        thought("mean divides by n - 1. That is the fault.", bash(MEAN)),
        thought("median of an even count has to take both.", bash(MEDIAN)),
        "Both are repaired: `mean` divides by the count, and `median` takes the mean of the two middle values.",
    ],
    [
        thought("First I look at the file.", "I'll read the module before I change anything.\n" + bash(LOOK)),
        thought("mean divides by n - 1. I repair that.", bash(MEAN)),
        "Repaired: `mean` divides by the count now.",
    ],
    [
        thought("First I look at the file.", "I'll read the module before I change anything.\n" + bash(LOOK)),
        "It looks right to me.",
    ],
    [bash("ls -la")],
)


@asynccontextmanager
async def answering(ps: Penstock, script: Script, run_id: str, *, version: int = 7) -> AsyncIterator[None]:
    """Answers the calls of a run by a script while the block lasts, with logprobs that differ from token to token."""

    async def answer(call: ModelCall) -> None:
        ids, _ = sampled(script(call))
        luck = random.Random(f"{call.group_index} {call.index}")
        logprobs = [-(luck.random() ** 14) * 9 for _ in ids]
        await call.deliver(
            Completion.of_tokens(
                np.array(ids), np.array(logprobs), policy_version=version + call.index // 2,
                logprobs_mode=LogprobsMode.PROCESSED,
            )
        )  # fmt: skip

    async def serve() -> None:
        async with ps.intercept(run_id=run_id) as session, asyncio.TaskGroup() as tasks:
            async for call in session.calls():
                tasks.create_task(answer(call))

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
