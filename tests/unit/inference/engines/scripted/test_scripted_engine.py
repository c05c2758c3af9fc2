"""The scripted engine: a strict fake."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unsupported
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_inference.engines.base import (
    Done,
    EngineOptions,
    FinishReason,
    GenerateRequest,
    LogprobsMode,
    PauseMode,
    Sampling,
    UpdateFormat,
)
from penstock_inference.engines.scripted.engine import ScriptedEngine
from penstock_inference.engines.scripted.script import Script

FILES = tiny_tokenizer.build(["say hello to the world"])
CODEC = Codec.load(FILES)
OPTIONS = EngineOptions(model_dir=Path(), model_name="script")


def play(text: str) -> ScriptedEngine:
    return ScriptedEngine(Script.parse(text), CODEC, OPTIONS)


def request(prompt: str, session: str = "", name: str = "r", max_tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(name, CODEC.encode(prompt), Sampling(max_tokens=max_tokens), session_id=session)


async def answer(engine: ScriptedEngine, wanted: GenerateRequest) -> Done:
    done = [event async for event in engine.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def text(engine: ScriptedEngine, wanted: GenerateRequest) -> str:
    return CODEC.decode((await answer(engine, wanted)).token_ids)


@pytest.mark.requirement("R4")
async def test_turns_are_answered_in_order_for_each_session() -> None:
    """One session's calls do not use up another's turns."""
    engine = play("turns: [{reply: one}, {reply: two}]")
    for session in ("a", "b"):
        assert await text(engine, request("x", session)) == "one<|im_end|>"
    for session in ("b", "a"):
        assert await text(engine, request("x", session)) == "two<|im_end|>"
    await engine.aclose()


async def test_a_turn_waits_for_the_call_that_it_is_for() -> None:
    """Side calls may come between the turns in any order."""
    engine = play(
        """
        turns:
          - {when: {prompt_contains: title generator}, repeat: true, reply: T}
          - {when: {has_tool_result: false, prompt_lacks: [secret, hidden]}, reply: call}
          - {when: {has_tool_result: true, prompt_contains: [a, b]}, reply: done}
        """
    )
    assert await text(engine, request("ab <tool_response>\nx\n</tool_response>")) == "done<|im_end|>"
    for _ in range(2):
        assert await text(engine, request("You are a title generator")) == "T<|im_end|>"
    assert await text(engine, request("plain")) == "call<|im_end|>"
    await engine.aclose()


async def test_a_call_without_an_entry_is_refused() -> None:
    """A strict fake does not make answers up."""
    engine = play("turns: [{when: {prompt_contains: a}, reply: one}]")
    with pytest.raises(FailedPrecondition) as caught:
        await answer(engine, request("b"))
    assert caught.value.reason == "SCRIPT_NO_ENTRY"
    await answer(engine, request("a"))
    with pytest.raises(FailedPrecondition):
        await answer(engine, request("a"))


@pytest.mark.parametrize(("strict", "calls"), [("true", 0), ("true", 1), ("false", 0)])
async def test_unused_script_entries_are_an_error_if_strict(strict: str, calls: int) -> None:
    """A test that asked for less than its script says so."""
    engine = play(f"strict: {strict}\nturns: [{{reply: one}}, {{reply: two}}, {{reply: r, repeat: true}}]")
    for _ in range(calls):
        await answer(engine, request("x", "s"))
    if strict == "true":
        with pytest.raises(FailedPrecondition) as caught:
            await engine.aclose()
        assert caught.value.reason == "SCRIPT_UNCONSUMED"
    await engine.aclose()


@pytest.mark.requirement("R82")
async def test_the_scripted_engine_declares_its_logprobs_as_scripted() -> None:
    """Nobody trains on them unknowingly."""
    engine = play("logprob: -0.5\nturns: [{reply: [17, 4, 2]}, {reply: ab, logprob: -2, finish: length}]")
    assert engine.info().logprobs_mode is LogprobsMode.SCRIPTED
    done = await answer(engine, request("x"))
    assert done.token_ids.tolist() == [17, 4, 2] and done.logprobs.tolist() == [-0.5] * 3
    assert (done.finish_reason, done.stop_token_id) == (FinishReason.STOP, 2)
    cut = await answer(engine, request("x"))
    assert set(cut.logprobs.tolist()) == {-2.0} and cut.finish_reason is FinishReason.LENGTH
    assert CODEC.decode(cut.token_ids) == "ab"
    with pytest.raises(Unsupported):
        await engine.score(CODEC.encode("abc"))


@pytest.mark.requirement("R63")
async def test_a_reply_longer_than_max_tokens_is_cut() -> None:
    """A cap takes effect, in a script too."""
    engine = play("turns: [{reply: a rather long answer}]")
    done = await answer(engine, request("x", max_tokens=2))
    assert done.token_ids.size == 2 and done.finish_reason is FinishReason.LENGTH


@pytest.mark.requirement("R22")
async def test_held_calls_resume_end_at_abort_and_wait_for_their_version() -> None:
    engine = play("turns: [{reply: one}, {reply: two}]")
    await engine.pause(PauseMode.KEEP)
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(answer(engine, request("x", name="kept")))
        ended = group.create_task(answer(engine, request("x", name="ended")))
        early = group.create_task(answer(engine, replace(request("x", name="early"), min_policy_version=3)))
        await asyncio.sleep(0)
        assert engine.stats().waiting == 3
        assert await engine.abort(request_ids=["ended"]) == 1
        await engine.resume()
        await kept
        assert not early.done()
        await engine.begin_update(3, "", UpdateFormat.FULL)
        await engine.push_tensors({})
        await engine.commit_update()
    assert ended.result().finish_reason is FinishReason.ABORT and ended.result().token_ids.size == 0
    assert [span.policy_version for span in early.result().version_spans] == [3]
    await engine.aclose()


@pytest.mark.requirement("R33", "R63")
@pytest.mark.parametrize(
    ("script", "field"),
    [
        ("turns: []", "turns"),
        ("turns: [{reply: a, what: b}]", "turns.0.what"),
        ("turns: [{reply: a, when: {promt_contains: b}}]", "turns.0.when.promt_contains"),
        ("turns: [{reply: a, logprob: 0.5}]", "turns.0.logprob"),
        ("logprob: .nan\nturns: [{reply: a}]", "logprob"),
        ("just text", "script"),
    ],
)
def test_a_script_with_a_mistake_is_refused_with_the_field_named(script: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Script.parse(script)
    assert caught.value.violations[0].field == field


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("script", ["turns: [", "{[", "\t- a: b"])
def test_a_script_that_is_not_yaml_is_refused(script: str) -> None:
    with pytest.raises(InvalidArgument):
        Script.parse(script)


@pytest.mark.requirement("R83")
def test_a_token_id_outside_the_vocabulary_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidArgument) as caught:
        play("turns: [{reply: [1, 999999]}]")
    assert caught.value.violations[0].field == "turns.0.reply"


@pytest.mark.requirement("R63")
async def test_the_scripted_engine_opens_from_a_model_directory_and_script(tmp_path: Path) -> None:
    """An unknown option is refused, a missing one named."""
    FILES.write(tmp_path / "model")
    (tmp_path / "turns.yaml").write_text("turns: [{reply: hello}]")
    options: dict[str, Any] = {"model_dir": tmp_path / "model", "model_name": "m"}
    engine = await ScriptedEngine.open(EngineOptions(**options, extra={"script": str(tmp_path / "turns.yaml")}))
    assert await text(engine, request("x")) == "hello<|im_end|>"
    await engine.aclose()
    for extra in ({}, {"script": "x", "speed": "1"}, {"script": str(tmp_path / "none.yaml")}):
        with pytest.raises((InvalidArgument, FailedPrecondition)):
            await ScriptedEngine.open(EngineOptions(**options, extra=extra))


@pytest.mark.requirement("R82")
def test_token_ids_of_a_text_reply_are_those_of_the_tokenizer() -> None:
    engine = play("turns: [{reply: say hello}]")
    np.testing.assert_array_equal(engine._replies[0][:-1], CODEC.encode("say hello"))
