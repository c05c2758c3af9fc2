"""Every manifest of the chart is one that Kubernetes accepts, by its own schemas and those of the operators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import utils
from tests.support.charts import CASES, ChartRefused, render

OLDEST: Final = "1.25.0"
"""The oldest whose schemas there are; older ones are asked by `python -m tests.kubernetes`."""
NEWEST: Final = kubernetes_validate.latest_version()
OPERATORS: Final = {
    "keda.sh/v1alpha1": "scaledobject-keda-v1alpha1",
    "cert-manager.io/v1": "certificate-cert-manager-v1",
    "monitoring.coreos.com/v1": "podmonitor-monitoring-v1",
}


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once() -> Iterator[None]:
    """Else the package reads a megabyte of definitions anew for each manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@cache
def checked(manifest: str, version: str) -> None:
    """`check` of a manifest in JSON, once: most cases have most manifests of the default."""
    check(json.loads(manifest), version)


def check(manifest: Mapping[str, Any], version: str) -> None:
    """Raises a validation error, also for a field that the kind does not have."""
    if (name := OPERATORS.get(manifest["apiVersion"])) is None:
        kubernetes_validate.validate(dict(manifest), version, strict=True)
        return
    schema = json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(manifest)


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_schemas_accept_every_manifest(case: str, version: str) -> None:
    """No field that a kind does not have, none that is missing."""
    for manifest in render(CASES[case], "--kube-version", version).manifests:
        checked(json.dumps(manifest), version)


def test_the_check_refuses_a_field_that_no_kind_has() -> None:
    """So the test above can fail, for kinds of Kubernetes and of operators."""
    rendered = render(CASES["keda"])
    for kind in ("StatefulSet", "ScaledObject"):
        manifest = json.loads(json.dumps(rendered.by_name[kind, "penstock-driver"]))
        manifest["spec"]["replica"] = 2
        with pytest.raises(jsonschema.ValidationError):
            check(manifest, NEWEST)


def test_a_server_that_is_too_old_is_refused() -> None:
    """What the oldest one gets of it, `python -m tests.kubernetes` asks that one itself."""
    rendered = render(CASES["hpa"], "--kube-version", OLDEST)
    assert {one["apiVersion"] for one in rendered.kind("PodDisruptionBudget")} == {"policy/v1"}
    assert {one["apiVersion"] for one in rendered.kind("HorizontalPodAutoscaler")} == {"autoscaling/v2"}
    with pytest.raises(ChartRefused, match="incompatible with Kubernetes"):
        render({}, "--kube-version", "1.19.0")


@pytest.mark.parametrize("case", CASES)
def test_both_living_versions_of_helm_render_the_same(case: str) -> None:
    """Helm 3 and Helm 4."""
    assert render(CASES[case], program="helm3").manifests == render(CASES[case]).manifests
