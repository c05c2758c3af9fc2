"""Parts of the backend of Kubernetes that need no cluster: what it prints, what errors it makes, what a pod runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.kubernetes import diagnosis, entrypoint
from penstock_sandbox.backends.kubernetes.cluster import ClaimState
from penstock_sandbox.backends.kubernetes.errors import Conflict, Gone, NotAccepted, translate
from penstock_sandbox.backends.kubernetes.keys import ClaimKey
from penstock_sandbox.backends.kubernetes.manifests import RULES, Choices, manifests
from penstock_sandbox.backends.kubernetes.trial_checks import declares_closed


def _printed(**chosen: Any) -> dict[str, Any]:
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in manifests(Choices(**chosen))["items"]}


@pytest.mark.requirement("R8")
def test_no_pod_is_privileged_and_the_service_may_not_exec() -> None:
    """What its account may do is claims, and reading what belongs to them."""
    pod = _printed()["SandboxTemplate/penstock"]["spec"]["podTemplate"]["spec"]
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert "privileged" not in security and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"] and "SYS_ADMIN" not in security["capabilities"]["add"]
    assert pod["automountServiceAccountToken"] is False and pod["restartPolicy"] == "Never"
    allowed = {resource for rule in RULES for resource in rule["resources"]}
    assert allowed == {"sandboxclaims", "sandboxwarmpools", "sandboxtemplates", "sandboxes", "pods"}
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]} in RULES


@pytest.mark.requirement("R8")
def test_pods_hold_no_key_of_the_services_and_the_reverse() -> None:
    """One end's key is in one Secret, its certificate in both; each print has new ones."""
    printed = _printed()
    pods, service = (printed[f"Secret/penstock-{name}"]["stringData"] for name in ("pod", "service"))
    assert "PRIVATE KEY" in pods["pod.pem"] and "PRIVATE KEY" not in pods["service.crt"]
    assert "PRIVATE KEY" in service["service.pem"] and "PRIVATE KEY" not in service["pod.crt"]
    assert service["pod.crt"] in pods["pod.pem"] and pods["service.crt"] in service["service.pem"]
    assert pods["pod.pem"] != _printed()["Secret/penstock-pod"]["stringData"]["pod.pem"]
    assert "PRIVATE" not in repr(ClaimKey.make(1))


@pytest.mark.parametrize(
    ("change", "closed"),
    [
        ({}, True),
        ({"networkPolicy": None}, False),
        ({"networkPolicyManagement": "Unmanaged"}, False),
        ({"networkPolicy": {"ingress": [], "egress": [{}]}}, False),
    ],
    ids=["ours", "default", "unmanaged", "egress"],
)
def test_a_template_is_closed_only_by_its_own_policy(change: dict[str, Any], closed: bool) -> None:
    template = _printed()["SandboxTemplate/penstock"]
    assert declares_closed({"spec": {**template["spec"], **change}}) is closed


def test_choices_are_in_the_printed_objects() -> None:
    printed = _printed(
        name="a", namespace="b", runtime_class="kata", user_namespaces=True, service_namespace="c", warm=0
    )
    spec = printed["SandboxTemplate/a"]["spec"]
    assert spec["podTemplate"]["spec"]["runtimeClassName"] == "kata"
    assert spec["podTemplate"]["spec"]["hostUsers"] is False
    (source,) = spec["networkPolicy"]["ingress"][0]["from"]
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "c"}}
    assert printed["RoleBinding/a-service"]["subjects"][0]["namespace"] == "c"
    assert printed["SandboxWarmPool/a"]["spec"]["replicas"] == 0


def test_the_entrypoint_is_a_program_for_python_3_8() -> None:
    """Alone: it imports the standard library only."""
    tree = ast.parse(Path(entrypoint.__file__).read_text(), feature_version=(3, 8))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name and name.startswith("penstock")]


@pytest.mark.requirement("R51", "R53")
@pytest.mark.parametrize(
    ("status", "message", "kind", "reason"),
    [
        (401, "", NotAccepted, "BACKEND_UNAVAILABLE"),
        (403, "cannot create", FailedPrecondition, "BACKEND_UNAVAILABLE"),
        (403, "exceeded quota: q", ResourceExhausted, "PROVIDER_LIMIT"),
        (404, "", Gone, ""),
        (409, "", Conflict, ""),
        (410, "", Gone, ""),
        (422, "spec is wrong", FailedPrecondition, "BACKEND_UNAVAILABLE"),
        (429, "", ResourceExhausted, "PROVIDER_LIMIT"),
        (500, "", Unavailable, "PROVIDER_FAILED"),
    ],
)
def test_answers_of_the_api_server_are_errors_with_a_reason(
    status: int, message: str, kind: type[Exception], reason: str
) -> None:
    error = translate("create", status, json.dumps({"kind": "Status", "message": message}), {"Retry-After": "7"})
    assert type(error) is kind
    if isinstance(error, PenstockError):
        assert error.reason == reason and message in error.message
    if status == 429:
        assert getattr(error, "retry_after_s", None) == 7.0


@pytest.mark.requirement("R8")
def test_a_proxys_page_is_not_passed_on() -> None:
    """It may repeat the request with its credentials."""
    error = translate("create", 403, "<html>Authorization: Bearer secret</html>")
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("DependenciesNotReady", "Pod exists with phase: Pending", ""),
        ("AdoptionConflict", "the next pass retries", ""),
        ("TemplateNotFound", "no template", "BACKEND_UNAVAILABLE"),
        ("InvalidMetadata", "a label", "BACKEND_UNAVAILABLE"),
        ("PodFailed", "Pod failed", "TEMPLATE_UNSUITABLE"),
        ("ReconcilerError", 'pods "x" is forbidden: exceeded quota: q', "PROVIDER_LIMIT"),
    ],
)
def test_only_what_waiting_cannot_mend_fails_at_once(reason: str, message: str, expected: str) -> None:
    problem = diagnosis.hopeless(ClaimState("claim", "uid", reason=reason, message=message))
    assert (problem.reason if problem is not None else "") == expected
