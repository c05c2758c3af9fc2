"""The policy of the tests: text that a tiny tokenizer turns into ids, and a trainer that answers calls with it.

The ids are one per byte, which decode to the text and are not those that the tokenizer would choose: a prompt that
repeats them proves that nothing sampled is tokenised again (R82).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.client import Completion, InterceptSession, LogprobsMode, ModelCall
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec

FILES = tiny_tokenizer.build(
    ["Copy the word in note.txt to out.txt with the bash tool, please. cat echo hello world"], 384
)
CODEC = Codec.load(FILES)
TITLE_SYSTEM_PROMPT = "You are a title generator"

Reply = Callable[[str], str]
"""From the text of a prompt to the text of the answer."""


def bash(command: str, **more: str) -> str:
    """An answer that calls the tool `bash`, which most agents of the tests have."""
    return calling("bash", command=command, **more)


def calling(tool: str, **arguments: str) -> str:
    """An answer that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


SHELLS: Mapping[str, Callable[[str], str]] = {
    # Claude Code
    "Claude Agent SDK": lambda command: calling("Bash", command=command, description="Does the work"),
    # Gemini CLI, and Qwen Code, which came of it
    "run_shell_command": lambda command: calling("run_shell_command", command=command, description="Does the work"),
    # Codex
    "\nexec_command: ": lambda command: calling("exec_command", cmd=command),
}
"""How agents that have no tool `bash` run a command, by what of their prompts tells them apart."""


def in_shell(command: str, **more: str) -> Reply:
    """An answer that runs a command with the tool that the prompt's agent has; `more` goes to a tool `bash`."""

    def reply(prompt: str) -> str:
        found = next((write for mark, write in SHELLS.items() if mark in prompt), None)
        return bash(command, **more) if found is None else found(command)

    return reply


def once_done(work: Reply, end: str, *, title: str = "A title") -> Reply:
    """Does the work, and says `end` when its result is there, however many turns the agent made up before."""

    def reply(prompt: str) -> str:
        if TITLE_SYSTEM_PROMPT in prompt:
            return title
        return end if "</tool_response>" in prompt else work(prompt)

    return reply


def sampled(text: str) -> tuple[list[int], list[float]]:
    """Ids and logprobs as an engine would give them for `text`, its end of turn included."""
    assert CODEC.end_of_turn_id is not None
    ids = [*tiny_tokenizer.bytewise(text), CODEC.end_of_turn_id]
    return ids, [-((position % 7) + 1) / 8 for position in range(len(ids))]


def prompt_text(call: ModelCall) -> str:
    """What the model would read."""
    return CODEC.decode(call.prompt_token_ids)


def in_turn(*replies: str | Reply, title: str = "A title") -> Reply:
    """Answers a conversation's turns in order, by the number of answers that its prompt holds already."""

    def reply(prompt: str) -> str:
        if TITLE_SYSTEM_PROMPT in prompt:
            return title
        chosen = replies[min(prompt.count("<|im_start|>assistant") - 1, len(replies) - 1)]
        return chosen if isinstance(chosen, str) else chosen(prompt)

    return reply


@dataclass
class Trainer:
    """Answers every call of a session and remembers what it was asked and what it said.

    `before` runs before an answer, which may hold it without holding others; `after` is set by the first answer that
    the gate acknowledged.
    """

    session: InterceptSession
    reply: Reply
    version: int = 3
    before: Callable[[ModelCall], Awaitable[None]] | None = None
    after: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[ModelCall] = field(default_factory=list)
    answers: dict[str, Completion] = field(default_factory=dict)

    async def run(self) -> None:
        """Until the session ends or this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for call in self.session.calls():
                self.calls.append(call)
                tasks.create_task(self._answer(call))

    async def _answer(self, call: ModelCall) -> None:
        if self.before is not None:
            await self.before(call)
        ids, logprobs = sampled(self.reply(prompt_text(call)))
        completion = Completion.of_tokens(
            np.array(ids), np.array(logprobs), policy_version=self.version, logprobs_mode=LogprobsMode.PROCESSED
        )
        self.answers[call.call_id] = completion
        await call.deliver(completion)
        self.after.set()
