"""Attacks as data: the goal of each, its program, and the expected outcome.

They are in the files `attacks/*.yaml` of this package, one for each class; the README beside this module documents the
keys.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib import resources
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.client.errors import InvalidArgument
from penstock.values.similar_names import did_you_mean

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml, where PyYAML was built with it: a tenth of the time."""


class AttackClass(StrEnum):
    """The goal of an attacker."""

    ESCAPE = "escape"
    """To reach the host, its kernel or other sandboxes."""
    SURVIVE = "survive"
    """To be alive when the verifier works."""
    FORGE_REWARD = "forge_reward"
    """To get a reward that was not earned."""
    DISGUISE_FAILURE = "disguise_failure"
    """To avoid grading by a failure that is blamed on another component."""
    EXHAUST = "exhaust"
    """To use up memory, disk, processes or time that others need."""
    NETWORK = "network"
    """To reach anything but the rollout's own model endpoint."""
    INGRESS = "ingress"
    """To get more from the model endpoint than the rollout may have."""
    FLOOD = "flood"
    """To deny the services to others by many or large messages."""


class Grading(StrEnum):
    """Where the verifier works: in a fork of the prepared state with the agent's changes, or in the agent's sandbox."""

    FORK = "fork"
    IN_PLACE = "in_place"


class Expected(BaseModel):
    """What must happen beside what holds for all attacks: no reward above the baseline's, no retriable failure or one
    blamed on infrastructure, the task or the model, an end in time, and services that keep running.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    any_reward: bool = False
    """The task lets the agent's own program set its reward: only how the rollout ends counts."""
    graded: bool = False
    """The rollout must get a reward: the attack must not even prevent it."""
    neighbour: bool = False
    """A concurrent rollout that does its work must get its full reward."""
    failure: tuple[str, ...] = ()
    """If its rollout fails, the reason must be one of these; none given = any that is the agent's own fault."""
    refused: str = ""
    """The reason of its rollout's required refusal."""
    max_growth_bytes: int | None = Field(None, gt=0)
    """Bytes of resident memory that no service may grow by during the attack."""


class Attack(BaseModel):
    """One attack. Exactly one of `sh`, `python` and `c` is its program."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=48)]
    attack_class: AttackClass
    tries: Annotated[str, Field(min_length=10, max_length=200)]
    """One plain sentence."""
    sh: str | None = None
    python: str | None = None
    c: str | None = None
    """Free-standing C: no library, `_start` from `programs/freestanding.h`."""
    library: bool = False
    """With `c`: it is a shared library, with `begin` as its initializer."""
    then: str = ""
    """With `c`: the shell lines that run the program, which is `$program`."""
    user: str = ""
    """The account, if the attack depends on it; else the run's."""
    model: Literal["source", "echo", "black_box"] = "source"
    """Answers its model calls: the run's source, or an endpoint that echoes requests."""
    host_tool: bool = False
    """Whether it is offered the host tool of `fixtures.py`."""
    beside: str | None = None
    """Python program of a concurrent agent in another sandbox; the attack begins when it reports `tried`."""
    beside_ends: bool = False
    """Whether the attack begins only after the other one has ended."""
    task: Literal["sums", "tests", "careless"] = "sums"
    """The task whose verifier is attacked; see `tasks.py`."""
    grading: tuple[Grading, ...] = (Grading.IN_PLACE,)
    backends: tuple[str, ...] = ()
    """Backends that it applies to; none given = all."""
    seconds: Annotated[float, Field(gt=0, le=300)] = 20.0
    """Seconds that the agent may run."""
    call_timeout: float | None = Field(None, gt=0)
    """Seconds after which its unanswered model calls expire; None = the default."""
    alone: bool = False
    """It uses so many resources that no other attack runs meanwhile."""
    expected: Expected = Expected()

    @model_validator(mode="after")
    def _one_program(self) -> "Attack":
        programs = [text for text in (self.sh, self.python, self.c) if text is not None]
        if len(programs) != 1:
            raise ValueError("an attack must have exactly one of sh, python and c")
        # A spec's files are templates, in which two braces begin a value's name.
        if any("{{" in text for text in (*programs, self.then, self.beside or "")):
            raise ValueError("a program must not have two braces in a row")
        return self

    def applies_to(self, backend: str) -> bool:
        """Whether it applies to this backend."""
        return not self.backends or backend in self.backends


_FILES: Final = resources.files("penstock.redteam")


def text_of(path: str) -> str:
    """Returns a file of this package."""
    return _FILES.joinpath(*path.split("/")).read_text("utf-8")


def registry() -> Mapping[str, Attack]:
    """Returns all attacks by name, in the order of their classes."""
    found: dict[str, Attack] = {}
    for kind in AttackClass:
        for item in _entries(kind):
            attack = Attack.model_validate({"attack_class": kind, **item})
            if attack.name in found:
                raise ValueError(f"two attacks have the name {attack.name}")
            found[attack.name] = attack
    return found


def select(names: Sequence[str] = (), classes: Sequence[str] = ()) -> list[Attack]:
    """Returns the attacks with these names or of these classes; all without either.

    Raises:
        InvalidArgument: `ATTACK_UNKNOWN`, there is no attack or no class of such a name.
    """
    known = registry()
    unknown = [name for name in names if name not in known]
    unknown += [name for name in classes if name not in set(AttackClass)]
    if unknown:
        meant = did_you_mean(unknown[0], known if unknown[0] in names else AttackClass)
        raise InvalidArgument(
            f"There is no attack and no class {', '.join(unknown)}{meant or ';'} classes: {', '.join(AttackClass)},"
            " `penstock doctor --attack --list` lists the attacks",
            reason="ATTACK_UNKNOWN",
        )
    if not names and not classes:
        return list(known.values())
    return [attack for attack in known.values() if attack.name in names or attack.attack_class in classes]


def _entries(kind: AttackClass) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.load(text_of(f"attacks/{kind}.yaml"), _LOADER)  # noqa: S506 - a safe loader
    return entries
