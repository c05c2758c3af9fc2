"""Budgets and agent keys as messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TypeVar

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.values import numbers, reader
from penstock_chassis import times
from penstock_chassis.validation import invalid_field
from penstock_interception.domain.agent_keys import ID_BYTES, AgentKey, KeyTerms, Scope
from penstock_interception.domain.budgets import Budgets, CallRate, RunBudgets
from penstock_interception.domain.state import Rollout

_B = TypeVar("_B", bound=RunBudgets)

MAX_PERIOD_S = 86_400.0
MAX_TTL_S = 366 * 86_400.0

_SCOPES = numbers(Scope, interception_pb2.TokenScope)
_SCOPES_BACK = {value: key for key, value in _SCOPES.items()}


def budgets_from(budgets: interception_pb2.Budgets) -> Budgets:
    """A rollout's budgets. Raises InvalidArgument that names the field."""
    return _checked(_budgets_from(budgets), "budgets")


def run_budgets_from(budgets: interception_pb2.RunBudgets) -> RunBudgets:
    """A run's budgets. Raises InvalidArgument that names the field."""
    return _checked(_run_budgets_from(budgets), "run_budgets")


def key_terms_from(terms: interception_pb2.TokenTerms, where: str) -> KeyTerms:
    """The terms of a requested key. Raises InvalidArgument that names the field."""
    scopes: list[Scope] = []
    for index, number in enumerate(terms.scopes):
        scope = _SCOPES_BACK.get(number)
        if scope is None:
            raise invalid_field(f"{where}.scopes[{index}]", "unknown")
        scopes.append(scope)
    ttl = None
    if terms.HasField("ttl"):
        ttl = times.seconds(terms.ttl)
        if not 1.0 <= ttl <= MAX_TTL_S:
            raise invalid_field(f"{where}.ttl", "1 second to 1 year")
    return KeyTerms(tuple(sorted(set(scopes))), ttl)


def delay_from(request: pb.IssueTokenRequest | pb.RevokeTokensRequest, name: str) -> float | None:
    """Seconds until keys become void; None if unset."""
    if not request.HasField(name):  # type: ignore[arg-type]
        return None
    delay = times.seconds(getattr(request, name))
    if not 0.0 <= delay <= MAX_TTL_S:
        raise invalid_field(name, "0 seconds to 1 year")
    return delay


def key_ids_from(given: Iterable[str]) -> list[bytes]:
    """Ids as `key_to` wrote them. Raises InvalidArgument."""
    ids = []
    for index, text in enumerate(given):
        try:
            token_id = bytes.fromhex(text)
        except ValueError:
            token_id = b""
        if len(token_id) != ID_BYTES:
            raise invalid_field(f"token_ids[{index}]", "no token_id")
        ids.append(token_id)
    return ids


def keys_to(rollout: Rollout) -> Iterator[pb.RolloutToken]:
    """A rollout's agent keys, oldest first."""
    return map(key_to, rollout.keys.values())


def key_to(grant: AgentKey) -> pb.RolloutToken:
    """An agent key's description, without the key itself."""
    message = pb.RolloutToken(
        token_id=grant.id.hex(),
        scopes=[_SCOPES[scope] for scope in sorted(grant.scopes)],
        create_time=times.timestamp(grant.created_ms / 1000),
    )
    if grant.expires_ms is not None:
        message.expire_time.CopyFrom(times.timestamp(grant.expires_ms / 1000))
    if grant.revoked_ms is not None:
        message.revoke_time.CopyFrom(times.timestamp(grant.revoked_ms / 1000))
    return message


_budgets_from = reader(Budgets, interception_pb2.Budgets)
_run_budgets_from = reader(RunBudgets, interception_pb2.RunBudgets)
reader(
    CallRate,
    interception_pb2.CallRate,
    left_out=("period",),
    by={
        "period_s": lambda rate: times.seconds(rate.period) if rate.HasField("period") else 1.0,
        "burst": lambda rate: rate.burst if rate.HasField("burst") else rate.calls,
    },
)


def _checked(budgets: _B, where: str) -> _B:
    for item in fields(budgets):
        name, value = f"{where}.{item.name.removesuffix('_s')}", getattr(budgets, item.name)
        if isinstance(value, int) and value < 1:
            raise invalid_field(name, "at least 1")
        if isinstance(value, float) and value <= 0:
            raise invalid_field(name, "positive")
        if isinstance(value, CallRate):
            _check_rate(value, name)
    return budgets


def _check_rate(rate: CallRate, where: str) -> None:
    if rate.calls < 1:
        raise invalid_field(f"{where}.calls", "at least 1")
    if not 0 < rate.period_s <= MAX_PERIOD_S:
        raise invalid_field(f"{where}.period", "positive, at most 1 day")
    if rate.burst < 1:
        raise invalid_field(f"{where}.burst", "at least 1")
