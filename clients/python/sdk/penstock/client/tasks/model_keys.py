"""`models` of a task file: several models that answer a rollout's calls. A file of its own has the same list.

The rules are those of the services (`penstock.values.models`), but for what only the rollout's mode decides.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from google.protobuf.json_format import ParseDict
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import InitErrorDetails

from penstock.client.tasks.field_types import Plain
from penstock.client.tasks.named_files import Beside
from penstock.client.tasks.spec import CallRule, Inference, PolicyConstraint, RolloutModel, Tokenizer, Upstream
from penstock.client.tasks.strict_model import Place, Strict, conflict
from penstock.client.tasks.yaml import YamlFile
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import models as rules
from penstock.values.similar_names import did_you_mean

_SOURCES: Final = ("inference", "upstream", "tokenizer")
_CLASS: Final = "CALL_CLASS_"
_CLASSES: Final = tuple(
    name.removeprefix(_CLASS).lower() for name, number in trajectory_pb2.CallClass.items() if number
)

_Index = Annotated[int, Field(ge=0, le=rules.MOST_INDEX)]
_Version = Annotated[int, Field(ge=0, lt=1 << 63)]


def _call_class(name: str) -> str:
    if name not in _CLASSES:
        raise ValueError(f"no such class of calls{did_you_mean(name, _CLASSES)}")
    return name


class CallRuleTable(Strict):
    """`calls` of a model."""

    from_index: _Index | None = Field(None, description="Position of the first call among the rollout's, from 0.")
    until_index: _Index | None = Field(None, description="Position after the last.")
    from_turn: _Index | None = Field(None, description="The least answers that its prompt continues.")
    until_turn: _Index | None = Field(None, description="One more than the most.")
    call_classes: list[Annotated[str, AfterValidator(_call_class)]] = Field(
        default_factory=list, max_length=len(_CLASSES), description="Such as main, sub_agent, compaction, title."
    )

    def made(self) -> CallRule:
        """Returns the value."""
        return CallRule(**self.model_dump())


class PolicyTable(Strict):
    """`policy` of a model."""

    min_version: _Version | None = None
    max_staleness: _Version | None = None

    def made(self) -> PolicyConstraint:
        """Returns the value."""
        return PolicyConstraint(min_version=self.min_version, max_staleness=self.max_staleness)


class ModelTable(Strict):
    """One of `models`."""

    policy_id: str = Field(description="The policy, which has versions of its own.")
    name: Plain = Field("", description="The name that the agent requests; default: each that no other model has.")
    inference: Plain | None = Field(None, description='An inference service\'s name; "" is the default one.')
    adapter: Plain = Field("", description="An adapter of the inference service.")
    upstream: Plain = Field("", description="The name of an endpoint in the operator's settings.")
    model: Plain = Field("", description="The model to ask of the upstream.")
    tokenizer: Plain = Field("", description="A tokenizer's name: a trainer answers. Default source: the rollout's.")
    trained: bool | None = Field(None, description="Whether its tokens may be trained; default: true.")
    policy: PolicyTable | None = Field(None, description="Which versions may answer.")
    calls: CallRuleTable | None = Field(None, description="Which calls it answers; default: what is left.")
    delegated: bool | None = Field(None, description="In gate mode, whether its source answers at once.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Refuses several sources, and what is of a source that is not set."""
        given = [name for name in _SOURCES if value.get(name) or (name == "inference" and value.get(name) is not None)]
        if len(given) > 1:
            yield (given[1],), f"set {' or '.join(given)}"
        for name, holder in (("adapter", "inference"), ("model", "upstream")):
            if value.get(name) and holder not in given:
                yield (name,), f"is of an {holder}, which is not set"

    def made(self) -> RolloutModel:
        """Returns the value."""
        return RolloutModel(
            policy_id=self.policy_id,
            name=self.name,
            source=self._source(),
            trained=self.trained,
            policy=None if self.policy is None else self.policy.made(),
            calls=None if self.calls is None else self.calls.made(),
            delegated=self.delegated,
        )

    def message(self) -> interception_pb2.RolloutModel:
        """Returns the message, for the rules."""
        fields = self.model_dump(exclude_none=True, include={"policy_id", "name", "trained", "policy", "delegated"})
        if self.calls is not None:
            fields["calls"] = self.calls.model_dump(exclude_none=True)
            fields["calls"]["call_classes"] = [_CLASS + name.upper() for name in self.calls.call_classes]
        if self.inference is not None:
            fields["source"] = {"inference": {"name": self.inference, "adapter": self.adapter}}
        elif self.upstream:
            fields["source"] = {"upstream": {"name": self.upstream, "model": self.model}}
        elif self.tokenizer:
            fields["source"] = {"tokenizer": {"name": self.tokenizer}}
        return ParseDict(fields, interception_pb2.RolloutModel())

    def _source(self) -> Inference | Upstream | Tokenizer | None:
        if self.inference is not None:
            return Inference(self.inference, self.adapter)
        if self.upstream:
            return Upstream(name=self.upstream, model=self.model)
        return Tokenizer(self.tokenizer) if self.tokenizer else None


def _hold(tables: list[ModelTable]) -> list[ModelTable]:
    """Applies the rules. Gate mode forbids nothing that another mode allows, but delegation to a tokenizer."""
    messages = [table.message() for table in tables]
    found = rules.problems(messages, interception_pb2.MODE_INTERCEPTION_GATE, interception_pb2.ModelSource())
    wrong = [_located(field, problem, tables) for field, problem in found]
    if wrong:
        raise ValidationError.from_exception_data("models", wrong)
    return tables


def _located(field: str, problem: str, tables: Sequence[ModelTable]) -> InitErrorDetails:
    """Returns the problem of a field of the message, `[0].calls.from_index`, at its place in the file."""
    steps: list[str | int] = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", field)]
    table = tables[int(steps[0])] if steps else None
    if steps[1:2] == ["source"]:
        steps[1:] = [next((name for name in _SOURCES if getattr(table, name)), "inference")]
    if len(steps) == 2 and getattr(table, str(steps[1])) is None:  # it is not in the file
        problem = f"{steps.pop()} {problem}"
    return InitErrorDetails(type=conflict(problem), loc=tuple(steps), input=None)


ModelTables = Annotated[list[ModelTable], Field(max_length=rules.MOST), AfterValidator(_hold)]
"""`models`."""


class ModelsFile(Strict):
    """The content of a file of models: what a task file has below `models`."""

    models: ModelTables = Field(min_length=1)

    @classmethod
    def unfolded(cls, value: Any) -> Any:
        """Expands the list."""
        return value if isinstance(value, Mapping) else {"models": value}


def load_models(path: str | Path) -> list[RolloutModel]:
    """Reads a rollout's models from a YAML or JSON file: a list, as a task file has below `models`.

    Raises:
        InvalidArgument: `TASK_FILE`; `violations` name the fields and lines.
    """
    return [table.made() for table in YamlFile(Path(path)).validated(ModelsFile, "list of models").models]
