"""Attacks as data: what each tries, the program that tries it, and what must happen.

They are in the files `attacks/*.yaml` of this package, one for each class; the README beside this module says what a
key means.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib import resources
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.client.errors import InvalidArgument


class AttackClass(StrEnum):
    """What an attacker wants."""

    ESCAPE = "escape"
    """To reach the host, its kernel or other sandboxes."""
    SURVIVE = "survive"
    """To be alive when the verifier works."""
    FORGE_REWARD = "forge_reward"
    """To be given a reward that was not earned."""
    DISGUISE_FAILURE = "disguise_failure"
    """Not to be graded, by a failure that looks like somebody else's."""
    EXHAUST = "exhaust"
    """To take memory, disk, processes or time that others need."""
    NETWORK = "network"
    """To reach anything but the rollout's own model endpoint."""
    INGRESS = "ingress"
    """To be served more at the model endpoint than the rollout may have."""
    FLOOD = "flood"
    """To stop others at the services by many or large messages."""


class Grading(StrEnum):
    """Where the verifier works: in a fork of the prepared state with the agent's changes, or in the agent's sandbox."""

    FORK = "fork"
    IN_PLACE = "in_place"


class Expected(BaseModel):
    """What must happen beside what holds for all attacks: no reward above the baseline's, no failure that is retriable
    or told as infrastructure's, the task's or the model's, an end in time, and services that run on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    any_reward: bool = False
    """The task lets the agent's own program say its reward: only how the rollout ends counts."""
    graded: bool = False
    """The rollout must be given a reward: the attack must not even prevent it."""
    neighbour: bool = False
    """A rollout that does its work meanwhile must get its full reward."""
    failure: tuple[str, ...] = ()
    """If its rollout fails, the reason must be one of these; none given = any that is the agent's own."""
    refused: str = ""
    """The reason with which its rollout must be refused."""
    max_growth_bytes: int | None = Field(None, gt=0)
    """Resident memory that no service may grow by while the attack runs."""


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
    """With `c`: it is a library for a loader, with `begin` as what runs when it is loaded."""
    then: str = ""
    """With `c`: the shell lines that use the program, which is `$program`."""
    user: str = ""
    """As whom, where that is the point; else as the run says."""
    model: Literal["source", "echo", "black_box"] = "source"
    """Who answers its model calls: the run's source, or an endpoint that says back what reached it."""
    host_tool: bool = False
    """Whether it is offered the host tool of `surroundings.py`."""
    beside: str | None = None
    """The Python of an agent in another sandbox, which is there meanwhile; the attack begins when it says `tried`."""
    beside_ends: bool = False
    """The other one has ended when the attack begins."""
    task: Literal["sums", "tests", "careless"] = "sums"
    """The task whose verifier is attacked; see `tasks.py`."""
    grading: tuple[Grading, ...] = (Grading.IN_PLACE,)
    backends: tuple[str, ...] = ()
    """Where it applies; none given = everywhere."""
    seconds: Annotated[float, Field(gt=0, le=120)] = 20.0
    """How long the agent may run."""
    alone: bool = False
    """It takes so much that nothing else is tried meanwhile."""
    expected: Expected = Expected()

    @model_validator(mode="after")
    def _one_program(self) -> "Attack":
        programs = [text for text in (self.sh, self.python, self.c) if text is not None]
        if len(programs) != 1:
            raise ValueError("an attack has exactly one of sh, python and c")
        # A spec's files are templates, and two braces would be a value's name.
        if any("{{" in text for text in (*programs, self.then, self.beside or "")):
            raise ValueError("a program holds no two braces in a row")
        return self

    def applies_to(self, backend: str) -> bool:
        """Whether it makes sense on this backend."""
        return not self.backends or backend in self.backends


_FILES: Final = resources.files("penstock.redteam")


def text_of(path: str) -> str:
    """A file of this package."""
    return _FILES.joinpath(*path.split("/")).read_text("utf-8")


def registry() -> Mapping[str, Attack]:
    """All attacks by name, in the order of their classes."""
    found: dict[str, Attack] = {}
    for kind in AttackClass:
        for item in _entries(kind):
            attack = Attack.model_validate({"attack_class": kind, **item})
            if attack.name in found:
                raise ValueError(f"two attacks are called {attack.name}")
            found[attack.name] = attack
    return found


def select(names: Sequence[str] = (), classes: Sequence[str] = ()) -> list[Attack]:
    """The attacks with these names or of these classes; all without either.

    Raises:
        InvalidArgument: `ATTACK_UNKNOWN`, there is no attack or no class of such a name.
    """
    known = registry()
    unknown = [name for name in names if name not in known]
    unknown += [name for name in classes if name not in set(AttackClass)]
    if unknown:
        raise InvalidArgument(
            f"There is no attack and no class {', '.join(unknown)}; classes are {', '.join(AttackClass)},"
            " `penstock doctor --attack --list` lists the attacks",
            reason="ATTACK_UNKNOWN",
        )
    if not names and not classes:
        return list(known.values())
    return [attack for attack in known.values() if attack.name in names or attack.attack_class in classes]


def _entries(kind: AttackClass) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load(text_of(f"attacks/{kind}.yaml"))
    return entries
