"""The policy of the tests: text that a tiny tokenizer turns into ids, and a trainer that answers calls with it.

The ids are one per byte, which decode to the text and are not those that the tokenizer would choose: a prompt that
repeats them proves that nothing sampled is tokenised again (R82).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.client import Completion, InterceptSession, LogprobsMode, ModelCall
from penstock_codec import tiny
from penstock_codec.codec import Codec

FILES = tiny.build(["Copy the word in note.txt to out.txt with the bash tool, please. cat echo hello world"], 384)
CODEC = Codec.load(FILES)
TITLE_SYSTEM_PROMPT = "You are a title generator"

Reply = Callable[[str], str]
"""From the text of a prompt to the text of the answer."""


def bash(command: str, **more: str) -> str:
    """An answer that calls the tool `bash`, which most agents of the tests have."""
    return shell("bash", command, **more)


def shell(tool: str, command: str, **more: str) -> str:
    """An answer that runs a command with a tool of that name."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'command': command, **more}})}\n</tool_call>"


RUN_SHELL_COMMAND = "run_shell_command"
"""The shell tool of Gemini CLI and of Qwen Code, which came of it."""


def in_shell(command: str, **more: str) -> Reply:
    """An answer that runs a command with the tool that the prompt's agent has for that."""

    def reply(prompt: str) -> str:
        return shell(RUN_SHELL_COMMAND if RUN_SHELL_COMMAND in prompt else "bash", command, **more)

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
    ids = [*tiny.bytewise(text), CODEC.end_of_turn_id]
    return ids, [-((position % 7) + 1) / 8 for position in range(len(ids))]


def prompt_text(call: ModelCall) -> str:
    """What the model would read."""
    return CODEC.decode(call.prompt_token_ids)


def in_turn(*replies: str, title: str = "A title") -> Reply:
    """Answers a conversation's turns in order, by the number of answers that its prompt holds already."""

    def reply(prompt: str) -> str:
        if TITLE_SYSTEM_PROMPT in prompt:
            return title
        return replies[min(prompt.count("<|im_start|>assistant") - 1, len(replies) - 1)]

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
