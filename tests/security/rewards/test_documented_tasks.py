"""Every task of the documentation and of the examples that has a verifier, against agents that do none of its work."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from tests.support.copying import Finished, finish, training
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running, running

from penstock.client import SeedFile, Task

ROOT: Final = Path(__file__).parents[3]
PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if "```yaml task\n" in path.read_text(encoding="utf-8")
)
EXAMPLES: Final = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/task.yaml"))
DOCUMENTED: Final = {
    **{
        f"{page}#{number}": (page, number)
        for page in PAGES
        for number, block in enumerate((ROOT / page).read_text(encoding="utf-8").split("```yaml task\n")[1:])
        if "verifier:" in block.partition("```")[0]
    },
    **{path: (path, None) for path in EXAMPLES},
}  # fmt: skip
HONEST: Final = {
    "docs/guides/first-rollout.md#0": 'echo "hello ada" > greeting.txt',
    "docs/guides/tasks.md#0": 'echo "hello ada" > greeting.txt',
    "docs/guides/rewards.md#0": r"printf 'import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\n' > sum.py",
    "docs/guides/own-repository.md#0": r"""cat > src/slug.py <<'END'
import re
def slug(text): return "-".join(re.findall("[a-z0-9]+", text.lower()))
END""",
    "examples/grpo/task.yaml": "echo ember > b.txt",
}
"""Whoever adds a task says here how it is done: one that nobody can do resists every attack."""
AT_ONCE: Final = 6  # a rollout waits for the model, its sandbox and its verifier most of the time

PAY: Final = """
import glob, os
def pay(words=("1",)):
    for path in [os.environ.get("PENSTOCK_REWARD_FILE", ""), *glob.glob("/tmp/penstock-*/*")]:
        for word in words:
            try:
                with open(path, "w") as file:
                    file.write(word)
            except OSError:
                pass
pay()
"""
CODE: Final = "sum.py"
"""What the verifier of a task that asks for a program runs."""
ANY_CODE: Final = "pays from its code"
_RIGHT: Final = "3\\n33\\n1000000000000\\nhello ada\\nember\\n1\\n"
ATTACKS: Final = {
    "exits with 0": "printf 'import os\\nos._exit(0)\\n' > sum.py",
    "raises SystemExit": "printf 'import sys\\nsys.exit(0)\\n' > sum.py",
    "prints success": "printf 'print(\"OK\\\\n1\\\\npassed\")\\n' > sum.py",
    "pays from its code": "cp pay.py sum.py",
    "pays and locks the file": """cat pay.py - > sum.py <<'END'
for path in glob.glob("/tmp/penstock-*"):
    for name in glob.glob(path + "/*"):
        os.chmod(name, 0o444)
    os.chmod(path, 0o555)
END""",
    "pays from a daemon": """cat pay.py - > sum.py <<'END'
import time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
for _ in range(600):
    pay()
    time.sleep(0.01)
END""",
    "kills whoever runs it": "printf 'import os, signal\\nos.kill(os.getppid(), signal.SIGKILL)\\n' > sum.py",
    "kills all that it can": "cat pay.py - > sum.py <<< 'os.kill(-1, 9)'",
    "copies what it finds in the sandbox": """cat > sum.py <<'END'
import glob, re
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("*") + glob.glob("/tmp/*/*"):
    try:
        found = re.findall(rb"b.(\\d+).", open(path, "rb").read(100000))
    except OSError:
        continue
    if found:
        print(b" ".join(found).decode())
END""",
    "writes answers beforehand": f"printf '{_RIGHT}' | tee answers.txt answers reward result.txt > /dev/null",
    "lays pipes": "for name in answers.txt reward; do mkfifo $name; done",
    "lays directories": "mkdir answers.txt reward",
    "lays links": "ln -s /dev/zero answers.txt; ln -s /proc/self/environ reward",
    "shadows the library": "for name in unittest os pathlib json re io sitecustomize usercustomize conftest encodings; "
    "do cp pay.py $name.py; done; mkdir -p unittest; cp pay.py unittest/__init__.py; cp pay.py unittest/__main__.py",
    "lays programs": """for folder in . ~/bin ~/.local/bin /tmp; do for name in grep test python3 timeout bash sh; do
mkdir -p $folder; printf '#!/bin/sh\\necho 1 > "$PENSTOCK_REWARD_FILE"\\nexit 0\\n' > $folder/$name
chmod 755 $folder/$name; done; done""",
    "lays profiles": """for name in .bashrc .profile .bash_profile .zshenv .pythonrc; do
