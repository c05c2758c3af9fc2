"""Budgets and tokens as messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis import times
from penstock_interception.budgets import DEFAULT_CALL_TIMEOUT_S, Budgets, CallRate, RunBudgets
from penstock_interception.calls import Rollout
from penstock_interception.rpc import convert
from penstock_interception.tokens import ID_BYTES, Grant, Scope, TokenTerms

MAX_PERIOD_S = 86_400.0
MAX_TTL_S = 366 * 86_400.0

_SCOPES = {
    Scope.COMPLETIONS: interception_pb2.TOKEN_SCOPE_COMPLETIONS,
    Scope.READ: interception_pb2.TOKEN_SCOPE_READ,
    Scope.TOOLS: interception_pb2.TOKEN_SCOPE_TOOLS,
}
_SCOPES_BACK = {value: key for key, value in _SCOPES.items()}


def budgets_from(budgets: interception_pb2.Budgets) -> Budgets:
    """A rollout's budgets. Raises InvalidArgument that names the field."""
    return Budgets(
        max_calls=_number(budgets, "budgets", "max_calls"),
        max_prompt_tokens=_number(budgets, "budgets", "max_prompt_tokens"),
        max_completion_tokens=_number(budgets, "budgets", "max_completion_tokens"),
        max_total_tokens=_number(budgets, "budgets", "max_total_tokens"),
        max_request_bytes=_number(budgets, "budgets", "max_request_bytes"),
        wall_time_s=_period(budgets, "budgets", "wall_time"),
        call_rate=_rate(budgets, "budgets"),
        max_tokens_per_call=_number(budgets, "budgets", "max_tokens_per_call"),
        max_request_bytes_per_call=_number(budgets, "budgets", "max_request_bytes_per_call"),
        call_timeout_s=_period(budgets, "budgets", "call_timeout") or DEFAULT_CALL_TIMEOUT_S,
        max_tool_calls=_number(budgets, "budgets", "max_tool_calls"),
    )


def run_budgets_from(budgets: interception_pb2.RunBudgets) -> RunBudgets:
    """A run's budgets. Raises InvalidArgument that names the field."""
    return RunBudgets(
        max_calls=_number(budgets, "run_budgets", "max_calls"),
        max_prompt_tokens=_number(budgets, "run_budgets", "max_prompt_tokens"),
        max_completion_tokens=_number(budgets, "run_budgets", "max_completion_tokens"),
        max_total_tokens=_number(budgets, "run_budgets", "max_total_tokens"),
        max_request_bytes=_number(budgets, "run_budgets", "max_request_bytes"),
        wall_time_s=_period(budgets, "run_budgets", "wall_time"),
        call_rate=_rate(budgets, "run_budgets"),
    )


def token_terms_from(terms: interception_pb2.TokenTerms, where: str) -> TokenTerms:
    """What a token is wanted for. Raises InvalidArgument that names the field."""
    scopes: list[Scope] = []
    for index, number in enumerate(terms.scopes):
        scope = _SCOPES_BACK.get(number)
        if scope is None:
            raise convert.invalid(f"{where}.scopes[{index}]", "unknown")
        scopes.append(scope)
    ttl = None
    if terms.HasField("ttl"):
        ttl = times.seconds(terms.ttl)
        if not 1.0 <= ttl <= MAX_TTL_S:
            raise convert.invalid(f"{where}.ttl", "1 second to 1 year")
    return TokenTerms(tuple(sorted(set(scopes))), ttl)


def delay_from(request: pb.IssueTokenRequest | pb.RevokeTokensRequest, name: str) -> float | None:
    """Seconds until something is void; None when the request does not say."""
    if not request.HasField(name):  # type: ignore[arg-type]
        return None
    delay = times.seconds(getattr(request, name))
    if not 0.0 <= delay <= MAX_TTL_S:
        raise convert.invalid(name, "0 seconds to 1 year")
    return delay


def token_ids_from(given: Iterable[str]) -> list[bytes]:
    """Ids as `token_to` wrote them. Raises InvalidArgument."""
    ids = []
    for index, text in enumerate(given):
        try:
            token_id = bytes.fromhex(text)
        except ValueError:
            token_id = b""
        if len(token_id) != ID_BYTES:
            raise convert.invalid(f"token_ids[{index}]", "no token_id")
        ids.append(token_id)
    return ids


def tokens_to(rollout: Rollout) -> Iterator[pb.RolloutToken]:
    """A rollout's tokens, oldest first."""
    return map(token_to, rollout.grants.values())


def token_to(grant: Grant) -> pb.RolloutToken:
    """A token as those may see it who do not hold it."""
    message = pb.RolloutToken(
        token_id=grant.id.hex(),
        scopes=[_SCOPES[scope] for scope in sorted(grant.scopes)],
        create_time=times.timestamp(grant.created_ms / 1000),
    )
    if grant.expires_ms is not None:
        message.expire_time.CopyFrom(times.timestamp(grant.expires_ms / 1000))
    if grant.dies_ms is not None:
        message.revoke_time.CopyFrom(times.timestamp(grant.dies_ms / 1000))
    return message


def _number(budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str, name: str) -> int | None:
    if not budgets.HasField(name):  # type: ignore[arg-type]
        return None
    value = int(getattr(budgets, name))
    if value < 1:
        raise convert.invalid(f"{where}.{name}", "at least 1")
    return value


def _period(budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str, name: str) -> float | None:
    if not budgets.HasField(name):  # type: ignore[arg-type]
        return None
    value = times.seconds(getattr(budgets, name))
    if value <= 0:
        raise convert.invalid(f"{where}.{name}", "positive")
    return value


def _rate(budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str) -> CallRate | None:
    if not budgets.HasField("call_rate"):
        return None
    rate = budgets.call_rate
    if rate.calls < 1:
        raise convert.invalid(f"{where}.call_rate.calls", "at least 1")
    period = times.seconds(rate.period) if rate.HasField("period") else 1.0
    if not 0 < period <= MAX_PERIOD_S:
        raise convert.invalid(f"{where}.call_rate.period", "positive, at most 1 day")
    burst = rate.burst if rate.HasField("burst") else rate.calls
    if burst < 1:
        raise convert.invalid(f"{where}.call_rate.burst", "at least 1")
    return CallRate(rate.calls, period, burst)
