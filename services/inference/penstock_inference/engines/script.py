"""The script of the scripted engine (YAML or JSON).

    logprob: -1.0              # of every token, unless its turn says otherwise; <= 0
    strict: true               # whether entries left over are an error
    turns:
      - when: {prompt_contains: You are a title generator}
        repeat: true           # for any number of calls, none included
        reply: A title
      - when: {has_tool_result: false}
        reply: |-
          <tool_call>
          {"name": "bash", "arguments": {"command": "cat note.txt"}}
          </tool_call>
      - reply: [17, 4, 2]      # token ids, as they are

Each session replays the whole script; requests without a session share one. A call takes the first entry that its
session has not used and whose `when` holds of the decoded prompt. A text is encoded by the model's tokenizer and ends
with its end-of-turn token, unless `finish: length`.
"""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_chassis.errors import InvalidArgument
from penstock_chassis.validation import violations_of

TOOL_RESULT_MARK = "</tool_response>"


class When(BaseModel):
    """What must hold of the decoded prompt; everything that is set must."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt_contains: str | tuple[str, ...] = ()
    prompt_lacks: str | tuple[str, ...] = ()
    has_tool_result: bool | None = None

    def holds(self, prompt: str) -> bool:
        """Whether this prompt is meant."""
        return (
            all(text in prompt for text in _texts(self.prompt_contains))
            and not any(text in prompt for text in _texts(self.prompt_lacks))
            and self.has_tool_result in (None, TOOL_RESULT_MARK in prompt)
        )


class Turn(BaseModel):
    """One answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    when: When = When()
    reply: str | tuple[int, ...]
    finish: Literal["stop", "length"] = "stop"
    logprob: float | None = Field(None, le=0, allow_inf_nan=False)
    repeat: bool = False


class Script(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    logprob: float = Field(-1.0, le=0, allow_inf_nan=False)
    strict: bool = True
    turns: tuple[Turn, ...] = Field(min_length=1)

    @classmethod
    def parse(cls, text: str) -> Script:
        """Raises InvalidArgument (SCRIPT_INVALID) naming every field at fault."""
        try:
            return cls.model_validate(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise InvalidArgument(f"the script is not YAML: {error}", reason="SCRIPT_INVALID") from error
        except ValidationError as error:
            violations = violations_of(error, "script")
            raise InvalidArgument(
                f"the script does not hold: {violations[0].field} {violations[0].description}",
                reason="SCRIPT_INVALID",
                violations=violations,
            ) from error


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
