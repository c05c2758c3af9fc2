"""The rules of companions: each field, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.sandbox.v1 import sandbox_pb2
from penstock.values.companions import MOST, MOST_BYTES, MOST_VARIABLES, problems


def companion(**fields: Any) -> sandbox_pb2.Companion:
    """One that is right but for `fields`."""
    return sandbox_pb2.Companion(**{"name": "db", "image": "postgres:16", **fields})


def test_a_list_that_uses_every_field_has_no_problem() -> None:
    check = sandbox_pb2.HealthCheck(argv=["pg_isready"], interval=Duration(seconds=1), retries=10)
    database = companion(aliases=["my_db", "db.example"], env={"POSTGRES_PASSWORD": "a\nb"}, health_check=check)
    web = companion(name="web-1", entrypoint=["/bin/sh"], command=["", "-c"], workdir="/srv", after=["db"])
    assert list(problems([database, web])) == []


@pytest.mark.parametrize(
    ("fields", "place", "named"),
    [
        ({"name": "My_db"}, "[0].name", "lower-case letters"),
        ({"name": "d" * 64}, "[0].name", "at most 63"),
        ({"name": "127"}, "[0].name", "not only digits"),
        ({"name": "sandbox"}, "[0].name", "the sandbox itself"),
        ({"aliases": ["10.0.0.1"]}, "[0].aliases", "10.0.0.1"),
        ({"aliases": ["localhost"]}, "[0].aliases", "localhost"),
        ({"aliases": ["a b"]}, "[0].aliases", "a b"),
        ({"aliases": [f"a{number}" for number in range(17)]}, "[0].aliases", "at most 16"),
        ({"image": ""}, "[0].image", "is required"),
        ({"user": "a\nb"}, "[0].user", "line breaks"),
        ({"workdir": "srv"}, "[0].workdir", "absolute"),
        ({"entrypoint": [""]}, "[0].entrypoint", "program"),
        ({"command": ["a\0"]}, "[0].command", "NUL"),
        ({"env": {"A=B": ""}}, "[0].env", "'='"),
        ({"env": {f"A{number}": "" for number in range(MOST_VARIABLES + 1)}}, "[0].env", "at most 256"),
        ({"env": {"A": "a" * MOST_BYTES}}, "[0]", "bytes"),
        ({"resources": {"cpu": float("nan")}}, "[0].resources.cpu", "positive"),
        ({"after": ["db"]}, "[0].after", "comes before it"),
        ({"health_check": {"argv": [""]}}, "[0].health_check.argv", "program"),
        ({"health_check": {"interval": Duration()}}, "[0].health_check.interval", "more than 0"),
        ({"health_check": {"timeout": Duration(seconds=301)}}, "[0].health_check.timeout", "300 s"),
        ({"health_check": {"start_period": Duration(seconds=-1)}}, "[0].health_check.start_period", "0 to"),
        ({"health_check": {"retries": 0}}, "[0].health_check.retries", "1 to 1000"),
    ],
)
def test_what_is_wrong_is_named_by_field_and_reason(fields: dict[str, Any], place: str, named: str) -> None:
    ((where, why),) = problems([companion(**fields)])
    assert where == place and named in why


def test_names_are_used_once_and_companions_are_few() -> None:
    assert [place for place, _ in problems([companion(), companion()])] == ["[1].name"]
    assert [place for place, _ in problems([companion(name=f"db-{number}") for number in range(MOST + 1)])] == [""]
