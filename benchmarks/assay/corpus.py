"""A corpus of planted tasks: fifteen classes of defects, and tasks without one.

Each task is made from one of the functions, with names, instructions, layouts and verifiers drawn from a seed. The
detectors see nothing of this module.
"""

from __future__ import annotations

import base64
import json
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.assay.functions import FUNCTIONS, Function
from penstock.client import Command, SeedFile, Task, Verifier
from penstock.client.tasks.spec import RewardFrom, Solution

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "meadow",
    "north",
    "orchard",
    "prairie",
    "quarry",
    "ridge",
    "summit",
    "tundra",
    "upland",
    "valley",
    "willow",
    "yonder",
    "zephyr",
]
RUN_PYTEST = "python3 -m pytest"


@dataclass(frozen=True)
class Planted:
    """A task, the class of its defect (empty: none), and the codes of which an assay must report one."""

    task: Task
    defect: str
    codes: frozenset[str] = frozenset()


class Maker:
    """Makes tasks of one seed. `pytest`: how pytest is run in the sandboxes."""

    def __init__(self, seed: int, pytest: str) -> None:
        self.draw = random.Random(seed)
        self.pytest = pytest

    def name(self) -> str:
        return f"{self.draw.choice(WORDS)}_{self.draw.choice(WORDS)}{self.draw.randrange(100)}"

    def function(self) -> tuple[Function, str]:
        return self.draw.choice(FUNCTIONS), self.name()

    # What tasks are made of

    def code(self, function: Function, name: str, *, right: bool) -> str:
        text = (function.right if right else function.broken).replace("NAME", name)
        note = self.draw.choice(["", f"# {function.does}\n", f'"""{function.does.capitalize()}."""\n\n'])
        return note + text if not right else f'"""{function.does.capitalize()}."""\n\n' + text

    def wanted(self, function: Function, name: str) -> list[Any]:
        scope: dict[str, Any] = {}
        exec(function.right.replace("NAME", name), scope)
        return [scope[name](json.loads(json.dumps(case))) for case in function.cases]

    def judge(self, function: Function, name: str, where: str, *, cases: list[int] | None = None) -> str:
        """A program that runs the agent's code in a process of its own, with its input, and compares what it prints."""
        chosen = list(range(len(function.cases))) if cases is None else cases
        wanted = self.wanted(function, name)
        pairs = [[function.cases[index], wanted[index]] for index in chosen]
        folder, module = where.rsplit("/", 1) if "/" in where else (".", where)
        runs = f"import json, sys; sys.path.insert(0, {folder!r}); import {module}; "
        runs += f"print(json.dumps({module}.{name}(json.load(sys.stdin))))"
        return (
            "import json, subprocess, sys\n"
            f"PAIRS = json.loads({json.dumps(pairs)!r})\n"
            f"PROGRAM = {runs!r}\n"
            "for given, wanted in PAIRS:\n"
            "    ran = subprocess.run([sys.executable, '-c', PROGRAM], input=json.dumps(given), text=True,\n"
            "                         stdout=subprocess.PIPE, timeout=20)\n"
            "    try:\n"
            "        same = ran.returncode == 0 and json.loads(ran.stdout) == wanted\n"
            "    except ValueError:\n"
            "        same = False\n"
            "    if not same:\n"
            "        sys.exit('wrong for %r' % (given,))\n"
        )

    def tests(self, function: Function, name: str, module: str, *, cases: list[int] | None = None) -> str:
        """Tests of pytest that import the agent's module, as many projects have them."""
        chosen = list(range(len(function.cases))) if cases is None else cases
        wanted = self.wanted(function, name)
        lines = [f"from {module} import {name}\n\n"]
        lines += [
            f"\ndef test_case_{index}():\n    assert {name}({function.cases[index]!r}) == {wanted[index]!r}\n\n"
            for index in chosen
        ]
        return "".join(lines)

    # Tasks without a defect

    def judged(self, index: str) -> Task:
        """A module below a directory, judged by a program."""
        function, name = self.function()
        folder, module = self.draw.choice(["src", "lib", "app", "pkg"]), self.name()
        path = f"{folder}/{module}.py"
        judge = self.judge(function, name, f"{folder}/{module}")
        checker = self.draw.choice(["judge.py", "grading/run.py", "check_it.py"])
        return Task(
            task_id=f"{index}-judged",
            instruction=f"{name}() in {path} {function.does}. Make it do so.\n",
            files=[SeedFile(path, self.code(function, name, right=False).encode()), self.beside()],
            verifier=Verifier(
                files=[SeedFile(checker, judge.encode())],
                commands=[Command(argv=["python3", "-I", checker])],
                changes_below=[folder],
            ),
            solution=self.solution(path, self.code(function, name, right=True)),
        )

    def scripted(self, index: str) -> Task:
        """A program that reads and writes, graded with a reward file in two commands."""
        width = self.draw.randrange(2, 6)
        rows = [[self.draw.randrange(1000) for _ in range(width)] for _ in range(4)]
        script = self.name() + ".sh"
        wanted = [sum(row) for row in rows]
        judge = (
            "import os\nvalue = 0\ntry:\n    with open(os.open('given.txt', os.O_RDONLY | os.O_NONBLOCK), 'rb') as f:\n"
            f"        value = int(f.read(2000).split() == {[str(item).encode() for item in wanted]!r})\n"
            "finally:\n    with open(os.environ['PENSTOCK_REWARD_FILE'], 'w') as out:\n        out.write(str(value))\n"
        )
        text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
        right = (
            "while read -r line; do\n  total=0\n  for number in $line; do\n    total=$((total + number))\n  done\n"
            "  echo $total\ndone\n"
        )
        return Task(
            task_id=f"{index}-scripted",
            instruction=f"Write {script}: for each line of numbers it prints their sum.\n",
            files=[self.beside()],
            verifier=Verifier(
                reward=RewardFrom.FILE,
                files=[SeedFile("asked.txt", text.encode())],
                commands=[
                    Command(shell=f"timeout -k 1 20 sh {script} < asked.txt > given.txt; true"),
                    Command(argv=["python3", "-I", "-c", judge]),
                ],
            ),
            solution=self.solution(script, right),
        )

    def answered(self, index: str) -> Task:
        """A file to write, from data that the task has."""
        rows = [(self.draw.choice(WORDS), self.draw.randrange(1, 500)) for _ in range(30)]
        totals: dict[str, int] = {}
        for word, count in rows:
            totals[word] = totals.get(word, 0) + count
        wanted = "".join(f"{word} {totals[word]}\n" for word in sorted(totals))
        data, result = f"{self.name()}.csv", f"{self.name()}.txt"
        judge = f"import sys; sys.exit(open({result!r}, 'rb').read(5000) != {wanted.encode()!r})"
        program = (
            "import csv\ntotals = {}\n"
            f"for word, count in csv.reader(open({data!r})):\n    totals[word] = totals.get(word, 0) + int(count)\n"
            f"with open({result!r}, 'w') as out:\n    for word in sorted(totals):\n"
            "        out.write(f'{word} {totals[word]}\\n')\n"
        )
        return Task(
            task_id=f"{index}-answered",
            instruction=f"Add up the second column of {data} by the first one, and write the sums to {result}.\n",
            files=[SeedFile(data, "".join(f"{word},{count}\n" for word, count in rows).encode())],
            verifier=Verifier(commands=[Command(argv=["python3", "-I", "-c", judge])]),
            solution=Solution(commands=[Command(argv=["python3", "-I", "-c", program])]),
        )

    def several(self, index: str) -> Task:
        """Two modules to change, one of them new, each judged."""
        (one, first), (other, second) = self.function(), self.function()
        module, further = self.name(), self.name() + "_more"
        judges = [self.judge(one, first, f"src/{module}"), self.judge(other, second, f"src/{further}")]
        files = [SeedFile(f"judge{number}.py", text.encode()) for number, text in enumerate(judges)]
        right, new = self.code(one, first, right=True), self.code(other, second, right=True)
        return Task(
            task_id=f"{index}-several",
            instruction=f"{first}() of src/{module}.py {one.does}. Write src/{further}.py: its {second}()"
            f" {other.does}.\n",
            files=[SeedFile(f"src/{module}.py", self.code(one, first, right=False).encode()), self.beside()],
            verifier=Verifier(
                files=files,
                commands=[Command(argv=["python3", "-I", file.path]) for file in files],
                changes_below=["src"],
            ),
            solution=Solution(
                files=[SeedFile(f"src/{module}.py", right.encode()), SeedFile(f"src/{further}.py", new.encode())],
                commands=[Command(argv=["test", "-s", f"src/{further}.py"])],
            ),
        )

    def tested(self, index: str) -> Task:
        """A package with tests that agents see, graded by tests of pytest that call the code from outside."""
        function, name = self.function()
        module = self.name()
        judge = self.judge(function, name, f"src/{module}").replace("\n", "\n    ").rstrip()
        checks = f"def test_from_outside():\n    {judge}\n\n\n"
        checks += f"def test_is_there():\n    assert open('src/{module}.py').read()\n"
        return Task(
            task_id=f"{index}-tested",
            instruction=f"{name}() in src/{module}.py {function.does}. Its tests are in tests.\n",
            files=[
                SeedFile(f"src/{module}.py", self.code(function, name, right=False).encode()),
                SeedFile("tests/test_some.py", self.tests(function, name, module, cases=[0]).encode()),
            ],
            verifier=Verifier(
                files=[SeedFile("hidden/test_outside.py", checks.encode())],
                commands=[Command(shell=f"{self.pytest} -q hidden/test_outside.py::test_from_outside")],
                changes_below=["src"],
            ),
            solution=self.solution(f"src/{module}.py", self.code(function, name, right=True)),
        )

    def versioned(self, index: str) -> Task:
        """A repository with commits of its own, and nothing after them."""
        task = self.judged(index)
        again = f"git init -q . && git add -A && {_COMMIT} -m first"
        again += f" && echo more >>NOTES && git add -A && {_COMMIT} -m second"
        return replace(task, task_id=f"{index}-versioned", setup=[Command(shell=again)])

    def compiled(self, index: str) -> Task:
        """Caches of the state as it is: nothing in them that agents do not have."""
        task = self.judged(index)
        return replace(task, task_id=f"{index}-compiled", setup=[Command(shell="python3 -m compileall -q .")])

    CLEAN = ("judged", "scripted", "answered", "several", "tested", "versioned", "compiled")

    def clean(self, number: int) -> Planted:
        """The nth task without a defect."""
        make: Callable[[str], Task] = getattr(self, self.CLEAN[number % len(self.CLEAN)])
        return Planted(make(f"clean-{number}"), "")

    # Defects

    def wrong_solution(self, number: int, index: str) -> Planted:
        """The solution does not do the task."""
        task = self.judged(index)
        file = task.files[0]
        other = self.code(*self.function(), right=True)
        content = [file.content.decode() + "\n\nDONE = True\n", other, "raise NotImplementedError\n"][number % 3]
        return Planted(
            replace(task, solution=self.solution(file.path, content)), "wrong solution", frozenset({"SOLUTION_FAILS"})
        )

    def unprepared(self, number: int, index: str) -> Planted:
        """The task cannot be set up."""
        bad = ["./configure --prefix=/opt", "test -d vendor", f"python3 -c 'import {self.name()}'", "cat seeds.json"]
        task = replace(self.judged(index), setup=[Command(shell=bad[number % len(bad)])])
        return Planted(task, "set-up fails", frozenset({"SETUP_FAILS"}))

    def flaky(self, number: int, index: str) -> Planted:
        """The verifier's result is chance, clock or memory addresses."""
        task = self.judged(index)
        assert task.verifier is not None
        chance = [
            "test $(od -An -N1 -tu1 /dev/urandom) -lt 128",
            "python3 -c 'import random, sys; sys.exit(random.random() < 0.5)'",
            "test $(date +%N | cut -c 4) -lt 5",
            f"python3 -c 'import sys; sys.exit(hash(\"{self.name()}\") % 2)'",
        ][number % 4]
        verifier = replace(task.verifier, commands=[*task.verifier.commands, Command(shell=chance)])
        return Planted(
            replace(task, verifier=verifier),
            "flaky",
            frozenset({"SOLUTION_UNSTABLE", "SOLUTION_FAILS", "NOTHING_REWARDED"}),
        )

    def vacuous(self, number: int, index: str) -> Planted:
        """The verifier passes whatever was done."""
        task = self.judged(index)
        assert task.verifier is not None
        (command,) = task.verifier.commands
        line = shlex.join(command.argv)
        always = [f"{line} || true", f"{line} | cat", f"{line}; echo graded", f"test -e {task.files[0].path}"][
            number % 4
        ]
        verifier = replace(task.verifier, commands=[Command(shell=always)])
        return Planted(replace(task, verifier=verifier), "vacuous", frozenset({"NOTHING_REWARDED"}))

    def for_nothing(self, number: int, index: str) -> Planted:
        """A part of the reward is for what was there before."""
        task = self.judged(index)
        assert task.verifier is not None
        before = [f"test -s {task.files[0].path}", "true", f"python3 -m py_compile {task.files[0].path}"][number % 3]
        verifier = replace(task.verifier, commands=[Command(shell=before), *task.verifier.commands])
        return Planted(replace(task, verifier=verifier), "reward for nothing", frozenset({"NOTHING_REWARDED"}))

    def existence(self, number: int, index: str) -> Planted:
        """Only whether a file exists, or has a name in it, is looked at."""
        task = [self.scripted, self.answered][number % 2](index)
        assert task.solution is not None
        words = task.instruction.split()
        target = next(word.strip(".:") for word in reversed(words) if word.strip(".:").endswith((".sh", ".txt")))
        look = [f"test -e {target}", f"test -f {target} && test -r {target}", f"ls {target}"][number % 3]
        verifier = Verifier(commands=[Command(shell=look)])
        return Planted(
            replace(task, verifier=verifier),
            "existence only",
            frozenset({"CHANGE_UNTESTED", "LINES_UNTESTED", "REWARD_FORGED"}),
        )

    def half_tested(self, number: int, index: str) -> Planted:
        """One of two changes is not tested."""
        task = self.several(index)
        assert task.verifier is not None
        verifier = replace(task.verifier, commands=[task.verifier.commands[number % 2]])
        return Planted(
            replace(task, verifier=verifier), "half tested", frozenset({"CHANGE_UNTESTED", "LINES_UNTESTED"})
        )

    def few_cases(self, number: int, index: str) -> Planted:
        """The verifier's inputs need only a part of the solution."""
        function = [
            FUNCTIONS[1],
            FUNCTIONS[3],
            FUNCTIONS[5],
            FUNCTIONS[6],
            FUNCTIONS[8],
            FUNCTIONS[10],
            FUNCTIONS[11],
            FUNCTIONS[2],
        ][number % 8]
        cases = [[1], [1], [0], [0], [3], [1], [3], [2]][number % 8]
        name, module = self.name(), self.name()
        path = f"src/{module}.py"
        broken = f"def {name}(value):\n    raise NotImplementedError\n"
        task = Task(
            task_id=index,
            instruction=f"{name}() in {path} {function.does}. Write it.\n",
            files=[SeedFile(path, broken.encode())],
            verifier=Verifier(
                files=[SeedFile("judge.py", self.judge(function, name, f"src/{module}", cases=cases).encode())],
                commands=[Command(argv=["python3", "-I", "judge.py"])],
                changes_below=["src"],
            ),
            solution=self.solution(path, self.code(function, name, right=True)),
        )
        return Planted(task, "few cases", frozenset({"CHANGE_UNTESTED", "LINES_UNTESTED"}))

    def ordered(self, number: int, index: str) -> Planted:
        """A test needs what an earlier one left."""
        task = self.tested(index)
        assert task.verifier is not None
        (file,) = task.verifier.files
        left = self.name()
        first = [
            f"import os\nos.environ[{left!r}] = '1'",
            f"open('/tmp/{left}', 'w').close()",
            f"globals()[{left!r}] = 1",
        ][number % 3]
        then = [
            f"import os\nassert {left!r} in os.environ",
            f"open('/tmp/{left}').close()",
            f"assert {left!r} in globals()",
        ][number % 3]
        indent = "\n    "
        text = "".join(
            f"\n\ndef test_{self.name()}():\n    {body.replace(chr(10), indent)}\n" for body in (first, then)
        )
        content = file.content.decode() + text
        verifier = replace(
            task.verifier,
            files=[SeedFile(file.path, content.encode())],
            commands=[Command(shell=f"{self.pytest} -q {file.path}")],
        )
        return Planted(replace(task, verifier=verifier), "order of tests", frozenset({"ORDER_DEPENDENT"}))

    def networked(self, number: int, index: str) -> Planted:
        """The verifier or the set-up fetches something."""
        task = self.judged(index)
        assert task.verifier is not None
        host = f"{self.name().replace('_', '-')}.example.org"
        fetch = [
            f"python3 -c 'import urllib.request; urllib.request.urlopen(\"https://{host}/x\", timeout=5)'",
            f"python3 -c 'import socket; socket.create_connection((\"{host}\", 443), 5)'",
            f"git clone -q https://{host}/it.git vendor",
        ][number % 3]
        if number % 2:
            return Planted(
                replace(task, setup=[Command(shell=fetch)]), "network", frozenset({"NETWORK_NEEDED", "SETUP_FAILS"})
            )
        verifier = replace(task.verifier, commands=[Command(shell=fetch), *task.verifier.commands])
        return Planted(replace(task, verifier=verifier), "network", frozenset({"NETWORK_NEEDED"}))

    def imported(self, number: int, index: str) -> Planted:
        """The agent's code runs in the process whose exit is the reward."""
        function, name = self.function()
        module = self.name()
        wanted = self.wanted(function, name)
        asserts = "".join(
            f"assert {module}.{name}({case!r}) == {value!r}\n"
            for case, value in zip(function.cases, wanted, strict=True)
        )
        in_one = f"import sys\nsys.path.insert(0, 'src')\nimport {module}\n{asserts}"
        kinds = [
            ([SeedFile("grade.py", in_one.encode())], [Command(argv=["python3", "grade.py"])]),
            (
                [SeedFile("tests/test_all.py", self.tests(function, name, module).encode())],
                [Command(shell=f"{self.pytest} -q -o pythonpath=src tests/test_all.py")],
            ),
        ]
        files, commands = kinds[number % 2]
        task = Task(
            task_id=index,
            instruction=f"{name}() in src/{module}.py {function.does}. Make it do so.\n",
            files=[SeedFile(f"src/{module}.py", self.code(function, name, right=False).encode())],
            verifier=Verifier(files=files, commands=commands, changes_below=["src"]),
            solution=self.solution(f"src/{module}.py", self.code(function, name, right=True)),
        )
        return Planted(task, "judge imports the work", frozenset({"REWARD_FORGED"}))

    def editable(self, number: int, index: str) -> Planted:
        """What grades lies in the working directory while the agent works, or is taken from what it leaves."""
        task = self.judged(index)
        assert task.verifier is not None
        (file,) = task.verifier.files
        path = ["check_work.py", "tests/test_work.py", "grade_it.py", "tests/verify_all.py"][number % 4]
        moved = SeedFile(path, file.content)
        verifier = Verifier(commands=[Command(argv=["python3", path])])
        return Planted(
            replace(task, files=[*task.files, moved], verifier=verifier),
            "grader can be edited",
            frozenset({"REWARD_FORGED"}),
        )

    def in_git(self, number: int, index: str) -> Planted:
        """The solution is in a commit (HEAD's own too), branch, stash, tag or loose object."""
        task = self.judged(index)
        assert task.solution is not None
        (file,) = task.solution.files
        path = file.path
        put = f"echo {base64.b64encode(file.content).decode()} | base64 -d >{path}"
        begin = f"git init -q . && git add -A && {_COMMIT} -m a && cp {path} /tmp/kept"
        back = f"cp /tmp/kept {path} && rm /tmp/kept"
        branch = self.name()
        ways = [
            f"git checkout -q -b {branch} && {put} && git add -A && {_COMMIT} -m b && git checkout -q -",
            f"{put} && {_CONFIG} stash -q",
            f"{put} && git add -A && {_COMMIT} -m b && git tag v9 && git reset -q --hard HEAD~1",
            f"{put} && git add -A && {_COMMIT} -m b && git reset -q --hard HEAD~1 && git repack -q -ad",
            f"{put} && git add -A && git reset -q --hard",
            f"{put} && git add -A && {_COMMIT} -m b && {back} && git add -A && {_COMMIT} -m c",
            f"{put} && git add -A && {_COMMIT} -m b && git update-ref refs/remotes/origin/main HEAD"
            " && git reset -q --hard HEAD~1 && git pack-refs --all",
            f"{put} && git add -A && {_COMMIT} -m b && {back}",
        ]
        way = f"{begin} && {ways[number % 8]}; rm -f /tmp/kept; git status --short"
        return Planted(replace(task, setup=[Command(shell=way)]), "solution in git", frozenset({"ANSWER_IN_GIT"}))

    def left_over(self, number: int, index: str) -> Planted:
        """The solution lies somewhere in the sandbox."""
        task = self.judged(index)
        assert task.solution is not None
        (file,) = task.solution.files
        put = f"echo {base64.b64encode(file.content).decode()} | base64 -d"
        name = self.name()
        ways = [
            f"{put} >{file.path}.orig",
            f"mkdir -p ~/{name} && {put} >~/{name}/work.py",
            f"mkdir -p ~/.config && {put} >~/.config/{name}",
            f"mkdir -p {name} && {put} >{name}/m.py && tar -czf {name}.tar.gz {name} && rm -r {name}",
            f"{put} >{name}.py && python3 -m zipfile -c {name}.whl {name}.py && rm {name}.py",
            f"{put} | sed 's/^/+/' >{name}.patch",
            f"{put} | gzip >{name}.gz",
            f"mkdir -p .cache/{name}/deep && {put} >.cache/{name}/deep/x",
        ]
        task = replace(task, setup=[Command(shell=ways[number % 8])])
        return Planted(task, "solution left in the sandbox", frozenset({"ANSWER_IN_VIEW"}))

    def cached(self, number: int, index: str) -> Planted:
        """Compiled Python of the solution or of the hidden tests was kept."""
        task = self.judged(index)
        assert task.solution is not None and task.verifier is not None
        (file,) = task.solution.files
        folder = file.path.rpartition("/")[0]
        put = f"echo {base64.b64encode(file.content).decode()} | base64 -d"
        (judge,) = task.verifier.files
        ways = [
            f"cp {file.path} /tmp/kept && {put} >{file.path} && python3 -m compileall -q {folder}"
            f" && cp /tmp/kept {file.path} && rm /tmp/kept",
            f"mkdir -p x && echo {base64.b64encode(judge.content).decode()} | base64 -d"
            f" >x/{judge.path.rpartition('/')[2]} && python3 -m compileall -q x && rm x/*.py",
        ]
        task = replace(task, setup=[Command(shell=ways[number % 2])])
        return Planted(task, "compiled leftovers", frozenset({"BYTECODE_DIFFERS"}))

    DEFECTS = (
        "wrong_solution", "unprepared", "flaky", "vacuous", "for_nothing", "existence", "half_tested", "few_cases",
        "ordered", "networked", "imported", "editable", "in_git", "left_over", "cached",
    )  # fmt: skip

    def planted(self, defect: str, number: int) -> Planted:
        """The nth task with a defect of a class."""
        make: Callable[[int, str], Planted] = getattr(self, defect)
        name = f"{defect.replace('_', '-')}-{number}"
        found = make(number, name)
        return replace(found, task=replace(found.task, task_id=name))

    # Parts

    def solution(self, path: str, content: str) -> Solution:
        return Solution(files=[SeedFile(path, content.encode())], commands=[Command(argv=["test", "-f", path])])

    def beside(self) -> SeedFile:
        """A file that has nothing to do with the task."""
        words = " ".join(self.draw.choice(WORDS) for _ in range(40))
        return SeedFile(self.draw.choice(["NOTES", "README.md", "docs/about.txt"]), f"{words}\n".encode())


_CONFIG = "git -c user.name=a -c user.email=a@b"
_COMMIT = f"{_CONFIG} commit -q"


def corpus(seed: int, of_each: int, clean: int, pytest: str = RUN_PYTEST) -> list[Planted]:
    """`of_each` tasks of each class of defects, and `clean` without one; the same for the same seed."""
    maker = Maker(seed, pytest)
    found = [maker.planted(defect, number) for defect in Maker.DEFECTS for number in range(of_each)]
    return found + [maker.clean(number) for number in range(clean)]
