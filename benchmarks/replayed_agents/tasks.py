"""The tasks: what a coding agent does in a shell, as scripts that print the same each time, and some that do not.

A step is a script in the working directory, so that an agent runs all of them by the same short command. Each ends with
a line that says which step is done: from it the script of the model knows what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.client import Command, SeedFile, Task, Verifier


@dataclass(frozen=True, slots=True)
class Work:
    """A task's steps, its files, and what its own programs print that differs each time ("" = nothing)."""

    name: str
    steps: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    prints: str = ""

    def task(self) -> Task:
        """As a task whose verifier wants its last step done."""
        files = [SeedFile(path, text.encode()) for path, text in self.files.items()]
        for number, step in enumerate(self.steps, 1):
            said = f"echo step {number} of {len(self.steps)} is done"
            files.append(SeedFile(step_file(number), f"{step}\n{said}\n".encode()))
        files.append(SeedFile("note.txt", b"kiwi\n"))
        verifier = Verifier(commands=[Command(shell="test -e note.txt")])
        instruction = (
            f"Run the steps of {self.name} in this directory: step-1.sh to step-{len(self.steps)}.sh, with bash."
        )
        return Task(task_id=f"replayed-{self.name}", instruction=instruction, files=files, verifier=verifier)

    def done(self, conversation: str) -> int:
        """How many steps are done, by what the agent's tools said."""
        done = (n for n in range(len(self.steps), 0, -1) if f"step {n} of {len(self.steps)} is done" in conversation)
        return next(done, 0)


def step_file(number: int) -> str:
    """The name of a step's script, from 1."""
    return f"step-{number}.sh"


_STATS: Final = "def mean(values):\n    return sum(values) / len(values)\n"
_TEST: Final = (
    "import unittest\nfrom stats import mean\n\n\nclass MeanTest(unittest.TestCase):\n"
    "    def test_mean(self):\n        self.assertEqual(mean([1, 3]), 2)\n"
)
_TABLE: Final = "pear,3\nkiwi,11\nfig,7\nkiwi,2\npear,5\n"

WORKS: Final = (
    Work("reading", ("ls -la", "cat table.csv", "wc table.csv"), {"table.csv": _TABLE}),
    Work(
        "searching",
        ("find . -type f | head -50", "grep -rn kiwi . | head", "grep -c . table.csv"),
        {"table.csv": _TABLE, "deep/er/one.txt": "kiwi\n", "deep/two.txt": "fig\n"},
    ),
    Work(
        "editing", ("sed -i s/kiwi/lime/ table.csv", "cat table.csv", "diff note.txt table.csv"), {"table.csv": _TABLE}
    ),
    Work(
        "programming",
        (
            "cat stats.py",
            "python3 -c 'import stats; print(stats.mean([1, 2, 6]))'",
            "python3 -m py_compile stats.py && ls",
        ),
        {"stats.py": _STATS},
    ),
    Work(
        "failing-program",
        (
            "python3 -c 'import stats; stats.mean([])'",
            "echo 'print(1/0)' > b.py; python3 b.py",
            "exit_with() { return 3; }; exit_with; echo $?",
        ),
        {"stats.py": _STATS},
    ),
    Work(
        "pipelines",
        (
            "cut -d, -f1 table.csv | sort | uniq -c",
            "awk -F, '{s+=$2} END {print s}' table.csv",
            "sort -t, -k2n table.csv",
        ),
        {"table.csv": _TABLE},
    ),
    Work(
        "archives",
        (
            "tar cf all.tar table.csv note.txt && tar tf all.tar",
            "mkdir out && tar xf all.tar -C out && ls out",
            "cmp table.csv out/table.csv && echo equal",
        ),
        {"table.csv": _TABLE},
    ),
    Work("errors", ("cat nowhere.txt", "no-such-program --help", "ls /root; cd /nowhere")),
    Work(
        "long-output",
        ("seq 1 3000", "seq 1 500 | sed 's/.*/line & of many lines/'", "printf 'a%.0s' $(seq 1 5000); echo"),
    ),
    Work(
        "environment",
        (
            "env | sort | grep -v -i -E 'key|token'",
            "id; pwd; umask; echo $SHELL $HOME",
            "cat ~/.profile; set | grep -c .",
        ),
    ),
    Work("host", ("hostname; cat /etc/hostname /etc/machine-id; uname -n", "cat /etc/hosts; nproc", "ls / /opt /home")),
    Work(
        "processes",
        (
            "echo $$; sleep 0.01 & echo $!; wait",
            "ls /proc | grep -c '^[0-9]'",
            "python3 -c 'import os; print(os.getpid() > 1)'",
        ),
    ),
    Work(
        "many-files",
        (
            "mkdir many; for i in $(seq 1 200); do echo $i > many/file-$i; done; ls -U many | head -40",
            "find many -name '*7' | wc -l",
            "python3 -c 'import os; print(os.listdir(\"many\")[:20])'",
        ),
    ),
    Work(
        "json",
        (
            "python3 -m json.tool data.json",
            'python3 -c \'import json; print(json.load(open("data.json"))["b"])\'',
            "echo '{' > bad.json; python3 -m json.tool bad.json",
        ),
        {"data.json": '{"b": [1, 2], "a": {"c": null}}'},
    ),
    Work("checksums", ("md5sum table.csv note.txt", "sha256sum table.csv", "cksum table.csv"), {"table.csv": _TABLE}),
    Work("text", ("printf 'Grüße, 世界\\n' > u.txt; cat u.txt", "od -c u.txt | head", "tr a-z A-Z < note.txt | rev")),
    Work(
        "repository",
        (
            "git init -q -b main . 2>&1; git status --short",
            "git add -A && git diff --cached --stat",
            "git ls-files | head",
        ),
        {"stats.py": _STATS},
    ),
    Work(
        "unit-tests",
        ("python3 -m unittest 2>&1 | tail -3", "cat test_stats.py | head -3", "ls"),
        {"stats.py": _STATS, "test_stats.py": _TEST},
        "the duration of its tests",
    ),
    Work(
        "commit",
        (
            "git init -q -b main . && git add -A",
            "git -c user.name=a -c user.email=a@b commit -qm first && git log --oneline",
            "git status --short",
        ),
        {"stats.py": _STATS},
        "the id of a commit, which has its time",
    ),
    Work("temporary-file", ("mktemp -d", "date +%s.%N", "ls"), {}, "a random path and the time"),
)
"""Twenty; the programs of three print what differs each time."""
