"""Converts a rollout's user from a client's request, and fills in what it leaves out."""

from __future__ import annotations

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock_chassis import times
from penstock_driver.domain.users import MODEL_INSTRUCTIONS, User, UserModel


def user_from_proto(spec: rollout_pb2.RolloutSpec) -> User | None:
    """The user of a rollout, to be checked; None if it has none."""
    if not spec.HasField("user"):
        return None
    given = spec.user
    script = tuple(given.script.instructions)
    is_model = given.WhichOneof("kind") == "model"
    most = given.max_instructions if given.HasField("max_instructions") else None
    if most is None:
        most = MODEL_INSTRUCTIONS if is_model else max(1, len(script))
    return User(most, script, _model(given.model, most) if is_model else None)


def _model(given: rollout_pb2.UserModel, most: int) -> UserModel:
    terms = rollout_gate_service_pb2.OpenRolloutRequest(
        mode=interception_pb2.MODE_TRANSPARENT_PROXY, budgets=given.budgets
    )
    if given.HasField("source"):
        terms.source.CopyFrom(given.source)
    if not given.budgets.HasField("max_calls"):
        terms.budgets.max_calls = max(1, 2 * most)
    known = UserModel("", terms)
    return UserModel(
        given.prompt,
        terms,
        given.max_tokens if given.HasField("max_tokens") else known.max_tokens,
        given.temperature if given.HasField("temperature") else None,
        times.seconds(given.timeout) if given.HasField("timeout") else known.timeout_s,
    )


def make_effective(wire: rollout_pb2.User, user: User) -> None:
    """Fill in the defaults."""
    wire.max_instructions = user.max_instructions
    if user.model is not None:
        wire.model.budgets.CopyFrom(user.model.terms.budgets)
        wire.model.max_tokens = user.model.max_tokens
        wire.model.timeout.CopyFrom(times.duration(user.model.timeout_s))
