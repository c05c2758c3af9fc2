"""Costs of model calls, by a table of prices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.analysis.test_atif import with_tools
from tests.unit.analysis.test_export import trajectory

from penstock.analysis.export import read_rows, rollouts, write
from penstock.analysis.interchange.atif import document
from penstock.analysis.prices import Cost, Price, Prices, Used, by_model, paid, used
from penstock.chat.v1 import chat_pb2
from penstock.client import InvalidArgument, Trajectory
from penstock.client.wire.results import trajectory as from_proto
from penstock.client.wire.results import trajectory_to
from penstock.tables.columns import row_digest
from penstock.trajectory.v1 import trajectory_pb2 as pb

TABLE = """
models:
  qwen3-8b: {prompt: 2, cached: 0.5, completion: 10}
  "qwen3-*": {prompt: 1, completion: 4}
"""


def test_prompt_cached_and_completion_tokens_have_prices_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(TABLE)
    prices = Prices.load(file)
    assert prices.cost([Used("qwen3-8b", 1_000_000, 200_000, 400_000)]) == Cost(0.6 * 2 + 0.4 * 0.5 + 0.2 * 10, "USD")
    # By the pattern, whose cached tokens cost as others.
    assert prices.cost([Used("qwen3-32b", 1_000_000, 500_000, 400_000)]) == Cost(3.0, "USD")


def test_a_model_without_a_price_is_named_and_not_free() -> None:
    prices = Prices({"a": Price(prompt=1, completion=1)}, "EUR")
    cost = prices.cost([Used("a", 1_000_000, 0), Used("b", 1, 1), Used("", 1, 1)])
    assert cost == Cost(1.0, "EUR", ("a model without a name", "b"))
    assert str(cost) == "1.0000 EUR, without a model without a name, b: no price"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("models: {a: {prompt: -1, completion: 1}}", "models.a.prompt"),
        ("models: {a: {prompt: 1}}", "models.a.completion"),
        ("models: {a: {prompt: 1, completion: .inf}}", "models.a.completion"),
        ("models: {a: {prompt: 1, completion: 1, output: 1}}", "models.a.output"),
        ("models: {}", "models"),
        ("- a", "the file"),
        ("a: [", "no YAML"),
    ],
)
def test_an_invalid_table_is_refused_with_its_key(text: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=place) as caught:
        Prices.load(file)
    assert caught.value.reason == "PRICES_INVALID"
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Prices.load(tmp_path / "absent.yaml")


def attempt_of(*ids: str, replayed: int = 0) -> pb.Trajectory:
    """An attempt of the rollout `r`: its first calls were answered by what an earlier attempt sampled as e0, e1, ..."""
    message = pb.Trajectory(rollout_id="r")
    for number, name in enumerate(ids):
        call = message.calls.add(call_id=name, rollout_id="r", prompt_count=10)
        call.completion.model = "m"
        call.completion.usage.MergeFrom(chat_pb2.Usage(completion_tokens=2, cached_tokens=3))
        if number < replayed:
            call.replayed_from.MergeFrom(pb.ReplayOrigin(rollout_id="r", attempt=1, call_id=f"e{number}"))
    return message


@pytest.mark.requirement("R129")
def test_only_what_was_sampled_for_the_rollout_is_paid() -> None:
    """What a branch replays was paid with its parent; a given answer never."""
    message = attempt_of("c0", "c1", "c2", "c3")
    message.calls[1].replayed_from.MergeFrom(pb.ReplayOrigin(rollout_id="parent", attempt=1, call_id="earlier"))
    message.calls[2].given = True
    message.calls[3].ClearField("completion")
    found = used(from_proto(message).calls)
    assert found == [Used("m", 10, 2, 3)]
    assert by_model([*found, *found, Used("a", 1, 1)]) == (Used("a", 1, 1), Used("m", 20, 4, 6))


def test_what_an_earlier_attempt_sampled_is_paid_once() -> None:
    """The last attempt's trajectory has it as replayed; whoever saw both attempts knows it by one id."""
    last = from_proto(attempt_of("c0", "c1", "c2", replayed=2))
    assert used(last.calls) == [Used("m", 10, 2, 3)] * 3
    earlier = from_proto(attempt_of("e0", "e1"))
    assert list(paid((*earlier.calls, *last.calls))) == ["e0", "e1", "c2"]
    prices = Prices({"*": Price(prompt=1_000_000, cached=0, completion=0)})
    (row,) = rollouts(last, prices)
    assert row["cost"]["amount"] == 21


def test_a_step_that_a_further_attempt_replayed_has_its_cost() -> None:
    prices = Prices({"m": Price(prompt=1_000_000, cached=0, completion=10_000_000)})
    message = trajectory_to(with_tools())
    message.calls[0].replayed_from.MergeFrom(pb.ReplayOrigin(rollout_id=message.rollout_id, attempt=1, call_id="e0"))
    message.calls[0].rollout_id = message.rollout_id
    made = document(from_proto(message), prices)
    assert made is not None and made["final_metrics"]["total_cost_usd"] == 78


async def test_the_row_of_a_rollout_has_its_cost(tmp_path: Path) -> None:
    prices = Prices({"*": Price(prompt=1_000_000, completion=10_000_000)})

    async def one() -> AsyncIterator[Trajectory]:
        yield trajectory()

    assert await write(one(), tmp_path / "r.jsonl", table="rollouts", prices=prices) == 1
    (row,) = read_rows(tmp_path / "r.jsonl")
    assert row["cost"] == {"amount": 2 + 5 + 30, "currency": "USD", "unpriced": []}
    assert row["row_sha256"] == row_digest(row)
    (free,) = rollouts(trajectory())
    assert free["cost"] is None


def test_a_document_has_the_costs_of_its_steps() -> None:
    prices = Prices({"m": Price(prompt=1_000_000, cached=0, completion=10_000_000)})
    made = document(with_tools(), prices)
    assert made is not None
    costs = [step["metrics"]["cost_usd"] for step in made["steps"] if "metrics" in step]
    assert costs == [7 + 20, 11 + 40] and made["final_metrics"]["total_cost_usd"] == 78
    with pytest.raises(InvalidArgument, match="USD"):
        document(with_tools(), Prices({"m": Price(prompt=1, completion=1)}, "EUR"))
