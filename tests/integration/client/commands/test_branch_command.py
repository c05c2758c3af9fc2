"""`penstock branch` and the example of branches, on rollouts that a scripted engine answers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from tests.integration.client.test_watch import connection, group_of
from tests.support.terminal.commands import invoke

from penstock.client import connect
from penstock.local.stack import LocalStack

__all__ = ["connection"]  # a fixture
ROOT = Path(__file__).parents[4]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parent(stack: LocalStack) -> str:
    """A rollout that ended with reward 0.75."""
    async with connect(stack.endpoints) as ps:
        return f"{await group_of(ps, 1, 'branched', 'branched')}-0"


def ended(printed: str) -> list[dict[str, object]]:
    """The last line of each rollout."""
    return [line for line in map(orjson.loads, printed.splitlines()) if "completed" in line]


@pytest.mark.requirement("R129")
def test_branches_are_run_saved_and_proved(connection: dict[str, str], parent: str, tmp_path: Path) -> None:
    save = tmp_path / "saved"
    given = ("branch", parent, "1", "-n", "2", "--json", "--save", str(save))
    code, printed, err = invoke(*given, environment=connection)
    assert code == 0, err
    lines = ended(printed)
    assert [line["reward"] for line in lines] == [0.75, 0.75] and "branches:" not in printed
    for line in lines:
        folder = Path(str(line["saved"]))
        turns = [orjson.loads(row) for row in (folder / "turns.jsonl").read_bytes().splitlines()]
        assert [turn["branch_point"] for turn in turns][:2] == [False, True]
        assert turns[0]["replayed_from"]["rollout_id"] == parent and turns[1]["replayed_from"] is None
        (row,) = [orjson.loads(row) for row in (folder / "sequences.jsonl").read_bytes().splitlines()]
        assert row["parent_rollout_id"] == parent and row["branch_call_id"]
        assert [span["untrained_reason"] for span in row["turn_spans"]][:2] == ["PARENT", ""]
        files = (str(folder / "turns.jsonl"), "--sequences", str(folder / "sequences.jsonl"))
        code, proof, err = invoke("verify", *files, environment=connection)
        assert code == 0, (proof, err)


@pytest.mark.requirement("R103", "R129")
def test_replayed_calls_are_proved_against_the_parents_export(
    connection: dict[str, str], parent: str, tmp_path: Path
) -> None:
    """What was changed in the parent's export is named with both calls; what is not there is unproven."""
    code, printed, err = invoke("branch", parent, "1", "--json", "--save", str(tmp_path), environment=connection)
    assert code == 0, err
    (line,) = ended(printed)
    turns, origins = Path(str(line["saved"])) / "turns.jsonl", tmp_path / "origins.jsonl"
    code, _, err = invoke("export", str(origins), "--table", "turns", "--group-id", "branched", environment=connection)
    assert code == 0, err
    code, out, err = invoke("verify", str(turns), "--against", str(origins))
    assert code == 0 and "; 1 replayed call compared with the origin" in out and "unproven" not in out, (out, err)

    code, out, err = invoke("verify", str(turns), "--against", str(turns), "--json")
    proof = orjson.loads(out)
    assert code == 0 and proof["holds"] and (proof["replayed"], proof["unproven_replays"]) == (0, 1), (out, err)
    code, out, err = invoke("verify", str(turns), "--against", str(turns))
    assert "0 replayed calls compared with the origin, 1 unproven: their origins are not in turns.jsonl" in out

    rows = [orjson.loads(row) for row in origins.read_bytes().splitlines()]
    rows[0]["completion_logprobs"][0] -= 1
    origins.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    code, out, err = invoke("verify", str(turns), "--against", str(origins))
    replayed = orjson.loads(turns.read_bytes().splitlines()[0])
    named = f"its logprobs differ from call {rows[0]['call_id']} of rollout {parent}, which it names as its origin"
    assert code == 1 and f"call {replayed['call_id']}: {named}" in out, (out, err)
    assert "the row of an origin was changed after the export" in out


def test_a_given_answer_ends_the_agent(connection: dict[str, str], parent: str, tmp_path: Path) -> None:
    """It says that it is done, and has done nothing; the parent's reward is another."""
    answer = tmp_path / "answer.txt"
    answer.write_text("There is nothing to do.")
    given = ("branch", parent, "0", "--answer", str(answer), "--json", "--save", str(tmp_path / "saved"))
    _, printed, err = invoke(*given, environment=connection)
    (line,) = ended(printed)
    assert line["reward"] != 0.75, err
    turns = (Path(str(line["saved"])) / "turns.jsonl").read_bytes().splitlines()
    assert len(turns) == 1 and orjson.loads(turns[0])["injected"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": 1', "is not a JSON object like"),
        ("{}", "it is empty"),
        ('{"words": "x"}', "unknown: words"),
        ('{"tool_calls": [{}]}', "name"),
    ],
)
def test_an_answer_that_cannot_be_read_is_wrong_usage(tmp_path: Path, content: str, said: str) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(content)
    code, _, err = invoke("branch", "r1", "0", "--answer", str(answer), environment={})
    assert code == 2 and said in " ".join(err.split()), err


def test_a_call_that_there_is_not_is_said(connection: dict[str, str], parent: str) -> None:
    code, _, err = invoke("branch", parent, "77", environment=connection)
    assert code == 4 and "no such call" in err, err


@pytest.mark.asyncio(loop_scope="session")
async def test_the_example_tells_what_each_call_is_worth(connection: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples/branches.py")),
        env={**os.environ, **connection},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "call 0:" in out.decode() and "in 4 branches" in out.decode()
