"""Costs of model calls, by a table of prices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.analysis.test_atif import with_tools
from tests.unit.analysis.test_export import trajectory

from penstock.analysis.export import read_rows, rollouts, write
from penstock.analysis.interchange.atif import document
from penstock.analysis.prices import Cost, Price, Prices, Used, by_model, used
from penstock.chat.v1 import chat_pb2
from penstock.client import InvalidArgument, Trajectory
from penstock.client.wire.results import trajectory as from_proto
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


def test_only_what_was_sampled_is_paid() -> None:
    """A replayed answer was paid before; a given one never."""
    message = pb.Trajectory(rollout_id="r")
    for number in range(4):
        call = message.calls.add(call_id=f"c{number}", prompt_count=10)
        call.completion.model = "m"
        call.completion.usage.MergeFrom(chat_pb2.Usage(completion_tokens=2, cached_tokens=3))
    message.calls[1].replayed_from.call_id = "earlier"
    message.calls[2].given = True
    message.calls[3].ClearField("completion")
    found = used(from_proto(message).calls)
    assert found == [Used("m", 10, 2, 3)]
    assert by_model([*found, *found, Used("a", 1, 1)]) == (Used("a", 1, 1), Used("m", 20, 4, 6))


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
