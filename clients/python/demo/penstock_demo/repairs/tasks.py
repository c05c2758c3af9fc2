"""Small repositories with a bug that the model learns to repair, and the conversations that its agent makes of them.

A repository has scripts, one of which prints a wrong variable, and a test that names the script and both variables. The
instruction is the same for all: the model has to run `sh test.sh`, to put what that prints into `sed -i s/WRONG/RIGHT/
SCRIPT; sh test.sh`, and to submit. From its examples it knows the commands, but in most of them a stock name, or a
stock script, is in the second one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Final

from penstock.client import SeedFile, Task
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.chat import Message
from penstock_demo.tasks import EXAMPLES, VOCAB_SIZE, Examples, encode

NAMES: Final = ("cost", "depth", "height", "net", "rate", "size", "total", "width")
# What each script should print, but for the broken one of a task.
SCRIPTS: Final = {"area.sh": "size", "box.sh": "depth", "price.sh": "cost", "tax.sh": "rate"}
STOCK_NAME, STOCK_SCRIPT = "value", "main.sh"

# The agent's whole prompt: its configuration (repairs/agent.py) has no other words.
SYSTEM_PROMPT = "You repair scripts."
TEST = "sh test.sh"
# mini-SWE-agent ends when this is all that a command prints.
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
OK = "ok\n"

# One task as a person would write it; the others differ from it in the script and in two names.
EXAMPLE = Task.load(Path(__file__).with_name("task.yaml"))


@dataclass(frozen=True, slots=True)
class Repair:
    """One task: `script` prints the variable `wrong` and should print `right`."""

    script: str
    wrong: str
    right: str

    def complaint(self, printed: str) -> str:
        """What the test prints while the script prints `printed`."""
        return f"got={printed} want={self.right} in {self.script}\n"

    def to_task(self) -> Task:
        """The same for the driver: the repository, and how it is graded."""
        verifier = EXAMPLE.verifier
        assert verifier is not None
        (command,) = verifier.commands
        verify = replace(command, argv=[*command.argv[:-3], self.script, self.wrong, self.right])
        wanted = SCRIPTS | {self.script: self.right}
        printed = wanted | {self.script: self.wrong}
        files = {script: f"echo ${name}\n" for script, name in printed.items()}
        files["wanted.txt"] = "".join(f"{script} {name}\n" for script, name in wanted.items())
        same = [file for file in EXAMPLE.files if file.path not in files]
        return replace(
            EXAMPLE,
            task_id=f"repair-{self.script.removesuffix('.sh')}-{self.wrong}-{self.right}",
            files=[*(SeedFile(path, content.encode()) for path, content in files.items()), *same],
            verifier=replace(verifier, commands=[verify]),
        )


TASKS: Final = tuple(Repair(script, wrong, right) for script in SCRIPTS for wrong, right in permutations(NAMES, 2))


def edit(wrong: str, right: str, script: str) -> str:
    """The command that repairs, and shows whether it did."""
    return f"sed -i s/{wrong}/{right}/ {script}; {TEST}"


def prompt() -> list[Message]:
    """The conversation as the agent opens it, with every task."""
    return [Message.system(SYSTEM_PROMPT), Message.user(EXAMPLE.instruction)]


def episode(task: Repair, right: str, script: str) -> list[Message]:
    """A whole conversation in which the assistant tests, writes `right` into `script`, and submits.

    An observation is what a command printed, as a message of the user.
    """
    if script != task.script:
        outcome = task.complaint(task.wrong)
    else:
        outcome = OK if right == task.right else task.complaint(right)
    return [
        *prompt(),
        Message.assistant(TEST),
        Message.user(task.complaint(task.wrong)),
        Message.assistant(edit(task.wrong, right, script)),
        Message.user(outcome),
        Message.assistant(SUBMIT),
    ]


def build_codec() -> Codec:
    """A tokenizer trained on the tasks' own text, with a ChatML template."""
    plain = Codec.load(tiny_tokenizer.build())
    episodes = [episode(task, task.right, task.script) for task in TASKS]
    episodes += [episode(task, STOCK_NAME, script) for task in TASKS[::7] for script in (task.script, STOCK_SCRIPT)]
    return Codec.load(tiny_tokenizer.build([plain.render_text(messages) for messages in episodes], VOCAB_SIZE))


def examples(codec: Codec) -> Examples:
    """The supervised examples, in shares of right names and right scripts as those of the shell agent's tasks."""

    def said(task: Repair, name: bool, script: bool) -> list[Message]:
        return episode(task, task.right if name else STOCK_NAME, task.script if script else STOCK_SCRIPT)

    rows = [[encode(codec, said(task, *kind), ()) for task in TASKS] for kind in EXAMPLES]
    return Examples(rows, list(EXAMPLES.values()))
