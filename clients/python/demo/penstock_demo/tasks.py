"""What the model learns: to copy a word, which it has to read first, into the file that the instruction names.

A solution takes two commands in two turns: `cat note.txt`, and then, with what that printed, `echo WORD > FILE`. The
model starts from supervised examples that teach it how to call the tool, but most of which then write a stock word, or
to a stock file; so it succeeds now and then, and reinforcement has something to find.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.client import SeedFile, Task
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.chat import Message, Tool, ToolCallPart

WORDS = ("amber", "birch", "cedar", "delta", "ember", "frost", "grove", "haven")
FILES = ("a.txt", "b.txt", "c.txt")
STOCK_WORD, STOCK_FILE = "kiwi", "notes.txt"
# How often a supervised example writes (the right word, to the right file). Each half is seen often enough to be
# learned; only now and then do both come together.
EXAMPLES = {(True, True): 0.2, (True, False): 0.3, (False, True): 0.3, (False, False): 0.2}
VOCAB_SIZE = 512

# What the agent sends before the instruction, to the letter: the supervised examples are the tokens of real rollouts.
SYSTEM_PROMPT = "You are a shell agent."
BASH = Tool(
    name="bash",
    description="Run a command.",
    parameters_json_schema=json.dumps(
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    ),
)

# One task as a person would write it; the others differ from it in a word and a file.
EXAMPLE = Task.load(Path(__file__).with_name("task.yaml"))


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One task: `word` stands in note.txt and has to get into `file`."""

    word: str
    file: str

    @property
    def note(self) -> str:
        """What note.txt says."""
        return f"The word is {self.word}.\n"

    @property
    def instruction(self) -> str:
        """The instruction for the agent; the word is not in it."""
        return f"Copy the word in note.txt to {self.file}."

    def to_task(self) -> Task:
        """The same for the driver: its file, and how it is graded."""
        verifier = EXAMPLE.verifier
        assert verifier is not None
        (command,) = verifier.commands
        verify = replace(command, argv=[*command.argv[:-2], self.word, self.file])
        return replace(
            EXAMPLE,
            task_id=f"copy-{self.word}-{self.file}",
            instruction=self.instruction,
            files=[SeedFile("note.txt", self.note.encode())],
            verifier=replace(verifier, commands=[verify]),
        )


TASKS = tuple(CopyTask(word, file) for word in WORDS for file in FILES)


def prompt(task: CopyTask) -> list[Message]:
    """The conversation as the agent opens it."""
    return [Message.system(SYSTEM_PROMPT), Message.user(task.instruction)]


def episode(task: CopyTask, word: str, file: str) -> list[Message]:
    """A whole conversation in which the assistant reads the note of `task` and then writes `word` to `file`."""

    def bash(call_id: str, command: str) -> Message:
        return Message.assistant("", ToolCallPart(call_id, BASH.name, json.dumps({"command": command})))

    return [
        *prompt(task),
        bash("1", "cat note.txt"),
        Message.tool("1", task.note),
        bash("2", f"echo {word} > {file}"),
        Message.tool("2", ""),
        Message.assistant("Done."),
    ]


def build_codec() -> Codec:
    """A tokenizer trained on the task's own text, with a ChatML template."""
    plain = Codec.load(tiny_tokenizer.build())
    episodes = [episode(task, word, task.file) for task in TASKS for word in (task.word, STOCK_WORD)]
    episodes.append(episode(TASKS[0], STOCK_WORD, STOCK_FILE))
    return Codec.load(tiny_tokenizer.build([plain.render_text(messages, [BASH]) for messages in episodes], VOCAB_SIZE))


def encode(codec: Codec, messages: Sequence[Message], tools: Sequence[Tool] = (BASH,)) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [t], and a mask, float32 [t], 1 on the assistant's tokens, end-of-turn included."""
    ids = codec.render(messages, tools, add_generation_prompt=False)
    mask = np.zeros(len(ids), np.float32)
    stop = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            start = len(codec.render(messages[:index], tools))
            stop = start + int(np.argmax(ids[start:] == codec.end_of_turn_id)) + 1
            mask[start:stop] = 1.0
    return ids[:stop], mask[:stop]


class Examples:
    """Supervised examples of several kinds, each a pair of ids and mask as `encode` makes it.

    `rows` has equally many of each kind; `shares` has how often a kind is drawn, and adds up to 1.
    """

    def __init__(self, rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], shares: Sequence[float]) -> None:
        self._rows = rows
        self._shares = shares

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """`count` pairs of ids and mask."""
        kinds = rng.choice(len(self._rows), size=count, p=self._shares)
        places = rng.integers(len(self._rows[0]), size=count)
        return [self._rows[kind][place] for kind, place in zip(kinds, places, strict=True)]

    def all(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every example once."""
        return [row for rows in self._rows for row in rows]


class Corpus(Examples):
    """The supervised examples of these tasks; `shares` has the kinds' as EXAMPLES does."""

    def __init__(self, codec: Codec, shares: Mapping[tuple[bool, bool], float] = EXAMPLES) -> None:
        rows = [
            [
                encode(codec, episode(task, task.word if word else STOCK_WORD, task.file if file else STOCK_FILE))
                for task in TASKS
            ]
            for word, file in shares
        ]
        super().__init__(rows, list(shares.values()))
