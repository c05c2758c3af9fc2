"""What a plan costs, judged before the work is done: a caller on the event loop plans there only what is little (R32).

Encoding is by far the most expensive part, about 250 ns a byte, and reading the arguments of unknown calls is next. So
what is measured is the text for these: calls that nobody has read yet, and what follows the answer that a prompt
continues, or everything where it continues none. A body's length says nothing: padding in it is no text, and a
rewritten conversation is as long as it was before. The instructions before what is continued are read, and rendered
once or twice at most, which is cheap: only very long ones matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from penstock_codec.chat import ImagePart, Message, Role, Tool, ToolCallPart, ToolResultPart

PART_BYTES: Final = 32
"""What a message or a part costs beside its text, as bytes of text."""
INSTRUCTION_SHARE: Final = 16
"""This many bytes of instructions before what is continued cost as much as one byte that is encoded."""
LONGEST_RUN: Final = 8
"""In messages. Each beginning of a run of answers is compared with the known answers: the cost grows by the square."""


class TooLongInline(Exception):
    """The plan is too much work for the event loop: make it in a thread."""


class Room:
    """How many bytes of text one plan may still work on. Each method raises TooLongInline once there is none left."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, text: str) -> None:
        """Takes what a text costs."""
        self._left -= PART_BYTES + (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")))
        if self._left < 0:
            raise TooLongInline

    def take_tools(self, tools: Sequence[Tool]) -> None:
        """Takes what rendering and encoding these tools costs."""
        for tool in tools:
            for text in (tool.name, tool.description, tool.parameters_json_schema):
                self.take(text)

    def take_messages(self, messages: Sequence[Message]) -> None:
        """Takes what rendering and encoding these messages costs."""
        for message in messages:
            self.take("")
            for part in message.parts:
                if isinstance(part, ToolCallPart):
                    self.take(part.id)
                    self.take(part.name)
                    self.take(part.arguments_json)
                elif isinstance(part, ImagePart):
                    self.take(part.ref)
                else:
                    self.take(part.text)
                    if isinstance(part, ToolResultPart):
                        self.take(part.call_id)

    def take_instructions(self, messages: Sequence[Message]) -> None:
        """Takes what continuing a conversation costs because of the instructions that it begins with."""
        for message in takewhile(lambda message: message.role in (Role.SYSTEM, Role.DEVELOPER), messages):
            self._left -= len(message.text) // INSTRUCTION_SHARE
            if self._left < 0:
                raise TooLongInline

    def check_runs(self, messages: Sequence[Message]) -> None:
        """Checks that no long run of answers is among these messages."""
        run = 0
        for message in messages:
            run = run + 1 if message.role is Role.ASSISTANT else 0
            if run > LONGEST_RUN:
                raise TooLongInline
