"""Rollouts whose client edits what the model said, through the gate in each dialect: their exports are proven."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from penstock.analysis.export import ROWS, read_rows, write_jsonl
from penstock.analysis.export_files import Format, new_file
from penstock.analysis.verify_chain import verify
from penstock.chat.v1 import chat_pb2
from penstock.client.errors import InvalidArgument
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire.results import trajectory as from_proto
from penstock.tables.columns import COLUMNS, Kind, Row, Table, row_digest
from penstock.trajectory.v1 import trajectory_pb2 as pb

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the model said, as the client keeps it."""

    text: str
    calls: tuple[tuple[str, str, Arguments], ...] = ()


@dataclass(frozen=True)
class Result:
    """A tool's answer."""

    call_id: str
    name: str
    text: str = "kiwi"


Item = str | Reply | Result
"""Of a history; a text is the user's."""

TWO = (
    'I look at both of them.\n<tool_call>\n{"name": "bash",  "arguments": {"command": "ls"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command" : "pwd"}}\n</tool_call>'
)
SCHEMA: Any = {"type": "object", "properties": {"command": {"type": "string"}}}


class Chat:
    """OpenAI Chat Completions."""

    path = "/v1/chat/completions"

    def body(self, history: Sequence[Item]) -> Any:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
        return {"model": "m", "messages": [self._message(item) for item in history], "tools": tools}

    def _message(self, item: Item) -> Any:
        match item:
            case str():
                return {"role": "user", "content": item}
            case Result():
                return {"role": "tool", "tool_call_id": item.call_id, "content": item.text}
            case Reply():
                calls = [
                    {
                        "id": key,
                        "type": "function",
                        "function": {"name": name, "arguments": orjson.dumps(args).decode()},
                    }
                    for key, name, args in item.calls
                ]
                return {"role": "assistant", "content": item.text} | ({"tool_calls": calls} if calls else {})

    def reply(self, answer: Any) -> Reply:
        message = answer["choices"][0]["message"]
        calls = [
            (call["id"], call["function"]["name"], orjson.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        return Reply(message["content"] or "", tuple(calls))


class Responses:
    """OpenAI Responses."""

    path = "/v1/responses"

    def body(self, history: Sequence[Item]) -> Any:
        tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
        return {"model": "m", "input": [part for item in history for part in self._items(item)], "tools": tools}

    def _items(self, item: Item) -> Iterator[Any]:
        match item:
            case str():
                yield {"role": "user", "content": item}
            case Result():
                yield {"type": "function_call_output", "call_id": item.call_id, "output": item.text}
            case Reply():
                text = {"type": "output_text", "text": item.text, "annotations": []}
                yield {"type": "message", "role": "assistant", "content": [text]}
                for key, name, args in item.calls:
                    arguments = orjson.dumps(args).decode()
                    yield {"type": "function_call", "call_id": key, "name": name, "arguments": arguments}

    def reply(self, answer: Any) -> Reply:
        text, calls = "", []
        for item in answer["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], orjson.loads(item["arguments"])))
        return Reply(text, tuple(calls))


class Messages:
    """Anthropic Messages."""

    path = "/v1/messages"

    def body(self, history: Sequence[Item]) -> Any:
        tools = [{"name": "bash", "input_schema": SCHEMA}]
        return {"model": "m", "max_tokens": 999, "messages": [self._message(item) for item in history], "tools": tools}

    def _message(self, item: Item) -> Any:
        match item:
            case str():
                return {"role": "user", "content": item}
            case Result():
                result = {"type": "tool_result", "tool_use_id": item.call_id, "content": item.text}
                return {"role": "user", "content": [result]}
            case Reply():
                uses = [{"type": "tool_use", "id": key, "name": name, "input": args} for key, name, args in item.calls]
                return {"role": "assistant", "content": [{"type": "text", "text": item.text}, *uses]}

    def reply(self, answer: Any) -> Reply:
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        return Reply(text, tuple((block["id"], block["name"], block["input"]) for block in uses))


class Google:
    """Google generateContent."""

    path = "/v1beta/models/m:generateContent"

    def body(self, history: Sequence[Item]) -> Any:
        tools = [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}]
        return {"contents": [self._content(item) for item in history], "tools": tools}

    def _content(self, item: Item) -> Any:
        match item:
            case str():
                return {"role": "user", "parts": [{"text": item}]}
            case Result():
                response = {"name": item.name, "response": {"output": item.text}}
                return {"role": "user", "parts": [{"functionResponse": response}]}
            case Reply():
                calls = [{"functionCall": {"name": name, "args": args}} for _, name, args in item.calls]
                return {"role": "model", "parts": [{"text": item.text}, *calls]}

    def reply(self, answer: Any) -> Reply:
        parts = answer["candidates"][0]["content"]["parts"]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        text = "".join(part.get("text", "") for part in parts)
        return Reply(text, tuple((str(i), call["name"], call["args"]) for i, call in enumerate(calls)))


DIALECTS = {kind.__name__: kind() for kind in (Chat, Responses, Messages, Google)}


def _argument_changed(reply: Reply) -> Iterator[Item]:
    (key, name, _), second = reply.calls
    yield replace(reply, calls=((key, name, {"command": "ls -a"}), second))
    yield from (Result(key, name) for key, name, _ in reply.calls)


def _call_dropped(reply: Reply) -> Iterator[Item]:
    yield replace(reply, calls=reply.calls[:1])
    yield Result(*reply.calls[0][:2])


def _calls_reordered(reply: Reply) -> Iterator[Item]:
    yield replace(reply, calls=reply.calls[::-1])
    yield from (Result(key, name) for key, name, _ in reply.calls[::-1])


def _one_by_one(reply: Reply) -> Iterator[Item]:
    first, second = reply.calls
    yield from (replace(reply, calls=(first,)), Result(*first[:2]), Reply("", (second,)), Result(*second[:2]))


def _end_of_text_edited(reply: Reply) -> Iterator[Item]:
    yield replace(reply, text=reply.text.rstrip().removesuffix("them.") + "those.")
    yield from (Result(key, name) for key, name, _ in reply.calls)


def _turn_dropped(reply: Reply) -> Iterator[Item]:
    yield "Never mind: say hello."


def _as_it_was(reply: Reply) -> Iterator[Item]:
    yield reply
    yield from (Result(key, name) for key, name, _ in reply.calls)


EDITS: dict[str, Callable[[Reply], Iterator[Item]]] = {
    edit.__name__.strip("_"): edit
    for edit in (
        *(_argument_changed, _call_dropped, _calls_reordered, _one_by_one, _end_of_text_edited),
        *(_turn_dropped, _as_it_was),
    )
}


async def _asked(rollout: Any, dialect: Any, history: Sequence[Item], trainer: Any, text: str, **options: Any) -> Reply:
    root = rollout.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {rollout.token}", "x-goog-api-key": rollout.token}
    headers |= {"x-api-key": rollout.token, "anthropic-version": "2023-06-01"} if dialect.path == Messages.path else {}
    async with aiohttp.ClientSession(headers=headers) as http:
        post = asyncio.ensure_future(_posted(http, root + dialect.path, dialect.body(history)))
        await trainer.answer(text, **options)
        reply: Reply = dialect.reply(await post)
        return reply


async def _posted(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def _edited(service: Any, dialect: Any, edit: Callable[[Reply], Iterator[Item]]) -> pb.Trajectory:
    """A rollout of three calls whose second has an edited history."""
    rollout, trainer = await service.open(), await service.trainer()
    reply = await _asked(rollout, dialect, ["Look."], trainer, TWO)
    assert [call[2] for call in reply.calls] == [{"command": "ls"}, {"command": "pwd"}]
    history: list[Item] = ["Look.", *edit(reply)]
    last = await _asked(rollout, dialect, history, trainer, "That is all there is.", version=2)
    await _asked(
        *(rollout, dialect, [*history, last, "More."], trainer, "No mo"),
        finish=chat_pb2.FINISH_REASON_LENGTH,
        version=3,
    )
    await service.close(rollout.rollout_id)
    captured: pb.Trajectory = await service.capture(rollout.rollout_id, include_bodies=True)
    await trainer.aclose()
    return captured


def _rows(trajectory: Trajectory) -> dict[Table, list[Row]]:
    """As files give them: the tables that are proven."""
    proven = (Table.TURNS, Table.SEQUENCES, Table.TOOL_CALLS)
    return {table: [orjson.loads(orjson.dumps(row)) for row in ROWS[table](trajectory)] for table in proven}


def _check(rows: dict[Table, list[Row]]) -> Any:
    return verify(rows[Table.TURNS], rows[Table.SEQUENCES], rows[Table.TOOL_CALLS])


@pytest.mark.requirement("R103")
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_export_is_proven_however_the_client_edited_the_models_texts(
    service: Any, dialect: str, tmp_path: Path
) -> None:
    """An argument changed, a call dropped, re-ordered or replayed by itself, text edited, a turn dropped; from
    rows at hand and from both kinds of files."""
    partial = 0
    for name, edit in EDITS.items():
        trajectory = from_proto(await _edited(service, DIALECTS[dialect], edit))
        partial += any(turn.untrained_reason == "PARTIAL" for sample in trajectory.samples for turn in sample.turns)
        at_hand = verify(ROWS[Table.TURNS](trajectory), ROWS[Table.SEQUENCES](trajectory))
        assert (at_hand.problems, at_hand.calls, at_hand.rollouts) == ([], 3, 1), name
        for format_ in Format:
            files = {table: tmp_path / f"{name}-{table}.{format_}" for table in (Table.TURNS, Table.SEQUENCES)}
            for table, file in files.items():
                with new_file(file, table, format_) as sink:
                    sink.write(list(ROWS[table](trajectory)))
            assert not verify(*map(read_rows, files.values())).problems, name
        write_jsonl([trajectory], tmp_path / "whole.jsonl")
        assert not verify(read_rows(tmp_path / "whole.jsonl")).problems
    assert partial >= 3, "the edits leave no turn that is shared in part"


def _other(value: Any, kind: Kind) -> Any:
    """A value of the same type that is another."""
    match value:
        case None:
            return {Kind.TEXT: "x", Kind.BOOL: True, Kind.JSON: {"x": 1}}.get(kind, [] if "[]" in kind else 7)
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[:-1] + ("0" if not value.endswith("0") else "1")
        case list():
            return [*value[:-1], _other(value[-1], kind)] if value else None
        case dict():
            return value | ({key: _other(value[key], kind) for key in list(value)[:1]} or {"x": 1})
    raise AssertionError(value)


def _mutations(value: Any, kind: Kind) -> Iterator[Any]:
    """Every way in which a value is changed once: whole, absent, and in its first, middle and last element."""
    yield _other(value, kind)
    if value is not None:
        yield None
    if isinstance(value, list) and value:
        yield value[1:]
        for place in {0, len(value) // 2}:
            if kind is Kind.MASK:
                yield [*value[:place], 1 - value[place], *value[place + 1 :]]
            elif isinstance(value[place], dict):
                for name, item in value[place].items():
                    changed = copy.deepcopy(value)
                    changed[place][name] = _other(item, Kind.TEXT)
                    yield changed
            else:
                yield [*value[:place], _other(value[place], kind), *value[place + 1 :]]


def _is_refused(rows: dict[Table, list[Row]], table: Table, place: int, row: Row) -> bool:
    """Whether a proof says that something is wrong once this row is in the place of another."""
    changed = rows | {table: [*rows[table][:place], row, *rows[table][place + 1 :]]}
    try:
        return bool(_check(changed).problems)
    except InvalidArgument as error:
        assert error.reason == "ROW_INVALID"
        return True


@pytest.fixture
async def rows(service: Any) -> dict[Table, list[Row]]:
    """Of a rollout that has rows of every kind: trained, partial, cut off and failed calls, calls of host tools."""
    captured = await _edited(service, DIALECTS["Chat"], EDITS["end_of_text_edited"])
    captured.calls.add(
        call_id="failed", rollout_id=captured.rollout_id, index=3, state=pb.CALL_STATE_FAILED, end_reason="ENGINE_LOST"
    )
    captured.reward.value, captured.reward.range_max = 0.5, 1.0
    captured.reward.components["tests"] = 0.5
    captured.labels["shard"] = "1"
    for index, result in enumerate(('{"a":1}', "")):
        captured.host_tool_calls.add(
            tool_call_id=f"t{index}", rollout_id=captured.rollout_id, index=index, name="look", arguments_json="{}",
            state=pb.CALL_STATE_DELIVERED, result_json=result, result_bytes=len(result),
        )  # fmt: skip
    found = _rows(from_proto(captured))
    assert not _check(found).problems
    reasons = {span["untrained_reason"] for row in found[Table.SEQUENCES] for span in row["turn_spans"]}
    assert {"", "PARTIAL", "TRUNCATED"} <= reasons, reasons
    return found


@pytest.mark.requirement("R103")
async def test_every_change_of_every_field_of_every_row_is_found(rows: dict[Table, list[Row]]) -> None:
    """Also a field that is taken away or put in, and a row that is left out or is there twice."""
    tried = 0
    for table, own in rows.items():
        for place, row in enumerate(own):
            assert list(row) == list(COLUMNS[table])
            for name, kind in COLUMNS[table].items():
                for value in _mutations(row[name], kind):
                    tried += 1
                    assert _is_refused(rows, table, place, row | {name: value}), (table, place, name, value)
                assert _is_refused(rows, table, place, {key: row[key] for key in row if key != name}), (table, name)
            assert _is_refused(rows, table, place, row | {"another": 1})
            left_out = rows | {table: own[:place] + own[place + 1 :]}
            assert (len(own) == 1 and table is not Table.TURNS) or _check(left_out).problems
            assert _check(rows | {table: [*own, row]}).problems
    assert tried > 500


@pytest.mark.requirement("R103")
async def test_forged_digest_does_not_hide_what_the_calls_contain(rows: dict[Table, list[Row]]) -> None:
    """Whoever writes a digest of his own cannot change a token, a mask, a logprob, a version or a weight."""
    proven = {
        Table.TURNS: {
            *("rollout_id", "call_id", "prompt_token_ids", "completion_token_ids", "completion_logprobs"),
            *("policy_spans", "chain_index", "chain_sha256", "rollout_chain_sha256", "rollout_rows"),
        },
        Table.SEQUENCES: {
            *("rollout_id", "input_ids", "loss_mask", "logprobs", "logprobs_mode", "prompt_len", "turn_spans"),
            *("policy_spans", "policy_version_min", "policy_version_max", "weight", "truncated", "temperatures"),
            *("samplings", "branch_id", "role", "tokenizer_sha256", "sample_id", "rollout_rows"),
        },
    }
    for table, names in proven.items():
        for place, row in enumerate(rows[table]):
            if row.get("state") == "failed":
                continue
            for name in names:
                for value in _mutations(row[name], COLUMNS[table][name]):
                    changed = row | {name: value}
                    changed["row_sha256"] = row_digest(changed)
                    assert _is_refused(rows, table, place, changed), (table, place, name, value)
