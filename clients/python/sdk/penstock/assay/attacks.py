"""The reward attacks that an assay tries, as data: attacks.yaml beside this module."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from penstock.tasks.scripts import quoted_path


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAttack:
    """A shell script that does none of a task's work; `tries` is one plain sentence."""

    name: str
    tries: str
    sh: str

    @property
    def needs_files(self) -> bool:
        """Whether it attacks the files that the solution changes or makes, and does nothing without them."""
        return '"$@"' in self.sh

    def script(self, paths: Sequence[str]) -> str:
        """Returns the script for a task whose solution changes or makes these files."""
        return f"set -- {' '.join(map(quoted_path, paths))}\n{self.sh}"


def attacks() -> tuple[RewardAttack, ...]:
    """Returns all attacks, in the order of their file."""
    text = resources.files("penstock.assay").joinpath("attacks.yaml").read_text("utf-8")
    return tuple(RewardAttack(**item) for item in yaml.safe_load(text))
