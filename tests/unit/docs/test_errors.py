"""docs/errors.md, docs/status.md and the protos' comments say what the code does, in both directions.

Reasons are what programs compare, so a name that only stands in one of the three is a defect of the other two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
from tests.unit.docs import code, protos
from tests.unit.docs.code import ANY, Raised
from tests.unit.docs.pages import Row, tables, words

from penstock.client import errors as client_errors
from penstock.interception.v1 import intercept_service_pb2
from penstock.local.stack import StackFailed
from penstock_chassis import errors, rpc_status
from penstock_chassis.errors import PenstockError
from penstock_driver.domain.rollout import COMPONENT_OF, Cause, Component
from penstock_interception.domain.calls import CallState
from penstock_interception.ingress import errors as outcomes
from penstock_sandbox.domain.model import ENDED_INSIDE

PAGE = "docs/errors.md"
EVERY = "Every service"
HEADINGS = {
    "chassis": EVERY,
    "sandbox": "Sandbox service",
    "driver": "Driver service",
    "interception": "Interception service",
    "inference": "Inference service",
}
CODES = {kind.__name__: status.name for kind, status in rpc_status.CODES.items()}
CLIENT_KINDS = frozenset(
    item.__name__
    for item in [*vars(client_errors).values(), StackFailed]
    if isinstance(item, type) and issubclass(item, client_errors.PenstockError)
)

PASSED_ON = {
    "chassis": {
        "penstock_chassis/rpc_status.py: kind(reason=reason)": "the reason of the service that was called",
        "penstock_chassis/rpc_status.py: kind(reason=f'TRANSPORT_{code.name}')": "the transport's own",
    },
    "sandbox": {
        "penstock_sandbox/domain/errno.py: kind(reason=reason)": "from the table above it, which is read",
    },
    "driver": {},
    "interception": {},
    "inference": {
        "penstock_inference/engines/numpy/model.py: kind(reason=reason)": "from the pairs above it, which are read",
        "penstock_inference/engines/checkpoint.py: kind(reason=reason)": "from the pairs above it, which are read",
        "penstock_inference/engines/scripted/engine.py: FailedPrecondition(reason=error.reason)": "the codec's",
        "penstock_inference/engines/scripted/engine.py: InvalidArgument(reason=error.reason)": "the codec's",
        "penstock_inference/engines/no_engine.py: FailedPrecondition(reason=error.reason)": "the codec's",
        "penstock_inference/rpc/inference_service.py: InvalidArgument(reason=error.reason)": "the codec's",
        "penstock_inference/app.py: FailedPrecondition(reason=error.reason)": "the codec's",
    },
    "client": {
        "penstock/client/errors.py: kind(reason=reason)": "the reason of the service that was called",
        "penstock/client/sandboxes/handle.py: kind(reason=failure.reason)": "of the child that could not be made",
        "penstock/adapters/harness/session.py: RolloutFailed(reason=failure.reason)": "of the rollout's own failure",
        "penstock/client/intercept/leases.py: kind(reason=reason)": "the name of the proto's ResultRejected.Reason",
        "penstock/cli/commands/up.py: StackFailed(reason=error.reason)": "the stack's",
        "penstock/local/processes.py: StackFailed(reason=failure.reason)": "of the service's last death",
    },
}
"""Where an error's reason is not written where it is made, and where it comes from instead."""

NOT_YET_RAISED: dict[str, str] = {}
"""Reasons that the contract names and that nothing can lead to today."""


@pytest.fixture(scope="module")
def page() -> dict[str, list[Row]]:
    """The tables of docs/errors.md."""
    return tables(PAGE)


@pytest.mark.parametrize("component", HEADINGS)
def test_error_table_lists_each_reason_with_its_code_and_no_other(component: str, page: dict[str, list[Row]]) -> None:
    """An error has a name, a meaning and a way on."""
    found, unread = code.raised(component, frozenset(CODES))
    assert unread == PASSED_ON[component].keys()
    _compare(found, page[HEADINGS[component]], "code", lambda kind: CODES[kind])


def test_each_reason_of_the_client_stands_in_its_table_with_its_exception(page: dict[str, list[Row]]) -> None:
    """What the client finds by itself is told the same way."""
    found, unread = code.raised("client", CLIENT_KINDS)
    assert unread == PASSED_ON["client"].keys()
    _compare(found, page["Python client and command line"], "exception", lambda kind: kind)


