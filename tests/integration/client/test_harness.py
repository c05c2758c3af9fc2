"""Sessions under a harness worker's names, on the real services; the worker itself is in tests/integration/trl."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.integration.client.conftest import TASK

from penstock.adapters.harness.session import RolloutFailed, Session, SessionClosed, SessionFactory, task_of
from penstock.client import (
    AlreadyExists,
    CallFinished,
    Command,
    Inference,
    InvalidArgument,
    Penstock,
    PenstockError,
    RolloutOptions,
    Task,
    Upstream,
    Verifier,
)
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

STUCK = Task(
    task_id="stuck",
    instruction="x",
    setup=[Command(["mkfifo", "note.txt"])],
    verifier=Verifier(commands=[Command(["true"])]),
)
"""The agent's first command reads a pipe that nobody writes."""


@pytest.fixture
def factory(stack: LocalStack) -> Iterator[SessionFactory]:
    """Sessions of the reference agent, answered by the inference service."""
    with SessionFactory("shell", TASK, target=stack.endpoints, options={"source": Inference()}) as made:
        yield made


async def first_call(ps: Penstock, session: Session) -> None:
    """Waits until the session's agent has got its first answer."""
    handle = await ps.rollouts.attach(session.rollout_id)
    async for event in handle.events():
        if isinstance(event.payload, CallFinished):
            return
    raise AssertionError("the rollout ended without a call")


async def sandboxes(ps: Penstock, session: Session) -> list[tuple[str, str]]:
    """What is left of the session's sandboxes."""
    return [item async for item in ps.sandboxes.list(labels={"penstock_rollout": session.rollout_id})]


