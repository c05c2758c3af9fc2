"""Which of a rollout's models answers a call, and what follows from it. Pure functions of a rollout's spec."""

from __future__ import annotations

from penstock_interception.domain.calls import PolicyBounds, RolloutSpec
from penstock_interception.graph.values import CallClass


def takes_name(spec: RolloutSpec, name: str) -> bool:
    """Returns whether an agent of this rollout may request a model by this name."""
    return not spec.models or any(model.name in ("", name) for model in spec.models)


def names(spec: RolloutSpec, own: str) -> tuple[str, ...]:
    """Returns the names that an agent may list, each once and the first the default; `own` is of a model without."""
    return tuple(dict.fromkeys(model.name or own for model in spec.models)) or (spec.model_name or own,)


def choose(spec: RolloutSpec, name: str, index: int, turn: int, call_class: CallClass) -> int | None:
    """Returns the position of the model that answers a call; None where the rollout has no models.

    The last model of each name takes what the others leave, so a call whose name the rollout takes has one.
    """
    if not any(model.name == name for model in spec.models):
        name = ""
    for position, model in enumerate(spec.models):
        if model.name == name and (model.rule is None or model.rule.selects(index, turn, call_class)):
            return position
    return None


def only_trained(spec: RolloutSpec) -> str:
    """Returns the policy that announcements without one are of: the only trained one; "" if there are several."""
    trained = {model.policy_id for model in spec.models if model.trained}
    return next(iter(trained)) if len(trained) == 1 else ""


def is_trained(spec: RolloutSpec, position: int | None, policy_id: str) -> bool:
    """Returns whether tokens of a policy may be trained, which answered a call that this model was chosen for.

    They differ where a recorded answer of another policy answered it.
    """
    if not spec.models:
        return not policy_id
    if position is not None and spec.models[position].policy_id == policy_id:
        return spec.models[position].trained
    return any(model.trained for model in spec.models if model.policy_id == policy_id)


def bounds_of(spec: RolloutSpec, position: int | None, policy_id: str) -> PolicyBounds:
    """Returns which versions of a policy may answer a call that this model was chosen for."""
    if not spec.models:
        return spec.policy
    if position is not None and spec.models[position].policy_id == policy_id:
        return spec.models[position].bounds
    return next((model.bounds for model in spec.models if model.policy_id == policy_id), PolicyBounds())
