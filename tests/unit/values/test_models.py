"""The rules of a rollout's models: each has its field, and what holds them all is taken."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from penstock.interception.v1 import interception_pb2 as pb
from penstock.values import models

GATE, PROXY, BLACK_BOX = pb.MODE_INTERCEPTION_GATE, pb.MODE_TRANSPARENT_PROXY, pb.MODE_BLACK_BOX
INFERENCE: dict[str, Any] = {"inference": {"name": "big"}}
TOKENIZER: dict[str, Any] = {"tokenizer": {"name": "tiny"}}
LAST: dict[str, Any] = {"policy_id": "student"}


def found(*given: dict[str, Any], mode: pb.Mode.ValueType = GATE, source: dict[str, Any] | None = None) -> list[str]:
    made = [ParseDict(one, pb.RolloutModel()) for one in given]
    return [field for field, _ in models.problems(made, mode, ParseDict(source or {}, pb.ModelSource()))]


def teacher(**changes: Any) -> dict[str, Any]:
    return {"policy_id": "teacher", "source": INFERENCE, "trained": False, "calls": {"from_index": 3}, **changes}


@pytest.mark.requirement("R133")
@pytest.mark.parametrize(
    "given",
    [
        (),
        (LAST,),
        (teacher(), LAST),
        (teacher(calls={"call_classes": ["CALL_CLASS_TITLE"]}), teacher(calls={"until_turn": 1}), LAST),
        (teacher(name="big", calls={"until_index": 1}), {"name": "big", "policy_id": "critic"}, LAST),
        (teacher(source={"upstream": {"name": "cloud"}}), LAST),
        (teacher(delegated=False, source=TOKENIZER), LAST),
    ],
)
def test_models_that_hold_the_rules_are_taken(given: tuple[dict[str, Any], ...]) -> None:
    assert found(*given) == []


@pytest.mark.requirement("R133")
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((LAST, LAST), "[0].calls"),
        (({"policy_id": ""},), "[0].policy_id"),
        (({"policy_id": "a b"},), "[0].policy_id"),
        (({"policy_id": "x" * 129},), "[0].policy_id"),
        (({"policy_id": "p", "name": "n" * 257},), "[0].name"),
        ((teacher(calls={}), LAST), "[0].calls"),
        ((teacher(calls={"from_index": -1}), LAST), "[0].calls.from_index"),
        ((teacher(calls={"from_index": 3, "until_index": 3}), LAST), "[0].calls.until_index"),
        ((teacher(calls={"until_turn": 0}), LAST), "[0].calls.until_turn"),
        ((teacher(calls={"from_turn": 1_000_001}), LAST), "[0].calls.from_turn"),
        ((teacher(calls={"call_classes": ["CALL_CLASS_JUDGE"]}), LAST), "[0].calls.call_classes[0]"),
        (({**LAST, "policy": {"max_staleness": -1}},), "[0].policy.max_staleness"),
        ((teacher(source={}), LAST), "[0].source"),
        ((teacher(source={"upstream": {}}), LAST), "[0].source.upstream.endpoint"),
        ((teacher(source={"upstream": {"caller": {"base_url": "http://x"}}}), LAST), "[0].source.upstream.caller"),
        (({**LAST, "source": {"upstream": {"name": "cloud"}}},), "[0].trained"),
        ((teacher(source={"upstream": {"name": "cloud"}}, policy={"min_version": 1}), LAST), "[0].policy"),
        ((teacher(source=TOKENIZER), LAST), "[0].delegated"),
        ((teacher(source={**INFERENCE, "tool_call_parser": "hermes"}), LAST), "[0].source.tool_call_parser"),
        (({**LAST, "trained": False},), ""),
        (tuple({"policy_id": "p", "name": str(n)} for n in range(65)), ""),
    ],
)
def test_what_breaks_a_rule_is_named_by_its_field(given: tuple[dict[str, Any], ...], field: str) -> None:
    assert found(*given) == [field]


@pytest.mark.requirement("R133")
def test_the_mode_and_the_rollouts_source_bound_what_a_model_may_be() -> None:
    assert found({**LAST, "delegated": True}, mode=PROXY) == ["[0].delegated"]
    assert found({**LAST, "source": TOKENIZER}, mode=PROXY) == ["[0].source.tokenizer"]
    assert found({**LAST, "delegated": True}, source=TOKENIZER) == ["[0].delegated"]
    assert found(LAST, mode=BLACK_BOX) == [""]
