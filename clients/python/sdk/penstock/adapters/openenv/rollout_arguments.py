"""The arguments of `run_rollout`, validated, and the rollout for them.

Every argument takes effect or is refused by name before anything starts (R63); replaced arguments are refused with a
pointer to the replacement (R65). Names and defaults are those of the tool that this one replaces; new arguments have
defaults that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.tasks.spec import (
    AgentChoice,
    Budgets,
    Command,
    Inference,
    Limits,
    Mode,
    ModelSource,
    RewardFrom,
    SandboxChoice,
    Upstream,
    Verifier,
)
from penstock.client.tasks.strict_model import in_words
from penstock.client.tasks.task import Task
from penstock.client.types.chat import Sampling

INFERENCE: Final = "inference"
"""The endpoint that is no upstream: the operator's own inference service."""
VERIFY_COMMAND_S: Final = 120.0
_OLD_REWARD_FILE: Final = "logs/verifier/reward.txt"
_REWARD_VARIABLE: Final = "PENSTOCK_REWARD_FILE"
_REMOVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "provider": "was removed: the agent's spec states its dialect; set the model by endpoint or base_url",
        "provider_name": "was removed: the agent's spec sets the model's name in its configuration",
        "thinking": "is now disable_thinking, or an option of the agent in options",
        "system_prompt": "is an option of the agent: options={'system_prompt': ...}",
        "extra_env": "was removed: set environment variables in setup, or use a task file",
        "env": "was removed: set environment variables in setup, or use a task file",
        "upload_files": "was removed: write files in setup, or use a task file with files",
        "sandbox_backend": "is now backend",
        "interception_base_url": "was removed: each sandbox has its own endpoint, which leads to the gate",
        "opencode_version": "was removed: the agent's spec pins its version; `penstock agents` lists the agents",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The operator's choices for arguments that callers leave out."""

    agent: str = "opencode"
    endpoint: str = ""
    backend: str = ""
    skip_permissions: bool = False