def test_every_error_class_has_one_code_and_the_client_the_same_names() -> None:
    """Nothing can be raised by a service that the tables above do not see."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)}
    assert {kind.__name__ for kind in kinds} - {"PenstockError"} == CODES.keys()
    assert CODES.keys() <= CLIENT_KINDS


def test_failure_table_lists_each_failure_with_cause_and_retry(
    page: dict[str, list[Row]],
) -> None:
    """Cause, party, reason and whether to try again are what a trainer decides by; each party is somebody's."""
    found: dict[str, tuple[str, str, str]] = {}
    unread = []
    for module in code.modules("driver"):
        for call in module.calls():
            match call.args:
                case [ast.Attribute(value=ast.Name(id="Cause"), attr=cause), reason, *_]:
                    retriable = code.argument(call, 3) or code.keyword(call, "retriable") or ast.Constant(value=False)
                case [ast.Constant() as reason, *_] if ast.unparse(call.func) == "_failure":
                    cause, retriable = "VERIFIER", ast.Constant(value=False)
                case _:
                    continue
            names = list(code.strings(reason))
            if not names:
                unread.append(ast.unparse(call))
            for name in names:
                helps = ("yes" if retriable.value else "no") if isinstance(retriable, ast.Constant) else ANY
                party = _party(cause, code.keyword(call, "component") or code.argument(call, 5))
                assert found.setdefault(name, (cause, party, helps)) == (cause, party, helps)
    assert unread == [
        # another service's own, and the same of what a task asks
        "Failure(Cause.INFRASTRUCTURE, error.reason, error.message, retriable, phase, component)",
        "Failure(Cause.TASK, error.reason, error.message, False, phase)",
        "failed(Cause.VERIFIER, reason, message, Phase.VERIFYING)",  # of _failure, which is read
    ]
    rows = {row["reason"]: row for row in page["Why a rollout failed"]}
    assert found.keys() == rows.keys()
    for name, (cause, party, helps) in found.items():
        assert rows[name]["cause"] == cause, name
        assert party == ANY or rows[name]["caused by"] == party, name
        assert helps == ANY or rows[name]["retriable"] == helps, name
    assert {word for row in rows.values() for word in words(row["caused by"])} == set(Component)


def test_each_reason_why_a_sandbox_is_lost_stands_in_its_table(page: dict[str, list[Row]]) -> None:
    """The end of a sandbox is told with its reason."""
    found = set(ENDED_INSIDE)
    for module in code.modules("sandbox"):
        for call in module.calls():
            found |= set(code.strings(code.keyword(call, "lost_reason")))
            if code.last_name(call.func) in ("lose", "SandboxGone"):
                found |= set(code.strings(code.argument(call, 0)))
    assert found == {row["reason"] for row in page["Why a sandbox was lost"]}


def test_rejection_table_lists_each_rejection_with_the_clients_exception(
    page: dict[str, list[Row]],
) -> None:
    """A delivery is judged against its call, and the trainer is told how."""
    rows = page["Why a result was rejected"]
    names = set(intercept_service_pb2.ResultRejected.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert {row["reason"] for row in rows} == names
    rejections = {
        kind for kind in CLIENT_KINDS if issubclass(getattr(client_errors, kind, type), client_errors.ResultRejected)
    }
    assert {row["exception"] for row in rows} == rejections - {"ResultRejected"}


def test_each_reason_why_a_call_has_no_answer_stands_in_its_table(page: dict[str, list[Row]]) -> None:
    """A call that nobody answers says why."""
    found = set[str]()
    position = {"Failure": 0, "SourceError": 0, "cancel": 1, "_end": 2, "_finish": 2}
    for module in code.modules("interception"):
        for call in module.calls():
            if (at := position.get(code.last_name(call.func))) is not None:
                found |= set(code.strings(code.argument(call, at)))
    assert found - {"PASSED_THROUGH"} == {row["reason"] for row in page["Why a call has no answer"]}


def test_each_finding_of_a_grade_stands_in_its_table_with_its_severity(page: dict[str, list[Row]]) -> None:
    """A grade comes with its reasons."""
    found: dict[str, set[str]] = {}
    for module in code.modules("interception"):
        for call in module.calls():
            if code.last_name(call.func) != "Finding" or not call.args:
                continue
            severity = call.args[0]
            levels = {severity.attr} if isinstance(severity, ast.Attribute) else {"WARNING", "INFO"}
            names = set(code.strings(call.args[1]))
            if not names:
                assert ast.unparse(call.args[1]) == "f'CALL_{call.state.name}'"
                names = {f"CALL_{state.name}" for state in CallState if state.terminal} - {"CALL_DELIVERED"}
            for name in names:
                found.setdefault(name, set()).update(levels)
    assert found == {row["reason"]: words(row["severity"]) for row in page["Findings of a grade"]}


def test_each_http_error_that_an_agent_may_see_stands_in_its_table(page: dict[str, list[Row]]) -> None:
    """What an SDK does next depends on the status."""
    found = {(400, reason.lower()) for reason in outcomes._OWN_CONVERSATION}
    for module in code.modules("interception"):
        for call in module.calls():
            match code.last_name(call.func), call.args:
                case "Problem", [ast.Constant(value=int(status)), name, *_]:
                    found |= {(status, text) for text in _texts(name)}
                case "BadRequest", [_, _, name, *_]:
                    found |= {(400, text) for text in _texts(name)}
                case "json_response", _:
                    status_of = code.keyword(call, "status")
                    assert isinstance(status_of, ast.Constant)
                    found |= {(int(str(status_of.value)), text) for text in _member(call, "code")}
    assert found == {(int(row["status"]), row["code"]) for row in page["What an agent gets"]}


def test_each_reason_of_the_codec_stands_in_its_table(page: dict[str, list[Row]]) -> None:
    """What cannot become tokens exactly is refused by name."""
    found = set[str]()
    for module in code.modules("codec"):
        for call in module.calls():
            if code.last_name(call.func) == "CodecError":
                names = list(code.strings(code.argument(call, 0)))
                assert names, ast.unparse(call)
                found |= set(names)
    assert found == {row["reason"] for row in page["Codec"]}


def test_the_exit_codes_of_the_shell_agent_stand_in_their_table(page: dict[str, list[Row]]) -> None:
    """They decide what the driver calls a success."""
    modules = [item for item in code.modules("driver") if "agents/catalog/shell_agent" in item.path]
    found = set[int]()
    for node in (node for module in modules for node in ast.walk(module.tree)):
        match node:
            case ast.Call(func=ast.Name(id="Stop"), args=[ast.Constant(value=int(value)), *_]):
                found.add(value)
            case ast.FunctionDef(name="converse" | "main"):
                found |= {
                    item.value.value
                    for item in ast.walk(node)
                    if isinstance(item, ast.Return)
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, int)
                }
    assert found == {int(row["code"]) for row in page["Exit codes of the shell agent"]}


