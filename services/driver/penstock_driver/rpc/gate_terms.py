"""What a rollout's spec asks of the gate: checked before anything is started, and passed on as it is."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock_chassis import times
from penstock_driver.rpc.findings import Findings

_TOKEN_SCOPES: Final = frozenset(interception_pb2.TokenScope.values()) - {interception_pb2.TOKEN_SCOPE_UNSPECIFIED}
_MAX_TTL_S: Final = 366 * 86_400
_MAX_PERIOD_S: Final = 86_400


def check_gate_terms(spec: rollout_pb2.RolloutSpec, found: Findings) -> None:
    """What the gate would refuse once the rollout has begun."""
    _check_source(spec, found)
    _check_budgets(spec.budgets, "spec.budgets", found)
    _check_budgets(spec.run_budgets, "spec.run_budgets", found)
    if spec.HasField("run_budgets") and not spec.run_id:
        found.add("spec.run_budgets", "needs run_id")
    for index, scope in enumerate(spec.token_terms.scopes):
        if scope not in _TOKEN_SCOPES:
            found.add(f"spec.token_terms.scopes[{index}]", "unknown")
    if spec.token_terms.HasField("ttl") and not 1 <= times.seconds(spec.token_terms.ttl) <= _MAX_TTL_S:
        found.add("spec.token_terms.ttl", "expected 1 second to 1 year")
    for field, value in spec.policy.ListFields():
        if value < 0:
            found.add(f"spec.policy.{field.name}", "expected at least 0")


def gate_terms(spec: rollout_pb2.RolloutSpec) -> rollout_gate_service_pb2.OpenRolloutRequest:
    """The terms as the gate takes them, without what the driver adds when it opens the rollout there."""
    request = rollout_gate_service_pb2.OpenRolloutRequest(mode=spec.mode)
    if spec.HasField("source"):
        request.source.CopyFrom(spec.source)
    if spec.HasField("budgets"):
        request.budgets.CopyFrom(spec.budgets)
    if spec.HasField("run_budgets"):
        request.run_budgets.CopyFrom(spec.run_budgets)
    if spec.HasField("token_terms"):
        request.token_terms.CopyFrom(spec.token_terms)
    if spec.HasField("policy"):
        request.policy.CopyFrom(spec.policy)
    if spec.HasField("run_id"):
        request.run_id = spec.run_id
    if spec.HasField("sampling_override"):
        request.sampling_override.CopyFrom(spec.sampling_override)
    return request


def _check_budgets(
    budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str, found: Findings
) -> None:
    for field, value in budgets.ListFields():
        if isinstance(value, Duration):
            if times.seconds(value) <= 0:
                found.add(f"{where}.{field.name}", "expected more than 0")
        elif isinstance(value, interception_pb2.CallRate):
            if value.calls < 1:
                found.add(f"{where}.call_rate.calls", "expected at least 1")
            if value.HasField("period") and not 0 < times.seconds(value.period) <= _MAX_PERIOD_S:
                found.add(f"{where}.call_rate.period", "expected more than 0 and at most 1 day")
            if value.HasField("burst") and value.burst < 1:
                found.add(f"{where}.call_rate.burst", "expected at least 1")
        elif value < 1:
            found.add(f"{where}.{field.name}", "expected at least 1")


def _check_source(spec: rollout_pb2.RolloutSpec, found: Findings) -> None:
    source, upstream = spec.source, spec.source.upstream
    kind = source.WhichOneof("source")
    if kind == "upstream" and upstream.WhichOneof("endpoint") is None:
        found.add("spec.source.upstream.endpoint", "is required: the name of an endpoint, or the caller's own")
    if upstream.HasField("caller"):
        key = upstream.caller.api_key
        if key and (not key.strip() or key != key.strip() or not key.isascii() or not key.isprintable()):
            found.add("spec.source.upstream.caller.api_key", "expected printable ASCII without whitespace around it")
    if spec.mode == interception_pb2.MODE_BLACK_BOX and kind != "upstream":
        found.add("spec.source", "black box mode needs an upstream, which answers the agent")
    if kind == "tokenizer" and spec.mode != interception_pb2.MODE_INTERCEPTION_GATE:
        found.add("spec.source.tokenizer", "only in gate mode: nobody else would answer")