@pytest.mark.requirement("R79", "R82", "R84")
async def test_a_session_gives_exit_code_traces_and_reward(factory: SessionFactory) -> None:
    """Everything that a worker reads of a rollout, as it was captured and graded."""

    def work() -> None:
        with pickle.loads(pickle.dumps(factory)) as copy, copy.create("Copy note.txt.", 7, "an-episode") as session:
            assert session.rollout_id == "an-episode"
            assert session.initial_messages() == [{"role": "user", "content": "Copy note.txt."}]
            assert session.list_tools() == []
            assert "not one of the session's" in (session.call_tool("bash", {}).error or "")
            assert session.wait_for_completion() == 0
            assert session.wait_for_completion(60) == 0
            graded = session.verify([])
            assert (graded.env_reward, graded.done) == (0.75, True)
            assert [event["type"] for event in session.fetch_trace()][-1] == "done"
            assert session.collect_artifacts() == {}

            first, second = session.fetch_training_trace().turns
            start = first.prompt_token_ids + first.completion_token_ids
            assert second.prompt_token_ids[: len(start)] == start
            for turn in (first, second):
                assert len(turn.per_token_logps) == len(turn.completion_token_ids)
                assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
            entries = session.fetch_proxy_trace()
            assert [entry["completion_token_ids"] for entry in entries] == [
                first.completion_token_ids,
                second.completion_token_ids,
            ]
            assert entries[1]["request"]["messages"][-1]["role"] == "tool"
            assert entries[0]["response"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "bash"
            assert entries[1]["response"]["choices"][0]["message"]["content"] == "Done."
            with pytest.raises(AlreadyExists):
                copy.create("Another.", episode_id="an-episode")
            session.close()

    await asyncio.to_thread(work)


@pytest.mark.requirement("R70")
async def test_closing_from_another_thread_ends_the_wait_and_the_sandbox(factory: SessionFactory, ps: Penstock) -> None:
    """Whoever waits is told at once, the sandbox is gone when `close` returns, and closing again does nothing."""
    session = await asyncio.to_thread(factory.create, STUCK)
    with ThreadPoolExecutor(2) as threads:
        waiting, grading = threads.submit(session.wait_for_completion), threads.submit(session.verify)
        await first_call(ps, session)
        await asyncio.to_thread(session.close)
        assert await sandboxes(ps, session) == []
        with pytest.raises(SessionClosed):
            await asyncio.wrap_future(waiting)
        assert (await asyncio.wrap_future(grading)).env_reward is None
    closing = [threading.Thread(target=session.close) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        await asyncio.to_thread(thread.join)
    assert len((await asyncio.to_thread(session.fetch_training_trace)).turns) == 1


@pytest.mark.requirement("R70", "R74")
async def test_an_agent_that_ran_out_of_time_keeps_its_turns(factory: SessionFactory, ps: Penstock) -> None:
    """TimeoutError, the captured turns stay, the sandbox goes; not graded is None."""
    session = await asyncio.to_thread(factory.create, STUCK)
    await first_call(ps, session)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(session.wait_for_completion, 0.01)
    assert len((await asyncio.to_thread(session.fetch_training_trace)).turns) == 1
    assert (await asyncio.to_thread(session.verify)).env_reward is None
    assert await sandboxes(ps, session) == []


@pytest.mark.requirement("R59", "R61")
async def test_an_agents_own_limit_is_a_timeout_and_its_rollout_is_graded(stack: LocalStack) -> None:
    """The limit that the factory gives ends the agent; the verifier runs all the same."""

    def work() -> None:
        limited = SessionFactory(
            "shell", target=stack.endpoints, agent_timeout_s=0.5, sampling={"temperature": 1.0, "top_k": -1}
        )
        with limited as factory, factory.create(STUCK) as session:
            with pytest.raises(TimeoutError):
                session.wait_for_completion()
            graded = session.verify([])
            assert graded.env_reward == 1.0
            assert graded.metrics["failure_cause"] == "timeout"

    await asyncio.to_thread(work)


@pytest.mark.requirement("R58", "R74")
async def test_a_failed_setup_is_no_outcome_of_the_policy(factory: SessionFactory) -> None:
    """The worker gets an exception, and leaves the rollout out."""

    def work() -> None:
        with factory.create(replace(STUCK, setup=[Command(["false"])])) as session:
            with pytest.raises(RolloutFailed) as failed:
                session.wait_for_completion()
            assert failed.value.reason == "SETUP_FAILED"
            assert session.verify([]).env_reward is None

    await asyncio.to_thread(work)


@pytest.mark.requirement("R27")
async def test_a_source_that_is_not_there_is_refused_by_create(stack: LocalStack) -> None:
    options: RolloutOptions = {"source": Upstream(name="nobody", model="m")}

    def work() -> None:
        with SessionFactory("shell", TASK, target=stack.endpoints, options=options) as factory:
            with pytest.raises(PenstockError) as refused:
                factory.create("x")
            assert refused.value.reason == "UPSTREAM_UNKNOWN"

    await asyncio.to_thread(work)


@pytest.mark.requirement("R63")
async def test_a_prompt_is_a_task_a_text_a_chat_or_a_mapping() -> None:
    """Each form means what it says, and anything else is refused by name."""
    assert task_of(TASK) is TASK
    assert task_of("do it", TASK).instruction == "do it"
    assert task_of("do it", TASK).verifier is TASK.verifier
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "do it"}]}]
    assert task_of(chat).instruction == "do it"
    whole = task_of(
        {
            "prompt": chat,
            "setup": "true",
            "verify": ["false"],
            "upload_files": {"a": "b"},
            "task_id": "t",
            "metadata": {"k": 1},
        }
    )
    assert whole.verifier is not None
    assert [str(item) for item in (*whole.setup, *whole.verifier.commands)] == ["true", "false"]
    assert (whole.task_id, whole.files[0].content, whole.metadata) == ("t", b"b", {"k": 1})
    for wrong in (
        3,
        [],
        [{"role": "assistant", "content": "x"}],
        {},
        {"prompt": "a", "task": "b"},
        {"prompt": "a", "x": 1},
    ):
        with pytest.raises(InvalidArgument) as refused:
            task_of(wrong)
        assert refused.value.reason == "HARNESS_TASK"
    with pytest.raises(InvalidArgument) as refused:
        SessionFactory("shell", sampling={"temprature": 1.0})
    assert refused.value.reason == "HARNESS_SAMPLING"