class RunRollout(BaseModel):
    """Arguments of `run_rollout`."""

    model_config = ConfigDict(extra="forbid")

    agent: str = Field("", max_length=128, description="A registered agent's name; empty = the server's default.")
    endpoint: str = Field(
        "",
        max_length=256,
        description="Where model calls go: an upstream that the operator configured, or `inference`.",
    )
    base_url: str = Field("", max_length=2048, description="An OpenAI-compatible endpoint of your own, with /v1.")
    api_key: str = Field("", max_length=8192, repr=False, description="The key for base_url.")
    model: str = Field("", max_length=256, description="The model's name there.")
    instruction: str = Field(description="The agent's instruction, byte for byte.")
    setup: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="Shell lines that run before the agent; the first that fails ends it.",
    )
    verify: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="Shell lines that run after the agent is dead; they make the reward.",
    )
    task_id: str = Field("", max_length=256, description="Returned in the result; empty = rollout.")
    mode: str = Field("transparent_proxy", description="transparent_proxy, black_box or interception_gate.")
    disable_thinking: bool | None = Field(None, description="Turn the model's thinking off.")
    max_tokens_cap: int = Field(4096, description="Most tokens of one answer; 0 or less = no limit.")
    top_logprobs: int = Field(
        5, ge=0, le=20, description="Accepted for compatibility: the sampled tokens' logprobs are always returned."
    )
    agent_timeout_s: float = Field(600.0, gt=0, description="Seconds that the agent may run.")
    template: str = Field("", max_length=512, description="The sandbox's image (or template), as image.")
    image: str = Field("", max_length=512, description="The sandbox's image; empty = the backend's default.")
    backend: str = Field("", max_length=64, description="Where the sandbox runs; empty = the server's default.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the agent's spec.")
    skip_permissions: bool | None = Field(
        None, description="Skip the agent's own permission prompts; unset = the operator's choice."
    )
    reward: Literal["", "passed_share", "file"] = Field(
        "",
        description="passed_share, or file: verify writes $PENSTOCK_REWARD_FILE. Empty = file if verify names that.",
    )
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[lowest, highest] reward; unset = [0, 1]."
    )

    @model_validator(mode="before")
    @classmethod
    def _pointers(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in sorted(given.keys() & _REMOVED.keys()):
                raise ValueError(f"{name} {_REMOVED[name]}")
        return given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.instruction.strip():
            raise ValueError("instruction is required")
        if self.mode not in list(Mode):
            raise ValueError(
                f"mode {self.mode[:40]!r} is unknown: use transparent_proxy, black_box or interception_gate"
            )
        if self.template and self.image and self.template != self.image:
            raise ValueError("template and image mean the same: set one of them")
        for name, commands in (("setup", self.setup), ("verify", self.verify)):
            for index, command in enumerate(commands):
                if not command.strip():
                    raise ValueError(f"{name}[{index}] is empty")
                if _OLD_REWARD_FILE in command:
                    raise ValueError(
                        f"{name}[{index}]: the agent could write this file, so it is not used as a reward: write "
                        f"the reward to ${_REWARD_VARIABLE} in verify"
                    )
        if self.reward and not self.verify:
            raise ValueError("reward needs verify")
        return self


def parse(arguments: Mapping[str, Any]) -> RunRollout:
    """Validates the arguments of a call.

    Raises:
        InvalidArgument: `OPENENV_ARGUMENTS`; `violations` name the arguments, without their values.
    """
    try:
        return RunRollout.model_validate(dict(arguments))
    except ValidationError as error:
        violations = tuple(
            Violation(
                ".".join(map(str, item["loc"])) or "arguments",
                "no such argument" if item["type"] == "extra_forbidden" else in_words(item),
            )
            for item in error.errors(include_url=False)
        )
        described = "; ".join(
            item.description if item.field == "arguments" else f"{item.field}: {item.description}"
            for item in violations
        )
        raise InvalidArgument(
            f"Invalid arguments: {described}", reason="OPENENV_ARGUMENTS", violations=violations
        ) from None


def task_of(given: RunRollout) -> Task:
    """Returns the task: commands are shell lines in the sandbox's working directory."""
    verifier = None
    if given.verify:
        by_file = given.reward == "file" or (
            not given.reward and any(_REWARD_VARIABLE in command for command in given.verify)
        )
        verifier = Verifier(
            commands=[Command(shell=line) for line in given.verify],
            reward=RewardFrom.FILE if by_file else RewardFrom.PASSED_SHARE,
            range=None if given.reward_range is None else (given.reward_range[0], given.reward_range[1]),
            command_timeout=VERIFY_COMMAND_S,
        )
    return Task(
        task_id=given.task_id or "rollout",
        instruction=given.instruction,
        setup=[Command(shell=line) for line in given.setup],
        verifier=verifier,
        keep_files=True,
    )


def options_of(given: RunRollout, defaults: Defaults, seed: int | None, labels: Mapping[str, str]) -> RolloutOptions:
    """Returns all options beside the task and the agent. `seed` is the episode's: it is sent with each model call.

    Raises:
        InvalidArgument: `OPENENV_ARGUMENTS`, no model source was named.
    """
    options: RolloutOptions = {
        "mode": Mode(given.mode),
        "limits": Limits(agent=given.agent_timeout_s),
        "sandbox": SandboxChoice(backend=given.backend or defaults.backend, image=given.image or given.template),
        "labels": labels,
    }
    if given.max_tokens_cap > 0:
        options["budgets"] = Budgets(max_tokens_per_call=given.max_tokens_cap)
    sampling = Sampling(seed=seed, thinking=False if given.disable_thinking else None)
    if sampling != Sampling():
        options["sampling"] = sampling
    source = _source(given, defaults)
    if source is not None:
        options["source"] = source
    return options


def agent_of(given: RunRollout, defaults: Defaults) -> AgentChoice:
    """Returns the agent and its setup."""
    skip = defaults.skip_permissions if given.skip_permissions is None else given.skip_permissions
    return AgentChoice(name=given.agent or defaults.agent, options=given.options, skip_permissions=skip)


def _source(given: RunRollout, defaults: Defaults) -> ModelSource | None:
    """Returns the model source. The operator's key is never sent to an address that a caller gave (R11)."""
    if given.base_url or given.api_key:
        if not (given.base_url and given.api_key and given.model):
            raise _unnamed(
                "set base_url, api_key and model together; an operator's endpoint has its own address and key"
            )
        return Upstream(base_url=given.base_url.rstrip("/"), api_key=given.api_key, model=given.model)
    endpoint = given.endpoint or defaults.endpoint
    if endpoint == INFERENCE:
        if given.model:
            raise _unnamed(f"the endpoint {INFERENCE} has one model: unset model")
        return Inference()
    if endpoint:
        return Upstream(name=endpoint, model=given.model)
    if given.mode == Mode.INTERCEPTION_GATE:
        return None
    raise _unnamed(
        f"set endpoint ({INFERENCE}, or an upstream of the operator's), or all of base_url, api_key and model"
    )


def _unnamed(message: str) -> InvalidArgument:
    return InvalidArgument(f"Invalid arguments: {message}", reason="OPENENV_ARGUMENTS")