def test_proto_comments_match_the_services(page: dict[str, list[Row]]) -> None:
    """Each `CODE (REASON)` in a comment stands in the service's table with that code, if its RPC is served."""
    known = {
        area: {(row["reason"], status) for row in page[heading] + page[EVERY] for status in words(row["code"])}
        for area, heading in (HEADINGS | {"ops": EVERY}).items()
    }
    refused = {row["RPC"] for row in tables("docs/status.md").get("RPCs", [])}
    promised = list(protos.promises())
    assert len({promise.area for promise in promised}) == 5
    broken = [
        promise
        for promise in promised
        if promise.subject not in refused
        and promise.reason not in NOT_YET_RAISED
        and (promise.reason, promise.code) not in known[promise.area]
    ]
    assert broken == []
    assert NOT_YET_RAISED.keys() <= {promise.reason for promise in promised}, "served now: take it off the list"


def test_every_rpc_has_a_handler_so_that_none_answers_without_a_reason() -> None:
    """The generated default would answer INTERNAL and nothing else."""
    served = {
        f"{service}/{rpc}"
        for component in ("chassis", "sandbox", "driver", "interception", "inference")
        for service, handlers in code.servicers(component).items()
        for rpc in handlers
    }
    assert {f"{service}/{rpc}" for _, service, rpc in protos.rpcs()} <= served


def test_the_rpcs_that_only_refuse_are_those_that_the_status_page_lists() -> None:
    """What is not there fails by name, and is told beforehand."""
    found = {
        (refusal.rpc, CODES[refusal.kind], refusal.reason)
        for component in ("sandbox", "driver", "interception", "inference")
        for refusal in code.refusals(component, frozenset(CODES))
    }
    assert found == {(row["RPC"], row["answers"], row["reason"]) for row in tables("docs/status.md").get("RPCs", [])}


def _compare(found: Iterable[Raised], rows: list[Row], column: str, name_of: object) -> None:
    assert callable(name_of)
    expected: dict[str, set[str]] = {}
    for item in found:
        expected.setdefault(item.reason, set()).add(ANY if item.kind == ANY else name_of(item.kind))
    told = {row["reason"]: words(row[column]) for row in rows}
    assert len(told) == len(rows), "a reason stands twice"
    assert expected.keys() - told.keys() == set(), "in the code and not in the table"
    assert told.keys() - expected.keys() == set(), "in the table and not in the code"
    assert {
        reason: told[reason] for reason, codes in expected.items() if ANY not in codes and told[reason] != codes
    } == {}


def _texts(node: ast.expr) -> set[str]:
    """The constant texts that an expression may be."""
    values = node.values if isinstance(node, ast.BoolOp) else [node]
    return {item.value for item in values if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def _party(cause: str, part: ast.expr | None) -> str:
    """Who is named in a failure of a cause; `ANY` where only the running code knows."""
    if part is None:
        return COMPONENT_OF[Cause(cause)]
    return part.attr if isinstance(part, ast.Attribute) else ANY


def _member(call: ast.Call, name: str) -> set[str]:
    """The constant texts under a key of a literal dictionary somewhere in a call."""
    found = set[str]()
    for node in ast.walk(call):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    found |= _texts(value)
    return found
