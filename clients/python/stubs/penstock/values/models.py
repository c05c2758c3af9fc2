"""The rules of a rollout's models, for clients and services alike.

Invariants: each rule needs the request alone; which sources there are, and which tokenizer they have, the gate knows.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2

MOST: Final = 64
"""Models of a rollout, and policies of a selector or an announcement."""
MOST_NAME: Final = 256
MOST_INDEX: Final = 1_000_000
_POLICY: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")
_CLASSES: Final = frozenset(trajectory_pb2.CallClass.values()) - {
    trajectory_pb2.CALL_CLASS_UNSPECIFIED,
    trajectory_pb2.CALL_CLASS_JUDGE,
}


def policy_problem(policy_id: str) -> str:
    """Returns why this cannot be a policy's id; empty if it can."""
    return "" if _POLICY.fullmatch(policy_id) else "must be 1 to 128 of a-z A-Z 0-9 _ . -, the first a letter or digit"


def is_delegated(model: interception_pb2.RolloutModel) -> bool:
    """Returns whether, in gate mode, the model's source answers at once."""
    if model.HasField("delegated"):
        return model.delegated
    return model.HasField("source") and not is_trained(model)


def is_trained(model: interception_pb2.RolloutModel) -> bool:
    """Returns whether the model's tokens may be trained."""
    return model.trained if model.HasField("trained") else True


def problems(
    models: Sequence[interception_pb2.RolloutModel],
    mode: interception_pb2.Mode.ValueType,
    source: interception_pb2.ModelSource,
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong: the field, such as `[0].name` (empty: the list itself), and the reason.

    `mode` and `source` are the rollout's.
    """
    if models and mode == interception_pb2.MODE_BLACK_BOX:
        yield "", "black box mode has one upstream: leave it unset"
    if len(models) > MOST:
        yield "", f"must be at most {MOST}"
        return
    last = {model.name: index for index, model in enumerate(models)}
    for index, model in enumerate(models):
        here = f"[{index}]"
        if len(model.name) > MOST_NAME:
            yield f"{here}.name", f"must have at most {MOST_NAME} characters"
        if problem := policy_problem(model.policy_id):
            yield f"{here}.policy_id", problem
        is_last = last[model.name] == index
        if model.HasField("calls"):
            yield from _rule(model.calls, f"{here}.calls")
            if is_last:
                yield f"{here}.calls", "the last model of a name takes all calls that are left: leave it unset"
        elif not is_last:
            yield f"{here}.calls", "is required: a further model has this name"
        for field, value in model.policy.ListFields():
            if value < 0:
                yield f"{here}.policy.{field.name}", "must be at least 0"
        yield from _source(model, here, mode, source)
    if models and not any(map(is_trained, models)):
        yield "", "must have one that is trained"


def _rule(rule: interception_pb2.CallRule, here: str) -> Iterator[tuple[str, str]]:
    stated = {field.name for field, _ in rule.ListFields()}
    if not stated:
        yield here, "must have a condition"
    for name in ("index", "turn"):
        start, end = getattr(rule, f"from_{name}"), getattr(rule, f"until_{name}")
        if not 0 <= start <= MOST_INDEX:
            yield f"{here}.from_{name}", f"must be 0 to {MOST_INDEX}"
        if f"until_{name}" in stated and not start < end <= MOST_INDEX:
            yield f"{here}.until_{name}", f"must be more than from_{name}, and at most {MOST_INDEX}"
    for number, call_class in enumerate(rule.call_classes):
        if call_class not in _CLASSES:
            yield f"{here}.call_classes[{number}]", "is not a class of an agent's calls"


def _source(
    model: interception_pb2.RolloutModel,
    here: str,
    mode: interception_pb2.Mode.ValueType,
    of_rollout: interception_pb2.ModelSource,
) -> Iterator[tuple[str, str]]:
    source, upstream = model.source, model.source.upstream
    is_gate = mode == interception_pb2.MODE_INTERCEPTION_GATE
    kind = source.WhichOneof("source")
    if model.HasField("source") and kind is None:
        yield f"{here}.source", "must name an inference service, an upstream or a tokenizer"
    if kind == "upstream":
        if upstream.HasField("caller"):
            yield f"{here}.source.upstream.caller", "must be one of the operator's: name an endpoint"
        elif upstream.WhichOneof("endpoint") is None:
            yield f"{here}.source.upstream.endpoint", "is required: the name of an endpoint"
        if is_trained(model):
            yield f"{here}.trained", "must be false: the answers of an upstream are text"
        if model.policy.ListFields():
            yield f"{here}.policy", "must be unset: the answers of an upstream have no versions"
    if kind == "tokenizer" and not is_gate:
        yield f"{here}.source.tokenizer", "needs gate mode: a tokenizer answers no calls"
    for name in ("tool_call_parser", "control_tokens"):
        if getattr(source, name):
            yield f"{here}.source.{name}", "is that of the rollout's source: leave it unset"
    if model.HasField("delegated") and not is_gate:
        yield f"{here}.delegated", "needs gate mode: in other modes each source answers at once"
    asked = source if model.HasField("source") else of_rollout
    if is_gate and is_delegated(model) and asked.WhichOneof("source") == "tokenizer":
        yield f"{here}.delegated", "must not be: a tokenizer answers no calls"
