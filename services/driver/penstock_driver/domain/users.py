"""Who sends an agent further instructions once it has ended: a script, or a model that plays the user.

Invariant: what a user decided is an event that is on disk before the agent is started again (decision 094).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.interception.v1 import rollout_gate_service_pb2

MOST_INSTRUCTIONS: Final = 64
MODEL_INSTRUCTIONS: Final = 8
"""The most further instructions of a model, unless the spec says otherwise."""
MAX_TEXT_BYTES: Final = 64 << 10
"""Of one instruction, and of a model's prompt."""
SEEN_BYTES: Final = 32 << 10
"""How much of an agent's message the user sees: its end."""
MAX_ANSWER_TOKENS: Final = 16384
MAX_TIMEOUT_S: Final = 3600.0
END: Final = "[END]"
"""What a model writes to end the conversation."""
OF_A_USER: Final = ".user"


def user_id(rollout_id: str) -> str:
    """The id at the gate of a rollout's user; no rollout has an id with this end."""
    return f"{rollout_id}{OF_A_USER}"


@dataclass(frozen=True, slots=True)
class UserModel:
    """A model that plays the user. `terms` are those of its calls at the gate; `timeout_s` is for one answer."""

    prompt: str
    terms: rollout_gate_service_pb2.OpenRolloutRequest = field(hash=False, repr=False)
    max_tokens: int = 1024
    temperature: float | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class User:
    """A script, or a `model` if there is one, that sends at most `max_instructions`."""

    max_instructions: int
    script: tuple[str, ...] = ()
    model: UserModel | None = None


class EndReason:
    """Why a conversation is over."""

    SCRIPT_ENDED: Final = "SCRIPT_ENDED"
    USER_ENDED: Final = "USER_ENDED"
    MAX_INSTRUCTIONS: Final = "MAX_INSTRUCTIONS"
    USER_BUDGET: Final = "USER_BUDGET"
    USER_REFUSED: Final = "USER_REFUSED"
    AGENT_FAILED: Final = "AGENT_FAILED"
    AGENT_TIMED_OUT: Final = "AGENT_TIMED_OUT"
    """The agent's time was over before a model had decided."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user decided after an end of the agent, counted from 1 within an attempt: the next `instruction`, or
    why there is none. `agent_message` is what the user saw.
    """

    index: int
    agent_message: str = ""
    instruction: str = ""
    end_reason: str = ""


def problems(user: User) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for everything that is wrong with a user, but for its model's source and budgets."""
    if not user.script and user.model is None:
        yield "", "expected a script with at least one instruction, or a model"
    if len(user.script) > MOST_INSTRUCTIONS:
        yield ".script.instructions", f"at most {MOST_INSTRUCTIONS} instructions"
    for index, text in enumerate(user.script[:MOST_INSTRUCTIONS]):
        if problem := _text_problem(text):
            yield f".script.instructions[{index}]", problem
    if not 1 <= user.max_instructions <= MOST_INSTRUCTIONS:
        yield ".max_instructions", f"expected 1 to {MOST_INSTRUCTIONS}"
    model = user.model
    if model is None:
        return
    if problem := _text_problem(model.prompt):
        yield ".model.prompt", problem
    if not 1 <= model.max_tokens <= MAX_ANSWER_TOKENS:
        yield ".model.max_tokens", f"expected 1 to {MAX_ANSWER_TOKENS}"
    if model.temperature is not None and not 0 <= model.temperature <= 2:
        yield ".model.temperature", "expected 0 to 2"
    if not 0 < model.timeout_s <= MAX_TIMEOUT_S:
        yield ".model.timeout", f"expected more than 0 and at most {MAX_TIMEOUT_S:g} s"


def _text_problem(text: str) -> str:
    if not text.strip():
        return "is required"
    if "\0" in text:
        return "NUL is not allowed"
    size = len(text.encode())
    return f"has {size} bytes; at most {MAX_TEXT_BYTES} are allowed" if size > MAX_TEXT_BYTES else ""
