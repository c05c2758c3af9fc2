"""A rollout's models, and what trainers say of their policies, from requests; each rule names its field."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.interception.v1 import intercept_service_pb2, interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.values import models as rules
from penstock_chassis.errors import Violation
from penstock_chassis.validation import invalid, invalid_field
from penstock_interception.domain.calls import CallRule, PolicyBounds, RolloutModel, Source
from penstock_interception.wire import convert


def models_from(
    request: pb.OpenRolloutRequest | pb.CheckSourceRequest,
    bounds: PolicyBounds,
    source_from: Callable[[interception_pb2.ModelSource], tuple[Source, str | None]],
) -> tuple[RolloutModel, ...]:
    """Returns the models. `bounds` are the rollout's. Raises InvalidArgument with each field that is wrong."""
    found = [
        Violation(f"models{place}", why) for place, why in rules.problems(request.models, request.mode, request.source)
    ]
    if found:
        raise invalid(found)
    is_gate = request.mode == interception_pb2.MODE_INTERCEPTION_GATE
    return tuple(
        RolloutModel(
            name=model.name,
            policy_id=model.policy_id,
            source=source_from(model.source)[0] if model.HasField("source") else None,
            trained=rules.is_trained(model),
            bounds=_bounds(model, bounds),
            rule=_rule(model.calls) if model.HasField("calls") else None,
            delegated=is_gate and rules.is_delegated(model),
        )
        for model in request.models
    )


def policy_ids_from(selector: intercept_service_pb2.CallSelector) -> frozenset[str]:
    """Returns the policies of a selector. Raises InvalidArgument."""
    if len(selector.policy_ids) > rules.MOST:
        raise invalid_field("selector.policy_ids", f"at most {rules.MOST}")
    for index, policy_id in enumerate(selector.policy_ids):
        if problem := rules.policy_problem(policy_id):
            raise invalid_field(f"selector.policy_ids[{index}]", problem)
    return frozenset(selector.policy_ids)


def versions_from(request: intercept_service_pb2.Hello | intercept_service_pb2.LeaseCallsRequest) -> dict[str, int]:
    """Returns the newest version of each policy; "" = the only trained one. Raises InvalidArgument."""
    if len(request.policies) > rules.MOST:
        raise invalid_field("policies", f"at most {rules.MOST}")
    stated = [("", request.policy_version)] if request.HasField("policy_version") else []
    for index, one in enumerate(request.policies):
        if not one.policy_id:
            raise invalid_field(f"policies[{index}].policy_id", "is required: policy_version is of the only policy")
        stated.append((announced_policy(one, f"policies[{index}]."), one.policy_version))
    return _newest(stated)


def announced_policy(announced: intercept_service_pb2.PolicyAnnounced, where: str) -> str:
    """Returns the policy that an announcement is of; `where` is its path. Raises InvalidArgument."""
    if announced.policy_id and (problem := rules.policy_problem(announced.policy_id)):
        raise invalid_field(f"{where}policy_id", problem)
    return announced.policy_id


def _newest(stated: Iterable[tuple[str, int]]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for policy_id, version in stated:
        newest[policy_id] = max(version, newest.get(policy_id, version))
    return newest


def _bounds(model: interception_pb2.RolloutModel, of_rollout: PolicyBounds) -> PolicyBounds:
    if not model.HasField("policy"):
        return of_rollout if rules.is_trained(model) else PolicyBounds()
    return bounds_from(model.policy)


def bounds_from(policy: interception_pb2.PolicyVersionConstraint) -> PolicyBounds:
    """Returns a constraint that is checked already."""
    return PolicyBounds(
        policy.min_version if policy.HasField("min_version") else None,
        policy.max_staleness if policy.HasField("max_staleness") else None,
    )


def _rule(rule: interception_pb2.CallRule) -> CallRule:
    return CallRule(
        rule.from_index,
        rule.until_index if rule.HasField("until_index") else None,
        rule.from_turn,
        rule.until_turn if rule.HasField("until_turn") else None,
        tuple(convert.CLASSES_BACK[number] for number in rule.call_classes),
    )
