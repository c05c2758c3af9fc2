"""`penstock replay` and `penstock diff` on real rollouts, from the services and from files."""

from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from tests.integration.client.test_watch import connection, group_of
from tests.support.terminal import ptys
from tests.support.terminal.commands import invoke

from penstock.client import connect
from penstock.local.stack import LocalStack

__all__ = ["connection"]  # a fixture


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def group(stack: LocalStack) -> str:
    """A group of two, whose file would drive a terminal."""
    async with connect(stack.endpoints) as ps:
        return await group_of(ps, 2, "replayed", "replayed")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_person_steps_through_a_rollout_forward_and_back(
    connection: dict[str, str], group: str, tmp_path: Path
) -> None:
    """Phases, prompt and answer of each call, tokens by probability, the grade; and nothing that the agent
    wrote reaches the terminal as a command."""
    rollout = f"{group}-0"
    async with ptys.penstock("replay", rollout, environment=connection, cwd=tmp_path, lines=40) as terminal:
        await terminal.shows(rollout, "1 of", "task", "copy-note", "reward 0.75", "running")
        terminal.press(b"G")
        await terminal.shows("end", "graded in a fresh fork: 1 of 1 command")
        terminal.press(b"g")
        await terminal.shows("1 of", "overview")
        for number in range(2, 30):
            terminal.press(b"\x1b[C" if number % 2 else b"n")
            if "call 0 (main)" in await terminal.shows(f"{number} of"):
                break
        await terminal.shows("new in the prompt", "system", "Copy note.txt", "answer", "Let me look.", "then the agent")
        terminal.press(b"t")
        await terminal.shows("probability of a token", "mean logprob")
        terminal.press(b"n")
        shown = await terminal.shows("call 1 (main)", "tool result", "PWNED", "Done.")
        assert "after 2 message parts as before" in shown and "[bold]x[/bold]" in shown
        terminal.press(b"p")
        await terminal.shows("call 0 (main)")
        terminal.resize(60, 12)
        await terminal.shows("more lines below")
        terminal.press(b"q")
        assert await terminal.ends() == 0
        assert not terminal.foreign and terminal.title != "PWNED"


def test_a_file_replays_as_the_services_do_and_says_what_it_lacks(
    connection: dict[str, str], model_dir: Path, group: str, tmp_path: Path
) -> None:
    """An export is enough: offline, by the rollout's name where it has several, with the text by the tokenizer."""
    file, nowhere = tmp_path / "turns.jsonl", {"PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1"}
    export = ("export", str(file), "--table", "turns", "--group-id", group, "--bodies")
    code, _, err = invoke(*export, environment=connection)
    assert code == 0, err
    code, _, err = invoke("replay", str(file), environment=nowhere)
    assert code == 2 and f"choose one, for example {file}@{group}-" in err
    one = f"{file}@{group}-1"
    code, live, err = invoke("replay", f"{group}-1", "--json", "--tokens", environment=connection)
    assert code == 0, err
    told = [orjson.loads(line) for line in live.splitlines()]
    with_text = ("--tokenizer", str(model_dir))
    code, offline, err = invoke("replay", one, "--json", "--tokens", *with_text, environment=nowhere)
    assert code == 0, err
    calls = [line["call"] for line in map(orjson.loads, offline.splitlines()) if "call" in line]
    assert calls == [line["call"] for line in told if "call" in line]
    assert "<tool_call>" in calls[0]["answer"] and len(calls[0]["logprobs"]) == calls[0]["sampled_tokens"]
    assert {line["event"]["event"] for line in told if "event" in line} >= {"PhaseChanged", "AgentEvent", "Ended"}
    code, printed, err = invoke("replay", one, "--all", environment=nowhere)
    assert code == 0 and "Let me look." in printed and "model calls only" in printed, err
    assert all(letter.isprintable() or letter == "\n" for letter in printed)


def test_rollouts_are_equal_or_their_first_difference_is_shown(
    connection: dict[str, str], group: str, tmp_path: Path
) -> None:
    """Exit code 0: nothing differs but ids and times; 1: the first token at which they part, with what came before."""
    first, second = f"{group}-0", f"{group}-1"
    code, out, err = invoke("diff", first, second, "--json", environment=connection)
    told = orjson.loads(out)
    assert code == 0 and told["same"] and told["seconds"]["running"], (out, err)
    file, changed = tmp_path / "turns.jsonl", tmp_path / "changed.jsonl"
    invoke("export", str(file), "--table", "turns", "--group-id", group, environment=connection)
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    of_first = [row for row in rows if row["rollout_id"] == first]
    of_first[1]["completion_token_ids"][0] += 1
    changed.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in of_first))
    code, out, err = invoke("diff", first, str(changed), environment=connection)
    assert code == 1 and "they diverge at call 1, in its answer, token 0" in out and "they differ" in out, (out, err)
    assert "not compared" in out
    code, _, err = invoke("diff", first, "nobody", environment=connection)
    assert code == 4 and "there is no rollout nobody" in err


def test_siblings_of_a_group_are_compared_best_with_worst(connection: dict[str, str], group: str) -> None:
    """One name is enough for a group."""
    code, out, err = invoke("diff", group, "--json", environment=connection)
    told = orjson.loads(out)
    assert code == 0 and {told["left"], told["right"]} == {f"{group}-0", f"{group}-1"}, (out, err)
