"""What a run does: made from the command line, and read by the trainer's own process from a file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

TRAINERS: Final = ("trl", "verl")
FILE: Final = "plan.json"
_MAY_CHANGE: Final = ("attempts", "concurrency", "out", "sandbox", "unseen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run of the recipe.

    Attributes:
        model: directory of the model before training.
        out: everything that the run writes.
        tasks: a directory with two of tasks: `train` and `test`.
        agents: agents that are trained with.
        unseen: agents that only the evaluations run.
        trainer: trl or verl.
        steps: optimizer steps.
        groups: groups of rollouts for each step; group i of a run is of task i and of agent i, both in turn.
        group_size: rollouts of a group, 2 or more.
        attempts: of each agent at each task of `test`, before and after.
        concurrency: rollouts at once, in evaluations.
        learning_rate: constant, of Adam.
        context_tokens: the model's context that is used, prompt and answer together.
        prompt_tokens: of an agent's first prompt, at most (verl's arrays).
        response_tokens: of all that follows it, at most (verl's arrays).
        answer_tokens: of one answer, for agents that have such an option.
        max_calls: of a rollout.
        agent_seconds: of a rollout.
        gpus: of the machine, all used by each phase.
        engine_options: of vLLM in the evaluations.
        training_options: of vLLM beside TRL, on the same GPUs.
        agent_options: options of agents, by agent and name; known ones beside the two above.
        tiny: a model made on the spot, on a CPU.
        sandbox: settings of the sandbox service.
    """

    model: Path
    out: Path
    tasks: Path
    agents: tuple[str, ...]
    unseen: tuple[str, ...]
    trainer: str
    steps: int
    groups: int
    group_size: int
    attempts: int
    concurrency: int
    learning_rate: float
    context_tokens: int
    prompt_tokens: int
    response_tokens: int
    answer_tokens: int
    max_calls: int
    agent_seconds: float
    gpus: int
    engine_options: Mapping[str, str]
    training_options: Mapping[str, str]
    agent_options: Mapping[str, Mapping[str, Any]]
    tiny: bool
    sandbox: Mapping[str, Any]

    def faults(self) -> list[str]:
        """Returns what is wrong with it, each with the option's name; empty = it can run."""
        found = []
        if not (self.model / "config.json").is_file() or not [*self.model.glob("model*.safetensors")]:
            found.append(f"MODEL: {self.model} has no config.json and model*.safetensors")
        found += [
            f"--tasks: {self.tasks} has no directory {name}"
            for name in ("train", "test")
            if not (self.tasks / name).is_dir()
        ]
        if both := set(self.agents) & set(self.unseen):
            found.append(f"--unseen: {', '.join(sorted(both))} is trained with")
        if not self.agents:
            found.append("--agent: none")
        if self.trainer not in TRAINERS:
            found.append(f"--trainer: {self.trainer} is none of {', '.join(TRAINERS)}")
        least = {"steps": 1, "groups": 1, "group_size": 2, "attempts": 1, "concurrency": 1, "max_calls": 1}
        found += [
            f"--{name.replace('_', '-')}: {value} is less than {bound}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        if self.prompt_tokens + self.response_tokens > self.context_tokens:
            found.append(
                f"--prompt-tokens and --response-tokens: {self.prompt_tokens} and {self.response_tokens} are more than "
                f"--context-tokens {self.context_tokens}"
            )
        return found

    def changes(self) -> list[str]:
        """Returns the fields in which the run that `out` has already is another one: its results are not of this."""
        file = self.out / FILE
        if not file.exists():
            return []
        before, now = json.loads(file.read_text("utf-8")), json.loads(self._text())
        return [name for name in now if name not in _MAY_CHANGE and now[name] != before.get(name)]

    def write(self) -> Path:
        """Writes it into `out`; returns the file."""
        file = self.out / FILE
        file.write_text(self._text(), "utf-8")
        return file

    def _text(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads what `write` wrote."""
        values: dict[str, Any] = json.loads(file.read_text("utf-8"))
        kinds: dict[str, type] = {"model": Path, "out": Path, "tasks": Path, "agents": tuple, "unseen": tuple}
        return cls(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})

    @property
    def trained(self) -> Path:
        """The model after training."""
        return self.out / "trained"

    @property
    def weights(self) -> Path:
        """Where TRL puts files of weights for vLLM."""
        return self.out / "weights"
