"""docs/guides/operate.md and the dashboard say what the code tells: every metric, its labels, every trouble."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import promql_parser
import pytest
import yaml
from tests.unit.docs import code
from tests.unit.docs.pages import ROOT, tables

from penstock_chassis.telemetry import metrics

PAGE = "docs/guides/operate.md"
DASHBOARD: dict[str, Any] = orjson.loads((ROOT / "observe/grafana/penstock.json").read_bytes())
SERVICES = ("driver", "inference", "interception", "sandbox")
# What Prometheus's own library tells of a process, and what Prometheus itself adds to each series.
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "process_max_fds"}
ADDED = {"service", "job", "instance", "le"}


@cache
def families() -> dict[str, metrics.Family]:
    """Everything that the services declare."""
    shared = (
        f"penstock_chassis.{name}"
        for name in ("interceptor", "journal", "membership.reporting", "operations", "telemetry.loop_lag")
    )
    for module in (*shared, *(f"penstock_{service}.metrics" for service in SERVICES)):
        importlib.import_module(module)
    # Tests of the library declare some of their own.
    return {family.name: family for family in metrics.families() if family.name.startswith("penstock_")}


def test_the_table_of_metrics_is_what_the_services_declare() -> None:
    """Who adds a metric adds its row."""
    rows = {row["metric"].strip("`"): row for row in tables(PAGE)["Metrics"]}
    assert rows.keys() == families().keys()
    for name, family in families().items():
        assert rows[name]["kind"] == family.kind
        assert tuple(re.findall(r"`(\w+)`", rows[name]["labels"])) == family.labels
        assert rows[name]["what it is"] == family.text


@pytest.mark.requirement("R8")
def test_names_follow_the_conventions() -> None:
    """Prometheus's: a prefix, base units, `_total` for counters alone; labels are few and none is an id (R8)."""
    for name, family in families().items():
        assert re.fullmatch(r"penstock_[a-z_]+", name)
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert family.kind != "histogram" or name.endswith("_seconds"), name
        assert not [label for label in family.labels if label.endswith("id") or "token" in label], name


def queries() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard, with its panel's title."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_dashboard_queries_use_existing_metrics_and_labels(title: str, query: str) -> None:
    """A panel that asks for what nobody tells would stay empty without a word."""
    parsed = promql_parser.parse(query.replace("$__rate_interval", "1m"))
    assert parsed is not None, title
    names = re.findall(r"\b((?:penstock|process)_\w+)", query)
    assert names or "vector" in query
    known: set[str] = set(ADDED)
    for name in names:
        if name in PROCESS:
            continue
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        family = families().get(name) or families()[base]
        assert (name != base) == (family.kind == "histogram"), name
        assert ("rate(" in query) == (family.kind != "gauge"), query
        known |= set(family.labels)
    used = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"\{(\w+)[=~!]", query)
    assert {label.strip() for labels in used for label in labels.split(",")} <= known, query


def test_panels_stand_beside_each_other_and_legends_name_labels_that_there_are() -> None:
    """No panel covers another, and each has a title and a text."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["title"]
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"] or label in ADDED | {"disk"}, target


def test_shares_alone_are_drawn_as_percent() -> None:
    """A count on such an axis would read as a hundred times as many, and flatten what is a share."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query, config = target["expr"], panel["fieldConfig"]
            unit = config["defaults"]["unit"]
            for override in config["overrides"]:
                if override["matcher"] == {"id": "byName", "options": target["legendFormat"]}:
                    unit = {item["id"]: item["value"] for item in override["properties"]}.get("unit", unit)
            share = "_ratio" in query or " / " in query or query.startswith("rate(process_cpu_seconds")
            assert (unit == "percentunit") == share, (panel["title"], query)


def test_prometheus_asks_each_service_where_the_compose_file_lets_it_listen() -> None:
    """Every replica, by TLS with its service's certificate, and the token that `penstock credentials` makes for it."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    jobs = yaml.safe_load((ROOT / "observe/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert sorted(job["job_name"] for job in jobs) == sorted(SERVICES)
    secrets = compose["services"]["prometheus"]["secrets"]
    for job in jobs:
        service = job["job_name"]
        port = int(compose["services"][service]["environment"][f"PENSTOCK_{service.upper()}_METRICS_PORT"])
        (found,), (label,) = job["dns_sd_configs"], job["relabel_configs"]
        assert (found["names"], found["type"], found["port"]) == ([service], "A", port)
        assert label == {"target_label": "service", "replacement": service}
        assert job["tls_config"]["server_name"] == service
        assert str(port) not in str([asked.get("ports") for asked in compose["services"].values()])
        for file in (job["authorization"]["credentials_file"], job["tls_config"]["ca_file"]):
            assert file.removeprefix("/run/secrets/") in secrets
    for name in ("prometheus", "grafana"):
        assert compose["services"][name]["profiles"] == ["observe"]
        assert all(port.startswith("127.0.0.1:") for port in compose["services"][name]["ports"])
        for volume in compose["services"][name]["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists()


@cache
def reasons() -> frozenset[str]:
    """Of every trouble that the code tells."""
    told: set[str] = set()
    for folder in code.FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "Trouble" not in text or "penstock/ops" in path.as_posix():
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and code.last_name(node.func) in ("Trouble", "_trouble"):
                    told |= set(code.strings(code.keyword(node, "reason") or code.argument(node, 0)))
                elif isinstance(node, ast.Tuple) and len(node.elts) == 4:
                    told |= {reason for reason in code.strings(node.elts[1]) if reason.startswith("SANDBOXES_")}
    return frozenset(told)


def test_trouble_table_lists_every_reason_in_the_code() -> None:
    """With what to do about it."""
    rows = {row["reason"]: row for row in tables(PAGE)["Something is wrong"]}
    assert reasons() == rows.keys()
    assert all(row["what to do"] for row in rows.values())


def expected(path: Path) -> Iterator[str]:
    """What a test compares something with, or waits for: it made it happen."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare) and all(isinstance(how, ast.Eq | ast.In) for how in node.ops):
            looked_at: list[ast.AST] = [node]
        elif isinstance(node, ast.Call) and code.last_name(node.func) == "becomes":
            looked_at = list(node.args)
        else:
            continue
        for part in looked_at:
            for leaf in ast.walk(part):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                    yield leaf.value


def test_every_reason_is_made_to_happen_by_a_test() -> None:
    """A trouble that no test makes may be one that never is told."""
    files = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "Trouble" in (text := path.read_text(encoding="utf-8")) or "troubles" in text
    ]
    made = {name for path in files if path != Path(__file__) for name in expected(path)}
    assert not reasons() - made
