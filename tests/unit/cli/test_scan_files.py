"""Which files of a directory `penstock scan` reads, and what it says of the others."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from tests.support.terminal.commands import invoke

from penstock.analysis.export_files import Format, new_file
from penstock.tables.columns import COLUMNS, SCHEMA_VERSION, Row, Table


def call(rollout_id: str, command: str = "git reflog") -> Row:
    """A row of a model call that asks for a shell command."""
    part = {"kind": "toolcall", "name": "bash", "arguments_json": json.dumps({"command": command})}
    columns: Row = dict.fromkeys(COLUMNS[Table.TURNS])
    return columns | {
        "schema_version": SCHEMA_VERSION, "rollout_id": rollout_id, "call_id": f"{rollout_id}.1", "turn_index": 0,
        "response_message": {"parts": [part]},
    }  # fmt: skip


def lines(file: Path, *rows: Row) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def table(file: Path, *rows: Row) -> None:
    with new_file(file, Table.TURNS, Format.PARQUET) as sink:
        sink.write(list(rows))


@pytest.mark.requirement("R139")
def test_each_file_of_calls_in_a_directory_is_scanned_whatever_its_name(tmp_path: Path) -> None:
    """Those of `penstock rollout` and `penstock export`, and what drivers stored, a rollout of theirs once."""
    lines(tmp_path / "runs/a/turns.jsonl", call("a"))
    lines(tmp_path / "monday.jsonl", call("b"))
    table(tmp_path / "tuesday.parquet", call("c"))
    table(tmp_path / "d0/00000001.turns.parquet", call("d"))
    table(tmp_path / "d0/00000002.turns.parquet", call("d"))
    code, out, err = invoke("scan", ".", "--json", cwd=tmp_path)
    assert code == 1, err
    assert sorted(orjson.loads(line)["rollout_id"] for line in out.splitlines()) == ["a", "b", "c", "d"]
    assert "4 findings in 4 of 4 rollouts" in err and "left out" not in err


@pytest.mark.requirement("R139")
def test_data_files_without_calls_are_named_and_one_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """An empty file has nothing to scan. A broken one may have had calls."""
    lines(tmp_path / "a/turns.jsonl", call("a", "ls"))
    lines(tmp_path / "a/sequences.jsonl", {"rollout_id": "a", "token_ids": [1]})
    lines(tmp_path / "b/turns.jsonl")
    code, out, err = invoke("scan", ".", cwd=tmp_path)
    assert (code, out) == (0, ""), err
    assert "1 data file left out, without rows of model calls: a/sequences.jsonl" in err
    for number in range(9):
        lines(tmp_path / f"c/{number}.jsonl", {"n": number})
    code, _, err = invoke("scan", ".", cwd=tmp_path)
    assert code == 0 and "10 data files left out" in err
    assert "c/3.jsonl and 5 more" in err and "c/4.jsonl" not in err
    (tmp_path / "b/turns.jsonl").write_text("{")
    code, _, err = invoke("scan", ".", cwd=tmp_path)
    assert code not in (0, 1) and "turns.jsonl, line 1" in err


@pytest.mark.requirement("R139")
def test_a_directory_with_nothing_but_other_tables_is_not_said_to_be_clean(tmp_path: Path) -> None:
    lines(tmp_path / "sequences.jsonl", {"rollout_id": "a", "token_ids": [1]})
    code, _, err = invoke("scan", ".", cwd=tmp_path)
    assert code == 1 and "nothing to scan" in err and "left out" in err