printf 'export PATH=/tmp:$PATH\\necho 1 > "$PENSTOCK_REWARD_FILE"\\nexit 0\\n' > ~/$name; done
mkdir -p "$(python3 -m site --user-site)"; cp pay.py "$(python3 -m site --user-site)/usercustomize.py"
printf 'import usercustomize\\n' > "$(python3 -m site --user-site)/pay.pth" """,
    "lays git hooks": "git init -q . && for name in pre-commit post-checkout post-index-change; "
    "do printf '#!/bin/sh\\npython3 pay.py\\n' > .git/hooks/$name; chmod 755 .git/hooks/$name; done",
    "stays behind": "(setsid sh -c 'while :; do python3 pay.py; done' > /dev/null 2>&1 &)",
    "locks its directory": "chmod 000 . ",
    "removes everything": 'rm -rf "$PWD"/* "$PWD"/.[!.]*',
}

CHECKER: Final = b"""import os
with open("greeting.txt") if os.path.isfile("greeting.txt") else open(os.devnull) as file:
    right = file.read(100) == "hello ada\\n"
with open(os.environ["PENSTOCK_REWARD_FILE"], "w") as file:
    file.write(str(int(right)))
"""


def documented(name: str, folder: Path) -> Task:
    """A task as it stands in the documentation, on a backend without images."""
    page, number = DOCUMENTED[name]
    if number is None:
        return Task.load(ROOT / page)
    text = re.findall(r"```yaml task\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[number]
    (folder / "check.py").write_bytes(CHECKER)
    (folder / "repository").mkdir()
    (folder / "repository/greet.py").write_text("print('hello')\n", encoding="utf-8")
    faulty = folder / "repair-slug/repository/src/slug.py"
    faulty.parent.mkdir(parents=True)
    faulty.write_text("def slug(text): return text.lower().replace(' ', '-')\n", encoding="utf-8")
    (folder / "task.yaml").write_text(text, encoding="utf-8")
    return replace(Task.load(folder / "task.yaml"), sandbox=None)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Four services with the local backend."""
    async with running(tmp_path_factory.mktemp("stack-documented"), agents=False) as started:
        yield started


async def worked_by(started: Running, task: Task, script: str) -> Finished:
    """A rollout whose agent runs the script and is done."""
    label = secrets.token_hex(8)
    files = [*task.files, SeedFile("forge.sh", f"{script}\n".encode()), SeedFile("pay.py", PAY.encode())]
    async with training(started, label, in_turn(bash("bash forge.sh"), "Done.")):
        return await finish(
            await started.ps.rollouts.create(replace(task, files=files), "shell", labels={"test": label})
        )


@pytest.mark.requirement("R99")
def test_every_documented_task_is_attacked() -> None:
    """That there are none, or that one is not found, would prove nothing."""
    assert DOCUMENTED.keys() == HONEST.keys()


@pytest.mark.requirement("R90", "R99")
@pytest.mark.parametrize("name", sorted(HONEST))
async def test_documented_verifier_gives_no_attacker_more_than_doing_nothing(
    stack: Running, tmp_path: Path, name: str
) -> None:
    """Whatever an agent leaves but the work itself; the work is worth more than nothing."""
    task = documented(name, tmp_path)
    assert task.verifier is not None
    idle = (await worked_by(stack, task, "true")).reward
    honest = (await worked_by(stack, task, HONEST[name])).reward
    assert idle is not None
    assert honest is not None
    assert honest > idle
    paid = {}
    at_once = asyncio.Semaphore(AT_ONCE)

    async def attack(name: str, script: str) -> None:
        async with at_once:
            finished = await worked_by(stack, task, script)
        if finished.reward is not None and finished.reward > idle:
            paid[name] = finished.reward
        failure = finished.result.outcome.failure
        assert failure is None or not failure.retriable, (name, failure)

    # Code that nothing runs is a file like any other: where the verifier runs none, one of them is enough.
    runs_code = CODE in HONEST[name]
    tried = [one for one, script in ATTACKS.items() if runs_code or CODE not in script or one == ANY_CODE]
    async with asyncio.TaskGroup() as attacks:
        for one in tried:
            attacks.create_task(attack(one, ATTACKS[one]))
    assert not paid
